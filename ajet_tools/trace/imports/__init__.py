"""Imports traces of other tools and ajet's own exports into a trace file, without loss.

Fields missing in a format are None, or the epoch for required times.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from ajet_sdk.errors import ConfigError, TaskError, TraceError
from ajet_sdk.tasks.json_rows import BadRows, Row, bounded, json_rows
from ajet_sdk.types import Episode, Run
from ajet_tools.trace.imports import native, openai, otlp, token_rows
from ajet_tools.trace.imports.converters import CONVERTERS
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, Sink, stable_id

SourceFormat = Literal[
    "native", "openai", "otlp", "studio",
    "tokens", "verifiers", "trl", "tinker", "tinker-capture", "rllm", "agent-lightning",
]  # fmt: skip
SOURCES: tuple[SourceFormat, ...] = get_args(SourceFormat)
_BY_OTLP = (
    "its own JSON is not read: export the spans as OTLP or as lines of `span.to_json()`, as the"
    ' guide shows under "Import from other tools"'
)


def format_of(name: str) -> SourceFormat | None:
    """Return a format by name; None for `auto`. Raises ConfigError."""
    if name in ("langfuse", "langsmith"):
        raise ConfigError(f"--from {name}: {_BY_OTLP}")
    if name != "auto" and name not in SOURCES:
        raise ConfigError(
            f"there is no import format {name!r}; formats: auto, {', '.join(SOURCES)}"
        )
    return next((format for format in SOURCES if format == name), None)


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Imported:
    path: Path
    formats: dict[str, str]
    """Format of each file."""
    episodes: int
    calls: int
    already: int
    """Episodes that were in the trace before."""
    bad_rows: int
    problems: list[str] = field(default_factory=list)
    """Errors of the first few bad rows."""
    left_out: dict[str, int] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict, repr=False)
    """Source row of each episode, for formats with token ids."""
    guessed: int = 0
    """Rows without a mask: tokens with an advantage count as sampled."""

    @property
    def understood(self) -> bool:
        """Whether anything was read, or nothing was there to be read."""
        return bool(self.episodes or self.already) or not (self.bad_rows or self.left_out)


def import_files(
    files: Sequence[Path | None],
    out: Path,
    format: SourceFormat | None = None,
    *,
    skip_bad_rows: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Import files into a new or existing trace file.

    Args:
        files: paths; None is stdin.
        out: path of the trace, which no live run may own.
        format: format of all files; None: detect it for each.
        skip_bad_rows: skip and count invalid rows instead of stopping at the first.
        progress: called with the bytes read of a file and its size (0 if unknown).

    Raises TaskError for an invalid row, with file and line, and ConfigError for an unknown format.
    """
    _check(files, out)
    bad, left_out = BadRows(skip=skip_bad_rows), Counter[str]()
    formats, places, guessed = dict[str, str](), dict[str, str](), 0
    with ExitStack() as stack:
        starts = [stack.enter_context(_open(path)) for path in files]
        kinds = [
            format or recognised(start, _name(path))
            for path, (_, start) in zip(files, starts, strict=True)
        ]
        sink = stack.enter_context(Sink(out))
        for path, kind, (file, start) in zip(files, kinds, starts, strict=True):
            formats[str(path or "-")] = kind
            counted = _Counted(file, _name(path), path, progress)
            parsed_episodes = _read(kind, path, counted, _name(path), bad, left_out)
            for parsed in _with_run(parsed_episodes, kind, _name(path), start):
                sink.put(parsed)
                if parsed.episode is not None and parsed.where:
                    places[parsed.episode.episode_id] = parsed.where
                    guessed += parsed.guessed
    counts = sink.episodes, sink.calls, sink.already, bad.count
    return Imported(out, formats, *counts, bad.first, dict(left_out), places, guessed)


def _name(path: Path | None) -> str:
    return "stdin" if path is None else path.name


def _check(files: Sequence[Path | None], out: Path) -> None:
    for path in files:
        if path is not None and not path.is_file():
            raise ConfigError(f"there is no file {path}")
    if out.is_dir():
        raise ConfigError(
            f"--out {out} is a directory; name a file, as in --out {out / 'imported.duckdb'}"
        )
    if out.suffix != ".duckdb":
        raise ConfigError(f"--out {out} must be a trace file: name it *.duckdb")


def recognised(start: bytes, name: str) -> SourceFormat:
    """Detect the format of a file from its beginning. Raises ConfigError for an unknown format."""
    if start.startswith(b"SQLite format 3\0"):
        return "studio"
    if start[8:12] == b"DUCK":
        raise ConfigError(
            f"{name} is already a trace; to join traces, put the files into one directory, which"
            " every command reads as one trace, or import what `ajet trace export --format native`"
            " writes of each"
        )
    head = start.decode("utf-8", "replace")
    for tool, needles in _BY_OTLP_SIGNS:
        if all(f'"{needle}"' in head for needle in needles):
            raise ConfigError(f"{name} is an export of {tool}; {_BY_OTLP}")
    for format, needles in _SIGNS:
        if all(f'"{needle}"' in head for needle in needles):
            return format
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise TaskError(
            f"{name} is UTF-16, not UTF-8; convert it first (`iconv -f UTF-16 -t UTF-8`)"
        )
    raise ConfigError(f"{name}: unknown format; name it with --from ({', '.join(SOURCES)})")


_SIGNS: tuple[tuple[SourceFormat, tuple[str, ...]], ...] = (
    ("native", ("ajet_trace",)),
    ("otlp", ("resourceSpans",)),
    ("otlp", ("resource_spans",)),
    ("otlp", ("context", "trace_id", "span_id")),
    ("agent-lightning", ("event_type", "rollout_id", "attempt_id")),
    ("verifiers", ("env", "traces")),
    ("tinker", ("model_input", "loss_fn_inputs")),
    ("tinker-capture", ("prompt_tokens", "samples")),
    ("rllm", ("trajectories", "steps")),
    ("trl", ("input_ids", "completion_mask")),
    ("trl", ("prompt_ids", "completion_ids")),
    ("tokens", ("token_ids", "loss_mask")),
    ("openai", ("custom_id",)),
    ("openai", ("messages",)),
    ("openai", ("choices",)),
    ("openai", ("request", "response")),
)
"""Formats with their keys near the beginning of a file; the first match wins."""

_BY_OTLP_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("LangSmith", ("run_type", "trace_id")),
    ("Langfuse", ("traceId", "startTime")),
    ("Langfuse", ("trace_id", "start_time", "project_id")),
    ("Langfuse", ("observations", "projectId")),
)

_HEAD = 1 << 16


@contextmanager
def _open(path: Path | None) -> Iterator[tuple[BinaryIO, bytes]]:
    """Open a stream and peek at its first bytes."""
    if path is None:
        stream = io.BufferedReader(sys.stdin.buffer, _HEAD)  # type: ignore[type-var]
        yield stream, stream.peek(_HEAD)
        return
    try:
        with path.open("rb") as file:
            start = file.read(_HEAD)
            file.seek(0)
            yield file, start
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error


class _Counted:
    """A stream that reports its progress."""

    def __init__(
        self, file: BinaryIO, name: str, path: Path | None, progress: Progress | None
    ) -> None:
        self._file = bounded(file, name)
        self._size = path.stat().st_size if path else 0
        self._progress = progress
        self._done = self._reported = 0

    def __iter__(self) -> Iterator[bytes]:
        for line in self._file:
            self._report(len(line))
            yield line

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._report(len(data))
        return data

    def _report(self, size: int) -> None:
        self._done += size
        if self._progress and (self._done - self._reported > 1 << 18 or self._done >= self._size):
            self._reported = self._done
            self._progress(self._done, self._size)


def _read(
    format: SourceFormat,
    path: Path | None,
    file: Any,
    name: str,
    bad: BadRows,
    left_out: Counter[str],
) -> Iterator[Parsed]:
    if format == "studio":
        if path is None:
            raise ConfigError(
                "AgentScope Studio's database cannot be read from stdin; name the file"
            )
        return otlp.read_studio(path, bad, left_out)
    rows: Iterator[Row] = json_rows(file, name, bad)
    if format == "native":
        return native.read(rows, bad)
    if format == "openai":
        return openai.read(rows, bad)
    if format == "otlp":
        return otlp.read(rows, bad, left_out)
    return token_rows.read(rows, bad, CONVERTERS.get(format))


def _with_run(
    parsed_episodes: Iterator[Parsed], format: SourceFormat, name: str, start: bytes
) -> Iterator[Parsed]:
    """Assign episodes without a run to a run named like the file, which follows at the end with its
    times."""
    default_run_id = stable_id("import", format, name, start)
    known: set[str] = set()
    mine: dict[str, Run] = {}
    for parsed in parsed_episodes:
        if parsed.run is not None:
            known.add(parsed.run.run_id)
            ended = parsed.run.status == "finished" and format != "native"
            if ended and parsed.run.ended_at is None:  # ended at an unknown time
                parsed = replace(
                    parsed, run=parsed.run.model_copy(update={"ended_at": parsed.run.started_at})
                )
        episode = parsed.episode
        if episode is not None and parsed.ended:
            run_id = episode.run_id or default_run_id
            trained = tuple(
                row if row.run_id else row.model_copy(update={"run_id": run_id})
                for row in parsed.trained
            )
            parsed = replace(
                parsed, episode=episode.model_copy(update={"run_id": run_id}), trained=trained
            )
            if run_id not in known:
                before = mine.get(run_id) or Run(
                    run_id=run_id,
                    name=name if run_id == default_run_id else "",
                    status="finished",
                    started_at=UNKNOWN_TIME,
                    ended_at=UNKNOWN_TIME,
                )
                mine[run_id] = _spanning(before, episode)
        yield parsed
    for run in mine.values():
        yield Parsed(run=run)


def _spanning(run: Run, episode: Episode) -> Run:
    """Extend the times of a run to include an episode."""
    if episode.started_at == UNKNOWN_TIME:
        return run
    began = (
        episode.started_at
        if run.started_at == UNKNOWN_TIME
        else min(run.started_at, episode.started_at)
    )
    ended = episode.ended_at if run.ended_at is None else max(run.ended_at, episode.ended_at)
    return run.model_copy(update={"started_at": began, "ended_at": ended})
