"""tensorboard, wandb and swanlab.

Configure network use in wandb and swanlab: `WANDB_MODE=offline`, `SWANLAB_MODE=offline` (or `local`),
`wandb login`, `swanlab login`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ajet_sdk.engines.loop_calls import in_thread
from ajet_sdk.errors import ConfigError, MissingExtra

T = TypeVar("T")

log = logging.getLogger("ajet")

_BEGIN_SECONDS = 40.0
_END_SECONDS = 60.0


@dataclass(frozen=True)
class TrackedRun:
    """A run as described to a tracker."""

    run_id: str
    """A resumed run with the same id continues in the tracker."""
    project: str
    name: str
    config: Mapping[str, object]
    directory: Path
    """Directory of the tracker's files."""


class _Service(Protocol):
    address: str
    """Where to view the run, as text."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def finish(self, error: BaseException | None) -> None: ...


class _Tensorboard:
    """An event file, written in the caller's thread.

    The package's own writer has a thread, which prints a traceback if the disk is full.
    """

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory = run.directory / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{os.getpid()}.{time.time_ns()}"
        self.address = str(directory / name)
        self._file = (directory / name).open("xb")
        self._event, self._records = Event, RecordWriter(self._file)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        event = self._event(wall_time=time.time(), step=step)
        for name, value in metrics.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._append(event)

    def _append(self, event: Any) -> None:
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError:
            self._file.raw.close()  # drop the buffer instead of writing it again
            raise

    def finish(self, error: BaseException | None) -> None:
        self._file.close()


class _Wandb:
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run.directory.mkdir(
            parents=True, exist_ok=True
        )  # otherwise it uses the system's temporary directory
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=run.directory,
            config=dict(run.config),
            settings=wandb.Settings(init_timeout=_BEGIN_SECONDS - 10, console="off", silent=True),
        )
        # wandb's own step cannot decrease, as after a resume from an earlier checkpoint.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        folder = Path(self._run.dir).parent
        offline = f"in {folder}; upload it with: wandb sync {folder}"
        self.address = offline if self._run.offline else str(self._run.url)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def finish(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=0 if error is None else 255 if _stopped(error) else 1)


class _Swanlab:
    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.run_id,
            resume="allow",
            log_dir=str(run.directory / "swanlab"),
            config=dict(run.config),
            settings=swanlab.Settings(
                interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")
            ),
        )
        offline = f"in {self._run.dir}; upload it with: swanlab sync {self._run.dir}"
        self.address = self._run.url if self._run.mode == "online" else offline

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._run.finish()
        elif _stopped(error):
            self._run.finish(state="aborted")
        else:
            self._run.finish(state="crashed", error=f"{type(error).__name__}: {error}")


TRACKERS: Mapping[str, Callable[[TrackedRun], _Service]] = {
    "tensorboard": _Tensorboard,
    "wandb": _Wandb,
    "swanlab": _Swanlab,
}
"""By the name in `trainer_common.logger`."""


class Tracker:
    """A run in one of `TRACKERS`. Later failures are logged once and do not stop the run.

    Raises MissingExtra if the package is absent, ConfigError if the run cannot start: no key, no
    network (after 40 seconds at most).
    """

    def __init__(self, name: str, run: TrackedRun, say: Callable[[str], None]) -> None:
        self._name = name
        self._directory = run.directory
        try:
            self._service: _Service | None = _in_a_thread(
                lambda: TRACKERS[name](run), _BEGIN_SECONDS
            )
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            extra = "local" if name == "tensorboard" else "loggers"
            raise MissingExtra(name, extra) from error
        except Exception as error:  # any error of the service
            advice = (
                f"log in with `{name} login`, write files here with {name.upper()}_MODE=offline"
            )
            if name == "tensorboard":
                advice = "reinstall it (pip install --force-reinstall tensorboard)"
            raise ConfigError(
                f"trainer_common.logger: {name} could not start the run ({type(error).__name__}:"
                f" {error}); {advice}, or remove {name}"
            ) from error
        say(f"{name}: {self._service.address}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._service is None:
            return
        try:
            self._service.log(step, metrics)
        except Exception as error:  # noqa: BLE001  any error of the service; reported, and the metrics are in the trace
            log.warning(
                "%s failed and gets no more metrics, which are still written to the trace: %s:"
                " %s: %s",
                self._name,
                self._service.address,
                type(error).__name__,
                error,
            )
            self._service = None

    def finish(self, error: BaseException | None) -> None:
        """Close the run as finished, stopped or failed; waits at most a minute for uploads."""
        if self._service is None:
            return
        service = self._service
        self._service = None
        try:
            _in_a_thread(lambda: service.finish(error), _END_SECONDS)
        except TimeoutError:
            log.warning(
                "%s has not uploaded everything; its files are in %s", self._name, self._directory
            )
        except Exception as lost:  # noqa: BLE001  as in `log`
            log.warning(
                "%s could not finish the run (%s: %s)", self._name, type(lost).__name__, lost
            )


def _in_a_thread(function: Callable[[], T], seconds: float) -> T:
    """Run a function in a thread; raises TimeoutError if it takes longer, and lets it continue.

    In the main thread a service would handle Ctrl-C itself, or wait for the network forever.
    """
    future = in_thread(function, "ajet-tracker")
    try:
        return future.result(seconds)
    except Late:
        if future.done():
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def _stopped(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
