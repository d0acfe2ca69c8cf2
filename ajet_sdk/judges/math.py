"""The math judge: compares values rather than notation.

Numbers, fractions and percentages are compared exactly here; roots, intervals and symbols by math-verify. Its time
limits use signals, which only work in the main thread. Judges run in other threads, so the limits are off, and an
expression that could take forever is refused before parsing.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import MissingExtra, NoReward
from ajet_sdk.judges.text import text_of

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

LONGEST = 300
"""Longest expression to parse, in characters."""
ROUNDING = 6
"""Decimals from which a decimal number may approximate a fraction: 0.333333 is 1/3."""

_DIGITS = r"\d+(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+"
_NUMBER = re.compile(rf"(?P<sign>[-+]?)(?P<digits>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?")
_FRACTION = re.compile(r"(?P<sign>[-+]?)\\[dt]?frac\{?(?P<top>[^{}]+?)\}?\{(?P<bottom>[^{}]+)\}")
_IN_TEXT = re.compile(rf"(?<![\w.])[-+]?(?:{_DIGITS})(?:\s*/\s*\d+)?\s*(?:\\?%)?")
_SAID = re.compile(r"(?:####|(?:final\s+)?answer\s*(?:is|:|=)+)\s*:?\s*([^\n]+)", re.IGNORECASE)
_COSTLY = re.compile(
    r"(?:\^|\*\*)\s*\{?\s*[-+(]*\s*\d{4,}|(?:\^|\*\*)[^+\-=,]*(?:\^|\*\*)|!|\d{60,}|\\(?:binom|sum|prod|int)"
)


def require_math() -> None:
    """Raise MissingExtra if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise MissingExtra("math-verify", "math")


def math(output: object, answer: object) -> bool:
    r"""Whether the final answer in the output equals `answer` in value.

    The final answer is the last `\boxed{}`, else the text after the last `####` or `answer is`, else (if a number is
    expected) the last number, else the whole output. `answer` may itself be a worked solution that ends this way.
    Raises NoReward if `answer` cannot be parsed: an error of the dataset, not of the agent.
    """
    right = final_answer(text_of(answer))
    if not right:
        raise NoReward("the reference answer is empty")
    truth = number(right)
    answer_text = final_answer(text_of(output), numeric=truth is not None)
    if _plain(answer_text) == _plain(right):
        return True
    mine = number(answer_text)
    if mine is not None and truth is not None:
        return _same(mine, truth, answer_text, right)
    return _verify(answer_text, right)


def final_answer(text: str, *, numeric: bool = False) -> str:
    """Extracts the final answer of a text. `numeric`: it must be a number."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return _trim(boxed)
    stated = _SAID.findall(text)
    answer = _trim(stated[-1] if stated else text)
    if not numeric or number(answer) is not None:
        return answer
    numbers = _IN_TEXT.findall(answer.rpartition("=")[2] if stated else answer)
    return (numbers[0] if stated else numbers[-1]).strip() if numbers else answer


def _last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{}`, with nested braces."""
    for match in reversed(list(re.finditer(r"\\f?boxed\s*\{", text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position]
    return None


def _trim(text: str) -> str:
    """Strips white space, emphasis, math delimiters and a final full stop."""
    before = None
    while before != text:
        before = text
        text = text.strip().strip("*_`").removesuffix(".")
        for left, right in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            if text.startswith(left) and text.endswith(right) and len(text) > len(left + right):
                text = text[len(left) : -len(right)]
    return text


def _plain(text: str) -> str:
    return re.sub(r"\s+|\\[,!; ]|\\left|\\right|\$", "", text)


def number(text: str) -> Fraction | None:
    """Parses a number, fraction or percentage exactly; None for anything else."""
    text = _plain(_trim(text)).replace("\\%", "%")
    if not text or len(text) > LONGEST:
        return None
    if text.endswith("%"):
        share = number(text[:-1])
        return None if share is None else share / 100
    latex = _FRACTION.fullmatch(text)
    if latex:
        return _ratio(latex["sign"], latex["top"], latex["bottom"])
    if text.count("/") == 1:
        top, bottom = text.split("/")
        return _ratio("", top, bottom)
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    value = Fraction(match["digits"].replace(",", "") + "e" + (match["exponent"] or "0"))
    return -value if match["sign"] == "-" else value


def _ratio(sign: str, top: str, bottom: str) -> Fraction | None:
    over, under = number(top), number(bottom)
    if over is None or not under:
        return None
    return -over / under if sign == "-" else over / under


def _same(mine: Fraction, truth: Fraction, answer_text: str, right: str) -> bool:
    if mine == truth:
        return True
    if answer_text.endswith("%") != right.endswith("%"):  # "50%" where the dataset writes 50
        mine, truth = (mine * 100, truth) if answer_text.endswith("%") else (mine, truth * 100)
        if mine == truth:
            return True
    decimals = max(len(text.partition(".")[2].rstrip("%")) for text in (answer_text, right))
    return decimals >= ROUNDING and abs(mine - truth) <= Fraction(1, 2 * 10**ROUNDING)


def _verify(answer_text: str, right: str) -> bool:
    """Compares by math-verify. An unparsable output is wrong; an unparsable reference answer is an error."""
    require_math()
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the limits are off
    if _too_costly(right):
        raise NoReward(f"the reference answer {right[:80]!r} is too long or too expensive to evaluate")
    truth = math_verify.parse(f"${right}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not truth:
        raise NoReward(
            f"the reference answer {right[:80]!r} is not a mathematical expression; use judge exact or regex"
        )
    if _too_costly(answer_text):
        return False
    mine = math_verify.parse(f"${answer_text}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return bool(math_verify.verify(truth, mine, timeout_seconds=None))


def _too_costly(text: str) -> bool:
    """Whether a text has powers of powers, factorials or huge exponents, which could take forever to evaluate."""
    return len(text) > LONGEST or _COSTLY.search(text) is not None


def open_math(config: Config) -> Any:
    """Opens the judge `math`. Raises MissingExtra without math-verify."""
    require_math()
    return math
