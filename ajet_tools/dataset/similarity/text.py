"""Defines when two texts are equal or similar.

Equal: the same *normal form* (ignoring letter case, runs of white space, full-width forms and curly
quotes). Similar: at least `threshold` of the characters are the same, by edit distance. Two rules
separate different tasks that look alike, which are common in datasets:

- In a text under 100 characters, the share that may differ shrinks with the length. At 0.8,
  `What is 12 + 34?` is similar to no other text, a sentence of 43 characters may differ in 3, one
  of 100 in 20.
- Different numbers make a different task: under 200 characters the numbers and operators must be
  the same; longer texts that differ only in their numbers are different.

A text of at least 100 characters is also similar to one with the same parts in another order, and
to one that contains it: at 0.8, if it has at least half of that one's length (`_shared_parts`).

The markup of Markdown and HTML is ignored. Questions of several parts, such as passage and
question, are similar if each part is.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ajet_sdk.tasks.questions import PART, SYSTEM

FULL = 100
"""Below this length, the threshold gets stricter."""
MARKED = 200
"""Texts below this length are similar only if they have the same numbers and operators."""
LONG = 4000
"""Longer texts are compared by parts (`_shared_share`), since the cost of an edit distance is
quadratic."""
_FULLWIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_QUOTES = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}
_UNSEEN = dict.fromkeys((0x00AD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF))
_FORMS = {**_FULLWIDTH, **_QUOTES, **_UNSEEN}
_SEPARATORS = re.compile(f"[{PART}{SYSTEM}]")
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
"""Matches markup and its content. Line prefixes match after a sentence too, since a normal form has
one line."""
_ENTITY = re.compile(r"&(?:[a-z]+|#\d+);")
_GRAM = 8
_PIECE = 128
"""Characters of the pieces in which long texts are compared."""
_CHANCE = 0.06
"""Share of 8-grams that unrelated texts have in common."""
_RUN = 12
"""Length of the character runs that two texts with the same parts share."""
_SAMPLES = 24
_WHOLE = 0.95
_LONGER = 2.5
"""How much longer a containing text may be, in multiples of the allowed edits."""


def normal(text: str) -> str:
    """Returns the form in which texts are compared, with `PART` between its parts.

    Mathematical characters are kept: `2²` differs from `22`.
    """
    if _SEPARATORS.search(text):
        parts = map(normal, _SEPARATORS.split(text))
        return PART.join(filter(None, parts))
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(_FORMS))
    return " ".join(text.casefold().split())


def marks(text: str) -> list[str]:
    """Returns the numbers and operators of a text in normal form, in order, ignoring markup."""
    return _MARK.findall(unmarked(text))


def unmarked(text: str) -> str:
    """Removes Markdown and HTML markup from a text in normal form: `**bold**`, `<b>bold</b>`,
    `## title`."""
    if PART in text:
        return PART.join(map(unmarked, text.split(PART)))
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
    return _NUMBER.sub("0", text)


def allowed(length: int, threshold: float) -> float:
    """Returns the number of edits by which similar texts of this length may differ."""
    return (1 - threshold) * length * min(1.0, length / FULL) + 1e-9


def shortest(threshold: float) -> int:
    """Returns the minimum length at which an edit is allowed; a shorter text has no similar
    texts."""
    return next((length for length in range(1, 10_000) if allowed(length, threshold) >= 1), 10_000)


def likeness(first: str, second: str, threshold: float) -> float | None:
    """Returns the share of characters that two similar texts in normal form have in common, else
    None.

    It is 1 - edits / length of the longer text (Levenshtein), exact up to 4,000 characters; for
    texts with the same parts the share of characters in these parts, for a contained text its own
    share. For questions of several parts it is the mean of theirs; with other parts they are
    similar only if the whole texts are equal.
    """
    parts = first.split(PART)
    other_parts = second.split(PART)
    if len(parts) == len(other_parts) > 1:
        return _likeness_of_parts(parts, other_parts, threshold)
    if len(parts) != len(
        other_parts
    ):  # one text in another form, or a question with more context than the other
        return 1.0 if " ".join(parts) == " ".join(other_parts) else None
    return _likeness(first, second, threshold)


def _likeness_of_parts(
    parts: Sequence[str], other_parts: Sequence[str], threshold: float
) -> float | None:
    similar = 0.0
    for part, other in zip(parts, other_parts, strict=True):
        share = _likeness(part, other, threshold)
        if share is None:
            return None
        similar += share * len(part)
    return similar / sum(map(len, parts))


def _likeness(first: str, second: str, threshold: float) -> float | None:
    first = unmarked(first)
    second = unmarked(second)
    if first == second:
        return 1.0
    if (share := _kept_share(first, second, threshold)) is not None:
        is_short = min(len(first), len(second)) < MARKED
        if is_short:
            differ = marks(first) != marks(second)
        else:
            differ = masked(first) == masked(second)
        return None if differ else share
    short, long = sorted((first, second), key=lambda text: (len(text), text))
    return _shared_parts(short, long, threshold)


def _kept_share(first: str, second: str, threshold: float) -> float | None:
    """Returns the share of unedited characters, or None below the threshold."""
    length = max(len(first), len(second))
    most = allowed(length, threshold)
    if abs(len(first) - len(second)) > most:
        return None
    if length > LONG:
        share = min(_shared_share(first, second), _shared_share(second, first))
        return share if share >= threshold else None
    distance = edits(first, second, int(most))
    return None if distance is None else 1 - distance / length


def least_part(threshold: float) -> float:
    """Returns the minimum length of a contained text, relative to the containing text."""
    return max(0.5, 1 - _LONGER * (1 - threshold))


def _shared_parts(short: str, long: str, threshold: float) -> float | None:
    """Returns the share of characters in parts that both texts have, in any order; None if they are
    not similar.

    Parts are runs of at least 12 characters. They must cover all of the shorter text and its
    numbers, or enough of both texts, with the same numbers.
    """
    if threshold >= 1 or len(short) < max(FULL, least_part(threshold) * len(long)):
        return None
    if not _has_samples(short, long):
        return None
    share = _share_in_runs(short, long)
    if share < threshold:
        return None
    share_of_long = _share_in_runs(long, short)
    marks_of_short = Counter(marks(short))
    marks_of_long = Counter(marks(long))
    if share_of_long >= threshold:
        return min(share, share_of_long) if marks_of_short == marks_of_long else None
    contained = share >= _WHOLE and marks_of_short <= marks_of_long
    return share if contained else None


def _has_samples(short: str, long: str) -> bool:
    """Whether a third of some sampled runs occur in the other text; most negatives are found
    early."""
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


def edits(first: str, second: str, most: int) -> int | None:
    """Returns the Levenshtein distance, or None above `most`."""
    from rapidfuzz.distance import Levenshtein

    distance = Levenshtein.distance(first, second, score_cutoff=most)
    return distance if distance <= most else None


def _shared_share(text: str, reference: str) -> float:
    """Estimates the share of a long text's characters that the other text has, as the mean over its
    parts.

    For each part, it is the share of 8-grams found in the other text, to the power 1/8 (the
    estimate of Mash, Ondov et al. 2016). Parts keep a text with one shared half at 0.5 instead of
    0.92; shares that unrelated texts reach count as 0.
    """
    known = {reference[start : start + _GRAM] for start in range(len(reference) - _GRAM + 1)}
    shared = np.array(
        [text[start : start + _GRAM] in known for start in range(len(text) - _GRAM + 1)]
    )
    bounds = [*range(0, len(shared), _PIECE), len(shared)]
    shares = np.array([shared[low:high].mean() for low, high in pairwise(bounds)])
    return float(np.where(shares > _CHANCE, shares ** (1 / _GRAM), 0).mean())
