"""When two texts count as one: exactly, or nearly.

Exactly: the same *normal form* (letter case, runs of white space, full-width forms and curly quotes don't count).
Nearly: at least `threshold` of the characters are the same, counted by edit distance. Two rules keep tasks apart that
are different though they look alike, because a dataset of tasks is full of such pairs:

- In a text under 100 characters each one counts for more: the share that may differ shrinks with the length. At 0.8,
  `What is 12 + 34?` is like no other text, a sentence of 43 characters may differ in 3, one of 100 in 20.
- Other numbers make another task: under 200 characters the numbers and operators must be the same; from there on, two
  texts that are the same but for their numbers are different. `numbers=False` takes this rule away.

Marks of emphasis in Markdown and HTML are no characters of a text, and no operators.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

__all__ = [
    "LONG",
    "MARKED",
    "allowed",
    "edits",
    "likeness",
    "marks",
    "masked",
    "normal",
    "normals",
    "shortest",
    "unmarked",
]

FULL = 100
"""From this length on the threshold is meant as it stands; below it, it grows stricter."""

MARKED = 200
"""Under this length two texts are alike only with the same numbers and operators."""

LONG = 4000
"""Longer texts are compared by pieces (`_shared_share`): an edit distance costs the product of the lengths."""

_FULLWIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_QUOTES = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}
_UNSEEN = dict.fromkeys((0x00AD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF))
_FORMS = {**_FULLWIDTH, **_QUOTES, **_UNSEEN}
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_MARK = re.compile(r"\d+(?:[.,]\d+)*|(?<![^\W\d_])[-+*/×÷^=<>%](?![^\W\d_])")
_MARKUP = re.compile(
    r"</?(?:b|i|u|em|strong|p|br|code|span|div|li|ul|ol|h[1-6])(?:\s[^<>]*)?/?>"
    r"|(?<![\w*])\*\*(?=[^\s*])(?P<bold>[^*]*[^\s*])\*\*(?![\w*])"
    r"|(?<![\w*])\*(?=[^\s*])(?P<italic>[^*]*[^\W\d_][^*]*(?<!\s))\*(?![\w*])"
    r"|(?<!\w)__(?=[^\s_])(?P<strong>[^_]*[^\s_])__(?!\w)"
    r"|`(?P<code>[^`]+)`"
)
_GRAM, _PIECE, _CHANCE = 8, 128, 0.06


def normal(text: str) -> str:
    """The form in which texts are compared. No sign of mathematics is lost: `2²` stays apart from `22`."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(_FORMS))
    return " ".join(text.casefold().split())


def normals(texts: Any, form: Callable[[str], str] = normal) -> Any:
    """The normal forms of a polars series. `form` makes them of what is not ASCII, for which all agree."""
    plain = texts.str.len_bytes() == texts.str.len_chars()
    spaced = texts.str.contains("  ", literal=True) | texts.str.starts_with(" ") | texts.str.ends_with(" ")
    spaced = (plain & (spaced | _has_control(texts))).arg_true()
    other = (~plain).arg_true()
    found = texts.str.to_lowercase()
    if len(spaced):
        some = found.gather(spaced).str.replace_all(r"[\s\x1c-\x1f]+", " ").str.strip_chars(" ")
        found = found.scatter(spaced, some)
    if len(other):
        found = found.scatter(other, pl.Series([form(text) for text in texts.gather(other)], dtype=pl.String))
    return found


def _has_control(texts: Any) -> Any:
    """Which of them have a control character. A regular expression takes five times as long."""
    array = texts.to_arrow(compat_level=pl.CompatLevel.oldest())
    _, starts, data = (buffer or b"" for buffer in array.buffers())
    places = np.flatnonzero(np.frombuffer(data, np.uint8) < 32)
    found = np.zeros(len(texts) + 1, bool)  # the last of what is not between them
    found[np.searchsorted(np.frombuffer(starts, np.int64)[array.offset :], places, side="right") - 1] = True
    return pl.Series(found[:-1])


def marks(text: str) -> list[str]:
    """The numbers and the operators of a text in normal form, in their order; marks of emphasis are none."""
    return _MARK.findall(unmarked(text))


def unmarked(text: str) -> str:
    """A text without the marks by which Markdown and HTML set words off: `**bold**`, `*italic*`, `<b>bold</b>`."""
    if not any(sign in text for sign in "*<_`"):
        return text
    return _MARKUP.sub(lambda found: next((one for one in found.groups() if one), ""), text)


def masked(text: str) -> str:
    """A text without its numbers."""
    return _NUMBER.sub("0", text)


def allowed(length: int, threshold: float) -> float:
    """How many edits a text of that length may be away from one that is like it."""
    return (1 - threshold) * length * min(1.0, length / FULL) + 1e-9


def shortest(threshold: float) -> int:
    """The least length at which one edit is allowed; a shorter text is like its exact copies alone."""
    return next((length for length in range(1, 10_000) if allowed(length, threshold) >= 1), 10_000)


def likeness(one: str, other: str, threshold: float, *, numbers: bool = True) -> float | None:
    """The share of characters that two texts in normal form have in common, or None where they are not alike.

    It is 1 - edits / length of the longer text (Levenshtein), exact up to 4,000 characters.
    """
    one, other = unmarked(one), unmarked(other)
    if one == other:
        return 1.0
    length = max(len(one), len(other))
    most = allowed(length, threshold)
    if abs(len(one) - len(other)) > most:
        return None
    if length > LONG:
        share = min(_shared_share(one, other), _shared_share(other, one))
        alike = share >= threshold
    else:
        distance = edits(one, other, int(most))
        share, alike = 1 - (distance or 0) / length, distance is not None
    return share if alike and not (numbers and _other_numbers(one, other)) else None


def _other_numbers(one: str, other: str) -> bool:
    if min(len(one), len(other)) < MARKED:
        return marks(one) != marks(other)
    return masked(one) == masked(other)


def edits(one: str, other: str, most: int) -> int | None:
    """The Levenshtein distance, or None where it is more than `most`."""
    from rapidfuzz.distance import Levenshtein

    distance = Levenshtein.distance(one, other, score_cutoff=most)
    return distance if distance <= most else None


def _shared_share(one: str, other: str) -> float:
    """About which share of the characters of a long text the other has too, as the mean over its pieces.

    Of each piece, the share of 8-grams that the other text has, to the power 1/8: the chance of a character to be kept
    (the estimate of Mash, Ondov et al. 2016). Piece by piece, so that half a text in common is half, and not 0.92; a
    share so small that unrelated texts have it is none.
    """
    known = {other[start : start + _GRAM] for start in range(len(other) - _GRAM + 1)}
    found = np.array([one[start : start + _GRAM] in known for start in range(len(one) - _GRAM + 1)])
    bounds = [*range(0, len(found), _PIECE), len(found)]
    shares = np.array([found[low:high].mean() for low, high in pairwise(bounds)])
    return float(np.where(shares > _CHANCE, shares ** (1 / _GRAM), 0).mean())
