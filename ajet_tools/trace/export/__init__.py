"""Exports episodes as datasets, token tables, OpenTelemetry traces or web pages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.export.job import Job, opened, refuse_trace

Format = Literal[
    "tasks",
    "messages",
    "sharegpt",
    "trl-prompt",
    "trl-preference",
    "tokens",
    "otlp",
    "native",
    "html",
]
FORMATS: tuple[Format, ...] = get_args(Format)
TRAINING: tuple[Format, ...] = (
    "tasks",
    "messages",
    "sharegpt",
    "trl-prompt",
    "trl-preference",
    "tokens",
)
"""Training data; other formats are for people, other tools, and copies of a trace."""
IMITATED: tuple[Format, ...] = ("messages", "sharegpt", "trl-prompt")
"""Training data whose replies are imitated, so that episodes worth nothing are left out."""
SUFFIXES: dict[Format, str] = {
    **dict.fromkeys(FORMATS, ".jsonl"),
    "tokens": ".parquet",
    "html": ".html",
}
"""File suffix of each format."""

_WRITERS: dict[Format, tuple[str, str]] = {
    "tasks": ("conversations", "write_tasks"),
    "messages": ("conversations", "write_messages"),
    "sharegpt": ("conversations", "write_sharegpt"),
    "trl-prompt": ("trl", "write_prompts"),
    "trl-preference": ("trl", "write_preferences"),
    "tokens": ("tokens", "write"),
    "otlp": ("otlp", "write"),
    "native": ("native", "write"),
    "html": ("html", "write"),
}
"""Module and writer of each format; a writer takes a job and a stream."""


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


def export(
    reader: TraceReader,
    episode_ids: Sequence[str],
    format: Format,
    target: Path | BinaryIO,
    *,
    redact: bool = True,
    margin: float = 0.0,
    keep_cut: bool = False,
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
        margin: least difference of rewards for a pair of `trl-preference`.
        trace: path of the trace, from which `html` looks for the tokenizer.
        progress: called with the numbers of finished episodes and of all.

    Raises ConfigError for an unknown format, or a target that is a trace or cannot be written.
    """
    if format not in _WRITERS:
        raise ConfigError(f"there is no export format {format!r}; formats: {', '.join(FORMATS)}")
    if isinstance(target, Path):
        refuse_trace(target)
    if isinstance(target, Path) and target.suffix.lower() not in (SUFFIXES[format], ""):
        raise ConfigError(
            f"{format} is written as *{SUFFIXES[format]}, not as {target.name}; name the file so"
        )
    module, name = _WRITERS[format]
    write: Callable[[Job, object], None] = getattr(
        importlib.import_module(f"{__name__}.{module}"), name
    )
    job = Job(reader, list(dict.fromkeys(episode_ids)), redact, margin, progress, trace, keep_cut)
    with opened(target) as file:
        write(job, file)
    return Exported(
        format=format,
        path=target if isinstance(target, Path) else None,
        episodes=len(job.written),
        rows=job.rows,
        redacted={kind: n for kind, n in job.redacted.items() if n},
        left_out={reason: n for reason, n in job.left_out.items() if n},
    )
