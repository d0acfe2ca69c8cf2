"""Records the episodes and calls of a deployed agent in a trace file."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ajet_sdk.agent.context import ActiveEpisode, ObservedExchange, Verdict, current_episode, observer
from ajet_sdk.capture.hooks import HOOKS, installed
from ajet_sdk.capture.remote import never_raise
from ajet_sdk.errors import AjetError
from ajet_sdk.gateway.episode import observed_call
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.samples.prefixes import PrefixIndex
from ajet_sdk.trace.encoding import REMOVED, Record, scrub
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Event, Run, Status, Task, new_id, now

log = logging.getLogger("ajet")

_FIRST_WRITE = 5.0


class trace:
    """Observe a deployed agent: record its LLM calls in a trace file, and never reroute, delay or break them.

    Call it once at start-up, or use it as a context manager. Every call of a decorated workflow is an episode; calls
    outside of one belong to an episode of the process. A file that cannot be written is one warning. The trace can be
    read while the agent runs.

    Args:
        path: a `.duckdb` file, or a directory in which each process gets a file of its own.
    """

    def __init__(self, path: str | Path) -> None:
        self._hooks = installed()
        self._hooks.__enter__()
        self._observation: Observation | None = Observation(Path(path))
        self._outer = HOOKS.observing, observer.get()
        HOOKS.observing = self._observation.process_episode
        observer.set(self._observation)
        atexit.register(self.close)

    def __enter__(self) -> trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def flush(self, timeout: float = 10.0) -> None:
        """Wait until all records so far are in the file."""
        if self._observation is not None:
            self._observation.flush(timeout)

    def close(self) -> None:
        """Stop observing and close the file. Further calls have no effect."""
        observation, self._observation = self._observation, None
        if observation is None:
            return
        atexit.unregister(self.close)
        HOOKS.observing, outer = self._outer
        if observer.get() is observation:
            observer.set(outer)
        observation.close()
        self._hooks.__exit__(None, None, None)


class ObservedEpisode:
    """An observed episode; records its calls."""

    def __init__(self, put: Callable[..., None]) -> None:
        self.episode_id = new_id()
        self.output: object = None
        self.active = ActiveEpisode(self.episode_id, self)
        self.started_at = now()
        self._put = put
        self.events: list[Event] = []
        self._index = PrefixIndex()
        self._indices = itertools.count()

    def answers(self, model: str) -> Verdict:
        """Always `other`: nothing is rerouted."""
        return "other"

    def takes_handle(self, agent: str) -> None:
        """Does nothing: there are no handles."""

    def fail(self, error: AjetError) -> None:
        """Does nothing: a deployed agent has no faults."""

    def observed(self, exchange: ObservedExchange) -> None:
        """Record a call."""
        self._put(self._index.add(observed_call(self.episode_id, next(self._indices), exchange)))

    def happened(self, event: Event) -> None:
        """Record an event, for example a tool call."""
        self.events.append(event)


class Observation:
    """The recording of one `ajet.trace`. A file that can't be written causes one warning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._pid = -1
        self._writer: TraceWriter | None = None
        self._gateway: Gateway | None = None
        self._run: Run | None = None
        self._process: ObservedEpisode | None = None
        self._open()

    def _open(self) -> None:
        """Open this process's file; a forked child gets its own where `path` is a directory."""
        self._pid = os.getpid()
        self._writer = self._gateway = self._process = None
        self._run = Run(name=f"{socket.gethostname()} {self._pid}", backbone="trace")
        try:
            self._writer = TraceWriter(self._file(), on_error="warn")
            self._put(self._run)
            self._gateway = Gateway(self._writer).start()
            self._writer.flush(_FIRST_WRITE)  # the first takes longest, and calls come only then
        except Exception as error:  # noqa: BLE001  # the boundary: an agent in service must not notice
            log.warning("ajet.trace(%s): nothing is recorded: %s: %s", self._path, type(error).__name__, error)

    def _file(self) -> Path:
        if self._path.suffix == ".duckdb" and not self._path.is_dir():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._path
        self._path.mkdir(parents=True, exist_ok=True)
        return self._path / f"{socket.gethostname()}-{self._pid}-{new_id()[:8]}.duckdb"

    def _put(self, *records: Record) -> None:
        if self._writer is not None:
            self._writer.put(*records)

    def _here(self) -> None:
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._open()

    def process_episode(self) -> ActiveEpisode:
        """The episode of calls outside of decorated functions."""
        self._here()
        with self._lock:
            if self._process is None:
                # Recorded at its start: a process in service is seldom ended in good order.
                self._process = process = ObservedEpisode(self._put)
                never_raise(lambda: self._record(process, "process", {}, "succeeded", None))
            return self._process.active

    @contextmanager
    def episode(self, name: str, arguments: Mapping[str, object]) -> Iterator[ObservedEpisode]:
        """Record the block as an episode; an exception is recorded and raised."""
        self._here()
        seen = ObservedEpisode(self._put)
        token = current_episode.set(seen.active)
        try:
            yield seen
        except BaseException as raised:
            error = raised
            never_raise(lambda: self._record(seen, name, arguments, "failed", error))
            raise
        else:
            never_raise(lambda: self._record(seen, name, arguments, "succeeded", None))
        finally:
            current_episode.reset(token)

    def _record(
        self,
        seen: ObservedEpisode,
        name: str,
        arguments: Mapping[str, object],
        status: Status,
        error: BaseException | None,
    ) -> None:
        metadata = scrub({key: _plain(value) for key, value in arguments.items()})
        query = next((value for value in metadata.values() if isinstance(value, str) and value != REMOVED), "")
        self._put(
            Episode(
                episode_id=seen.episode_id,
                run_id=self._run.run_id if self._run else "",
                group_id=seen.episode_id,
                task=Task(main_query=query, env_type=name, metadata=metadata),
                output=_plain(seen.output),
                events=tuple(seen.events),
                status=status,
                error=None if error is None else f"{type(error).__name__}: {error}",
                cause=None if error is None else type(error).__name__,
                started_at=seen.started_at,
                ended_at=now(),
            )
        )

    def flush(self, timeout: float) -> None:
        """Wait until all records are in the file."""
        if self._writer is not None:
            self._writer.flush(timeout)

    def close(self) -> None:
        """Close the run and the file; never raises."""
        if self._pid != os.getpid():
            return
        if self._run is not None:
            ended = self._run.model_copy(update={"status": "finished", "ended_at": now()})
            never_raise(lambda: self._put(ended))
        if self._gateway is not None:
            never_raise(self._gateway.close)
        if self._writer is not None:
            never_raise(self._writer.close)


def _plain(value: object) -> object:
    """The value as JSON, else its `repr`."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value)[:1000]
