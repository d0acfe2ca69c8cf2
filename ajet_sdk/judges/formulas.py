"""Compares formulas by math-verify. It runs in a process that can be killed: see
`sandbox/limited.py`.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import math_verify
import sympy  # type: ignore[import-untyped]

logging.disable()  # it warns that its own time limits, which need the main thread, are off
_DIGITS = 30
_EXACT = sympy.Rational(1, 10**20)
"""Relative error of a value that was evaluated to `_DIGITS` digits."""
_TOLERANCE = sympy.Rational(1, 10**6)


def compare(answer: str, right: str) -> Literal["equal", "different", "no reference"]:
    """Whether two LaTeX expressions are equal; "no reference" if `right` is none."""
    truth = _parsed(right)
    if not truth:
        return "no reference"
    value = _parsed(answer)
    if not value or not math_verify.verify(truth, value, timeout_seconds=None):
        return "different"
    return "equal" if _is_near(truth[0], value[0]) else "different"


def _parsed(text: str) -> list[Any]:
    # As LaTeX alone: else a number within a formula that cannot be read would stand for the formula
    # (https://github.com/huggingface/Math-Verify/pull/82).
    parsed = math_verify.parse(
        f"${text}$",
        extraction_config=[math_verify.LatexExtractionConfig()],
        parsing_timeout=None,  # type: ignore[arg-type]
    )
    # A text alone is what is left of a formula that cannot be read, perhaps its beginning.
    return parsed if parsed and not isinstance(parsed[0], str) else []


def _is_near(truth: Any, value: Any) -> bool:
    """Whether numbers within two expressions are equal; math-verify rounds them to six decimals,
    however small.
    """
    truth = _right_side(truth)
    value = _right_side(value)
    if not isinstance(truth, sympy.Basic | sympy.MatrixBase) or not isinstance(
        value, sympy.Basic | sympy.MatrixBase
    ):
        return True
    if getattr(truth, "is_number", False) and getattr(value, "is_number", False):
        return _is_near_number(truth, value)
    if isinstance(truth, sympy.FiniteSet) and isinstance(value, sympy.FiniteSet):
        pairs = [[_is_near(a, b) for b in value.args] for a in truth.args]
        return all(map(any, pairs)) and all(map(any, zip(*pairs, strict=True)))
    parts = _parts(truth)
    others = _parts(value)
    if len(parts) != len(others):
        return True
    return all(map(_is_near, parts, others))


def _right_side(expression: Any) -> Any:
    return expression.rhs if isinstance(expression, sympy.Eq) else expression


def _parts(expression: Any) -> list[Any]:
    """The parts of a tuple, an interval or a matrix."""
    if isinstance(expression, sympy.MatrixBase):
        return list(expression.flat())
    if isinstance(expression, sympy.Tuple | sympy.Interval):
        return list(expression.args)
    return []


def _is_near_number(truth: Any, value: Any) -> bool:
    exact = sympy.N(truth, _DIGITS)
    given = sympy.N(value, _DIGITS)
    if not exact.is_finite or not given.is_finite:
        return True
    error = abs(exact - given)
    size = max(abs(exact), abs(given))
    if _is_integer(exact) or _is_integer(given):
        return bool(error <= _EXACT * size)
    return bool(error <= _TOLERANCE * size)


def _is_integer(value: Any) -> bool:
    nearest = sympy.Integer(round(sympy.re(value)))
    return bool(abs(value - nearest) <= _EXACT * abs(nearest))


_KINDS = (
    (r"2\sqrt{2}", r"\sqrt{8}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\frac{\pi}{2}", "1.570796"),
    (r"\{1, 2\}", "(1, 3]"),
    (r"x \ge 3", r"[3, \infty)"),
    (r"\sin^2 x + \cos^2 x", "1"),
)
for _answer, _right in _KINDS:
    compare(_answer, _right)  # so that tables are built and modules loaded before the first fork
