"""The filter language of episodes: `reward<0.5 status=failed agent=werewolf step>10 text~"calc"`.

    filter := all ("or" all)*
    all    := one (["and"] one)*
    one    := "not" one | "(" filter ")" | field operator value ("," value)* | text
    operator := = != < <= > >= ~ (contains, in any case) !~

A word that stands alone is looked for in everything that was said. Quotes hold what has blanks or means something else.
`none` is the value of a field that has none. `!=` and `!~` are true exactly where `=` and `~` are not.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from ajet_sdk.errors import QueryError
from ajet_sdk.types import now
from ajet_tools.trace.queries import fields
from ajet_tools.trace.queries.fields import ALIASES, Field

__all__ = [
    "FIELDS",
    "Condition",
    "Filter",
    "FilterError",
    "Joined",
    "Node",
    "Token",
    "conditions",
    "parse",
    "sql_of",
    "tokens",
]

FIELDS: dict[str, str] = {name: field.about for name, field in fields.FIELDS.items()}
"""Field -> what it means, in a few words."""

_LONGEST = 10_000
_DEEPEST = 30
_MOST = 60
_MOST_VALUES = 500


class FilterError(QueryError):
    """An expression that is not understood; `position` is where (from 0), and the message says what would be."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(f"{message} (filter, character {position + 1})")
        self.position = position


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison as SQL over a row `e` of `episodes`."""

    sql: str
    parameters: tuple[Any, ...]
    needle: str | None = None
    """The text that is looked for in everything said, which takes long on a large trace."""


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
    parameters: tuple[Any, ...]
    needles: tuple[str, ...] = ()
    """The texts looked for, to be highlighted in what is shown."""
    node: Node = Condition("true", ())
    """The same as a tree, for who wants to answer its parts one by one."""

    @property
    def reads_text(self) -> bool:
        """It looks into messages, and may take seconds on a large trace."""
        return any(condition.needle is not None for condition in conditions(self.node))


def parse(text: str) -> Filter:
    """A filter; of an empty text one that every episode fits. `age` counts from now. Raises FilterError."""
    if len(text) > _LONGEST:
        raise FilterError(f"a filter has at most {_LONGEST:,} characters", _LONGEST)
    parser = _Parser(tokens(text), len(text))
    node = parser.whole()
    sql, parameters = sql_of(node)
    return Filter(text=text, sql=sql, parameters=parameters, needles=tuple(parser.needles), node=node)


def conditions(node: Node) -> Iterable[Condition]:
    """The comparisons that a filter is made of."""
    return [node] if isinstance(node, Condition) else [c for part in node.parts for c in conditions(part)]


def sql_of(node: Node) -> tuple[str, tuple[Any, ...]]:
    """A part of a filter as SQL, and its parameters."""
    if isinstance(node, Condition):
        return node.sql, node.parameters
    parts = [sql_of(part) for part in node.parts]
    joined = f" {node.word.upper()} ".join(sql for sql, _ in parts)
    return (f"(NOT {joined})" if node.word == "not" else f"({joined})"), tuple(p for _, own in parts for p in own)


@dataclass(frozen=True, slots=True)
class Token:
    kind: Literal["word", "quoted", "operator", "(", ")", ",", "end"]
    text: str
    at: int


_TOKEN = re.compile(
    r"""(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<operator>!=|!~|<=|>=|==|=|<|>|~)|(?P<mark>[(),])"""
    r"""|(?P<word>[^\s"'()=<>!~,][^\s"()=<>!~,]*)""",
    re.S,
)


def tokens(text: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = _TOKEN.match(text, at)
        if match is None and text[at] in "\"'":
            raise FilterError(f"the quote {text[at]} is never closed", at)
        if match is None:
            raise FilterError(f"{text[at]!r} stands alone; to look for it, put it in quotes", at)
        body = match[0]
        if any("\ud800" <= c <= "\udfff" for c in body):
            raise FilterError("half a surrogate pair is not a character", at)
        if match["quoted"]:
            found.append(Token("quoted", re.sub(r"\\(.)", _unescaped, body[1:-1], flags=re.S), at))
        elif match["operator"]:
            found.append(Token("operator", "=" if body == "==" else body, at))
        elif body in ("(", ")", ","):
            found.append(Token(body, body, at))  # type: ignore[arg-type]
        else:
            found.append(Token("word", body, at))
        at = match.end()
    return found


def _unescaped(match: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t", '"': '"', "'": "'", "\\": "\\"}.get(match[1], match[0])


class _Parser:
    """Recursive descent over the tokens; one use."""

    def __init__(self, tokens: Sequence[Token], end: int) -> None:
        self._tokens = [*tokens, Token("end", "", end)]
        self._next = 0
        self._depth = 0
        self._terms = 0
        self.needles: list[str] = []

    def whole(self) -> Node:
        if self._peek().kind == "end":
            return Condition("true", ())
        node = self._either()
        token = self._peek()
        if token.kind != "end":
            raise FilterError("there is no ( for this )", token.at)
        return node

    def _peek(self) -> Token:
        return self._tokens[self._next]

    def _take(self) -> Token:
        token = self._tokens[self._next]
        self._next += token.kind != "end"
        return token

    def _is_word(self, word: str) -> bool:
        """The next token is a word of the language: neither quoted nor the name of a field."""
        token = self._peek()
        return token.kind == "word" and token.text.lower() == word

    def _either(self) -> Node:
        parts = [self._both()]
        while self._is_word("or"):
            self._take()
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else Joined("or", tuple(parts))

    def _both(self) -> Node:
        parts = [self._one()]
        while True:
            if self._is_word("and") or self._peek().kind == ",":
                self._take()
            elif self._peek().kind in (")", "end") or self._is_word("or"):
                break
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else Joined("and", tuple(parts))

    def _one(self) -> Node:
        token = self._take()
        if token.kind == "(" or (token.kind == "word" and token.text.lower() == "not"):
            self._depth += 1
            if self._depth > _DEEPEST:
                raise FilterError(f"more than {_DEEPEST} conditions inside each other", token.at)
            node = self._either() if token.kind == "(" else Joined("not", (self._one(),))
            self._depth -= 1
            if token.kind == "(" and self._take().kind != ")":
                raise FilterError("the ( is never closed", token.at)
            return node
        self._terms += 1
        if self._terms > _MOST:
            raise FilterError(f"more than {_MOST} conditions", token.at)
        if token.kind in ("end", ")", ",") or (token.kind == "word" and token.text.lower() in ("or", "and")):
            raise FilterError("a condition is missing here, such as reward<0.5", token.at)
        if token.kind == "operator":
            raise FilterError(f"a field is missing before {token.text}; there are: {', '.join(FIELDS)}", token.at)
        if self._peek().kind == "operator":
            return self._comparison(token)
        self.needles.append(token.text)
        return _text(token.text)

    def _comparison(self, name: Token) -> Node:
        field = _field(name)
        operator = self._take()
        allowed = _OPERATORS[field.kind]
        if operator.text not in allowed:
            raise FilterError(f"{name.text} is compared by {' '.join(allowed)}, not by {operator.text}", operator.at)
        values = [self._value(name)]
        while self._peek().kind == "," and not self._a_field_follows():
            self._take()
            values.append(self._value(name))
        if len(values) > _MOST_VALUES:
            raise FilterError(f"more than {_MOST_VALUES} values", operator.at)
        if len(values) > 1 and operator.text[0] in "<>":
            raise FilterError(f"{operator.text} takes one value", values[1].at)
        if operator.text == "~":
            self.needles += [value.text for value in values]
        plain = operator.text.removeprefix("!") if operator.text[0] == "!" else operator.text
        parts = tuple(_compare(field, plain, value) for value in values)
        node = parts[0] if len(parts) == 1 else Joined("or", parts)
        return Joined("not", (node,)) if operator.text[0] == "!" else node

    def _a_field_follows(self) -> bool:
        """What comes after the comma is the next condition, not one more value."""
        after = self._tokens[self._next + 2 : self._next + 3]
        return bool(after) and after[0].kind == "operator"

    def _value(self, name: Token) -> Token:
        value = self._take()
        if value.kind not in ("word", "quoted"):
            raise FilterError(f"{name.text} is compared with nothing: a value is missing", value.at)
        return value


_ORDERED = ("=", "!=", "<", "<=", ">", ">=")
_OPERATORS: dict[str, tuple[str, ...]] = {
    "number": _ORDERED,
    "seconds": _ORDERED,
    "age": ("<", "<=", ">", ">="),
    "word": ("=", "!=", "~", "!~"),
    "id": ("=", "!=", "~", "!~"),
    "choice": ("=", "!="),
    "flag": ("=", "!="),
    "text": ("~", "!~"),
}


def _field(name: Token) -> Field:
    known = name.text.lower()
    known = ALIASES.get(known, known)
    if name.kind == "quoted" or known not in fields.FIELDS:
        raise FilterError(
            f"there is no field {name.text!r}{_nearest(known, [*FIELDS, *ALIASES])}; there are: {', '.join(FIELDS)}",
            name.at,
        )
    return fields.FIELDS[known]


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f", did you mean {near[0]}?" if near else ""


def _text(needle: str) -> Condition:
    return Condition(*fields.any_text(needle), needle=needle)


def _compare(field: Field, operator: str, value: Token) -> Node:
    """One comparison, `!` taken off."""
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
    given = _seconds(value) if field.kind == "seconds" else _number(value)
    return Condition(field.where(f"{field.expression} {operator} ?"), (given,))


_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_FLAGS = {"yes": True, "true": True, "no": False, "false": False}


def _one_of(value: Token, choices: Iterable[str]) -> str:
    known = list(choices)
    if value.text.lower() not in known:
        raise FilterError(f"{value.text!r} is none of {', '.join(known)}{_nearest(value.text, known)}", value.at)
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
    found = _DURATION.fullmatch(value.text)
    seconds = float(found[1]) * _UNITS[(found[2] or "s").lower()] if found else _CENTURY + 1
    if seconds > _CENTURY:
        raise FilterError(f"{value.text!r} is not a time such as 30s, 5m, 2h or 1d (100 years at most)", value.at)
    return seconds
