"""Computes the answers of questions that are one calculation, such as `What is 12 plus 30?`.

A model that writes rows and one that checks them make the same mistakes; a calculation makes none.
Only a text that is nothing but a request and a calculation is computed:
`How many digits has 12 * 30?` is not.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from ajet_tools.text.number_words import TENS, UNITS

_LEADS = (
    r"(?:please|kindly|now|question|problem|q)\b[:,]?",
    (
        r"(?:(?:can|could) you )?(?:tell me|calculate|compute|evaluate|work"
        r" out|find|solve|simplify|determine)\b[:,]?"
    ),
    r"(?:what(?:'s| is| are| does| do| will be)?|how much (?:is|are|does|do))\b[:,]?",
    r"(?:was ist|wie ?viel (?:ist|sind)|berechne|rechne|combien (?:font|fait)|calcule[rz]?)\b[:,]?",
    r"(?:cu[aá]nto (?:es|son)|quanto (?:fa|è|e))\b[:,]?",
    r"the (?:exact )?(?:value|result|answer) of\b",
    r"(?:you get )?(?:if|when) you\b",
)
_LEAD = re.compile(rf"(?:{'|'.join(_LEADS)})\s*")
_TAIL = re.compile(
    r"(?:[\s?.!:,=_]|\bequals?\b(?: to)?|\bas a (?:whole"
    r" )?number\b|\b(?:is|are|gives?|ergibt)\s*$)*\Z"
)
_PLAIN = re.compile(r"-?\d[\d.,]*")
_NUMBERS = r"(?:the )?(?:two |following )*(?:numbers?)?[.:]? ?"
_PHRASES = (
    (re.compile(r"(?:the )?(?:sum|total) of (.+?) (?:and|plus) (.+)"), "({0})+({1})"),
    (re.compile(r"(?:the )?product of (.+?) and (.+)"), "({0})*({1})"),
    (re.compile(r"(?:the )?difference (?:between|of) (.+?) and (.+)"), "({0})-({1})"),
    (re.compile(r"(?:the )?quotient of (.+?) and (.+)"), "({0})/({1})"),
    (
        re.compile(
            r"add (?:up )?(?:the )?(?:two |following )*(?:numbers?)?[.:]? ?(.+?) (?:and|to|plus)"
            r" (.+)"
        ),
        "({0})+({1})",
    ),
    (re.compile(r"subtract (.+?) from (.+)"), "({1})-({0})"),
    (
        re.compile(
            r"multiply (?:the )?(?:two |following )*(?:numbers?)?[.:]? ?(.+?) (?:and|by|with) (.+)"
        ),
        "({0})*({1})",
    ),
    (re.compile(r"divide (.+?) by (.+)"), "({0})/({1})"),
)
_WORDS = (
    (re.compile(r"\b(?:plus|added to|más|mas)\b"), "+"),
    (re.compile(r"\b(?:minus|take away|less|moins|menos|weniger)\b"), "-"),
    (re.compile(r"\b(?:times|multiplied by|mal|fois|por|multipliziert mit)\b"), "*"),
    (re.compile(r"\b(?:divided by|over|geteilt durch|divisé par|dividido (?:por|entre))\b"), "/"),
    (re.compile(r"\b(?:to the power of|hoch)\b"), "^"),
    (re.compile(r"\bmod(?:ulo)?\b"), "%"),
    (re.compile(r"\bsquared\b"), "^2"),
    (re.compile(r"\bcubed\b"), "^3"),
    (re.compile(r"\\(?:times|cdot)"), "*"),
    (re.compile(r"\\div"), "/"),
    (re.compile(r"(?<=[\d)])\s*x\s*(?=[\d(])"), "*"),
    (re.compile(r"%\s*(?:of|von|de)\b"), "/100*"),
    (re.compile(r"\bpercent of\b"), "/100*"),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
)
_SIGNS = str.maketrans(
    {"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "∕": "/", "$": "", "’": "'"}
)
_UNIT = re.compile(
    rf"\b(?:({'|'.join(TENS)})(?:[- ]({'|'.join(UNITS[1:10])}))?|({'|'.join(UNITS)}))\b"
)
_TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\*\*|[-+*/^%()])")
_MOST_DIGITS = 400
"""Results with more digits are not computed."""
_DECIMALS = re.compile(r"\d\.(\d+)\s*\Z")
_OPERATORS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "%": operator.mod,
}  # fmt: skip


class _NotArithmetic(Exception):
    """The text is not a calculation."""


def computed(question: str) -> Fraction | None:
    """Returns the result that a question asks for, or None if it isn't one calculation of
    numbers."""
    text = " ".join(question.translate(_SIGNS).casefold().split())
    before = None
    while text != before:
        before = text
        lead = _LEAD.match(text)
        text = text[lead.end() :] if lead is not None else text
    text = text[: _TAIL.search(text).start()]  # type: ignore[union-attr]  # it matches the empty end
    text = _UNIT.sub(_figures, text)
    for pattern, form in _PHRASES:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        if all(
            _PLAIN.fullmatch(operand.strip()) for operand in match.groups()
        ):  # else the order is open
            text = form.format(*match.groups())
            break
    for pattern, sign in _WORDS:
        text = pattern.sub(sign, text)
    try:
        calculation = _Calculation(text)
        value = calculation.value()
    except (_NotArithmetic, ZeroDivisionError, RecursionError):
        return None
    return value if calculation.operations else None


def is_rounded(text: str, value: Fraction, result: Fraction) -> bool:
    """Whether a value is the result, to the places of its text if the result has no end."""
    if value == result:
        return True
    decimals = _DECIMALS.search(text)
    places = len(decimals[1]) if decimals else 0
    has_no_end = result.denominator != 1 and places > 0
    return has_no_end and abs(value - result) <= Fraction(1, 10**places)


def _figures(match: re.Match[str]) -> str:
    tens, unit, small = match.groups()
    if small:
        return str(UNITS.index(small))
    return str(10 * (TENS.index(tens) + 2) + (UNITS.index(unit) if unit else 0))


class _Calculation:
    """A parser of sums, products, powers and parentheses."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        self.operations = 0
        place = 0
        while place < len(text.rstrip()):
            token = _TOKEN.match(text, place)
            if token is None:
                raise _NotArithmetic
            self._tokens.append("^" if token[1] == "**" else token[1])
            place = token.end()
        self._next = 0

    def value(self) -> Fraction:
        result = self._sum()
        if self._next < len(self._tokens):
            raise _NotArithmetic
        return result

    def _peek(self) -> str:
        if self._next < len(self._tokens):
            return self._tokens[self._next]
        return ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token

    def _sum(self) -> Fraction:
        return self._chain("+-", self._product)

    def _product(self) -> Fraction:
        return self._chain("*/%", self._signed)

    def _chain(self, signs: str, operand: Callable[[], Fraction]) -> Fraction:
        result = operand()
        while self._peek() and self._peek() in signs:
            sign = self._take()
            result = _OPERATORS[sign](result, operand())
            self.operations += 1
        return result

    def _signed(self) -> Fraction:
        if self._peek() in ("+", "-"):
            sign = self._take()
            value = self._signed()
            return -value if sign == "-" else value
        return self._power()

    def _power(self) -> Fraction:
        base = self._operand()
        if self._peek() != "^":
            return base
        self._take()
        exponent = self._signed()
        self.operations += 1
        size = max(abs(base.numerator), base.denominator)
        if exponent.denominator != 1 or abs(exponent) * math.log10(size + 1) > _MOST_DIGITS:
            raise _NotArithmetic
        return base ** int(exponent)

    def _operand(self) -> Fraction:
        token = self._take()
        if token == "(":
            value = self._sum()
            if self._take() != ")":
                raise _NotArithmetic
            return value
        if not token or token in "+-*/^%()":
            raise _NotArithmetic
        return Fraction(token)
