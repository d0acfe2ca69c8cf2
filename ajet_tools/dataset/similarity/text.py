"""When two texts count as one: exactly, or nearly.

Exactly: the same *normal form* (letter case, runs of white space, full-width forms and curly quotes don't count).
Nearly: at least `threshold` of the characters are the same, counted by edit distance. Two rules keep tasks apart that
are different though they look alike, because a dataset of tasks is full of such pairs:

- In a text under 100 characters each one counts for more: the share that may differ shrinks with the length. At 0.8,
  `What is 12 + 34?` is like no other text, a sentence of 43 characters may differ in 3, one of 100 in 20.
- Other numbers make another task: under 200 characters the numbers and operators must be the same; from there on, two
  texts that are the same but for their numbers are different. `numbers=False` takes this rule away.

A text of at least 100 characters is also like one that has the same parts in another order, and like one that it
stands in, be it as its beginning: at 0.8 from half of the other's length on (`_shared_parts`).

The marks of Markdown and HTML are no characters of a text, and no operators.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import polars as pl

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
    r"</?(?:a|b|i|u|s|em|strong|code|span|sub|sup|small|mark|del|ins|kbd|font)(?:\s[^<>]*)?/?>"
    r"|(?P<block></?(?:p|br|hr|div|li|ul|ol|h[1-6]|pre|blockquote|table|thead|tbody|tr|td|th)(?:\s[^<>]*)?/?>)"
    r"|(?<![\w*])(?P<stars>\*{2,3})(?=[^\s*])(?P<bold>[^*]*[^\s*])(?P=stars)(?![\w*])"
    r"|(?<![\w*])\*(?=[^\s*])(?P<italic>[^*]*[^\W\d_][^*]*(?<!\s))\*(?![\w*])"
    r"|(?<!\w)(?P<lines>_{1,3})(?=[^\s_])(?P<strong>[^_]*[^\s_])(?P=lines)(?!\w)"
    r"|~~(?P<struck>[^~]+)~~"
    r"|!?\[(?P<link>[^\[\]]*)\]\((?:https?:|[./#])[^()\s]*\)"
    r"|(?P<fence>```(?:[a-z]+(?= ))?)"
    r"|`(?P<code>[^`]+)`"
    r"|(?:(?<=^)|(?<=[.:;!?] ))(?:[-*+•>]|#{1,6}) (?=[^\W\d_])"
    r"|(?<!\S)#{2,6} "
)
"""A mark, with what it sets off; those that begin a line, which in a normal form follows the end of a sentence."""
_ENTITY = re.compile(r"&(?:[a-z]+|#\d+);")
_GRAM, _PIECE, _CHANCE = 8, 128, 0.06
_RUN = 12
"""Characters in a row that two texts with the same parts share."""
_SAMPLES = 24
_WHOLE = 0.95
_LONGER = 2.5
"""A text that holds another may be longer by that many times what may be edited."""


def normal(text: str) -> str:
    """The form in which texts are compared. No sign of mathematics is lost: `2²` stays apart from `22`."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(_FORMS))
    return " ".join(text.casefold().split())


def normals(texts: pl.Series, form: Callable[[str], str] = normal) -> pl.Series:
    """The normal forms of a polars series. `form` makes them of what is not ASCII, for which all agree."""
    plain = texts.str.len_bytes() == texts.str.len_chars()
    spaced = texts.str.contains("  ", literal=True) | texts.str.starts_with(" ") | texts.str.ends_with(" ")
    spaced = (plain & (spaced | _has_control(texts))).arg_true()
    non_ascii = (~plain).arg_true()
    normalized = texts.str.to_lowercase()
    if len(spaced):
        some = normalized.gather(spaced).str.replace_all(r"[\s\x1c-\x1f]+", " ").str.strip_chars(" ")
        normalized = normalized.scatter(spaced, some)
    if len(non_ascii):
        forms = pl.Series(map(form, texts.gather(non_ascii)), dtype=pl.String)
        normalized = normalized.scatter(non_ascii, forms)
    return normalized


def _has_control(texts: pl.Series) -> pl.Series:
    """Which of them have a control character. A regular expression takes five times as long."""
    array = texts.to_arrow(compat_level=pl.CompatLevel.oldest())
    _, starts, data = (buffer or b"" for buffer in array.buffers())
    places = np.flatnonzero(np.frombuffer(data, np.uint8) < 32)
    flags = np.zeros(len(texts) + 1, bool)  # the last of what is not between them
    flags[np.searchsorted(np.frombuffer(starts, np.int64)[array.offset :], places, side="right") - 1] = True
    return pl.Series(flags[:-1])


def marks(text: str) -> list[str]:
    """The numbers and the operators of a text in normal form, in their order; marks of emphasis are none."""
    return _MARK.findall(unmarked(text))


def unmarked(text: str) -> str:
    """A text in normal form without the marks of Markdown and HTML: `**bold**`, `<b>bold</b>`, `## title`, `- item`."""
    if "&" in text and _ENTITY.search(text):
        text = html.unescape(text)
    if not any(sign in text for sign in "*<_`#[~-+•>"):
        return text
    return " ".join(_MARKUP.sub(_inside, text).split())


def _inside(match: re.Match[str]) -> str:
    if match["block"] or match["fence"]:
        return " "
    names = ("bold", "italic", "strong", "struck", "link", "code")
    return next((unmarked(match[name]) for name in names if match[name]), "")


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

    It is 1 - edits / length of the longer text (Levenshtein), exact up to 4,000 characters; of texts with the same
    parts the share of their characters in these, and of one within another that of the shorter.
    """
    one, other = unmarked(one), unmarked(other)
    if one == other:
        return 1.0
    if (share := _kept_share(one, other, threshold)) is not None:
        return None if numbers and _other_numbers(one, other) else share
    short, long = sorted((one, other), key=lambda text: (len(text), text))
    return _shared_parts(short, long, threshold, numbers)


def _kept_share(first: str, second: str, threshold: float) -> float | None:
    """The share of the characters that edits leave; None where it is below the threshold."""
    length = max(len(first), len(second))
    most = allowed(length, threshold)
    if abs(len(first) - len(second)) > most:
        return None
    if length > LONG:
        share = min(_shared_share(first, second), _shared_share(second, first))
        return share if share >= threshold else None
    distance = edits(first, second, int(most))
    return None if distance is None else 1 - distance / length


def _other_numbers(first: str, second: str) -> bool:
    if min(len(first), len(second)) < MARKED:
        return marks(first) != marks(second)
    return masked(first) == masked(second)


def least_part(threshold: float) -> float:
    """The length of a text within another that is like it, by that of the other, at least."""
    return max(0.5, 1 - _LONGER * (1 - threshold))


def _shared_parts(short: str, long: str, threshold: float, numbers: bool) -> float | None:
    """The share of characters in parts that both texts have, in any order; None where they are not alike by it.

    Parts are runs of at least 12 characters. All of the shorter text must be in them, with its numbers, or so much of
    both as is asked, with the same numbers.
    """
    if threshold >= 1 or len(short) < max(FULL, least_part(threshold) * len(long)):
        return None
    if not _has_samples(short, long):
        return None
    share = _share_in_runs(short, long)
    if share < threshold:
        return None
    share_of_long = _share_in_runs(long, short)
    apart = Counter(marks(short)), Counter(marks(long))
    if share_of_long >= threshold and (apart[0] == apart[1] or not numbers):
        return min(share, share_of_long)
    return share if share >= _WHOLE and share_of_long < threshold and (apart[0] <= apart[1] or not numbers) else None


def _has_samples(short: str, long: str) -> bool:
    """A third of some runs stand in the other text, too: nearly all that do not are told by the first of them."""
    step = (len(short) - _RUN) / (_SAMPLES - 1)
    hits = 0
    for number in range(_SAMPLES):
        start = int(number * 7 % _SAMPLES * step)
        hits += short[start : start + _RUN] in long
        if number == _SAMPLES // 3 and not hits:
            return False
    return hits >= _SAMPLES // 3


def _share_in_runs(text: str, reference: str) -> float:
    runs = {reference[start : start + _RUN] for start in range(len(reference) - _RUN + 1)}
    covered = end = 0
    for start in range(len(text) - _RUN + 1):
        if text[start : start + _RUN] in runs:
            covered += start + _RUN - max(end, start)
            end = start + _RUN
    return covered / len(text)


def edits(one: str, other: str, most: int) -> int | None:
    """The Levenshtein distance, or None where it is more than `most`."""
    from rapidfuzz.distance import Levenshtein

    distance = Levenshtein.distance(one, other, score_cutoff=most)
    return distance if distance <= most else None


def _shared_share(text: str, reference: str) -> float:
    """About which share of the characters of a long text the other has too, as the mean over its pieces.

    Of each piece, the share of 8-grams that the other text has, to the power 1/8: the chance of a character to be kept
    (the estimate of Mash, Ondov et al. 2016). Piece by piece, so that half a text in common is half, and not 0.92; a
    share so small that unrelated texts have it is none.
    """
    known = {reference[start : start + _GRAM] for start in range(len(reference) - _GRAM + 1)}
    shared = np.array([text[start : start + _GRAM] in known for start in range(len(text) - _GRAM + 1)])
    bounds = [*range(0, len(shared), _PIECE), len(shared)]
    shares = np.array([shared[low:high].mean() for low, high in pairwise(bounds)])
    return float(np.where(shares > _CHANCE, shares ** (1 / _GRAM), 0).mean())
