"""The filter language of episodes: `reward<0.5 status=failed agent=werewolf step>10 text~"calc"`.

For its grammar see `ajet_tools.text.grammar`. A word that stands alone is looked for in everything that was said.
`none` is the value of a field that has none.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from ajet_sdk.types import now
from ajet_tools.text.grammar import BareWord, Comparison, FilterError, Token, fold, tree
from ajet_tools.trace.queries import fields
from ajet_tools.trace.queries.fields import ALIASES, Field

FIELDS: dict[str, str] = {name: field.about for name, field in fields.FIELDS.items()}
"""Field -> what it means, in a few words."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison as SQL over a row `e` of `episodes`."""

    sql: str
    parameters: tuple[object, ...]
    needle: str | None = None
    """A text to find in all messages, which takes long on a large trace."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Conditions joined by a word; `not` has one part."""

    word: Literal["and", "or", "not"]
    parts: tuple[Node, ...]


Node = Condition | Joined


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter: `SELECT ... FROM episodes e WHERE {sql}` with `parameters` in place of its `?`."""

    text: str
    sql: str
    parameters: tuple[object, ...]
    needles: tuple[str, ...] = ()
    """The texts looked for, to be highlighted in what is shown."""
    node: Node = Condition("true", ())
    """The same as a tree, to evaluate its parts one by one."""

    @property
    def reads_text(self) -> bool:
        """Whether it reads messages, which may take seconds on a large trace."""
        return any(condition.needle is not None for condition in conditions(self.node))


def parse(text: str) -> Filter:
    """Parse a filter; an empty text matches every episode. `age` counts from now. Raises FilterError."""
    root = tree(text, "reward<0.5")
    needles: list[str] = []

    def leaf(part: BareWord | Comparison) -> Node:
        if isinstance(part, BareWord):
            needles.append(part.text.text)
            return _text(part.text.text)
        if part.operator.text == "~":
            needles.extend(value.text for value in part.values)
        return _comparison(part)

    node = Condition("true", ()) if root is None else fold(root, leaf, lambda word, parts: Joined(word, tuple(parts)))
    sql, parameters = sql_of(node)
    return Filter(text=text, sql=sql, parameters=parameters, needles=tuple(needles), node=node)


def conditions(node: Node) -> Iterable[Condition]:
    """The comparisons that a filter is made of."""
    return [node] if isinstance(node, Condition) else [c for part in node.parts for c in conditions(part)]


def sql_of(node: Node) -> tuple[str, tuple[object, ...]]:
    """A part of a filter as SQL, and its parameters."""
    if isinstance(node, Condition):
        return node.sql, node.parameters
    parts = [sql_of(part) for part in node.parts]
    joined = f" {node.word.upper()} ".join(sql for sql, _ in parts)
    return (f"(NOT {joined})" if node.word == "not" else f"({joined})"), tuple(p for _, args in parts for p in args)


def _comparison(part: Comparison) -> Node:
    field, operator = _field(part.field), part.operator
    allowed = _OPERATORS[field.kind]
    if operator.text not in allowed:
        supported = " ".join(each for plain in allowed for each in (plain, *_NEGATED.get(plain, ())))
        raise FilterError(f"{part.field.text} supports {supported}, not {operator.text}", operator.at)
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
    field = None if name.kind == "quoted" else fields.field_of(name.text)
    if field is None:
        near = _nearest(name.text, [*FIELDS, *ALIASES])
        listed = ", ".join([*FIELDS, "metric.NAME"])
        raise FilterError(f"there is no field {name.text!r}{near}; fields: {listed}", name.at)
    return field


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f", did you mean {near[0]}?" if near else ""


def _text(needle: str) -> Condition:
    return Condition(*fields.any_text(needle), needle=needle)


def _compare(field: Field, operator: str, value: Token) -> Node:
    """With one value."""
    if field.kind == "text":
        return _text(value.text)
    if operator == "~":
        return Condition(*fields.contains(field, value.text))
    if (
        operator == "="
        and value.kind == "word"
        and value.text.lower() == "none"
        and field.kind not in ("flag", "choice")
    ):
        return Joined("not", (Condition(field.given, ()),))
    if field is fields.FIELDS["feedback"] and operator == "=" and value.text.lower() in _FLAGS:
        there = Condition(field.where("true"), ())
        return there if _FLAGS[value.text.lower()] else Joined("not", (there,))
    if field.kind == "flag":
        wanted = Condition(field.expression, ())
        return wanted if _one_of(value, _FLAGS) in ("yes", "true") else Joined("not", (wanted,))
    if field.kind == "age":
        at = now() - timedelta(seconds=_seconds(value))
        return Condition(field.where(f"{field.expression} {_TURNED[operator]} ?::TIMESTAMPTZ"), (at,))
    if operator == "=" and field.kind in ("word", "id", "choice"):
        text = _one_of(value, field.choices) if field.choices else value.text
        return Condition(*fields.equals(field, text))
    if field is fields.FIELDS["step"] and value.text.lower() == "last":
        return Condition(field.where(f"{field.expression} {operator} {fields.LAST_STEP}"), ())
    bound = _seconds(value) if field.kind == "seconds" else _number(value)
    return Condition(field.where(f"{field.expression} {operator} ?"), (bound,))


_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_FLAGS = {"yes": True, "true": True, "no": False, "false": False}


def _one_of(value: Token, choices: Iterable[str]) -> str:
    known = list(choices)
    if value.text.lower() not in known:
        raise FilterError(f"{value.text!r} is not one of {', '.join(known)}{_nearest(value.text, known)}", value.at)
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
        raise FilterError(f"{value.text!r} is not a time such as 30s, 5m, 2h or 1d (100 years at most)", value.at)
    return seconds
