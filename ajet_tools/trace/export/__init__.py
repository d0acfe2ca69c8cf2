"""Writes episodes as datasets, token tables, OpenTelemetry traces or web pages.

A format is a line of `WRITERS`, and a function that yields the rows of a job or writes a whole
file. Which episodes
are written, and what of them may be learned from, is decided in `ajet_tools.dataset.from_traces`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.export.job import Job, Row, json_line, opened, refuse_trace

Format = Literal[
    "messages", "sharegpt", "trl-prompt", "preferences", "tokens", "otlp", "native", "html"
]
FORMATS: tuple[Format, ...] = get_args(Format)


class FormatWriter(NamedTuple):
    module: str
    function: str
    """Takes a job and records, and yields rows; or, of a whole file, takes a job and a stream."""
    suffix: str = ".jsonl"
    whole: bool = False
    """Written as a whole file by its own function; the others are rows, in the format of the
    file's suffix."""
    teaches: bool = True
    """Whether it is data to train on, which leaves out validation tasks."""


WRITERS: dict[Format, FormatWriter] = {
    "messages": FormatWriter("conversations", "message_rows"),
    "sharegpt": FormatWriter("conversations", "sharegpt_rows"),
    "trl-prompt": FormatWriter("trl", "prompt_rows"),
    "preferences": FormatWriter("trl", "preference_rows"),
    "tokens": FormatWriter("tokens", "write", ".parquet", whole=True),
    "otlp": FormatWriter("otlp", "write", whole=True, teaches=False),
    "native": FormatWriter("native", "write", whole=True, teaches=False),
    "html": FormatWriter("html", "write", ".html", whole=True, teaches=False),
}


@dataclass(frozen=True)
class Exported:
    format: Format
    path: Path | None
    """None for an open stream."""
    episodes: int
    """Episodes with any output."""
    rows: int
    """JSON lines, table rows, or spans (`otlp`)."""
    redacted: dict[str, int] = field(default_factory=dict)
    """Redacted values by kind; repetitions in an episode count once."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Omitted items, by a reason that names them."""


def rows_of(job: Job, format: Format, records: Iterable[Any] | None = None) -> Iterator[Row]:
    """Yields the rows of a format that is no whole file, of all records of the job or of these; for
    `preferences` they are groups of records."""
    if records is None:
        if format == "preferences":
            records = job.groups(feedback=True)
        else:
            records = job.records()
    rows: Iterator[Row] = _function(format)(job, records)
    return rows


def _function(format: Format) -> Callable[..., Any]:
    module = importlib.import_module(f"{__name__}.{WRITERS[format].module}")
    function: Callable[..., Any] = getattr(module, WRITERS[format].function)
    return function


def export(
    reader: TraceReader,
    episode_ids: Sequence[str],
    format: Format,
    target: Path | BinaryIO,
    *,
    redact: bool = True,
    margin: float = 0.0,
    keep_cut: bool = False,
    keep_pictures: bool = False,
    trace: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write episodes to a file, atomically, or to a stream.

    Args:
        reader: reader of the trace.
        episode_ids: episodes in the order of the output. Their content is read in chunks.
        format: one of FORMATS.
        target: a path or an open binary stream.
        redact: replace secrets and personal data by placeholders (see `ajet_tools.trace.redact`).
        keep_cut: also write replies that were cut at their limit, which formats to imitate leave out.
        keep_pictures: with `redact`, leave pictures as they are.
        margin: least difference of rewards for a pair of `preferences`.
        trace: path of the trace, from which `html` looks for the tokenizer.
        progress: called with the numbers of finished episodes and of all.

    Raises ConfigError for an unknown format, a target that is a trace or cannot be written, or if
    the episodes give no row.
    """
    if format not in WRITERS:
        raise ConfigError(f"there is no export format {format!r}; formats: {', '.join(FORMATS)}")
    suffix = WRITERS[format].suffix
    if isinstance(target, Path):
        refuse_trace(target)
        if target.suffix.lower() not in (suffix, ""):
            raise ConfigError(
                f"{format} is written as *{suffix}, not as {target.name}; name the file so"
            )
    job = Job(reader, list(dict.fromkeys(episode_ids)), redact, margin, progress, trace, keep_cut)
    job.keep_pictures = keep_pictures
    with opened(target) as file:
        if WRITERS[format].whole:
            _function(format)(job, file)
        else:
            for row in rows_of(job, format):
                file.write(json_line(row))
        if not job.rows:
            raise job.no_rows(format)
    return Exported(
        format=format,
        path=target if isinstance(target, Path) else None,
        episodes=len(job.written),
        rows=job.rows,
        redacted={kind: n for kind, n in job.redacted.items() if n},
        left_out={reason: n for reason, n in job.left_out.items() if n},
    )
