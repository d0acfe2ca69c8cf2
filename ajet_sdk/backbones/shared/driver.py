"""The driver of a run on a Ray cluster: checkpoint store, Ray, the traces of the nodes, the ledger.

`trinity.backbone` and `verl.backbone` derive from it and start their trainers.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml

from ajet_sdk.backbones.shared.mapping import Place
from ajet_sdk.backbones.shared.steps import check_job, total_steps
from ajet_sdk.backbones.shared.validation import validation_tasks
from ajet_sdk.cluster.code import INSTALL, package_code
from ajet_sdk.cluster.mailbox import namespace_of
from ajet_sdk.cluster.ray import LOCAL, RayCluster, cluster
from ajet_sdk.config.model_source import adapter_values, first_model
from ajet_sdk.engines.local.weights import LOAD_ERRORS, Mismatch, read_causal_lm
from ajet_sdk.errors import ConfigError, MissingExtra, TraceLocked, TrainingError, first_line
from ajet_sdk.learn.checkpoint import check_export
from ajet_sdk.learn.learner import default_lr
from ajet_sdk.learn.probe import Probe
from ajet_sdk.learn.recipe import build_recipe, wants_recipe
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.reporting.results import TunedModel
from ajet_sdk.secret_keys import masked
from ajet_sdk.trace.reader import episodes, ledger_balance, open_trace, trace_files
from ajet_sdk.trace.schema import SAMPLED
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, LedgerEntry

if TYPE_CHECKING:
    from ajet_sdk.cluster.mailbox import TrainedMessage
    from ajet_sdk.config.config import Config
    from ajet_sdk.protocols import Job

P = TypeVar("P", bound=Place)
T = TypeVar("T")


@contextmanager
def open_run(job: Job, writer: TraceWriter) -> Iterator[tuple[Job, Loggers, int]]:
    """Open the loggers of a job; yields the job with the cluster's machines, the loggers and the
    number of steps.

    Raises ConfigError.
    """
    check_job(job)
    job = replace(job, config=config_for_cluster(job))
    total = total_steps(job.config, len(job.train))
    with Loggers.of(job, writer, total) as loggers:
        yield job, loggers, total


class ClusterRun:
    """The parts of a cluster run that do not depend on the trainer."""

    def __init__(self, job: Job, writer: TraceWriter, loggers: Loggers, total: int) -> None:
        self.job = job
        self.config = job.config
        self.writer = writer
        self.loggers = loggers
        self.total = total
        base = job.config.trainer_common.checkpoint_base_dir
        self.store = (Path(base) if base else job.directory / "checkpoint").resolve()
        self.traces = job.directory.resolve()
        """The directory of the nodes' trace files: in the checkpoint store, if configured, as every
        node reaches it."""
        if base:
            self.traces = self.store / job.run_id / "traces"

    async def place(self, kind: type[P], *, lora: bool = False, **more: object) -> P:
        """The run's paths, model and learning rate (the default for an adapter with `lora`). A
        recipe's model is built first."""
        model = await model_to_train(self.job, self.loggers.say)
        return kind(
            run_id=self.job.run_id,
            model=model,
            steps=self.total,
            lr=learning_rate(self.config, model, self.loggers.say, lora=lora),
            checkpoints=self.store,
            val_tasks=len(validation_tasks(self.job)),
            **more,
        )

    def result(self, path: Path | None) -> TunedModel:
        """The exported model, if any, with the newest metrics."""
        start = self.config.model.path
        return self.loggers.tuned(
            path, self.job.directory, {0: Path(first_model(self.config))} if start else {}
        )

    def cluster(self, hook: str = INSTALL) -> AbstractContextManager[RayCluster]:
        """Join the job's Ray cluster, or start one here; workers call the function `hook` when they
        start."""
        source = self.config.source
        package = package_code(
            self.job.workflow,
            self.job.judge,
            beside=[source.parent] if source else [],
            leave_out=[self.job.directory, self.store],
        )
        address = self.job.ray or LOCAL
        self.loggers.say(
            "starting Ray on this machine"
            if address == LOCAL
            else f"joining the Ray cluster at {address}"
        )
        return cluster(
            address, package=package, namespace=namespace_of(self.job.run_id), quiet=True, hook=hook
        )

    def keep(self, mapping: Mapping[str, object], name: str) -> None:
        """Write the trainer's config as a YAML file next to ajet's."""
        shown = masked(json.loads(json.dumps(mapping, default=str)), "***")
        (self.job.directory / name).write_text(
            yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
        )

    def roll_back(
        self, step: int, kept: Sequence[str] = (), reports: Sequence[TrainedMessage] = ()
    ) -> None:
        """Resume at a checkpoint: later samples are marked superseded, in the trace files of the
        driver and the nodes.

        The nodes' processes have ended. Calls that the driver booked are not booked again. The
        driver's episodes in `kept` stay. `reports` are the trainer's, of the steps up to the
        checkpoint: a driver that was killed may have missed some.
        """
        if step:
            self.loggers.say(f"resuming after step {step} of {self.total}")
            self.loggers.last |= self._newest_metrics(step)
        else:
            self.loggers.say("no checkpoint found; starting at step 0")
        step = step or -1
        run_id = self.job.run_id
        self._book_missed(reports)
        steps_taken = _steps_taken(reports)
        self.writer.supersede(run_id, step, kept=kept)
        rows = self.writer.query(
            "SELECT call_id FROM ledger WHERE run_id = ? AND step > ?", [run_id, step]
        )
        booked = rows["call_id"].to_pylist()
        reached = self._booked_by_step(step)
        for path in trace_files(self.traces) if any(self.traces.glob("*.duckdb")) else ():
            if path.resolve() != self.writer.path.resolve():
                with TraceWriter(path) as node_writer:
                    move_to_steps(node_writer, run_id, steps_taken)
                    lost = self._lost_on_the_way(node_writer, reached)
                    node_writer.supersede(run_id, step, booked, lost=lost)

    def _book_missed(self, reports: Sequence[TrainedMessage]) -> None:
        """Add what the trainer reported to the ledger, where it is missing."""
        sql = "SELECT DISTINCT call_id FROM ledger WHERE run_id = ?"
        booked = set(self.writer.query(sql, [self.job.run_id])["call_id"].to_pylist())
        for report in reports:
            entries = ledger_entries(self.job.run_id, report)
            self.writer.put(*(entry for entry in entries if entry.call_id not in booked))
        self.writer.flush()

    def _booked_by_step(self, step: int) -> dict[int, set[str]]:
        """The episodes in the driver's ledger, by step up to one."""
        sql = "SELECT DISTINCT step, episode_id FROM ledger WHERE run_id = ? AND step <= ?"
        reached: dict[int, set[str]] = {}
        for row in self.writer.query(sql, [self.job.run_id, step]).to_pylist():
            reached.setdefault(row["step"], set()).add(row["episode_id"])
        return reached

    def _lost_on_the_way(
        self, node_writer: TraceWriter, reached: Mapping[int, set[str]]
    ) -> list[str]:
        """Training episodes of a node that are in no ledger, though others of their step are: their
        group was lost on its way to the trainer, as when an engine dies behind the last reply.

        Of a step without any entry, the report of the trainer may be lost instead.
        """
        rows = node_writer.query(_UNBOOKED_BY_NODE, [self.job.run_id]).to_pylist()
        return [
            row["episode_id"]
            for row in rows
            if row["step"] in reached and row["episode_id"] not in reached[row["step"]]
        ]

    def is_validated(self) -> bool:
        """Whether the trace has a validation of the last step."""
        return any(name.startswith("val/") for name in self._newest_metrics(self.total, only=True))

    def _newest_metrics(self, step: int, only: bool = False) -> dict[str, float]:
        """The newest value of each metric up to a step, or only of that step."""
        rows = self.writer.query(
            f"""SELECT name, arg_max(value, "at") AS value FROM metrics
                WHERE run_id = ? AND step {"=" if only else "<="} ? GROUP BY name""",
            [self.job.run_id, step],
        )
        return {row["name"]: row["value"] for row in rows.to_pylist()}

    def copy_traces(self) -> None:
        """Copy the nodes' trace files next to the driver's, where commands look for them."""
        if self.traces == self.job.directory.resolve():
            return
        for file in self.traces.glob("trace-*.duckdb"):
            target = self.job.directory / file.name
            shutil.copy2(file, target)
            log, stale = (path.with_name(f"{path.name}.wal") for path in (file, target))
            stale.unlink(missing_ok=True)  # DuckDB refuses a file with the log of another
            if log.exists():
                shutil.copy2(log, stale)

    def close_books(self, reports: Sequence[TrainedMessage] = ()) -> None:
        """Copy the nodes' traces and complete the ledger. With the trainer's `reports`, episodes
        that were carried over become those of the step that trained them."""
        self.writer.flush()
        if self.config.rollout.carry_over:
            self._move_carried(_steps_taken(reports))
        self.copy_traces()
        close_books(self.writer, self.job.directory, self.job.run_id)

    def _move_carried(self, steps_taken: Mapping[str, int]) -> None:
        for path in self.traces.glob("trace-*.duckdb"):
            with when_unlocked(partial(TraceWriter, path)) as node_writer:
                move_to_steps(node_writer, self.job.run_id, steps_taken)

    def export(self, checkpoint: Path) -> Path:
        """Copy a Hugging Face checkpoint to the run's `model` directory and check that it loads.

        Raises CheckpointError if it is not the trained model; see `check_export`.
        """
        target = self.store / self.job.run_id / "model"
        last = self.total
        with open_trace(self.job.directory, writer=self.writer) as trace:
            validated = episodes(trace, self.job.run_id, last, split="val")
        calls = [
            call for episode in validated for call in episode.calls if call.policy_version == last
        ]
        gap = export(checkpoint, target, calls)
        if gap is not None:
            self.loggers.say(
                "reloaded model reproduces the sampler's log-probabilities; mean difference"
                f" {gap:.1g}"
            )
        return target


_RELEASES = {"trinity": ("trinity-rft", "0.6"), "verl": ("verl", "0.8")}
"""Distribution of a package, and the release whose classes the backbones use: verl 0.9 has no
`TaskRunner`, for example."""


def check_installed(*packages: str) -> None:
    """Raise MissingExtra for the first package that is not installed, and ConfigError for one of a
    release that the backbones don't work with."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(package, "trinity")
        if package not in _RELEASES:
            continue
        distribution, release = _RELEASES[package]
        try:
            installed = version(distribution)
        except PackageNotFoundError:  # a checkout on the path, whose release nobody knows
            continue
        if not installed.startswith(f"{release}."):
            raise ConfigError(
                f"{distribution} {installed} is installed, and this ajet works with {release};"
                " install it with `ajet install trinity`"
            )


async def model_to_train(job: Job, say: Callable[[str], None]) -> str:
    """The absolute directory of the model, or its name on the hub. A recipe's model is built
    first."""
    config = job.config
    if not config.model.path:
        raise ConfigError(
            f"model.path is not set: backbone {config.backbone} needs a local directory or a"
            " Hugging Face name"
        )
    if wants_recipe(config):
        path = await build_recipe(config, Probe(config, job.workflow, job.judge, job.train), say)
    else:
        path = config.resolve(config.model.path)
    if adapter_values(path) is not None:
        raise ConfigError(
            f"model.path: {path} is a LoRA adapter, which backbone {config.backbone} can't start"
            " from; name a model with the adapter merged (a finished run exports one as `model/`),"
            " or use backbone local"
        )
    return str(path.resolve()) if path.exists() else str(path)


def learning_rate(
    config: Config, model: str, say: Callable[[str], None], *, lora: bool = False
) -> float:
    """The configured learning rate, or the default for a model of this size."""
    parameters = _parameters(model)
    lr = config.trainer_common.optim.lr
    if lr is None:
        lr = default_lr(parameters, lora=lora)
        say(f"trainer_common.optim.lr is not set; using {lr:g} for {parameters:,} parameters")
    return lr


def config_for_cluster(job: Job) -> Config:
    """The config with the cluster's number of machines and GPUs, unless it sets them."""
    config = job.config
    common = job.config.trainer_common
    if config.is_set("trainer_common.n_gpus_per_node"):
        return config
    if (job.ray or LOCAL) == LOCAL:
        import torch

        nodes = [torch.cuda.device_count()]
    else:
        with cluster(job.ray or LOCAL, quiet=True) as joined:
            nodes = [int(node.gpus) for node in joined.nodes() if node.alive]
    gpus = [count for count in nodes if count]
    update = {"n_gpus_per_node": min(gpus, default=0)}
    if not config.is_set("trainer_common.nnodes"):
        update["nnodes"] = max(1, len(gpus))
    return config.model_copy(update={"trainer_common": common.model_copy(update=update)})


def export(checkpoint: Path, target: Path, calls: Sequence[Call] = ()) -> float | None:
    """Copy a transformers checkpoint to `target` after checking that it loads.

    Returns and raises as `check_export`; `calls` were sampled by the final weights.
    """
    draft = target.with_name(f"{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(checkpoint, draft, ignore=shutil.ignore_patterns("*.pt"))
    gap = check_export(draft, calls)
    shutil.rmtree(target, ignore_errors=True)
    draft.replace(target)
    return gap


def _parameters(model: str) -> int:
    """Number of parameters of a model. Raises ConfigError if the tensors in its directory do not
    fit.

    A name on the hub is not downloaded here, so only its shape is read.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if Path(model).is_dir():
            whole, mismatch = read_causal_lm(model, device_map="meta", trust_remote_code=False)
        else:
            mismatch = Mismatch()
            with torch.device("meta"):
                whole = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(model, trust_remote_code=False)
                )
    except LOAD_ERRORS as error:
        raise ConfigError(
            f"model.path: {model} cannot be loaded as a causal language model: {first_line(error)}"
        ) from error
    if mismatch:
        raise ConfigError(
            f"model.path: the weights in {model} do not match the model of its config.json:"
            f" {mismatch}"
        )
    return sum(p.numel() for p in whole.parameters())


_ENDING = 60.0
"""Seconds to wait for other processes to close their trace files."""

_UNBOOKED_BY_NODE = f"""
    SELECT DISTINCT e.step, e.episode_id FROM calls c JOIN episodes e USING (episode_id)
    WHERE e.run_id = ? AND e.split = 'train' AND e.status = 'succeeded'
        AND NOT coalesce(e.superseded, false) AND c.trainable AND c.phase = 'rollout'
        AND {SAMPLED} > 0
        AND c.episode_id NOT IN (SELECT episode_id FROM ledger)"""
"""Sound episodes that their node didn't book: the driver does, when they were trained."""

_UNBOOKED = f"""
    SELECT coalesce(e.step, 0) AS step, c.episode_id, c.call_id,
        {SAMPLED} - coalesce(b.tokens, 0) AS tokens,
        CASE WHEN e.split = 'val' THEN 'evaluation'
            WHEN e.episode_id IS NULL OR e.status = 'succeeded' THEN 'superseded'
            ELSE 'failed' END AS outcome
    FROM calls c LEFT JOIN episodes e USING (episode_id)
    LEFT JOIN (
        SELECT call_id, sum(tokens)::BIGINT AS tokens FROM ledger WHERE run_id = $1 GROUP BY call_id
    ) b USING (call_id)
    WHERE c.trainable AND c.phase = 'rollout' AND {SAMPLED} > coalesce(b.tokens, 0)
        AND (e.run_id = $1 OR e.episode_id IS NULL
            AND c.started_at >= (SELECT min(started_at) FROM runs WHERE run_id = $1))"""
"""Calls that are not in the ledger, also those of an episode that ended with its process."""


def close_books(writer: TraceWriter, directory: Path, run_id: str) -> None:
    """Complete the ledger and check that every sampled token is in it once.

    Sound episodes that did not reach the trainer (explored ahead of the last step, or lost with a
    node) become `superseded`, interrupted ones `failed`. Waits up to a minute for processes with
    open trace files. Raises TrainingError if a call is booked twice.
    """
    when_unlocked(partial(_close_books, writer, directory, run_id))


def when_unlocked(function: Callable[[], T]) -> T:
    """Call `function`, again for up to a minute while other processes have trace files open."""
    deadline = time.monotonic() + _ENDING
    while True:
        try:
            return function()
        except TraceLocked:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def ledger_entries(run_id: str, report: TrainedMessage) -> list[LedgerEntry]:
    """The entries of the calls that Trinity's trainer took."""
    entries = []
    for call in report["calls"]:
        row = {**call, "run_id": run_id, "step": report["step"]}
        known = {name: value for name, value in row.items() if name in LedgerEntry.model_fields}
        entries.append(LedgerEntry(**known))
    return entries


def _steps_taken(reports: Sequence[TrainedMessage]) -> dict[str, int]:
    """The step that took each episode."""
    return {
        episode_id: report["step"]
        for report in reports
        for group in report["groups"]
        for episode_id in group["episodes"]
    }


def move_to_steps(writer: TraceWriter, run_id: str, steps_taken: Mapping[str, int]) -> None:
    """Record episodes as those of the steps that took them, where they were begun for others."""
    sql = "SELECT episode_id, step FROM episodes WHERE run_id = ? AND split = 'train'"
    moved: dict[int, list[str]] = {}
    for row in writer.query(sql, [run_id]).to_pylist():
        step = steps_taken.get(row["episode_id"], row["step"])
        if step != row["step"]:
            moved.setdefault(step, []).append(row["episode_id"])
    for step, episode_ids in moved.items():
        writer.move_to_step(episode_ids, step)


def _close_books(writer: TraceWriter, directory: Path, run_id: str) -> None:
    with open_trace(directory, writer=writer) as trace:
        for row in trace.query(_UNBOOKED, [run_id]).to_pylist():
            writer.put(LedgerEntry(run_id=run_id, **row))
        wrong = ledger_balance(trace, run_id)
    if wrong:
        raise TrainingError(
            f"the ledger of run {run_id} does not balance:\n  " + "\n  ".join(wrong[:10])
        )
