"""Finds quotations in a document's text, and numbers that a quotation may spell out."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from ajet_tools.dataset.curation.language import language_of
from ajet_tools.text.number_words import TENS

_MARKS = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛′`´", "'"),
        **dict.fromkeys("“”„‟″«»", '"'),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff"),
    }
)

_FORMS = {
    **{
        code: unicodedata.normalize("NFKC", chr(code))
        for code in (*range(0xFB00, 0xFB07), *range(0xFF01, 0xFF5F))
    },
    ord("…"): "...",
}
"""Ligatures and full-width letters, but no characters with a meaning of their own, such as x²."""
_AROUND = " \t\n\"'"
# the minimum of letters and digits of a quotation
_LEAST = 12
_LEAST_FIGURE = 6
"""With a figure."""
_LEAST_WIDE = 5
"""In Chinese, Japanese or Korean."""


@dataclass(frozen=True)
class Span:
    """The location of a quotation: `text[start:end]`."""

    start: int
    end: int
    text: str


class Searchable:
    """A text to search for quotations. Letters, digits, case and punctuation must match."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._form, self._places = _plain(text)

    def find(self, quote: str) -> Span | None:
        """Returns the first occurrence, or None. Surrounding quotation marks and dots are
        ignored."""
        form = _plain(unicodedata.normalize("NFC", quote))[0].strip(_AROUND)
        form = form.removeprefix("...").removesuffix("...").strip(_AROUND)
        position = self._form.find(form) if form else -1
        if position < 0:
            return None
        start = self._places[position]
        end = self._places[position + len(form) - 1] + 1
        return Span(start, end, self._text[start:end])


def long_enough(quote: str) -> bool:
    """Whether a quotation is long enough to be evidence."""
    letters = [character for character in quote if character.isalnum()]
    if sum(ord(character) > 0x2E7F for character in letters) > len(letters) / 2:
        return len(letters) >= _LEAST_WIDE
    return len(letters) >= (_LEAST_FIGURE if any(map(str.isdigit, letters)) else _LEAST)


def _plain(text: str) -> tuple[str, list[int]]:
    """Returns the normalized text, and the original position of each character."""
    if text.isascii() and not re.search(r"[`|\n\t\r\f\v]|  ", text):
        return text, list(range(len(text)))
    characters: list[str] = []
    places: list[int] = []
    blank = True
    for place, character in enumerate(text):
        if character.isascii():
            form = character
        else:
            form = _FORMS.get(ord(character), character)
        for char in form.translate(_MARKS):
            if char.isspace():
                if blank:
                    continue
                char = " "
            blank = char == " "
            characters.append(char)
            places.append(place)
    return "".join(characters), places


_SMALL = """
zero no none
one first once single a
two second twice pair both
three third thrice
four fourth
five fifth
six sixth half
seven seventh
eight eighth
nine ninth
ten tenth decade
eleven eleventh
twelve twelfth dozen
thirteen thirteenth
fourteen fourteenth fortnight
fifteen fifteenth
sixteen sixteenth
seventeen seventeenth
eighteen eighteenth
nineteen nineteenth
""".strip().splitlines()
"""Words for 0 to 19."""
_LARGE = [
    "hundred",
    "hundreds",
    "thousand",
    "thousands",
    "million",
    "millions",
    "billion",
    "billions",
    "dozen",
    "dozens",
    "century",
]
_PARTS = [
    "half",
    "halves",
    "third",
    "thirds",
    "quarter",
    "quarters",
    "point",
    "tenth",
    "tenths",
    "percent",
]


def may_be_spelt(figure: str, quote: str) -> bool:
    """Whether a quotation without figures may spell one out; other languages than English aren't
    read."""
    if language_of(quote) != "en":
        return True
    words = set(re.findall(r"[a-z]+", quote.lower()))
    if not figure.isdecimal():
        return not words.isdisjoint(_PARTS)
    value = int(figure)
    if value < len(_SMALL):
        return not words.isdisjoint(_SMALL[value].split())
    if value < 100:
        return any(word.startswith(TENS[value // 10 - 2][:-1]) for word in words)
    return not words.isdisjoint(_LARGE) or any(
        word in TENS or word.endswith("teen") for word in words
    )
