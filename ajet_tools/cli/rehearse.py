"""`ajet rehearse`: a cluster run in small, at the desk."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ajet_sdk.errors import ConfigError, MissingExtra, TrainingError
from ajet_sdk.output import echo
from ajet_tools.cli.arguments import Arguments, split_arguments, use_placeholder_key

if TYPE_CHECKING:
    from ajet_sdk.config import Config

__all__ = ["app"]

app = typer.Typer(add_completion=False)


@app.command()
def rehearse(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="AGENT KEY=VALUE", help="The agent, where no file names it, and overrides."),
    ] = None,
    conf: Annotated[Path | None, typer.Option("--conf", "-c", help="A config file with the root `ajet:`.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the rehearsal's directory when all is well.")] = False,
) -> None:
    """Run a cluster job in small on this machine's CPU: the real Trinity and Ray, a tiny model, two steps.

    It takes about a minute, and finds at the desk what would otherwise break on the GPUs: keys that Trinity does not
    know or can't honour, an agent that can't be sent to another process, tasks that lack what it asks for.

    \b
    ajet rehearse --conf math.yaml
    ajet rehearse --conf math.yaml ajet.trainer_common.nnodes=4
    """
    agent, overrides = split_arguments(arguments or [])
    if conf is None and agent is None:
        raise ConfigError("say what to rehearse: a config file (--conf FILE) or an agent (agent.py:solve)")
    config = Arguments(conf=conf, overrides=overrides, agent=agent, backbone="trinity").config()
    use_placeholder_key()
    directory = config.directory.parent / f"rehearsal-{config.experiment_name}"
    shutil.rmtree(directory, ignore_errors=True)
    _rehearse(config, directory)
    if keep:
        echo(f"Its traces: ajet trace view {directory}")
    else:
        shutil.rmtree(directory)


def _rehearse(config: Config, directory: Path) -> None:
    from importlib.util import find_spec

    for package in ("torch", "ray", "trinity"):
        if find_spec(package) is None:
            raise MissingExtra(package, "trinity")
    from ajet_sdk import run
    from ajet_sdk.backbones.trinity.mapping import check
    from ajet_sdk.backbones.trinity.placement import engines
    from ajet_sdk.backbones.trinity.rehearsal import Stopwatch, check_mapping, findings, rehearsed, tiny_model

    check(config)  # before a model is made
    watch = Stopwatch(echo)
    common, rollout = config.trainer_common, config.rollout
    model, whose = tiny_model(config, directory / "model")
    watch.done("model", f"random weights, {whose}")
    asyncio.run(check_mapping(config, directory / "real", model))
    sampling = engines(config) * rollout.tensor_parallel_size
    where = f"{common.nnodes} × {common.n_gpus_per_node} GPUs, {sampling} to sample"
    watch.done("config", f"Trinity takes it for {where if common.n_gpus_per_node else 'a CPU'}")
    try:
        tuned = run.train(rehearsed(config, directory, model))
    except TrainingError as error:
        raise TrainingError(f"{error}\nThe rehearsal's logs and traces are in {directory}") from error
    found, failures = findings(directory)
    if failures:
        raise TrainingError(
            f"{found['failed']} of {found['episodes']} episodes failed:\n  "
            + "\n  ".join(failures)
            + f"\nlook with: ajet trace view {directory}"
        )
    watch.done("run", _counted(found))
    _judge(found, tuned, directory)
    watch.done("checkpoint", f"{tuned.path}")
    echo("The rehearsal went well. Rewards of 0 and 1 in turn stood in for the judge's, so it says nothing of them.")


def _counted(found: dict[str, int]) -> str:
    return (
        f"{found['episodes']} episodes, {found['calls']} calls, {found['trained']} tokens trained, "
        f"{found['versions']} versions of the model sampled"
    )


def _judge(found: dict[str, int], tuned: Any, directory: Path) -> None:
    """Raise TrainingError where the rehearsal shows that the real run would not learn."""
    look = f"look with: ajet trace view {directory}"
    if not found["trained"]:
        raise TrainingError(f"nothing was trained: no call of the policy was captured; {look}")
    if found["versions"] < 2:
        raise TrainingError(f"new weights never reached the sampler; {look}")
    if tuned.path is None:
        raise TrainingError(f"no model was written; {look}")
