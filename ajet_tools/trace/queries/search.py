"""Full-text search over messages, replies, outputs, tasks and errors.

Only texts are searched, not the JSON keys around them (`role`, `content`, `total_tokens`); case is
ignored. Calls are searched in spans of time, a short query each: a search reports its progress, can
be cancelled between two spans, and no query comes near the time limit. DuckDB's regular expressions
are twice as fast as its ILIKE and `contains(lower(...))`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.base import rows

_SPAN = 20_000
"""Calls that one query searches."""
_OPEN_SPANS = 5
"""Spans after which the files are closed: DuckDB caches what it has read until then."""
_MESSAGE = ("reasoning_content", "reasoning", "name")
_TOOLS = ("tool_calls[*].function.name", "tool_calls[*].function.arguments")
_RESPONSE = [f"$.choices[*].message.{part}" for part in (*_MESSAGE, *_TOOLS)]
_NAMES = r'"(type|role)":\s*"[^"]*"|"[^"\\]*":'
"""What is no text in the JSON of a part: keys, and the values that name its kind."""


class Cancelled(QueryError):
    """The caller cancelled the query."""


def matches(expression: str) -> str:
    """Return a condition with a `pattern` as its parameter; it is false for NULL."""
    return f"coalesce(regexp_matches({expression}, ?, 'i'), false)"


def pattern(needle: str) -> str:
    """Escape a text for DuckDB's regular expressions."""
    text = needle.encode("utf-8", "replace").decode()  # as a trace stores lone surrogates
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in text)


def _json_matches(column: str, texts: Sequence[str], mixed: Sequence[str]) -> str:
    """Match the texts in a JSON column; matching the whole JSON first is cheap and excludes most
    rows.

    Each JSON function keeps 2,048 parsed rows in memory, so there are few of them.

    Args:
        texts: paths of texts.
        mixed: paths of texts or lists of parts, which are objects.
    """
    lines: list[str] = []
    parts: list[str] = []
    for path in texts:
        text = f"{column}->>'{path}'"
        lines.append(f"array_to_string({text}, chr(10))" if "[*]" in path else text)
    for path in mixed:
        values = f"{column}->>'{path}'"
        kinds = f"json_type({column}, '{path}')"
        if "[*]" not in path:
            values = f"[{values}]"
            kinds = f"[{kinds}]"
        are_texts = f"[kind IS DISTINCT FROM 'ARRAY' FOR kind IN {kinds}]"
        lines.append(f"array_to_string(list_where({values}, {are_texts}), chr(10))")
        parts.append(f"array_to_string({column}->>'{path}[*]', chr(10))")
    joined = f"concat_ws(chr(10), {', '.join(lines)})"
    values_of_parts = f"regexp_replace(concat_ws(chr(10), {', '.join(parts)}), '{_NAMES}', '', 'g')"
    is_in_text = f"{matches(joined)} OR {matches(values_of_parts)}"
    return f"CASE WHEN {matches(column)} THEN {is_in_text} ELSE false END"


IN_CALL = f"""({
    _json_matches(
        "c.messages_suffix", [f"$[*].{part}" for part in (*_MESSAGE, *_TOOLS)], ["$[*].content"]
    )
}
  OR {
    _json_matches(
        "c.response",
        [*_RESPONSE, "$.choices[*].text"],
        ["$.choices[*].message.content", "$.content", "$.output"],
    )
}
  OR c.messages_suffix IS NULL AND {
    _json_matches("c.request", ["$.prompt", "$.instructions"], ["$.input"])
}
  OR {matches("c.error")})"""
"""A condition on a row `c` of `calls`, with `call_parameters`."""

IN_EPISODE = f"""({matches("e.task->>'$.main_query'")} OR {matches("e.output->>'$'")} OR {matches("e.error")})"""
"""A condition on a row `e` of `episodes`, with `episode_parameters`."""


def call_parameters(needle: str) -> list[str]:
    """Return the parameters of IN_CALL: for each JSON column the text as JSON escapes it, the text
    itself, and for the JSON of parts as JSON escapes it."""
    plain = pattern(needle)
    escaped = pattern(json.dumps(needle, ensure_ascii=False)[1:-1])
    return [escaped, plain, escaped] * 3 + [plain]


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


def of_span(span: Span) -> str:
    """Return the condition that a row `c` of `calls` began in a span."""
    since, until = span
    conditions = ["true"]
    if since is not None:
        conditions.append(f"c.started_at >= '{since.isoformat()}'")
    if until is not None:
        conditions.append(f"c.started_at < '{until.isoformat()}'")
    return " AND ".join(conditions)


def episodes_with(
    reader: TraceReader,
    needle: str,
    since: datetime | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> set[str]:
    """Return the ids of the episodes that hold a text, in themselves or in a call.

    Args:
        since: search only calls that began at this time or later.
        progress: called after each span with the calls searched and all.
        cancelled: checked before each span.

    Raises Cancelled.
    """
    sql = f"SELECT episode_id FROM episodes e WHERE {IN_EPISODE}"
    ids = {row["episode_id"] for row in rows(reader, sql, *episode_parameters(needle))}
    spans: list[tuple[Span, int]] = [((since, None), 0)]
    if since is None:
        spans = call_spans(reader, _SPAN)
    done = 0
    total = sum(size for _, size in spans)
    for number, (span, size) in enumerate(spans):
        if cancelled and cancelled():
            raise Cancelled("the search was canceled")
        if number and number % _OPEN_SPANS == 0:
            reader.close()
        sql = f"SELECT DISTINCT c.episode_id FROM calls c WHERE {of_span(span)} AND {IN_CALL}"
        ids.update(row["episode_id"] for row in rows(reader, sql, *call_parameters(needle)))
        done += size
        if progress:
            progress(done, total)
    return ids
