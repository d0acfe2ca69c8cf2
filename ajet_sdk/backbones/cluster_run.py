"""A run on a Ray cluster as its driver sees it, whoever trains: the store, Ray, the nodes' traces, the books.

The driver trains nothing. `trinity.backbone` and `verl.backbone` each add the trainer that they start.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones import ledger
from ajet_sdk.backbones.clustered import export, sized
from ajet_sdk.backbones.post import namespace_of
from ajet_sdk.backbones.steps import total_steps
from ajet_sdk.errors import ConfigError
from ajet_sdk.loggers import Loggers
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.types import Call

if TYPE_CHECKING:
    from ajet_sdk.cluster import RayCluster
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

__all__ = ["ClusterRun", "opened", "step_saved"]


@contextmanager
def opened(job: Job, writer: TraceWriter) -> Iterator[tuple[Job, Loggers, int]]:
    """The job with the machines that it gets, its loggers, and its number of steps. Raises ConfigError."""
    if not job.train:
        raise ConfigError("there is no training task; see task_reader")
    job = replace(job, config=sized(job))
    total = total_steps(job.config, len(job.train))
    with Loggers.of(job, writer, total) as loggers:
        yield job, loggers, total


def step_saved(directory: Path) -> int:
    """The step of the newest checkpoint that a trainer wrote into its directory; 0 where there is none."""
    newest = directory / "latest_checkpointed_iteration.txt"
    return int(newest.read_text()) if newest.exists() else 0


class ClusterRun:
    """What does not depend on who trains."""

    def __init__(self, job: Job, writer: TraceWriter, loggers: Loggers, total: int) -> None:
        self.job, self.config, self.writer = job, job.config, writer
        self.loggers, self.total = loggers, total
        base = job.config.trainer_common.checkpoint_base_dir
        self.store = (Path(base) if base else job.directory / "checkpoint").resolve()
        self.traces = self.store / job.run_id / "traces" if base else job.directory.resolve()
        """Where the nodes write: in the checkpoint store where that is a place of its own, since they all reach it."""

    def cluster(self, beside: Sequence[Path] = ()) -> AbstractContextManager[RayCluster]:
        """The Ray cluster of the job, or one that is started here. `beside` are folders that nodes need, too."""
        from ajet_sdk.cluster import LOCAL, cluster
        from ajet_sdk.parcel import parcel_of

        source = self.config.source
        parcel = parcel_of(
            self.job.workflow,
            self.job.judge,
            beside=[*([source.parent] if source else []), *beside],
            leave_out=[self.job.directory, self.store],
        )
        address = self.job.ray or LOCAL
        self.loggers.say(
            "starting Ray on this machine" if address == LOCAL else f"joining the Ray cluster at {address}"
        )
        return cluster(address, parcel=parcel, namespace=namespace_of(self.job.run_id), quiet=True)

    def keep(self, mapping: Mapping[str, Any], name: str) -> None:
        """Keep what the trainer gets as a YAML file beside our own config."""
        import yaml

        shown = json.loads(json.dumps(mapping, default=str))
        (self.job.directory / name).write_text(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))

    def roll_back(self, step: int) -> None:
        """Take up the run at a checkpoint: what was sampled after it is sampled again."""
        if step:
            self.loggers.say(f"going on from step {step} of {self.total}")
            self.loggers.last |= self._measured(step)
        else:
            self.loggers.say("there is no checkpoint: beginning at step 0")
        ledger.roll_back(self.writer, self.traces, self.job.run_id, step if step else -1)

    def is_validated(self) -> bool:
        """Whether the trace has a validation of the last step."""
        return any(name.startswith("val/") for name in self._measured(self.total, only=True))

    def _measured(self, step: int, only: bool = False) -> dict[str, float]:
        """The newest value of each metric up to a step, or only of that step."""
        rows = self.writer.query(
            f"""SELECT name, arg_max(value, "at") AS value FROM metrics
                WHERE run_id = ? AND step {"=" if only else "<="} ? GROUP BY name""",
            [self.job.run_id, step],
        )
        return {row["name"]: row["value"] for row in rows.to_pylist()}

    def bring_traces(self) -> None:
        """Copy what the nodes wrote beside the driver's trace, where every command looks."""
        if self.traces == self.job.directory.resolve():
            return
        for file in self.traces.glob("trace-*.duckdb"):
            target = self.job.directory / file.name
            shutil.copy2(file, target)
            log, stale = (path.with_name(f"{path.name}.wal") for path in (file, target))
            stale.unlink(missing_ok=True)  # DuckDB refuses a file with the log of another
            if log.exists():
                shutil.copy2(log, stale)

    def close_books(self) -> None:
        """Bring the nodes' traces, and book what no one has booked; see `ledger.close_books`."""
        self.writer.flush()
        self.bring_traces()
        ledger.close_books(self.writer, self.job.directory, self.job.run_id)

    def export(self, found: Path) -> Path:
        """Copy a Hugging Face checkpoint to where every backbone leaves its model, and say so once it loads there.

        Raises CheckpointError where it is not the model that was trained; see `check_export`.
        """
        target = self.store / self.job.run_id / "model"
        gap = export(found, target, self._validated_with(self.total))
        if gap is not None:
            self.loggers.say(f"loaded again, the model gives the sampler's log-probabilities to {gap:.1g} in the mean")
        self.loggers.say(f"the trained model is in {target}")
        return target

    def _validated_with(self, version: int) -> list[Call]:
        """The calls of the validation that weights after so many updates sampled."""
        trace = open_trace(self.job.directory)
        try:
            found = episodes(trace, self.job.run_id, version, split="val")
        finally:
            trace.close()
        return [call for episode in found for call in episode.calls if call.policy_version == version]
