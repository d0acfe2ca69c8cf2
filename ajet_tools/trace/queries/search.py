"""Full-text search over messages, replies, outputs, tasks and errors, in spans of calls.

A span is one short query, so that progress is told, a search can be called off between two, and none comes near the
time limit of a query. What DuckDB finds is looked at again here, as the text that a person reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ajet_sdk.dialects.message_parts import parts_of, reply_messages, request_messages
from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import visible
from ajet_tools.trace.queries.fields import CallTexts, call_spans, calls_with, episodes_with

_SPAN = 10_000
_KEPT = 5
_AROUND = 40
_AFTER = 80
_LONGEST = 1000


@dataclass(frozen=True, slots=True)
class Hit:
    """One text of an episode in which the needle stands, at its first place there."""

    episode_id: str
    call_id: str | None
    """None for what belongs to the episode: its task, output, error."""
    where: str
    """`task`, `output`, `error`, or the role of a message: system, user, assistant, tool."""
    snippet: str
    """The text around it on one line, safe to show."""
    start: int
    """The match within the snippet: snippet[start:end]."""
    end: int


def search(
    reader: TraceReader,
    needle: str,
    run_id: str | None = None,
    *,
    within: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[Hit]:
    """Where a text occurs, in upper and lower case alike; `within` names the only episodes to look at.

    First what is found in tasks, outputs and errors of episodes, then in calls, as they were written; a message that a
    later call repeats is found once. `progress(done, of)` is told after each span, in calls; `cancelled()` is asked
    before each and ends the search. Raises QueryError where there is nothing to look for.
    """
    needle = needle.encode("utf-8", "replace").decode()
    if not needle.strip() or len(needle) > _LONGEST:
        raise QueryError(f"a search text must have 1 to {_LONGEST:,} characters, not only spaces")
    return _search(reader, needle, run_id, within, progress, cancelled)


def _search(
    reader: TraceReader,
    needle: str,
    run_id: str | None,
    within: Sequence[str] | None,
    progress: Callable[[int, int], None] | None,
    cancelled: Callable[[], bool] | None,
) -> Iterator[Hit]:
    only = None if within is None else frozenset(within)
    look, seen = re.compile(re.escape(needle), re.I), set[int]()
    for episode in episodes_with(reader, needle, run_id):
        if only is None or episode["episode_id"] in only:
            texts = (("task", episode["task"]), ("output", episode["output"]), ("error", episode["error"]))
            yield from _hits(look, seen, episode["episode_id"], None, texts)
    spans = call_spans(reader, _SPAN)
    done, of = 0, sum(size for _, size in spans)
    for i, (span, size) in enumerate(spans):
        if cancelled and cancelled():
            return
        if i % _KEPT == 0:
            reader.close()  # DuckDB keeps what it has read of a file for as long as it is open
        for row in calls_with(reader, needle, span, run_id):
            if only is None or row["episode_id"] in only:
                yield from _hits(look, seen, row["episode_id"], row["call_id"], _texts(row))
        done += size
        if progress:
            progress(done, of)


def _texts(row: CallTexts) -> Iterator[tuple[str, str | None]]:
    """The texts that are new in a call, with their roles."""
    asked = [] if row["messages_suffix"] is None else json.loads(row["messages_suffix"])
    if row["request"] is not None:
        asked = request_messages(json.loads(row["request"]))
    for parts in map(parts_of, [*asked, *reply_messages(json.loads(row["response"] or "{}"))]):
        yield parts.role, parts.text
    yield "error", row["error"]


def _hits(
    look: re.Pattern[str], seen: set[int], episode_id: str, call_id: str | None, texts: Iterable[tuple[str, str | None]]
) -> Iterator[Hit]:
    """The hits in some texts but for those `seen`, which has the texts with a hit."""
    for where, text in texts:
        match = look.search(text) if text else None
        if text and match and (known := hash((episode_id, where, text))) not in seen:
            seen.add(known)
            yield Hit(episode_id, call_id, where, *_snippet(text, match.start(), match.end()))


def _snippet(text: str, start: int, end: int) -> tuple[str, int, int]:
    """The text around text[start:end] on one line, and the match's place in it."""
    before = ("…" if start > _AROUND else "") + _line(text[max(0, start - _AROUND) : start]).lstrip()
    match = _line(text[start : min(end, start + _AFTER)])
    after = _line(text[end : end + _AFTER]).rstrip() + ("…" if len(text) > end + _AFTER else "")
    return before + match + after, len(before), len(before) + len(match)


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", visible(text))
