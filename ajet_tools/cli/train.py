"""`ajet train`: trains the model behind an agent; `--sweep` once per combination of values.

`ajet rehearse`: a small cluster run on the CPU.

`ajet serve`: an OpenAI-compatible endpoint for a checkpoint.
"""

from __future__ import annotations

import asyncio
import difflib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ajet_sdk import run
from ajet_sdk import serve as sdk
from ajet_sdk.backbones.trinity.mapping import check
from ajet_sdk.backbones.trinity.rehearsal import Stopwatch, check_mapping, findings, tiny_model
from ajet_sdk.backbones.trinity.rehearsal import rehearse as rehearsal_of
from ajet_sdk.config.config import Config
from ajet_sdk.errors import AjetError, ConfigError, MissingExtra, TraceError, TrainingError
from ajet_sdk.reporting.output import echo, style
from ajet_sdk.reporting.results import TunedModel, view_command
from ajet_sdk.swarm.work import WorkSummary
from ajet_sdk.swarm_worker import train_at
from ajet_sdk.trace.reader import open_trace
from ajet_tools.cli.arguments import (
    AgentAndOverrides,
    Conf,
    HeldOutTasks,
    Host,
    JobOptions,
    Port,
    Resume,
    Tasks,
    key_option,
    split_arguments,
)
from ajet_tools.cli.dry_run import print_plan
from ajet_tools.cli.result import print_result
from ajet_tools.cli.viewer import logview
from ajet_tools.cli.work import WorkResult
from ajet_tools.text.clean import flat_keys

NO_UPDATE = 3
"""Exit code of a training run without any update."""


def serve(
    checkpoint: Annotated[str | None, Argument(show_default=False)] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: Annotated[
        str | None, Option(help="The model's name. Default: the directory's name.")
    ] = None,
    trace: Annotated[Path | None, Option(help="Record every call in this trace file.")] = None,
    wait: Annotated[bool, Option("--wait")] = False,
) -> None:
    """Serve a checkpoint as an OpenAI-compatible endpoint, until Ctrl-C.

    Clients must send the key of AJET_SERVE_KEY, if it is set; it is required if other machines can
    connect.

    Args:
        checkpoint: A Hugging Face checkpoint: a directory or a name; or tinker://... with TINKER_BASE_URL.
        wait: Serve nothing; return once the server at --host and --port answers.

    \b
    ajet serve CHECKPOINT --trace served.duckdb
    ajet serve CHECKPOINT & ajet serve --wait
    ajet run agent.py:solve --judge agent.py:exact --tasks tasks.jsonl \\
      --model NAME@http://127.0.0.1:8000/v1
    """
    if wait:
        sdk.wait_for_server(host, port)
        return
    if checkpoint is None:
        raise ConfigError("nothing to serve: pass a checkpoint, or --wait to wait for a server")
    sdk.serve(
        checkpoint,
        host=host,
        port=port,
        name=name,
        trace=trace,
        api_key=os.environ.get("AJET_SERVE_KEY"),
    )


def rehearse(arguments: AgentAndOverrides = None, conf: Conf = None) -> None:
    """Rehearse a cluster job on this machine's CPU: the real Trinity and Ray, a tiny model, two
    steps.

    Takes about a minute. Errors are caught before you use a GPU: keys that Trinity does not
    support, an agent that cannot be sent to another process, tasks without a column that the agent
    needs.

    \b
    ajet rehearse --conf math.yaml
    ajet rehearse --conf math.yaml ajet.trainer_common.nnodes=4
    """
    agent, overrides = split_arguments(arguments or [])
    if conf is None and agent is None:
        raise ConfigError(
            "nothing to rehearse: pass a config file (--conf FILE) or an agent (agent.py:solve)"
        )
    config = JobOptions(conf).config(agent, overrides, more={"backbone": "trinity"})
    directory = config.directory.parent / f"rehearsal-{config.experiment_name}"
    shutil.rmtree(directory, ignore_errors=True)
    _rehearse(config, directory)
    shutil.rmtree(directory)


def _rehearse(config: Config, directory: Path) -> None:
    for package in ("torch", "ray", "trinity"):
        if find_spec(package) is None:
            raise MissingExtra(package, "trinity")

    # what Trinity does not support is told without waiting for the model
    check(config)  # before the model is created
    watch = Stopwatch(echo)
    model, whose = tiny_model(config, directory / "model")
    watch.done("model", f"random weights, {whose}")
    cluster = asyncio.run(check_mapping(config, directory / "real", model)).cluster
    where = (
        f"{cluster.node_num} × {cluster.gpu_per_node} GPUs, {cluster.explorer_gpu_num} to sample"
    )
    watch.done("config", f"Trinity accepts it for {where if cluster.gpu_per_node else 'a CPU'}")
    try:
        tuned = run.train(rehearsal_of(config, directory, model))
    except TrainingError as error:
        raise TrainingError(
            f"{error}\nThe rehearsal's logs and traces are in {directory}"
        ) from error
    counts, failures = findings(directory)
    if failures:
        raise TrainingError(
            f"{counts['failed']} of {counts['episodes']} episodes failed:\n  "
            + "\n  ".join(failures)
            + f"\nTo view them: {view_command(directory)}"
        )
    totals = (
        f"{counts['episodes']} episodes, {counts['calls']} calls, {counts['trained']} tokens"
        " trained"
    )
    watch.done("run", f"{totals}; {counts['versions']} model versions sampled")
    _judge(counts, tuned, directory)
    watch.done("checkpoint", f"{tuned.path}")
    echo(
        "The rehearsal succeeded. Rewards are meaningless: they alternate between 0 and 1, without"
        " the judge."
    )


def _judge(counts: dict[str, int], tuned: TunedModel, directory: Path) -> None:
    """Raises TrainingError if the rehearsal shows that the real run would not learn."""
    look = f"to view the run: {view_command(directory)}"
    if not counts["trained"]:
        raise TrainingError(f"nothing was trained: no call to the policy was captured; {look}")
    if counts["versions"] < 2:
        raise TrainingError(f"the sampler never received new weights; {look}")
    if tuned.path is None:
        raise TrainingError(f"no model was written; {look}")


def swarm_key() -> str | None:
    """The key for a swarm's server: the owner's, else a worker's."""
    return os.environ.get("AJET_SWARM_OWNER_KEY") or os.environ.get("AJET_SWARM_KEY")


def train(
    arguments: AgentAndOverrides = None,
    *,
    job: JobOptions,
    backbone: Annotated[str | None, key_option("backbone")] = None,
    tasks: Tasks = None,
    val_tasks: HeldOutTasks = None,
    resume: Resume = False,
    debug: Annotated[
        str, Option(metavar="TAGS", help='Tags of the breakpoints to stop at:  "TAG1|TAG2".')
    ] = "",
    sweep: Annotated[list[str] | None, Option(metavar="KEY=VALUE,VALUE")] = None,
    max_cost: Annotated[float | None, key_option("tinker.max_cost")] = None,
    dry_run: Annotated[bool, Option("--dry-run")] = False,
    swarm: Annotated[str | None, Option(metavar="URL")] = None,
    with_ray: Annotated[bool, Option("--with-ray")] = False,
    with_ray_cluster: Annotated[str | None, Option(metavar="ADDRESS")] = None,
    with_appworld: Annotated[bool, Option("--with-appworld", hidden=True)] = False,
    with_logview: Annotated[
        bool, Option("--with-logview", help="Serve the viewer at a printed URL during the run.")
    ] = False,
    skip_check_avail_gpu: Annotated[bool, Option("--skip-check-avail-gpu", hidden=True)] = False,
    prefix: Annotated[str, Option(hidden=True)] = "",
) -> None:
    """Train the model behind an agent. `ajet --conf FILE` is the same.

    Exits with 3 if no update was made: the model is then the one that training began with.

    Args:
        sweep: Train once for each value of a config key, one after the other; repeatable: for each combination.
        dry_run: Print the episodes, tokens and cost to expect; ask no model.
        swarm: Train at this server (`ajet swarm start`), with the agent, judge and tasks here. A server without a
            training gets the config; otherwise this joins its training. Keys: AJET_SWARM_OWNER_KEY or AJET_SWARM_KEY.
        with_ray: Start Ray on this machine for the run, and stop it afterwards.
        with_ray_cluster: Use this Ray cluster: HOST:PORT, or `auto` for the one on this machine.

    \b
    ajet train --conf math.yaml
    ajet train --conf math.yaml --backbone debug ajet.debug.debug_first_n_tasks=1
    ajet train --conf math.yaml --dry-run
    ajet train --conf math.yaml --resume
    ajet train math.yaml --swarm http://gpu-box:10086
    ajet train --conf math.yaml --sweep lr=1e-4,3e-4 --sweep seed=0,1,2
    ajet train agent.py:solve --judge agent.py:exact --tasks tasks.jsonl \\
      --model ./Qwen2.5-0.5B-Instruct
    """
    arguments = list(arguments or [])
    if job.conf is None and arguments and arguments[0].endswith((".yaml", ".yml")):
        job = replace(job, conf=Path(arguments.pop(0)))
    agent, overrides = split_arguments(arguments)
    if job.conf is None and agent is None:
        raise ConfigError(
            "nothing to train: pass a config file (--conf FILE) or an agent (agent.py:solve)"
        )

    def with_overrides(more: Sequence[str]) -> Config:
        return job.config(
            agent,
            [*overrides, *more],
            tasks=tasks,
            val_tasks=val_tasks,
            more={"backbone": backbone, "tinker.max_cost": max_cost},
        )

    config = with_overrides(())
    if with_ray and with_ray_cluster is not None:
        raise ConfigError(
            "--with-ray starts a local Ray and --with-ray-cluster joins a cluster; give only one of"
            " them"
        )
    ray = "local" if with_ray else with_ray_cluster
    _check_flags(config, ray is not None, with_appworld, prefix)
    if dry_run:
        print_plan(config)
        raise typer.Exit
    if swarm is not None:
        refused = {"--resume": resume, "--debug": debug, "--sweep": sweep, "--with-ray": ray}
        named = ", ".join(option for option, given in refused.items() if given)
        if named:
            raise ConfigError(f"--swarm trains at its server; there is no {named} here")
        summary = WorkSummary()
        try:
            train_at(config, swarm, key=swarm_key(), say=echo, summary=summary)
        finally:
            print_result(WorkResult.of(summary), as_json=False)
        return
    if resume:
        config = newest_experiment(config, job.exp_dir)
    if sweep:
        configs = configs_of(sweep, config, with_overrides)
        run_sweep(
            configs,
            lambda of_point, begun: run.train(of_point, resume=begun, ray=ray),
            resume=resume,
        )
        echo(f"Compare the runs: ajet trace compare {config.directory}")
        return

    tags = tuple(tag.strip() for tag in re.split(r"[|,]", debug) if tag.strip())
    with logview(config.directory, with_logview):
        tuned = run.train(config, resume=resume, debug_tags=tags, ray=ray)
    if tuned.path is not None and tuned.trained_tokens != 0:
        if tuned.best not in (None, tuned.path):
            echo(f"best validation: {tuned.best}")
        echo(f"Try it with: {tuned.serve_command}")
    if warning := tuned.warning():
        echo(style(warning, fg="yellow"))
    if tuned.is_unchanged:
        raise typer.Exit(NO_UPDATE)


def _check_flags(config: Config, ray: bool, appworld: bool, prefix: str) -> None:
    if appworld:
        raise ConfigError(
            "--with-appworld is not implemented; start the environment service yourself and give"
            " its URL"
        )
    if ray and config.backbone in ("debug", "local", "tinker"):
        raise ConfigError(
            f"backbone {config.backbone} runs in this process, without Ray. To run agents in other"
            " processes or on other machines, run `ajet swarm start` here and `ajet work URL` there"
        )
    if prefix:
        echo("Note: --prefix has no effect.", err=True)


def newest_experiment(config: Config, exp_dir: Path | None) -> Config:
    """Returns the config for the experiment to resume: the given one, or the newest of this file or
    agent."""
    if config.is_set("experiment_dir") or config.directory.exists():
        return config
    base = exp_dir or Path("launcher_record")
    stem = re.sub(r"-\d{8}-\d{6}$", "", config.experiment_name)
    experiments = sorted(
        p
        for p in base.glob(f"{stem}-*")
        if re.fullmatch(r"-\d{8}-\d{6}", p.name.removeprefix(stem))
    )
    if not experiments:
        raise ConfigError(
            f"nothing to resume: {base} has no experiment {config.experiment_name} or {stem}-…"
        )
    update = {"experiment_name": experiments[-1].name}
    if exp_dir is not None:
        update["experiment_dir"] = str(experiments[-1])
    echo(f"Resuming {experiments[-1]}", err=True)
    return config.model_copy(update=update)


_NO_RUN = "empty"


def configs_of(
    sweeps: Sequence[str], config: Config, with_overrides: Callable[[Sequence[str]], Config]
) -> dict[str, Config]:
    """Returns the config of each combination of `KEY=VALUE,VALUE` options, by name, within the
    config's directory.

    Raises ConfigError for an unknown key or an invalid config.
    """
    configs: dict[str, Config] = {}
    known = [key for key, _ in flat_keys(config.model_dump())]
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        name, _, listed = sweep.partition("=")
        if not all(listed.split(",")):
            raise ConfigError(
                f"--sweep takes KEY=VALUE,VALUE, such as lr=1e-4,3e-4 (got {sweep!r})"
            )
        axes[_full_key(name, known)] = list(dict.fromkeys(listed.split(",")))
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        name = ",".join(
            f"{key.rpartition('.')[2]}={value.replace('/', '-')}" for key, value in point.items()
        )
        settings = [
            f"ajet.{key}={value}" for key, value in {**point, "experiment_name": name}.items()
        ]
        directory = {"experiment_dir": str(config.directory / name)}
        configs[name] = with_overrides(settings).model_copy(update=directory)
    return configs


def _full_key(name: str, known: Sequence[str]) -> str:
    """Returns the full key; a unique last part is sufficient."""
    name = name.removeprefix("ajet.")
    if name in known:
        fitting = [name]
    else:
        fitting = [key for key in known if key.endswith(f".{name}")]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConfigError(
            f"--sweep: {name} is ambiguous: {' or '.join(fitting)}; give the full key"
        )
    near = difflib.get_close_matches(name, [*known, *(key.rpartition(".")[2] for key in known)], 1)
    raise ConfigError(
        f"--sweep: there is no key {name}{f'; did you mean {near[0]}?' if near else ''}"
    )


def run_sweep(
    configs: Mapping[str, Config], train: Callable[[Config, bool], object], *, resume: bool
) -> None:
    """Trains each config; a failed run doesn't end the others.

    With `resume`, finished runs are skipped and others continue. Raises ConfigError if an
    experiment exists without it, and at the end if runs failed.
    """
    states = {name: _last_status(config.directory) for name, config in configs.items()}
    begun = [name for name, state in states.items() if state is not None]
    if begun and not resume:
        raise ConfigError(
            f"the sweep was started: {configs[begun[0]].directory} exists; pass --resume or another"
            " experiment_name"
        )
    failed: list[str] = []
    for i, (name, config) in enumerate(configs.items(), 1):
        done = states[name] == "finished"
        echo(
            style(
                f"run {i} of {len(configs)}: {name}{', finished before' if done else ''}", bold=True
            )
        )
        try:
            None if done else train(config, states[name] not in (None, _NO_RUN))
        except AjetError as error:
            failed.append(name)
            echo(style(f"{type(error).__name__}: {error}", fg="red"), err=True)
    if failed:
        raise ConfigError(
            f"{len(failed)} of {len(configs)} runs failed: {'; '.join(failed)}; try again with"
            " --resume"
        )


def _last_status(directory: Path) -> str | None:
    """Returns the status of an experiment's newest run, `_NO_RUN` without runs, None without an
    experiment."""
    try:
        with open_trace(directory) as reader:
            table = reader.query("SELECT status FROM runs ORDER BY started_at DESC LIMIT 1")
    except TraceError:
        return _NO_RUN if directory.exists() else None
    return str(table[0][0]) if len(table) else _NO_RUN
