"""The fields of the filter language: what each means, and its SQL over a row `e` of `episodes`.

A value never stands in the SQL: a condition has a `?` for each of its parameters.

Where a text stands in a trace: what of a call and of an episode is text, and the SQL that finds one in it.

What is searched is what was said: the words of the JSON around it (`role`, `content`, `total_tokens`) are not found.
Case does not count. DuckDB's regular expressions search twice as fast as its ILIKE and `contains(lower(...))`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Literal, TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.types import OUTCOMES
from ajet_tools.trace.queries.base import USAGE_TOKENS, rows

Kind = Literal["number", "seconds", "age", "word", "id", "choice", "flag", "text"]

SQL = tuple[str, tuple[object, ...]]
"""A condition and its parameters."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field: of what kind its values are, and what is compared."""

    kind: Kind
    about: str
    expression: str = ""
    """The value, in SQL. Of a field that an episode may have several of, it stands for one of them."""
    among: str = ""
    """`FROM ... WHERE ...` of those several; empty where there is one."""
    choices: tuple[str, ...] = ()

    def where(self, condition: str) -> str:
        """A condition on `expression` as one on the episode; false where there is no value."""
        return f"EXISTS (SELECT 1 {self.among} AND {condition})" if self.among else f"coalesce({condition}, false)"

    @property
    def given(self) -> str:
        """The condition that there is a value."""
        return self.where(f"{self.expression} IS NOT NULL")


_CALLS = "FROM calls c WHERE c.episode_id = e.episode_id"

_ROLLOUT = f"{_CALLS} AND c.phase = 'rollout'"

_FEEDBACK = "FROM feedback f WHERE f.episode_id = e.episode_id"

_LEDGER = "FROM ledger l WHERE l.episode_id = e.episode_id"

_FIRST_CHOICE = "coalesce(c.response->>'$.choices[0].index', '0') = '0'"
"""Usage is that of a request, which its choices share."""

_PROMPT = f"""coalesce(c.prefix_len + len(c.prompt_suffix),
  CASE WHEN {_FIRST_CHOICE} THEN TRY_CAST(c.response->>'$.usage.prompt_tokens' AS BIGINT) END)"""

_ANSWERED = f"(SELECT sum(TRY_CAST(c.response->>'$.usage.cost' AS DOUBLE)) {_CALLS} AND {_FIRST_CHOICE})"
_JUDGED = "TRY_CAST(e.metrics->>'$.judge_cost' AS DOUBLE)"
_COST = f"coalesce({_ANSWERED} + {_JUDGED}, {_ANSWERED}, {_JUDGED})"

_UNREAD = f"{_ROLLOUT} AND c.response->>'$.choices[0].unread_tool_call' = 'true'"

QUERY = "e.task->>'$.main_query'"

REWARD = "(SELECT sum(r.value * r.weight) FROM rewards r WHERE r.episode_id = e.episode_id)"

_SOLVED = f"coalesce(e.is_success, {REWARD} >= 1 - 1e-9, false)"

FIELDS: dict[str, Field] = {
    "reward": Field("number", "the sum of its rewards", REWARD),
    "status": Field("choice", "how it ended", "e.status", choices=("succeeded", "failed", "timeout", "aborted")),
    "success": Field("flag", "whether it solved its task", _SOLVED),
    "agent": Field("word", "an agent that made a call", "c.agent", _CALLS),
    "step": Field("number", "the training step; `last`: the last of its run and split", "e.step"),
    "task": Field("id", "the task: its id, or its query", "e.task_id"),
    "attempt": Field("number", "which attempt of its group, from 0", "e.attempt"),
    "split": Field("choice", "train, val or trial", "e.split", choices=("train", "val", "trial")),
    "decoding": Field(
        "choice", "sampled or greedy: how its tokens were drawn", "e.decoding", choices=("sampled", "greedy")
    ),
    "turns": Field("number", "calls of its agents", f"(SELECT count(*) {_ROLLOUT})"),
    "calls": Field("number", "calls, those of judges too", f"(SELECT count(*) {_CALLS})"),
    "agents": Field("number", "how many agents made calls", f"(SELECT count(DISTINCT c.agent) {_ROLLOUT})"),
    "tokens": Field(
        "number",
        "sampled tokens, by usage where no call has ids",
        f"(SELECT coalesce(sum(len(c.output_ids)), {USAGE_TOKENS}) {_CALLS})",
    ),
    "prompt_tokens": Field("number", "prompt tokens of all calls", f"(SELECT sum({_PROMPT}) {_CALLS})"),
    "cost": Field("number", "money: `usage.cost` of its calls, as some providers report it, and `judge_cost`", _COST),
    "latency": Field("seconds", "how long a call took: latency>5s", "epoch(c.ended_at - c.started_at)", _CALLS),
    "unread_tool_calls": Field(
        "number", "replies with a tool call that cannot be parsed", f"(SELECT count(*) {_UNREAD})"
    ),
    "cut_tool_calls": Field(
        "number",
        "those of them that are cut at the maximum length",
        f"(SELECT count(*) {_UNREAD} AND c.finish_reason = 'length')",
    ),
    "seconds": Field("seconds", "how long it took: 90, 1.5m, 2h", "epoch(e.ended_at - e.started_at)"),
    "age": Field("age", "how long ago it ended: 30s, 5m, 2h, 1d", "e.ended_at"),
    "cause": Field("word", "the class of its error", "e.cause"),
    "error": Field("word", "its error", "e.error"),
    "model": Field("word", "a model that answered a call", "c.model", _CALLS),
    "version": Field("number", "the policy version of a call", "c.policy_version", _CALLS),
    "tag": Field("word", "the target tag of a call", "c.target_tag", _CALLS),
    "finish": Field("word", "the finish reason of a call", "c.finish_reason", _CALLS),
    "feedback": Field("number", "a score that a person gave; feedback=yes: any word at all", "f.score", _FEEDBACK),
    "outcome": Field("choice", "what the ledger says of a call's tokens", "l.outcome", _LEDGER, choices=OUTCOMES),
    "episode": Field("id", "the episode's id", "e.episode_id"),
    "group": Field("id", "the group's id", "e.group_id"),
    "run": Field("id", "the run's id", "e.run_id"),
    "superseded": Field("flag", "whether a resume rolled it back", "coalesce(e.superseded, false)"),
    "text": Field("text", "anything said: task, messages, replies, output, errors"),
}
"""Field -> what it is. An id may be given by its beginning."""

LAST_STEP = """(SELECT max(l.step) FROM episodes l WHERE l.run_id = e.run_id AND l.split = e.split
  AND NOT coalesce(l.superseded, false))"""

_METRIC = re.compile(r"metric\.[A-Za-z_][\w./@-]{0,99}", re.A)


def field_of(name: str) -> Field | None:
    """The field of this name; `metric.NAME` is a metric of the episode's own. None where there is no such field."""
    if _METRIC.fullmatch(name):
        key = json.dumps(name.removeprefix("metric."))
        return Field("number", "a metric of the episode", f"TRY_CAST(e.metrics->>'$.{key}' AS DOUBLE)")
    return FIELDS.get(ALIASES.get(name.lower(), name.lower()))


ALIASES = {"policy": "version", "policy_version": "version", "policy/version": "version", "duration": "seconds"}


def any_text(needle: str) -> SQL:
    """The condition that an episode contains a text: in its task, output, error or calls."""
    in_calls = f"e.episode_id IN (SELECT c.episode_id FROM calls c WHERE {IN_CALL})"
    return f"({IN_EPISODE} OR {in_calls})", (*episode_parameters(needle), *call_parameters(needle))


def contains(field: Field, needle: str) -> SQL:
    """The condition that a field's value contains a text (of a task, also its query)."""
    sql, parameters = field.where(matches(field.expression)), [pattern(needle)]
    if field is FIELDS["task"]:
        sql, parameters = f"({sql} OR {matches(QUERY)})", parameters * 2
    return sql, tuple(parameters)


def equals(field: Field, value: object) -> SQL:
    """The condition that a field equals a value; an id may begin with it, and a task also matches by its query."""
    if field.kind != "id":
        return field.where(f"{field.expression} = ?"), (value,)
    sql = field.where(f"starts_with({field.expression}, ?)")
    if field is FIELDS["task"]:
        return f"({sql} OR coalesce(lower({QUERY}) = lower(?), false))", (value, value)
    return sql, (value,)


Span = tuple[datetime | None, datetime | None]
"""Calls that began in [since, until); None is open."""

_MESSAGE = ("content", "content[*].text", "reasoning_content", "reasoning", "name")

_TOOLS = ("tool_calls[*].function.name", "tool_calls[*].function.arguments")

_ANTHROPIC = ("$.content", "$.content[*].text")

_ITEMS = ("$.output", "$.output[*].content[*].text", "$.output[*].arguments")

_INPUT = ("$.input", "$.input[*].content", "$.input[*].content[*].text", "$.input[*].output")

_RESPONSE = [f"$.choices[*].message.{part}" for part in (*_MESSAGE, *_TOOLS)]


def matches(expression: str) -> str:
    """A condition with one parameter, a `pattern`; false where there is no text."""
    return f"coalesce(regexp_matches({expression}, ?, 'i'), false)"


def pattern(needle: str) -> str:
    """The regular expression of exactly this text."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{{{ord(c):x}}}" for c in needle)


def _text_at(column: str, *paths: str) -> str:
    """The texts at some paths of a JSON column, one a line."""
    texts = (f"{column}->>'{path}'" for path in paths)
    lines = (f"array_to_string({text}, chr(10))" if "[*]" in text else text for text in texts)
    return f"concat_ws(chr(10), {', '.join(lines)})"


def _joined_text(column: str, *paths: str) -> str:
    """Matching the whole JSON first is cheap and excludes most rows."""
    return f"CASE WHEN {matches(column)} THEN {matches(_text_at(column, *paths))} ELSE false END"


IN_CALL = f"""({_joined_text("c.messages_suffix", *(f"$[*].{part}" for part in (*_MESSAGE, *_TOOLS)))}
  OR {_joined_text("c.response", *_RESPONSE, "$.choices[*].text", *_ANTHROPIC, *_ITEMS)}
  OR c.messages_suffix IS NULL AND {_joined_text("c.request", "$.prompt", "$.instructions", *_INPUT)}
  OR {matches("c.error")})"""
"""A condition on a row `c` of `calls`, with `call_parameters`."""

IN_EPISODE = f"""({matches("e.task->>'$.main_query'")} OR {matches("e.output->>'$'")} OR {matches("e.error")})"""
"""A condition on a row `e` of `episodes`, with `episode_parameters`."""


def call_parameters(needle: str) -> list[str]:
    """The parameters of IN_CALL: the text as JSON spells it, then the text itself, for each column of JSON."""
    itself, spelled = pattern(needle), pattern(json.dumps(needle, ensure_ascii=False)[1:-1])
    return [spelled, itself] * 3 + [itself]


def episode_parameters(needle: str) -> list[str]:
    """The parameters of IN_EPISODE."""
    return [pattern(needle)] * 3


def call_spans(reader: TraceReader, size: int) -> list[tuple[Span, int]]:
    """Spans of time, each with its number of calls (about `size`), so that short queries replace a long one."""
    total = int(rows(reader, "SELECT count(*) AS n FROM calls")[0]["n"])
    parts = min(max(1, round(total / size)), 1000)
    cuts: list[datetime] = []
    if parts > 1:
        fractions = ", ".join(f"{i / parts:.6f}" for i in range(1, parts))
        quantiles = rows(reader, f"SELECT quantile_disc(started_at, [{fractions}]) AS cuts FROM calls")[0]["cuts"]
        cuts = sorted(set(quantiles or ()))
    edges: list[datetime | None] = [None, *cuts, None]
    each = total // (len(cuts) + 1)
    spans = list(pairwise(edges))
    return [(span, each if i else total - each * len(cuts)) for i, span in enumerate(spans)]


def of_span(span: Span) -> tuple[str, list[datetime]]:
    """The condition that a row `c` of `calls` began in a span, and its parameters."""
    since, until = span
    parts = ["c.started_at >= ?"] * (since is not None) + ["c.started_at < ?"] * (until is not None)
    return " AND ".join(parts) or "true", [edge for edge in span if edge is not None]


def within(reader: TraceReader, run_id: str | None) -> tuple[str, list[str]]:
    """The condition that a row `c` of `calls` is of a run: of its episodes, or of one that has not ended."""
    if run_id is None or rows(reader, "SELECT count(*) AS n FROM runs")[0]["n"] < 2:
        return "true", []
    of_others = "SELECT episode_id FROM episodes WHERE run_id <> ? AND episode_id IS NOT NULL"
    return f"c.episode_id NOT IN ({of_others})", [run_id]


class CallTexts(TypedDict):
    """The texts of a call in which a search looks; JSON but for the error."""

    episode_id: str
    call_id: str
    messages_suffix: str | None
    response: str | None
    error: str | None
    request: str | None
    """Only of a call without messages."""


class EpisodeTexts(TypedDict):
    """The texts of an episode in which a search looks."""

    episode_id: str
    task: str | None
    output: str | None
    error: str | None


def calls_with(reader: TraceReader, needle: str, span: Span, run_id: str | None = None) -> Iterator[CallTexts]:
    """The calls of a span of time that contain a text."""
    in_span, edges = of_span(span)
    of_run, run = within(reader, run_id)
    table = reader.query(
        f"""
        SELECT c.episode_id, c.call_id, c.messages_suffix, c.response, c.error,
          CASE WHEN c.messages_suffix IS NULL THEN c.request END AS request
        FROM calls c WHERE {in_span} AND {IN_CALL} AND {of_run}""",
        [*edges, *call_parameters(needle), *run],
    )
    for start in range(0, len(table), _AT_ONCE):
        yield from table.slice(start, _AT_ONCE).to_pylist()


_AT_ONCE = 64
"""Rows converted to Python at once; their texts may be long."""


def episodes_with(reader: TraceReader, needle: str, run_id: str | None = None) -> list[EpisodeTexts]:
    """The episodes whose task, output or error contains a text."""
    return rows(
        reader,
        f"""
        SELECT e.episode_id, e.task->>'$.main_query' AS task, e.output->>'$' AS output, e.error
        FROM episodes e WHERE (?::VARCHAR IS NULL OR e.run_id = ?) AND {IN_EPISODE} ORDER BY e.ended_at""",
        run_id,
        run_id,
        *episode_parameters(needle),
    )
