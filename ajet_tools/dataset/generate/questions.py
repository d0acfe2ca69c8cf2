"""Validates generated questions about a chunk, and finds their quotations in it.

Quotations match word for word, ignoring white space and styles of quotation marks and dashes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ajet_tools.dataset import prompts
from ajet_tools.dataset.curation.schema import Misfit, RowShape, query_of
from ajet_tools.dataset.documents.chunks import Chunk
from ajet_tools.dataset.files.values import answer_of
from ajet_tools.dataset.generate.records import Unusable, WriterCall
from ajet_tools.dataset.verify.verdict import question_of

_ABOUT_TEXT = re.compile(
    r"\b(according to|(stated|mentioned|described|given|shown|listed|discussed) in) (the|this|that) "
    r"((above|given|provided) )?(passage|text|excerpt|document|section|article|author|table)\b"
    r"|\b(this|the (above|given|provided|following)) (passage|text|excerpt|document|section|article)\b"
    r"|\bthe (passage|excerpt)\b|\bdo(es)? the (text|author|document|article)s? (say|state|mention|describe)"
    r"|\b(laut|nach|in|aus) (dem|diesem|der|diesen) (text|textabschnitt|abschnitt|auszug|dokument)\b"
    r"|\b(selon|d['’]après|dans) (le|ce|l['’]|cet) ?(texte|passage|extrait|document)\b"
    r"|\b(según|en) (el|este) (texto|pasaje|fragmento|documento)\b"
    r"|(根据|依据)(本|上述|该|以上|这段)?(文本|文章|段落|文档|文中)",
    re.IGNORECASE,
)
"""Phrases that refer to a text that the solver of the task does not have."""

_FIGURE = re.compile(r"\d+(?:[.,]\d+)*")

_LONGEST_QUOTE = 2000


@dataclass(frozen=True)
class DocsAttempt(WriterCall):
    """A call about a chunk, for a kind of task."""

    chunk: Chunk
    kind: str

    @cached_property
    def text(self) -> Searchable:
        return Searchable(self.chunk.text)

    def origin(self, span: Span | None = None) -> dict[str, object]:
        """Returns the provenance with the position of the quotation, else of the chunk."""
        block = self.chunk.block_at(span.start) if span is not None else self.chunk.blocks[0]
        document: dict[str, object] = {**self.provenance["document"], "chunk": self.chunk.number}
        document |= {"page": block.page} if block.page is not None else {}
        document |= {"heading": block.heading} if block.heading else {}
        evidence = {} if span is None else {"span": {"quote": span.text, "start": span.start, "end": span.end}}
        return {**self.provenance, "document": document, **evidence}


def read_question(
    attempt: DocsAttempt, row: object, shape: RowShape | None
) -> tuple[dict[str, object], dict[str, object]]:
    """Returns a valid row with its provenance. Raises Unusable if its format or quotation is wrong."""
    try:
        values, quote = _task_of(row, shape)
    except Misfit as misfit:
        raise Unusable("wrong format", str(misfit), attempt.origin()) from misfit
    span = attempt.text.find(quote)
    if problem := _problem(values, quote, span, attempt):
        raise Unusable(*problem, attempt.origin(span))
    return values, attempt.origin(span)


def open_book(values: Mapping[str, object], passage: str) -> dict[str, object]:
    """Adds the chunk to the question, for verifiers that have to find the answer there."""
    text = prompts.load("from-docs/open-book").render(passage=passage, question=question_of(values))
    return {**values, query_of(values) or "main_query": text, "closed_book": values}


def _task_of(row: Any, shape: RowShape | None) -> tuple[dict[str, object], str]:
    """Returns the task row and the quotation. Raises Misfit."""
    if not isinstance(row, Mapping):
        raise Misfit("a row is not an object")
    fields = {name: value for name, value in row.items() if name != "quote"}
    quote = row.get("quote")
    if not isinstance(quote, str) or not quote.strip():
        raise Misfit("quote is missing" if "quote" not in row else "quote is not text")
    if shape is not None:
        return shape.fit(fields), quote
    question, answer = fields.get("question"), fields.get("answer")
    answer = str(answer) if isinstance(answer, int | float) and not isinstance(answer, bool) else answer
    for name, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise Misfit(f"{name} is {'missing' if value is None else 'empty or no text'}")
    unknown = [name for name in fields if name not in ("question", "answer")]
    if unknown:
        raise Misfit(f"{unknown[0]} is no field that was asked for")
    return {"main_query": str(question).strip(), "metadata": {"answer": str(answer).strip()}}, quote


def _problem(
    values: Mapping[str, object], quote: str, span: Span | None, attempt: DocsAttempt
) -> tuple[str, str] | None:
    """Returns why a row is no valid task about the document: reason and detail."""
    if span is None:
        where = f"chunk {attempt.chunk.number} of {attempt.chunk.document.name}"
        return "quote not in the document", f"{_short(quote)} is not in {where}"
    if not long_enough(span.text):
        return "quote too short", f"{_short(quote)} is too short to be evidence"
    if len(span.text) > _LONGEST_QUOTE:
        return "quote too long", f"{len(span.text):,} characters are no quotation but a passage"
    name = query_of(values)
    about = _ABOUT_TEXT.search(str(values[name])) if name else None
    if about:
        return "asks about the text", f"{about[0]!r}: the solver does not have the text"
    if attempt.kind == "knowledge" and (answer := answer_of(values)) is not None:
        # figures in the answer must be in the quote, unless it spells them out
        there = {figure.replace(",", "") for figure in _FIGURE.findall(span.text)}
        strange = [figure for figure in _FIGURE.findall(str(answer)) if figure.replace(",", "") not in there]
        if there and strange:
            return "answer not in the quote", f"{strange[0]} is in the answer and not in {_short(span.text)}"
    return None


def _short(text: str) -> str:
    shown = repr(" ".join(text.split()))
    return shown if len(shown) <= 120 else shown[:119] + "…"


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
"""Ligatures and full-width letters, but no characters with a meaning of their own, such as x²."""

_AROUND = " \t\n\"'"

_LEAST, _LEAST_FIGURE, _LEAST_WIDE = 12, 6, 5
"""Minimum letters and digits of a quotation: words only, with a figure, in Chinese, Japanese or Korean."""


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
        """Returns the first occurrence, or None. Surrounding quotation marks and dots are ignored."""
        form = _plain(unicodedata.normalize("NFC", quote))[0].strip(_AROUND)
        form = form.removeprefix("...").removesuffix("...").strip(_AROUND)
        at = self._form.find(form) if form else -1
        if at < 0:
            return None
        start, end = self._places[at], self._places[at + len(form) - 1] + 1
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
        form = character if character.isascii() else _FORMS.get(ord(character), character)
        for char in form.translate(_MARKS):
            if char.isspace():
                if blank:
                    continue
                char = " "
            blank = char == " "
            characters.append(char)
            places.append(place)
    return "".join(characters), places
