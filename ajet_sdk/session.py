"""An open run: directory, log file, trace, gateway, capture, and the threads that run users'
code."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ajet_sdk.addresses import public
from ajet_sdk.capture.hooks import installed
from ajet_sdk.config.config import plain_yaml
from ajet_sdk.config.objects import code_of
from ajet_sdk.errors import AjetError, ConfigError, TrainingError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.event_loop import TERMINATED, exit_on_sigterm
from ajet_sdk.rollout.threads import Workers
from ajet_sdk.trace.reader import ledger_balance, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Run, now

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

log = logging.getLogger("ajet")


class Session:
    """One run, open; its status is recorded at the end."""

    def __init__(
        self,
        config: Config,
        *,
        resume: bool = False,
        backbone: str | None = None,
        code: tuple[Any, ...] = (),
        of_validation: bool = False,
        gateway: Gateway | None = None,
    ) -> None:
        self.config = config
        self.backbone = backbone or config.backbone
        self.resume = resume
        self.code = code
        """Workflow and judge, whose code is named in the trace."""
        self._gateway = gateway
        """A gateway that outlives the run; None: the run has its own."""
        self._of_validation = of_validation
        """Whether a run without training uses the config's validation tasks."""
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        directory = self.config.directory
        try:
            directory.mkdir(
                parents=True, exist_ok=True, mode=0o700
            )  # prompts, replies and rewards are private
            for name in ("logs", "metrics", "checkpoint"):
                (directory / name).mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"the directory of the run, {directory}, cannot be written:"
                f" {error.strerror or error}. Name another one with --exp-dir (experiment_dir)"
            ) from error
        with ExitStack() as stack:
            stack.enter_context(exit_on_sigterm())
            # clients of a gateway that outlives the run are told that their episodes are kept
            survives: Literal["kill"] | None = None if self._gateway is None else "kill"
            self.writer: TraceWriter = stack.enter_context(
                TraceWriter(directory / "trace.duckdb", survives=survives)
            )
            self.run = self._run()
            stack.enter_context(log_file(directory / "logs" / f"{self.run.run_id}.log"))
            (directory / "config.yaml").touch(mode=0o600)
            (directory / "config.yaml").write_text(
                plain_yaml(self.config.shown()), encoding="utf-8"
            )
            self.writer.put(self.run)
            self.writer.flush()  # whatever is served from here on can be resumed after a kill
            if self._gateway is not None:
                self.gateway = stack.enter_context(self._gateway.recording(self.writer))
            else:
                self.gateway = stack.enter_context(Gateway(self.writer))
            stack.enter_context(installed())
            stack.enter_context(Workers(self.config.rollout.max_env_worker))
            self._stack = stack.pop_all()
        return self

    def _code(self) -> dict[str, dict[str, str]]:
        """Which code gives the replies and the rewards: `workflow` and `judge`."""
        named = zip(("workflow", "judge"), self.code, strict=False)
        return {name: code for name, value in named if (code := code_of(value))}

    def _run(self) -> Run:
        config = self.config
        fields: dict[str, Any] = {
            "name": config.experiment_name,
            "config": {
                **config.shown(),
                **(
                    {"config_file": public(str(config.source))} if config.source else {}
                ),  # paths in it are beside it
                **({"tasks": "validation"} if self._of_validation else {}),
                "code": self._code(),
            },
            "backbone": self.backbone,
        }
        if not self.resume:
            return Run(**fields)
        sql = (
            "SELECT run_id, started_at, config FROM runs WHERE backbone = ? ORDER BY started_at DESC"
            " LIMIT 1"
        )
        newest = self.writer.query(sql, [self.backbone]).to_pylist()
        if not newest:
            raise ConfigError(
                f"there is nothing to resume in {config.directory}: its trace has no run of"
                f" backbone {self.backbone}"
            )
        before = json.loads(newest[0].pop("config") or "{}").get("code", {})
        for name, code in self._code().items():
            if name in before and before[name] != code:
                log.warning(
                    "The %s, %s, was edited since the run was started; rewards before and after it"
                    " may not compare",
                    name,
                    code["name"],
                )
        return Run(**fields, **newest[0])

    def check_ledger(self) -> None:
        """Raise TrainingError if the tokens in the ledger do not add up to those sampled."""
        with open_trace(self.config.directory, writer=self.writer) as trace:
            wrong = ledger_balance(trace, self.run.run_id)
        if wrong:
            more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise TrainingError(
                f"the ledger of run {self.run.run_id} does not balance:\n  "
                + "\n  ".join(wrong[:10])
                + more
            )

    def record_signal(self, number: signal.Signals) -> None:
        """Record that a signal stops the run, in case the process is killed before it ends."""
        if number == signal.SIGINT:
            text = "stopped by Ctrl-C"
        else:
            text = f"stopped by {number.name}"
        self.run = self.run.model_copy(update={"status": "interrupted", "error": text})
        self.writer.put(self.run)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        status = "finished"
        text = None
        if isinstance(error, SystemExit) and error.code == TERMINATED:
            status = "interrupted"
            text = "stopped by SIGTERM"
        elif isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            status = "interrupted"
            text = "stopped by Ctrl-C"
        elif error is not None:
            status = "failed"
            text = f"{type(error).__name__}: {error}"
            log.error("The run failed: %s", text, extra={"raised": True})  # only for the file
        try:
            self.writer.put(
                self.run.model_copy(update={"status": status, "ended_at": now(), "error": text})
            )
        except AjetError as lost:
            if error is None:
                raise
            log.error("The run's status could not be recorded: %s", lost)
        finally:
            self._stack.close()


class _LogFile(logging.FileHandler):
    """A log file that is abandoned with a message once it cannot be written, as on a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        log.removeHandler(self)
        log.warning("%s is truncated here: %s", self.baseFilename, sys.exc_info()[1])


class _PublicText(logging.Formatter):
    """Removes passwords and keys of addresses from lines and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return public(super().format(record))


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Within the block, also write ajet's log to the file."""
    path.touch(mode=0o600)
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(_PublicText("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    level = log.level
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        with suppress(OSError):  # its buffer doesn't fit the disk, which was reported
            handler.close()
