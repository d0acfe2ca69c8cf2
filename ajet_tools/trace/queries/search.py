"""Full-text search over messages, replies, outputs, tasks and errors.

Only texts are searched, not the JSON keys around them (`role`, `content`, `total_tokens`); case is
ignored. Calls are searched in spans of time, a short query each: a search reports its progress, can
be cancelled between two spans, and no query comes near the time limit. DuckDB's regular expressions
are twice as fast as its ILIKE and `contains(lower(...))`. Each hit is matched again in Python, in
the text as shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import TypedDict

from ajet_sdk.dialects.message_parts import parts_of, reply_messages, request_messages
from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import visible
from ajet_tools.trace.queries.base import rows

_SPAN = 10_000
"""Calls that one query searches."""
_OPEN_SPANS = 5
"""Spans after which the files are closed: DuckDB caches what it has read until then."""
_AROUND = 40
_AFTER = 80
_LONGEST = 1000
_BATCH = 64
"""Rows converted to Python at once; their texts may be long."""

_MESSAGE = ("content", "content[*].text", "reasoning_content", "reasoning", "name")
_TOOLS = ("tool_calls[*].function.name", "tool_calls[*].function.arguments")
_ANTHROPIC = ("$.content", "$.content[*].text")
_ITEMS = ("$.output", "$.output[*].content[*].text", "$.output[*].arguments")
_INPUT = ("$.input", "$.input[*].content", "$.input[*].content[*].text", "$.input[*].output")
_RESPONSE = [f"$.choices[*].message.{part}" for part in (*_MESSAGE, *_TOOLS)]


def matches(expression: str) -> str:
    """Return a condition with a `pattern` as its parameter; it is false for NULL."""
    return f"coalesce(regexp_matches({expression}, ?, 'i'), false)"


def pattern(needle: str) -> str:
    """Escape a text for DuckDB's regular expressions."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in needle)


def _json_matches(column: str, *paths: str) -> str:
    """Match the texts at some paths of a JSON column; matching the whole JSON first is cheap and
    excludes most rows."""
    texts = (f"{column}->>'{path}'" for path in paths)
    lines = (f"array_to_string({text}, chr(10))" if "[*]" in text else text for text in texts)
    joined = f"concat_ws(chr(10), {', '.join(lines)})"
    return f"CASE WHEN {matches(column)} THEN {matches(joined)} ELSE false END"


IN_CALL = f"""({_json_matches("c.messages_suffix", *(f"$[*].{part}" for part in (*_MESSAGE, *_TOOLS)))}
  OR {_json_matches("c.response", *_RESPONSE, "$.choices[*].text", *_ANTHROPIC, *_ITEMS)}
  OR c.messages_suffix IS NULL AND {_json_matches("c.request", "$.prompt", "$.instructions", *_INPUT)}
  OR {matches("c.error")})"""
"""A condition on a row `c` of `calls`, with `call_parameters`."""

IN_EPISODE = f"""({matches("e.task->>'$.main_query'")} OR {matches("e.output->>'$'")} OR {matches("e.error")})"""
"""A condition on a row `e` of `episodes`, with `episode_parameters`."""


def call_parameters(needle: str) -> list[str]:
    """Return the parameters of IN_CALL: for each JSON column the text as JSON escapes it, then the
    text itself."""
    plain, escaped = pattern(needle), pattern(json.dumps(needle, ensure_ascii=False)[1:-1])
    return [escaped, plain] * 3 + [plain]


def episode_parameters(needle: str) -> list[str]:
    """Return the parameters of IN_EPISODE."""
    return [pattern(needle)] * 3


Span = tuple[datetime | None, datetime | None]
"""Calls that began in [since, until); None is open."""


def call_spans(reader: TraceReader, size: int) -> list[tuple[Span, int]]:
    """Divide the calls of a trace into spans of time with about `size` calls each, and count the
    calls of each span."""
    total = int(rows(reader, "SELECT count(*) AS n FROM calls")[0]["n"])
    parts = min(max(1, round(total / size)), 1000)
    cuts: list[datetime] = []
    if parts > 1:
        fractions = ", ".join(f"{i / parts:.6f}" for i in range(1, parts))
        quantiles = rows(
            reader, f"SELECT quantile_disc(started_at, [{fractions}]) AS cuts FROM calls"
        )[0]["cuts"]
        cuts = sorted(set(quantiles or ()))
    each = total // (len(cuts) + 1)
    return [
        (span, each if i else total - each * len(cuts))
        for i, span in enumerate(pairwise([None, *cuts, None]))
    ]


def of_span(span: Span) -> tuple[str, list[datetime]]:
    """Return the condition that a row `c` of `calls` began in a span, and its parameters."""
    since, until = span
    parts = ["c.started_at >= ?"] * (since is not None) + ["c.started_at < ?"] * (until is not None)
    return " AND ".join(parts) or "true", [edge for edge in span if edge is not None]


class _CallTexts(TypedDict):
    """The searched texts of a call, as JSON except for the error."""

    episode_id: str
    call_id: str
    messages_suffix: str | None
    response: str | None
    error: str | None
    request: str | None
    """Only for a call without messages."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The first match in a text of an episode."""

    episode_id: str
    call_id: str | None
    """None for the episode's task, output and error."""
    where: str
    """`task`, `output`, `error`, or the role of a message: system, user, assistant, tool."""
    snippet: str
    """The text around the match on one line, without control characters."""
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
    """Find a text, ignoring case, in all episodes or in those whose ids are in `within`.

    Yields hits in tasks, outputs and errors of episodes first, then hits in calls, in order of
    time; a message repeated by later calls counts once. `progress(done, of)` is called after each
    span with numbers of calls; `cancelled()` is checked before each span. Raises QueryError for a
    blank or overlong text.
    """
    needle = needle.encode("utf-8", "replace").decode()
    if not needle.strip() or len(needle) > _LONGEST:
        raise QueryError(f"a search text must have 1 to {_LONGEST:,} characters, not only spaces")
    only = None if within is None else frozenset(within)
    look, seen = re.compile(re.escape(needle), re.I), set[int]()
    sql = f"""
        SELECT e.episode_id, e.task->>'$.main_query' AS task, e.output->>'$' AS output, e.error
        FROM episodes e WHERE (?::VARCHAR IS NULL OR e.run_id = ?) AND {IN_EPISODE} ORDER BY e.ended_at"""
    for episode in rows(reader, sql, run_id, run_id, *episode_parameters(needle)):
        if only is None or episode["episode_id"] in only:
            texts = [(name, episode[name]) for name in ("task", "output", "error")]
            yield from _hits(look, seen, episode["episode_id"], None, texts)
    spans = call_spans(reader, _SPAN)
    done, of = 0, sum(size for _, size in spans)
    for i, (span, size) in enumerate(spans):
        if cancelled and cancelled():
            return
        if i % _OPEN_SPANS == 0:
            reader.close()
        for row in _calls_with(reader, needle, span, run_id):
            if only is None or row["episode_id"] in only:
                yield from _hits(look, seen, row["episode_id"], row["call_id"], _texts(row))
        done += size
        if progress:
            progress(done, of)


def _calls_with(
    reader: TraceReader, needle: str, span: Span, run_id: str | None
) -> Iterator[_CallTexts]:
    """Yield the calls of a span that contain a text; `run_id` excludes calls of episodes of other
    runs."""
    in_span, edges = of_span(span)
    of_run, run = "true", list[str]()
    if run_id is not None and rows(reader, "SELECT count(*) AS n FROM runs")[0]["n"] > 1:
        of_run = (
            "c.episode_id NOT IN (SELECT episode_id FROM episodes WHERE run_id <> ? AND episode_id"
            " IS NOT NULL)"
        )
        run = [run_id]
    table = reader.query(
        f"""
        SELECT c.episode_id, c.call_id, c.messages_suffix, c.response, c.error,
          CASE WHEN c.messages_suffix IS NULL THEN c.request END AS request
        FROM calls c WHERE {in_span} AND {IN_CALL} AND {of_run}""",
        [*edges, *call_parameters(needle), *run],
    )
    for start in range(0, len(table), _BATCH):
        yield from table.slice(start, _BATCH).to_pylist()


def _texts(row: _CallTexts) -> Iterator[tuple[str, str | None]]:
    """Yield the texts that a call adds, with their roles."""
    asked = [] if row["messages_suffix"] is None else json.loads(row["messages_suffix"])
    if row["request"] is not None:
        asked = request_messages(json.loads(row["request"]))
    for parts in map(parts_of, [*asked, *reply_messages(json.loads(row["response"] or "{}"))]):
        yield parts.role, parts.text
    yield "error", row["error"]


def _hits(
    look: re.Pattern[str],
    seen: set[int],
    episode_id: str,
    call_id: str | None,
    texts: Iterable[tuple[str, str | None]],
) -> Iterator[Hit]:
    """Yield the hits in some texts, except for texts whose hashes are in `seen`, which is
    updated."""
    for where, text in texts:
        match = look.search(text) if text else None
        if text and match and (known := hash((episode_id, where, text))) not in seen:
            seen.add(known)
            start, end = match.span()
            before = ("…" if start > _AROUND else "") + _line(
                text[max(0, start - _AROUND) : start]
            ).lstrip()
            inside = _line(text[start : min(end, start + _AFTER)])
            after = _line(text[end : end + _AFTER]).rstrip() + (
                "…" if len(text) > end + _AFTER else ""
            )
            yield Hit(
                episode_id,
                call_id,
                where,
                before + inside + after,
                len(before),
                len(before) + len(inside),
            )


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", visible(text))
