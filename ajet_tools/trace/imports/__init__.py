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
from typing import BinaryIO, Literal, get_args

from ajet_sdk.errors import ConfigError, PictureError, TaskError, TraceError
from ajet_sdk.tasks.json_rows import BadRows, Row, bounded, json_rows
from ajet_sdk.tasks.row_pictures import with_data
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


@dataclass
class Imported:
    """What an import read."""

    path: Path
    formats: dict[str, str] = field(default_factory=dict)
    """Format of each file."""
    episodes: int = 0
    calls: int = 0
    already: int = 0
    """Episodes that were in the trace before."""
    bad_rows: int = 0
    problems: list[str] = field(default_factory=list)
    """Errors of the first few bad rows."""
    left_out: Counter[str] = field(default_factory=Counter)
    places: dict[str, str] = field(default_factory=dict, repr=False)
    """Source row of each episode, for formats with token ids."""
    guessed: int = 0
    """Rows without a mask: tokens with an advantage count as sampled."""

    @property
    def understood(self) -> bool:
        """Whether anything was read, or nothing was there to be read."""
        return bool(self.episodes or self.already) or not (self.bad_rows or self.left_out)


@dataclass(frozen=True)
class _Source:
    """An open file with its format."""

    path: Path | None
    """None: stdin."""
    name: str
    file: BinaryIO
    start: bytes
    format: SourceFormat


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
        progress: called with the bytes read of a file and its size.

    Raises TaskError for an invalid row, with file and line, and ConfigError for an unknown format.
    """
    _check(files, out)
    bad = BadRows(skip=skip_bad_rows)
    imported = Imported(out)
    with ExitStack() as stack:
        sources = []
        for path in files:  # all are recognised before the first is read
            name = "stdin" if path is None else path.name
            file, start = stack.enter_context(_open(path))
            kind = format or recognised(start, name)
            sources.append(_Source(path, name, file, start, kind))
        sink = stack.enter_context(Sink(out))
        for source in sources:
            imported.formats[str(source.path or "-")] = source.format
            parsed_episodes = _read(source, bad, imported.left_out, progress)
            for parsed in _with_run(parsed_episodes, source):
                sink.put(parsed)
                if parsed.episode is not None and parsed.where:
                    imported.places[parsed.episode.episode_id] = parsed.where
                    imported.guessed += parsed.guessed
    imported.episodes = sink.episodes
    imported.calls = sink.calls
    imported.already = sink.already
    imported.bad_rows = bad.count
    imported.problems = bad.first
    return imported


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
    # before our own signs, which those exports have, too
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
    raise ConfigError(
        f"{name}: unknown format; name it to `ajet trace import --from` ({', '.join(SOURCES)})"
    )


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


def _read(
    source: _Source, bad: BadRows, left_out: Counter[str], progress: Progress | None
) -> Iterator[Parsed]:
    if source.format == "studio":
        if source.path is None:
            raise ConfigError(
                "AgentScope Studio's database cannot be read from stdin; name the file"
            )
        return otlp.read_studio(source.path, bad, left_out)
    rows = json_rows(bounded(source.file, source.name), source.name, bad)
    if progress is not None and source.path is not None:
        rows = _reported(rows, source.file, source.path.stat().st_size, progress)
    if source.format == "native":
        return native.read(rows, bad)
    if source.format == "openai":
        if source.path is not None:
            rows = _with_pictures(rows, source.path.parent, bad)
        return openai.read(rows, bad)
    if source.format == "otlp":
        return otlp.read(rows, bad, left_out)
    return token_rows.read(rows, bad, CONVERTERS.get(source.format))


def _with_pictures(rows: Iterator[Row], directory: Path, bad: BadRows) -> Iterator[Row]:
    """Yields rows with the data of pictures in place of the names of their files."""
    for row in rows:
        if not isinstance(row.value, dict) or b"image" not in row.text:
            yield row
            continue
        try:
            yield replace(row, value=with_data(row.value, directory))
        except (PictureError, OSError) as error:
            bad.add(row.where, f"has a picture that cannot be read: {error}")


def _reported(rows: Iterator[Row], file: BinaryIO, size: int, progress: Progress) -> Iterator[Row]:
    done = 0
    for row in rows:
        if file.tell() != done:
            done = file.tell()
            progress(done, size)
        yield row


def _with_run(parsed_episodes: Iterator[Parsed], source: _Source) -> Iterator[Parsed]:
    """Assign episodes without a run to a run named like the file, which follows at the end with its
    times."""
    default_run_id = stable_id("import", source.format, source.name, source.start)
    known: set[str] = set()
    added: dict[str, Run] = {}
    for parsed in parsed_episodes:
        if parsed.run is not None:
            known.add(parsed.run.run_id)
        episode = parsed.episode
        if episode is not None and parsed.ended:
            run_id = episode.run_id or default_run_id
            episode = episode.model_copy(update={"run_id": run_id})
            trained = tuple(
                values if values.run_id else values.model_copy(update={"run_id": run_id})
                for values in parsed.trained
            )
            parsed = replace(parsed, episode=episode, trained=trained)
            if run_id not in known:
                name = source.name if run_id == default_run_id else ""
                added[run_id] = _spanning(added.get(run_id) or _imported_run(run_id, name), episode)
        yield parsed
    for run in added.values():
        yield Parsed(run=run)


def _imported_run(run_id: str, name: str) -> Run:
    return Run(
        run_id=run_id,
        name=name,
        status="finished",
        started_at=UNKNOWN_TIME,
        ended_at=UNKNOWN_TIME,
    )


def _spanning(run: Run, episode: Episode) -> Run:
    """Extend the times of a run to include an episode."""
    if episode.started_at == UNKNOWN_TIME:
        return run
    times = [run.started_at, episode.started_at]
    started_at = min(time for time in times if time != UNKNOWN_TIME)
    ended_at = max(run.ended_at or UNKNOWN_TIME, episode.ended_at)
    return run.model_copy(update={"started_at": started_at, "ended_at": ended_at})
