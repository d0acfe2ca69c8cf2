"""Episodes of a trace as files that other tools read: datasets, token tables, OpenTelemetry, a page to look at."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.export.job import Job
from ajet_tools.trace.export.target import opened, refuse_trace

Format = Literal["tasks", "messages", "sharegpt", "trl-prompt", "trl-preference", "tokens", "otlp", "native", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
TRAINING: tuple[Format, ...] = ("tasks", "messages", "sharegpt", "trl-prompt", "trl-preference", "tokens")
"""Those that a model is trained on; the others are for people, other tools, and copies of a trace."""
SUFFIXES: dict[Format, str] = {**dict.fromkeys(FORMATS, ".jsonl"), "tokens": ".parquet", "html": ".html"}
"""The file name's ending that fits each format."""

_WRITERS: dict[Format, tuple[str, str]] = {
    "tasks": ("messages", "write_tasks"),
    "messages": ("messages", "write_messages"),
    "sharegpt": ("messages", "write_sharegpt"),
    "trl-prompt": ("trl", "write_prompts"),
    "trl-preference": ("trl", "write_preferences"),
    "tokens": ("tokens", "write"),
    "otlp": ("otlp", "write"),
    "native": ("native", "write"),
    "html": ("html", "write"),
}
"""Each format's module here, and its function of a job and a stream."""


@dataclass(frozen=True)
class Exported:
    format: Format
    path: Path | None
    """None where it was written to an open stream."""
    episodes: int
    """Episodes of which something was written."""
    rows: int
    """Lines of JSON; rows of a table; spans (`otlp`)."""
    redacted: dict[str, int] = field(default_factory=dict)
    """How many values were replaced, by kind; the same value counts once an episode."""
    left_out: dict[str, int] = field(default_factory=dict)
    """What was not written: how many, by a reason that says what is counted."""


def export(
    reader: TraceReader,
    episode_ids: Sequence[str],
    format: Format,
    target: Path | BinaryIO,
    *,
    redact: bool = True,
    margin: float = 0.0,
    trace: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write episodes to a file, whole or not at all, or to a stream, in the order of `episode_ids`.

    Args:
        reader: of the trace that has the episodes.
        episode_ids: which; about 100 bytes are held for each, of their content only a chunk.
        format: one of FORMATS.
        target: a path, which is written beside and then put in its place, or an open binary stream.
        redact: replace secrets and personal data by placeholders (see `ajet_tools.trace.redact`).
        margin: by how much a reward must be better to make a pair of `trl-preference`.
        trace: where the trace lies; `html` looks for the run's tokenizer from there.
        progress: called with the number of episodes done and of all.

    Raises ConfigError for an unknown format, a target that is a trace, or one that cannot be written.
    """
    if format not in _WRITERS:
        raise ConfigError(f"there is no export format {format!r}; formats: {', '.join(FORMATS)}")
    if isinstance(target, Path):
        refuse_trace(target)
    if isinstance(target, Path) and target.suffix.lower() not in (SUFFIXES[format], ""):
        raise ConfigError(f"{format} is written as *{SUFFIXES[format]}, not as {target.name}; name the file so")
    module, name = _WRITERS[format]
    write: Callable[[Job, object], None] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    job = Job(reader, list(dict.fromkeys(episode_ids)), redact, margin, progress, trace)
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
