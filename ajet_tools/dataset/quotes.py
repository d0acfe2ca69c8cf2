"""Whether a quotation is in a text: word for word, whatever the white space, the quotation marks and the dashes."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

__all__ = ["Searchable", "Span", "long_enough"]

_MARKS = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛′`´", "'"),
        **dict.fromkeys("“”„‟″«»", '"'),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\ufeff"),
    }
)
_FORMS = {
    **{code: unicodedata.normalize("NFKC", chr(code)) for code in (*range(0xFB00, 0xFB07), *range(0xFF01, 0xFF5F))},
    ord("…"): "...",
}
"""Ligatures and full-width letters; no sign that means something of its own, such as the 2 of x²."""
_AROUND = " \t\n\"'"
_LEAST, _LEAST_FIGURE, _LEAST_WIDE = 12, 6, 5
"""Letters and digits of a quotation: with words alone, with a figure among them, in Chinese, Japanese or Korean."""


@dataclass(frozen=True)
class Span:
    """A quotation as it stands in the text: `text[start:end]`."""

    start: int
    end: int
    text: str


class Searchable:
    """A text in which quotations are looked for. Letters, digits, case and punctuation must be the same."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._form, self._places = _plain(text)

    def find(self, quote: str) -> Span | None:
        """Where the quotation stands first, or None. Quotation marks and dots around it are not part of it."""
        form = _plain(unicodedata.normalize("NFC", quote))[0].strip(_AROUND)
        form = form.removeprefix("...").removesuffix("...").strip(_AROUND)
        at = self._form.find(form) if form else -1
        if at < 0:
            return None
        start, end = self._places[at], self._places[at + len(form) - 1] + 1
        return Span(start, end, self._text[start:end])


def long_enough(quote: str) -> bool:
    """Whether a quotation says enough to be evidence: a word or two are in every text."""
    letters = [character for character in quote if character.isalnum()]
    if sum(ord(character) > 0x2E7F for character in letters) > len(letters) / 2:
        return len(letters) >= _LEAST_WIDE
    return len(letters) >= (_LEAST_FIGURE if any(map(str.isdigit, letters)) else _LEAST)


def _plain(text: str) -> tuple[str, list[int]]:
    """The form in which texts are compared, and where each of its characters comes from."""
    if text.isascii() and not re.search(r"[`|\n\t\r\f\v]|  ", text):
        return text, list(range(len(text)))
    made: list[str] = []
    places: list[int] = []
    blank = True
    for place, character in enumerate(text):
        form = character if character.isascii() else _FORMS.get(ord(character), character)
        for one in form.translate(_MARKS):
            if one.isspace():
                if blank:
                    continue
                one = " "
            blank = one == " "
            made.append(one)
            places.append(place)
    return "".join(made), places
