"""Parses a number as it is written in an answer, and compares numbers."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 300
"""Longest number or expression, in characters."""
TOLERANCE = Fraction(1, 10**6)
"""Relative error of a decimal number that stands for another number: 0.333333 is 1/3."""
SIGNIFICANT = 6
"""Digits that such a decimal number needs."""

_DIGITS = r"\d+(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+"
_NUMBER = re.compile(rf"(?P<sign>[-+]?)(?P<digits>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?")
_POWER_OF_TEN = re.compile(
    r"(?:(?P<factor>[^\\×·*^x]+)(?:\\times|\\cdot|×|·|\*|x))?10\^(?:\{(?P<braced>[-+]?\d{1,3})\}|(?P<digit>[-+]?\d{1,3}))"
)
_FRACTION = re.compile(r"(?P<sign>[-+]?)\\[dt]?frac\{?(?P<top>[^{}]+?)\}?\{(?P<bottom>[^{}]+)\}")
_SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_SUPERSCRIPT = re.compile(r"(?<![\d.])10(⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,3})")
_DASH = re.compile(r"(?:(?<=^)|(?<=[ $(]))(?<!\d )[–](?=[$\d.])")
_ABOUT = re.compile(r"^(?:\\approx|\\sim|≈|~)")
_LAYERS = 20
"""Pairs of delimiters around an answer."""


def trim(text: str) -> str:
    """Strips white space, emphasis, math delimiters and a final full stop."""
    for _ in range(_LAYERS):
        before = text
        text = text.strip().strip("*_`").removesuffix(".")
        for left, right in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
            if text.startswith(left) and text.endswith(right) and len(text) > len(left + right):
                text = text[len(left) : -len(right)]
        if text == before:
            break
    return text


def without_spacing(text: str) -> str:
    """Removes white space and commands that change only the look of a formula."""
    return re.sub(r"\s+|\\[,!; ]|\\left|\\right|\$", "", text)


def in_ascii(text: str) -> str:
    """Writes signs and powers of ten as ASCII does; a dash that joins two numbers is no sign."""
    text = _SUPERSCRIPT.sub(
        lambda match: f"10^{match[1].translate(_SUPERSCRIPTS)}", text.replace("−", "-")
    )
    return _DASH.sub("-", text)


def number(text: str) -> Fraction | None:
    """Parses a number, fraction or percentage exactly; None for anything else."""
    text = _ABOUT.sub("", in_ascii(without_spacing(trim(text)).replace("\\%", "%")))
    if not text or len(text) > LONGEST:
        return None
    if text.endswith("%"):
        share = None if text.endswith("%%") else number(text[:-1])
        return None if share is None else share / 100
    latex = _FRACTION.fullmatch(text)
    if latex:
        return _ratio(latex["sign"], latex["top"], latex["bottom"])
    if text.count("/") == 1:
        top, bottom = text.split("/")
        return _ratio("", top, bottom)
    power = _POWER_OF_TEN.fullmatch(text)
    if power:
        factor = number(power["factor"] or "1")
        exponent = int(power["braced"] or power["digit"])
        return None if factor is None else factor * Fraction(10) ** exponent
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    value = Fraction(match["digits"].replace(",", "") + "e" + (match["exponent"] or "0"))
    return -value if match["sign"] == "-" else value


def _ratio(sign: str, top: str, bottom: str) -> Fraction | None:
    over = number(top)
    under = number(bottom)
    if over is None or not under:
        return None
    return -over / under if sign == "-" else over / under


def same_number(text: str, right: str) -> bool:
    """Whether two numbers as written have the same value, `right` being the reference.

    Integers are compared exactly. A fraction or a decimal number also stands for another with a
    relative error of at most 10^-6, if one of them is written with at least six digits. "50%" is
    also 50, where one of them has the sign and the other has not.
    """
    value = number(text)
    truth = number(right)
    if value is None or truth is None:
        return False
    if _near(value, truth, text, right):
        return True
    if trim(text).endswith("%") == trim(right).endswith("%"):
        return False
    if trim(text).endswith("%"):
        return _near(value * 100, truth, text, right)
    return _near(value, truth * 100, text, right)


def _near(value: Fraction, truth: Fraction, text: str, right: str) -> bool:
    if value == truth:
        return True
    if 1 in (truth.denominator, value.denominator):
        return False
    digits = max(_significant(text), _significant(right))
    return digits >= SIGNIFICANT and abs(value - truth) <= TOLERANCE * max(abs(value), abs(truth))


def _significant(text: str) -> int:
    """The digits of a decimal number from its first that is not 0; 0 for a number without decimal
    point.
    """
    match = re.search(r"\d[\d,]*\.\d*|\.\d+", text)
    return len(re.sub(r"\D", "", match[0]).lstrip("0")) if match else 0
