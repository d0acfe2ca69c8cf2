"""Records the episodes and calls of a deployed agent in a trace file."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from ajet_sdk.agent.activity import Activity
from ajet_sdk.agent.context import (
    ActiveEpisode,
    ObservedExchange,
    Recorder,
    Verdict,
    current_episode,
    observer,
)
from ajet_sdk.capture.hooks import HOOKS, installed
from ajet_sdk.capture.processes import never_raise
from ajet_sdk.capture.settings import ObservationSettings
from ajet_sdk.errors import AjetError
from ajet_sdk.gateway.episode import observed_call
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.samples.prefixes import PrefixIndex
from ajet_sdk.secret_keys import without
from ajet_sdk.trace.encoding import REMOVED, Record, scrub
from ajet_sdk.trace.limits import Limits, delete_beyond
from ajet_sdk.trace.writer import TraceWriter, take_over
from ajet_sdk.types import Episode, Event, Phase, Run, Status, Task, new_id, now

log = logging.getLogger("ajet")

_FLUSH_MS = 10_000
"""Milliseconds until a call is in the file if no reader asks; until then it is in a journal. Large
writes cost less."""
_FIRST_WRITE = 5.0
_RETRY = 60.0
"""Seconds until the next attempt to begin a file."""


class trace(AbstractContextManager["trace"]):
    """Observe a deployed agent: record its LLM calls in a trace file, and never reroute, delay or
    break them.

    Call it once at start-up, or use it as a context manager. Every call of a decorated workflow is
    an episode; other LLM calls belong to an episode of the process. A file that cannot be written
    causes one warning. The trace can be read while the agent runs. If the process is killed, calls
    whose reply was returned are in a journal beside the file; the next `ajet.trace` or reader of
    the trace recovers them.

    Args:
        path: a `.duckdb` file, or a directory in which each process writes its own files.
        rotate: when a process begins its next file in the directory: at a size ("64MB"), at an age ("1d"), or at
            whichever of several comes first. The default is 64 MB or a day.
        keep: limits of this machine's files in the directory: "30d" since the last change, "2GB" in total, "100
            files", or several of them. When a file is begun, the oldest files beyond the limits are deleted, except
            those being written; the new file counts, without a size.
        mask: regular expressions whose matches are removed from all texts before storage, or a function from a text to
            the text to store. If the function fails, the text is not stored.
        sample: fraction of episodes to record, from 0 to 1; outside of a workflow, of calls.
        durable: return a reply only after the journal is synced to disk, so that a crash of the machine loses no call.

    Raises:
        ConfigError: the path, a limit, an expression or a share is not valid.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rotate: str | Sequence[str] | None = None,
        keep: str | Sequence[str] | None = None,
        mask: Sequence[str] | Callable[[str], str] | None = None,
        sample: float = 1.0,
        durable: bool = False,
    ) -> None:
        settings = ObservationSettings(path, rotate, keep, mask, sample, durable)
        self._hooks = installed()
        self._hooks.__enter__()
        self._observation: Observation | None = Observation(settings)
        self._outer = HOOKS.observing, observer.get()
        HOOKS.observing = self._observation.process_episode
        observer.set(self._observation)
        atexit.register(self.close)

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush(self, timeout: float = 10.0) -> None:
        """Wait until all records so far are in the file."""
        if self._observation is not None:
            self._observation.flush(timeout)

    def close(self) -> None:
        """Stop observing and close the file. Further calls have no effect."""
        observation = self._observation
        self._observation = None
        if observation is None:
            return
        atexit.unregister(self.close)
        HOOKS.observing, outer = self._outer
        if observer.get() is observation:
            observer.set(outer)
        observation.close()
        self._hooks.__exit__(None, None, None)


class ObservedEpisode:
    def __init__(
        self,
        put: Callable[..., None] | None,
        settings: ObservationSettings,
        gateway: Gateway | None = None,
    ) -> None:
        """`put` stores records, None: the episode is not recorded. `gateway`: takes reports of
        child processes."""
        self.episode_id = new_id()
        self.output: object = None
        self.active = ActiveEpisode(self.episode_id, self, observed=True)
        if gateway is not None:
            self.active = replace(self.active, gateway_url=gateway.url, api_key=gateway.token)
        self.started_at = now()
        self._put = put
        self._settings = settings
        self.events: list[Event] = []
        self.over = False
        self.secrets = set[str]()
        self._index = PrefixIndex()
        self._indices = itertools.count()

    def is_over(self, phase: Phase) -> bool:
        """Whether the decorated function has returned; later calls are the process's."""
        return self.over

    def called_by(self, activity: Activity) -> None:
        """Does nothing: errors do not fail a deployed agent."""

    def has_child(self, child: str, activity: Activity) -> None:
        """Does nothing, as `called_by`."""

    def is_outlived_by(self, activities: Iterable[Activity]) -> bool:
        """Always false: nothing is refused."""
        return False

    def unanswered(self, error: BaseException | None) -> None:
        """Does nothing: nothing is sent to a gateway."""

    def hide(self, secrets: Collection[str]) -> None:
        self.secrets.update(secrets)

    def answers(self, model: str) -> Verdict:
        """Always `other`: nothing is rerouted."""
        return "other"

    def takes_handle(self, agent: str) -> None:
        """Does nothing: there are no handles."""

    def fail(self, error: AjetError) -> None:
        """Does nothing: errors do not fail a deployed agent."""

    def observed(self, exchange: ObservedExchange) -> None:
        if self._put is None:
            return
        call = observed_call(self.episode_id, next(self._indices), exchange)
        texts = {
            name: self._settings.clean_call(getattr(call, name))
            for name in ("request", "response", "error")
        }
        self._put(self._index.add(call.model_copy(update=texts)))

    def happened(self, event: Event) -> None:
        """Record an event, for example a tool call."""
        self.events.append(event)


class _TraceFile:
    """A trace file of this process, with its run."""

    def __init__(self, path: Path, name: str, settings: ObservationSettings) -> None:
        self.started = time.time()
        self.puts = 0
        """Number of `put` calls in progress."""
        self.run = Run(
            name=name,
            backbone="trace",
            config={"sample": settings.sample} if settings.sample < 1 else {},
        )
        survives: Literal["kill", "crash"] = "crash" if settings.durable else "kill"
        self.writer = TraceWriter(
            path, on_error="warn", flush_ms=_FLUSH_MS, survives=survives, close_at_exit=False
        )  # `trace.close` closes it after the run's end
        self.writer.put(self.run)
        self.gateway = Gateway(self.writer).start()
        self.writer.flush(_FIRST_WRITE)  # the first takes longest; do it before any call

    def close(self) -> None:
        ended = self.run.model_copy(update={"status": "finished", "ended_at": now()})
        never_raise(lambda: self.writer.put(ended))
        never_raise(self.gateway.close)
        never_raise(self.writer.close)


class Observation:
    """The recording of one `ajet.trace`. A file that can't be written causes one warning."""

    def __init__(self, settings: ObservationSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._pid = -1
        self._open()

    def _open(self) -> None:
        """Open this process's file; a forked child gets its own where `path` is a directory."""
        self._pid = os.getpid()
        self._writing = threading.Condition()
        self._rotation: threading.Thread | None = None
        self._rotates_from = 0.0
        self._process: ObservedEpisode | None = None
        self._unseen = ObservedEpisode(None, self._settings)
        self._episodes: WeakValueDictionary[str, ObservedEpisode] = WeakValueDictionary()
        """Episodes by id, for reports of child processes."""
        self._file: _TraceFile | None = None
        self._file = self._begin()

    def _begin(self) -> _TraceFile | None:
        """Delete old files and begin the next file; None, with a warning, if it cannot be
        written."""
        path = self._settings.path
        host = socket.gethostname()
        try:
            if path.suffix == ".duckdb" and not path.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
            else:
                path.mkdir(parents=True, exist_ok=True)
                take_over(path)
                if self._settings.keep != Limits():
                    try:
                        delete_beyond(self._settings.keep, path, f"{host}-")
                    except (
                        OSError
                    ) as error:  # another process deletes them too, or they belong to another user
                        log.warning(
                            "ajet.trace(%s): old files could not be deleted: %s", path, error
                        )
                path = path / f"{host}-{self._pid}-{new_id()[:8]}.duckdb"
            file = _TraceFile(path, f"{host} {self._pid}", self._settings)
            file.gateway.observe(self._reported)
            return file
        except Exception as error:  # noqa: BLE001  # recording must not break a deployed agent
            if self._file:
                goes_on = "the next file cannot be begun"
            else:
                goes_on = "nothing is recorded"
            log.warning("ajet.trace(%s): %s: %s: %s", path, goes_on, type(error).__name__, error)
            return None

    def _put(self, *records: Record) -> None:
        self._here()  # an episode may go on in a forked child
        with self._writing:
            file = self._file
            if file is None:
                return
            file.puts += 1
        try:  # outside of the lock, so that threads share the wait for the disk
            run_id = {"run_id": file.run.run_id}
            file.writer.put(
                *(r.model_copy(update=run_id) if isinstance(r, Episode) else r for r in records)
            )
        finally:
            with self._writing:
                file.puts -= 1
                self._writing.notify_all()
                old = time.time() - file.started
                if (
                    file is self._file
                    and self._rotation is None
                    and old >= self._rotates_from
                    and self._settings.rotate.reached(file.writer.path, old)
                ):
                    self._rotation = threading.Thread(
                        target=self._rotate, name="ajet-trace-rotate", daemon=True
                    )
                    self._rotation.start()

    def _rotate(self) -> None:
        """Begin the next file, then close the full one. If that fails, continue with the full one
        for a minute."""
        fresh = self._begin()
        with self._lock, self._writing:
            full = self._file
            if fresh is None or full is None:
                self._rotates_from = time.time() - (full.started if full else 0.0) + _RETRY
            else:
                self._file = fresh
                self._process = None
                self._rotates_from = 0.0
                self._writing.wait_for(lambda: full.puts == 0)
        if fresh is not None and full is not None:
            full.close()
        self._rotation = None

    def _here(self) -> None:
        if self._pid != os.getpid():
            with self._lock:
                if self._pid != os.getpid():
                    self._open()

    def _is_sampled(self) -> bool:
        return self._settings.sample >= 1 or random.random() < self._settings.sample

    def _observe(self) -> ObservedEpisode:
        file = self._file
        seen = ObservedEpisode(self._put, self._settings, None if file is None else file.gateway)
        self._episodes[seen.episode_id] = seen
        return seen

    def _reported(self, episode_id: str) -> Recorder:
        """The episode that a child process reports to; the process's if it is over."""
        seen = self._episodes.get(episode_id)
        if seen is None or seen.over:
            return self.process_episode().recorder
        return seen

    def process_episode(self) -> ActiveEpisode:
        """The episode of calls outside of decorated functions."""
        self._here()
        if not self._is_sampled():
            return self._unseen.active
        with self._lock:
            if self._process is None:
                # Recorded at its start, as deployed processes are often killed.
                self._process = process = self._observe()
                never_raise(lambda: self._record(process, "process", {}, "succeeded", None))
            return self._process.active

    @contextmanager
    def episode(self, name: str, arguments: Mapping[str, object]) -> Iterator[ObservedEpisode]:
        """Record the block as an episode; an exception is recorded and raised."""
        self._here()
        is_sampled = self._is_sampled()
        if is_sampled:
            seen = self._observe()
        else:
            seen = ObservedEpisode(None, self._settings)
        outer = current_episode.get()
        current_episode.set(seen.active)
        try:
            yield seen
        except BaseException as raised:
            error = raised
            if is_sampled:
                never_raise(lambda: self._record(seen, name, arguments, "failed", error))
            raise
        else:
            if is_sampled:
                never_raise(lambda: self._record(seen, name, arguments, "succeeded", None))
        finally:
            seen.over = True
            current_episode.set(outer)  # a stream may end in another context than it began in

    def _record(
        self,
        seen: ObservedEpisode,
        name: str,
        arguments: Mapping[str, object],
        status: Status,
        error: BaseException | None,
    ) -> None:
        def clean(value: object) -> Any:
            return self._settings.clean(without(value, seen.secrets))

        metadata = clean(scrub({key: _plain(value) for key, value in arguments.items()}))
        query = next(
            (value for value in metadata.values() if isinstance(value, str) and value != REMOVED),
            "",
        )
        self._put(
            Episode(
                episode_id=seen.episode_id,
                group_id=seen.episode_id,
                task=Task(main_query=query, env_type=name, metadata=metadata),
                output=clean(_plain(seen.output)),
                events=tuple(self._masked(event) for event in seen.events),
                status=status,
                error=None if error is None else clean(f"{type(error).__name__}: {error}"),
                cause=None if error is None else type(error).__name__,
                started_at=seen.started_at,
                ended_at=now(),
            )
        )

    def _masked(self, event: Event) -> Event:
        clean = self._settings.clean
        protocol = self._settings.clean_call
        result = (protocol if event.kind == "mcp" else clean)(event.result)
        return event.model_copy(
            update={
                "arguments": clean(event.arguments),
                "result": result,
                "error": clean(event.error),
            }
        )

    def flush(self, timeout: float) -> None:
        """Wait until all records are in the file."""
        if self._file is not None:
            self._file.writer.flush(timeout)

    def close(self) -> None:
        """Close the run and the file; never raises."""
        if self._pid != os.getpid():
            return
        if (rotation := self._rotation) is not None:
            rotation.join()
        if self._file is not None:
            self._file.close()


def _plain(value: object) -> object:
    """The value as JSON, else its `repr`."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return repr(value)[:1000]
