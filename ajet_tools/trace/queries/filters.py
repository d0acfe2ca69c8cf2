"""Filters of episodes, as SQL: `reward<0.5 status=failed agent=werewolf step>10 text~"calc"`.

For the grammar see `ajet_tools.text.grammar`. A bare word is a full-text search. `FIELD=none`
matches episodes without a value. Values are always passed as parameters, never as part of the SQL.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from ajet_sdk.types import OUTCOMES, now
from ajet_tools.text.grammar import BareWord, Comparison, FilterError, Token, fold, tree
from ajet_tools.trace.queries.base import USAGE_TOKENS
from ajet_tools.trace.queries.search import (
    IN_CALL,
    IN_EPISODE,
    call_parameters,
    episode_parameters,
    matches,
    pattern,
)

Kind = Literal["number", "seconds", "age", "word", "id", "choice", "flag", "text"]

SQL = tuple[str, tuple[object, ...]]
"""A condition and its parameters."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the filter language, over a row `e` of `episodes`."""

    kind: Kind
    expression: str = ""
    """SQL of the value, or of each value if an episode may have several."""
    among: str = ""
    """`FROM ... WHERE ...` of several values; empty for a single value."""
    choices: tuple[str, ...] = ()

    def where(self, condition: str) -> str:
        """Turn a condition on `expression` into a condition on the episode; false without a
        value."""
        return (
            f"EXISTS (SELECT 1 {self.among} AND {condition})"
            if self.among
            else f"coalesce({condition}, false)"
        )


_CALLS = "FROM calls c WHERE c.episode_id = e.episode_id"
_ROLLOUT = f"{_CALLS} AND c.phase = 'rollout'"
_FIRST_CHOICE = "coalesce(c.response->>'$.choices[0].index', '0') = '0'"
"""The choices of a request share its usage, so only the first one counts."""
_PROMPT = f"""coalesce(c.prefix_len + len(c.prompt_suffix),
  CASE WHEN {_FIRST_CHOICE} THEN TRY_CAST(c.response->>'$.usage.prompt_tokens' AS BIGINT) END)"""

_ANSWERED = (
    f"(SELECT sum(TRY_CAST(c.response->>'$.usage.cost' AS DOUBLE)) {_CALLS} AND {_FIRST_CHOICE})"
)
_JUDGED = "TRY_CAST(e.metrics->>'$.judge_cost' AS DOUBLE)"
_UNREAD = f"{_ROLLOUT} AND c.response->>'$.choices[0].unread_tool_call' = 'true'"
_QUERY = "e.task->>'$.main_query'"
REWARD = "(SELECT sum(r.value * r.weight) FROM rewards r WHERE r.episode_id = e.episode_id)"

FIELDS: dict[str, Field] = {
    "reward": Field("number", REWARD),
    "status": Field("choice", "e.status", choices=("succeeded", "failed", "timeout", "aborted")),
    "success": Field("flag", f"coalesce(e.is_success, {REWARD} >= 1 - 1e-9, false)"),
    "agent": Field("word", "c.agent", _CALLS),
    "step": Field("number", "e.step"),  # or `last`: the last step of the episode's run and split
    "task": Field("id", "e.task_id"),  # or the task's query
    "attempt": Field("number", "e.attempt"),
    "split": Field("choice", "e.split", choices=("train", "val", "trial")),
    "decoding": Field("choice", "e.decoding", choices=("sampled", "greedy")),
    "turns": Field("number", f"(SELECT count(*) {_ROLLOUT})"),  # calls of agents
    "calls": Field("number", f"(SELECT count(*) {_CALLS})"),  # calls of agents and judges
    "agents": Field("number", f"(SELECT count(DISTINCT c.agent) {_ROLLOUT})"),
    "tokens": Field(
        "number", f"(SELECT coalesce(sum(len(c.output_ids)), {USAGE_TOKENS}) {_CALLS})"
    ),
    "prompt_tokens": Field("number", f"(SELECT sum({_PROMPT}) {_CALLS})"),
    "cost": Field("number", f"coalesce({_ANSWERED} + {_JUDGED}, {_ANSWERED}, {_JUDGED})"),
    "latency": Field("seconds", "epoch(c.ended_at - c.started_at)", _CALLS),
    "unread_tool_calls": Field("number", f"(SELECT count(*) {_UNREAD})"),
    "cut_tool_calls": Field(
        "number", f"(SELECT count(*) {_UNREAD} AND c.finish_reason = 'length')"
    ),
    "seconds": Field("seconds", "epoch(e.ended_at - e.started_at)"),
    "age": Field("age", "e.ended_at"),  # time since the episode ended
    "cause": Field("word", "e.cause"),  # class of the error
    "error": Field("word", "e.error"),
    "model": Field("word", "c.model", _CALLS),
    "version": Field("number", "c.policy_version", _CALLS),
    "tag": Field("word", "c.target_tag", _CALLS),
    "finish": Field("word", "c.finish_reason", _CALLS),
    "feedback": Field(
        "number", "f.score", "FROM feedback f WHERE f.episode_id = e.episode_id"
    ),  # `yes`: any feedback
    "outcome": Field(
        "choice", "l.outcome", "FROM ledger l WHERE l.episode_id = e.episode_id", choices=OUTCOMES
    ),
    "episode": Field("id", "e.episode_id"),
    "group": Field("id", "e.group_id"),
    "run": Field("id", "e.run_id"),
    "superseded": Field("flag", "coalesce(e.superseded, false)"),  # rolled back by a resume
    "text": Field("text"),  # task, messages, replies, output, errors
}
"""Fields by name; an id matches by its beginning."""
_ALIASES = {
    "policy": "version",
    "policy_version": "version",
    "policy/version": "version",
    "duration": "seconds",
}
_LAST_STEP = """(SELECT max(l.step) FROM episodes l WHERE l.run_id = e.run_id AND l.split = e.split
  AND NOT coalesce(l.superseded, false))"""

_METRIC = re.compile(r"metric\.[A-Za-z_][\w./@-]{0,99}", re.A)


def _contains(field: Field, needle: str) -> SQL:
    """Return the condition that a value, or a task's query, contains a text."""
    sql, parameters = field.where(matches(field.expression)), [pattern(needle)]
    if field is FIELDS["task"]:
        sql, parameters = f"({sql} OR {matches(_QUERY)})", parameters * 2
    return sql, tuple(parameters)


def _equals(field: Field, value: str) -> SQL:
    """Return the condition that a field equals a value, that an id begins with it, or that it is a
    task's query."""
    if field.kind != "id":
        return field.where(f"{field.expression} = ?"), (value,)
    sql = field.where(f"starts_with({field.expression}, ?)")
    if field is FIELDS["task"]:
        return f"({sql} OR coalesce(lower({_QUERY}) = lower(?), false))", (value, value)
    return sql, (value,)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison as SQL over a row `e` of `episodes`."""

    sql: str
    parameters: tuple[object, ...]
    needle: str | None = None
    """The text of a full-text search, which takes seconds on a large trace."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Conditions joined by `and` or `or`, or a single one negated by `not`."""

    word: Literal["and", "or", "not"]
    parts: tuple[Node, ...]


Node = Condition | Joined


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter: `SELECT ... FROM episodes e WHERE {sql}` with `parameters` in place of its
    `?`."""

    text: str
    sql: str
    parameters: tuple[object, ...]
    needles: tuple[str, ...] = ()
    """Search texts, for highlighting."""
    node: Node = Condition("true", ())
    """The filter as a tree, to evaluate its parts separately."""

    @property
    def reads_text(self) -> bool:
        """Whether the filter has a full-text search."""
        return any(condition.needle is not None for condition in conditions(self.node))


def parse(text: str) -> Filter:
    """Parse a filter; an empty text matches every episode. `age` counts from now. Raises
    FilterError."""
    root = tree(text, "reward<0.5")
    needles: list[str] = []

    def leaf(part: BareWord | Comparison) -> Node:
        if isinstance(part, BareWord):
            needles.append(part.text.text)
            return _text(part.text.text)
        if part.operator.text == "~":
            needles.extend(value.text for value in part.values)
        return _comparison(part)

    node = (
        Condition("true", ())
        if root is None
        else fold(root, leaf, lambda word, parts: Joined(word, tuple(parts)))
    )
    sql, parameters = sql_of(node)
    return Filter(text=text, sql=sql, parameters=parameters, needles=tuple(needles), node=node)


def conditions(node: Node) -> Iterable[Condition]:
    """Return the comparisons of a filter."""
    return (
        [node]
        if isinstance(node, Condition)
        else [c for part in node.parts for c in conditions(part)]
    )


def sql_of(node: Node) -> tuple[str, tuple[object, ...]]:
    """Return a filter, or a part of it, as SQL with parameters."""
    if isinstance(node, Condition):
        return node.sql, node.parameters
    parts = [sql_of(part) for part in node.parts]
    joined = f" {node.word.upper()} ".join(sql for sql, _ in parts)
    return (f"(NOT {joined})" if node.word == "not" else f"({joined})"), tuple(
        p for _, args in parts for p in args
    )


def _comparison(part: Comparison) -> Node:
    field, operator = _field(part.field), part.operator
    allowed = _OPERATORS[field.kind]
    if operator.text not in allowed:
        supported = " ".join(
            each for plain in allowed for each in (plain, *_NEGATED.get(plain, ()))
        )
        raise FilterError(
            f"{part.field.text} supports {supported}, not {operator.text}", operator.at
        )
    parts = tuple(_compare(field, operator.text, value) for value in part.values)
    return parts[0] if len(parts) == 1 else Joined("or", parts)


_ORDERED = ("=", "<", "<=", ">", ">=")
_OPERATORS: dict[str, tuple[str, ...]] = {
    "number": _ORDERED,
    "seconds": _ORDERED,
    "age": ("<", "<=", ">", ">="),
    "word": ("=", "~"),
    "id": ("=", "~"),
    "choice": ("=",),
    "flag": ("=",),
    "text": ("~",),
}
_NEGATED = {"=": ("!=",), "~": ("!~",)}


def _field(name: Token) -> Field:
    if name.kind != "quoted" and _METRIC.fullmatch(name.text):
        key = json.dumps(name.text.removeprefix("metric."))
        return Field("number", f"TRY_CAST(e.metrics->>'$.{key}' AS DOUBLE)")
    lower = name.text.lower()
    field = None if name.kind == "quoted" else FIELDS.get(_ALIASES.get(lower, lower))
    if field is None:
        near = _nearest(name.text, [*FIELDS, *_ALIASES])
        listed = ", ".join([*FIELDS, "metric.NAME"])
        raise FilterError(f"there is no field {name.text!r}{near}; fields: {listed}", name.at)
    return field


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f", did you mean {near[0]}?" if near else ""


def _text(needle: str) -> Condition:
    sql = f"({IN_EPISODE} OR e.episode_id IN (SELECT c.episode_id FROM calls c WHERE {IN_CALL}))"
    return Condition(sql, (*episode_parameters(needle), *call_parameters(needle)), needle=needle)


def _compare(field: Field, operator: str, value: Token) -> Node:
    """Compare a field with one value."""
    if field.kind == "text":
        return _text(value.text)
    if operator == "~":
        return Condition(*_contains(field, value.text))
    word = value.text.lower()
    if (
        operator == "="
        and value.kind == "word"
        and word == "none"
        and field.kind not in ("flag", "choice")
    ):
        return Joined("not", (Condition(field.where(f"{field.expression} IS NOT NULL"), ()),))
    is_feedback_flag = field is FIELDS["feedback"] and operator == "=" and word in _FLAGS
    if field.kind == "flag" or is_feedback_flag:
        wanted = Condition(field.where("true") if is_feedback_flag else field.expression, ())
        return wanted if _FLAGS[_choice(value, _FLAGS)] else Joined("not", (wanted,))
    if field.kind == "age":
        at = now() - timedelta(seconds=_seconds(value))
        return Condition(
            field.where(f"{field.expression} {_TURNED[operator]} ?::TIMESTAMPTZ"), (at,)
        )
    if operator == "=" and field.kind in ("word", "id", "choice"):
        text = _choice(value, field.choices) if field.choices else value.text
        return Condition(*_equals(field, text))
    if field is FIELDS["step"] and word == "last":
        return Condition(field.where(f"{field.expression} {operator} {_LAST_STEP}"), ())
    bound = _seconds(value) if field.kind == "seconds" else _number(value)
    return Condition(field.where(f"{field.expression} {operator} ?"), (bound,))


_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_FLAGS = {"yes": True, "true": True, "no": False, "false": False}


def _choice(value: Token, choices: Iterable[str]) -> str:
    known = list(choices)
    if value.text.lower() not in known:
        raise FilterError(
            f"{value.text!r} is not one of {', '.join(known)}{_nearest(value.text, known)}",
            value.at,
        )
    return value.text.lower()


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,2})?", re.I | re.A)
_DURATION = re.compile(r"(\d{1,12}\.?\d{0,6}|\.\d{1,6})(ms|s|m|h|d|w)?", re.I | re.A)
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_CENTURY = 100 * 365 * 86400.0


def _number(value: Token) -> float:
    if not _NUMBER.fullmatch(value.text) or len(value.text) > 40:
        raise FilterError(f"{value.text!r} is not a number", value.at)
    return float(value.text)


def _seconds(value: Token) -> float:
    match = _DURATION.fullmatch(value.text)
    seconds = float(match[1]) * _UNITS[(match[2] or "s").lower()] if match else _CENTURY + 1
    if seconds > _CENTURY:
        raise FilterError(
            f"{value.text!r} is not a time such as 30s, 5m, 2h or 1d (100 years at most)", value.at
        )
    return seconds
