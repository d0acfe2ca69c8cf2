"""Grammar of filters over episodes (`trace.queries.filters`) and dataset rows
(`dataset.curation.filter`).

    filter := all ("or" all)*
    all    := one (["and"] one)*
    one    := "not" one | "(" filter ")" | field operator value ("," value)* | text
    operator := = != < <= > >= ~ (contains, in any case) !~

Values with blanks or special characters are quoted. `!=` and `!~` negate `=` and `~`. The two
filter modules give fields, values and texts their meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ajet_sdk.errors import QueryError

T = TypeVar("T")

_LONGEST = 10_000
_DEEPEST = 30
_MOST = 60
_MOST_VALUES = 500


class FilterError(QueryError):
    """A filter that cannot be parsed, with the position of the error (from 0)."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(f"{message} (filter, character {position + 1})")
        self.position = position


@dataclass(frozen=True, slots=True)
class Token:
    kind: Literal["word", "quoted", "operator", "(", ")", ",", "end"]
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class BareWord:
    """A search text without field and operator."""

    text: Token


@dataclass(frozen=True, slots=True)
class Comparison:
    """A field compared with one or several values, any of which may match.

    A negated operator is parsed as `not` around the positive comparison.
    """

    field: Token
    operator: Token
    values: tuple[Token, ...]


Word = Literal["and", "or", "not"]


@dataclass(frozen=True, slots=True)
class Tree:
    """Parts joined by `and` or `or`, or a single part negated by `not`."""

    word: Word
    parts: tuple[Tree | BareWord | Comparison, ...]


Node = Tree | BareWord | Comparison


def tree(text: str, example: str) -> Node | None:
    """Parse a filter; an empty one gives None. `example` is a condition to quote in error messages.

    Raises FilterError.
    """
    if len(text) > _LONGEST:
        raise FilterError(f"a filter has at most {_LONGEST:,} characters", _LONGEST)
    return _Parser(_tokens(text), len(text), example).whole()


def fold(
    node: Node, leaf: Callable[[BareWord | Comparison], T], join: Callable[[Word, Sequence[T]], T]
) -> T:
    """Evaluate a tree bottom-up: `leaf` on its leaves in order, then `join` on their results."""
    if isinstance(node, Tree):
        return join(node.word, [fold(part, leaf, join) for part in node.parts])
    return leaf(node)


_TOKEN = re.compile(
    r"""(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<operator>!=|!~|<=|>=|==|=|<|>|~)|(?P<mark>[(),])"""
    r"""|(?P<word>[^\s"'()=<>!~,][^\s"()=<>!~,]*)""",
    re.S,
)

_ESCAPE, _ESCAPED = (
    re.compile(r"\\(.)", re.S),
    {"n": "\n", "t": "\t", '"': '"', "'": "'", "\\": "\\"},
)


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        match = _TOKEN.match(text, at)
        if match is None and text[at] in "\"'":
            raise FilterError(f"the quote {text[at]} is never closed", at)
        if match is None:
            raise FilterError(
                f"{text[at]!r} is not allowed alone; to search for it, put it in quotes", at
            )
        body = match[0]
        if any("\ud800" <= c <= "\udfff" for c in body):
            raise FilterError("half a surrogate pair is not a character", at)
        if match["quoted"]:
            tokens.append(
                Token("quoted", _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[0]), body[1:-1]), at)
            )
        elif match["operator"]:
            tokens.append(Token("operator", "=" if body == "==" else body, at))
        elif body in ("(", ")", ","):
            tokens.append(Token(body, body, at))  # type: ignore[arg-type]
        else:
            tokens.append(Token("word", body, at))
        at = match.end()
    return tokens


class _Parser:
    """Recursive-descent parser, used once."""

    def __init__(self, tokens: Sequence[Token], end: int, example: str) -> None:
        self._tokens = [*tokens, Token("end", "", end)]
        self._example = example
        self._next = self._depth = self._terms = 0

    def whole(self) -> Node | None:
        if self._peek().kind == "end":
            return None
        node = self._either()
        if self._peek().kind != "end":
            raise FilterError("this ) has no matching (", self._peek().at)
        return node

    def _peek(self) -> Token:
        return self._tokens[self._next]

    def _take(self) -> Token:
        token = self._tokens[self._next]
        self._next += token.kind != "end"
        return token

    def _is_word(self, word: str) -> bool:
        token = self._peek()
        return token.kind == "word" and token.text.lower() == word

    def _either(self) -> Node:
        parts = [self._both()]
        while self._is_word("or"):
            self._take()
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else Tree("or", tuple(parts))

    def _both(self) -> Node:
        parts = [self._one()]
        while True:
            if self._is_word("and") or self._peek().kind == ",":
                self._take()
            elif self._peek().kind in (")", "end") or self._is_word("or"):
                return parts[0] if len(parts) == 1 else Tree("and", tuple(parts))
            parts.append(self._one())

    def _one(self) -> Node:
        token = self._take()
        if token.kind == "(" or (token.kind == "word" and token.text.lower() == "not"):
            return self._inner(token)
        self._terms += 1
        if self._terms > _MOST:
            raise FilterError(f"more than {_MOST} conditions", token.at)
        if token.kind in ("end", ")", ",") or (
            token.kind == "word" and token.text.lower() in ("or", "and")
        ):
            raise FilterError(f"a condition is missing here, for example {self._example}", token.at)
        if token.kind == "operator":
            raise FilterError(
                f"a field is missing before {token.text}, as in {self._example}", token.at
            )
        return self._comparison(token) if self._peek().kind == "operator" else BareWord(token)

    def _inner(self, token: Token) -> Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise FilterError(f"more than {_DEEPEST} levels of nested conditions", token.at)
        node = self._either() if token.kind == "(" else Tree("not", (self._one(),))
        self._depth -= 1
        if token.kind == "(" and self._take().kind != ")":
            raise FilterError("this ( is never closed", token.at)
        return node

    def _comparison(self, field: Token) -> Node:
        operator = self._take()
        values = [self._value(field)]
        while self._peek().kind == "," and not self._a_condition_follows():
            self._take()
            values.append(self._value(field))
        if len(values) > _MOST_VALUES:
            raise FilterError(f"more than {_MOST_VALUES} values", operator.at)
        if len(values) > 1 and operator.text[0] in "<>":
            raise FilterError(f"{operator.text} takes a single value", values[1].at)
        negated = operator.text[0] == "!"
        plain = Token(
            "operator", operator.text.removeprefix("!") if negated else operator.text, operator.at
        )
        node = Comparison(field, plain, tuple(values))
        return Tree("not", (node,)) if negated else node

    def _a_condition_follows(self) -> bool:
        """Whether a condition follows the comma, rather than another value."""
        first, second, third = [
            *self._tokens[self._next + 1 : self._next + 4],
            *self._tokens[-1:] * 2,
        ][:3]
        if first.kind == "word" and first.text.lower() == "not":
            return second.kind == "(" or third.kind == "operator"
        return first.kind == "(" or second.kind == "operator"

    def _value(self, field: Token) -> Token:
        value = self._take()
        if value.kind not in ("word", "quoted"):
            raise FilterError(f"a value is missing after {field.text}", value.at)
        return value
