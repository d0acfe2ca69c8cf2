"""Generates tasks from documents: questions whose answers are in a quotation that is verified
against the source."""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ajet_sdk.engines.budget import tokens_of
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import AjetError, ConfigError, TaskError
from ajet_sdk.tasks.questions import answer_of, plain_question, text_of
from ajet_tools.dataset import prompts
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.curation.schema import Misfit, RowShape, query_of
from ajet_tools.dataset.documents.chunks import Chunk
from ajet_tools.dataset.documents.corpus import Corpus
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.examples import Side, as_examples, split_sides, splits_from
from ajet_tools.dataset.generate.loop import Generation
from ajet_tools.dataset.generate.records import (
    NO_CHECKS,
    Candidate,
    Checks,
    DocsConfig,
    NoProgress,
    Outlook,
    Unusable,
    WriterCall,
)

if TYPE_CHECKING:
    from ajet_tools.dataset.verify.verdict import Verifier

_ABOUT_TEXT = re.compile(
    r"\b(according to|(stated|mentioned|described|given|shown|listed|discussed) in)"
    r" (the|this|that) "
    r"((above|given|provided) )?(passage|text|excerpt|document|section|article|author|table)\b"
    r"|\b(this|the (above|given|provided|following))"
    r" (passage|text|excerpt|document|section|article)\b"
    r"|\bthe (passage|excerpt)\b|\bdo(es)? the (text|author|document|article)s?"
    r" (say|state|mention|describe)"
    r"|\b(laut|nach|in|aus) (dem|diesem|der|diesen)"
    r" (text|textabschnitt|abschnitt|auszug|dokument)\b"
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
        evidence = (
            {}
            if span is None
            else {"span": {"quote": span.text, "start": span.start, "end": span.end}}
        )
        return {**self.provenance, "document": document, **evidence}


def read_question(
    attempt: DocsAttempt, row: object, shape: RowShape | None
) -> tuple[dict[str, object], dict[str, object]]:
    """Returns a valid row with its provenance. Raises Unusable if its format or quotation is
    wrong."""
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
    text = prompts.load("from-docs/open-book").render(
        passage=passage, question=plain_question(values)
    )
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
    answer = (
        str(answer) if isinstance(answer, int | float) and not isinstance(answer, bool) else answer
    )
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
        # figures in the answer must be in the quote, unless it may spell them out
        there = {figure.replace(",", "") for figure in _FIGURE.findall(span.text)}
        strange = [
            figure
            for figure in _FIGURE.findall(str(answer))
            if figure.replace(",", "") not in there
        ]
        if not there:
            strange = [
                figure for figure in strange if not may_be_spelt(figure.replace(",", ""), span.text)
            ]
        if strange:
            return (
                "answer not in the quote",
                f"{strange[0]} is in the answer and not in {_short(span.text)}",
            )
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
    **{
        code: unicodedata.normalize("NFKC", chr(code))
        for code in (*range(0xFB00, 0xFB07), *range(0xFF01, 0xFF5F))
    },
    ord("…"): "...",
}
"""Ligatures and full-width letters, but no characters with a meaning of their own, such as x²."""
_AROUND = " \t\n\"'"
_LEAST, _LEAST_FIGURE, _LEAST_WIDE = 12, 6, 5
"""Minimum letters and digits of a quotation: words only, with a figure, in Chinese, Japanese or
Korean."""


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


_SMALL = (
    ("zero", "no", "none"),
    ("one", "first", "once", "single", "a"),
    ("two", "second", "twice", "pair", "both"),
    ("three", "third", "thrice"),
    ("four", "fourth"),
    ("five", "fifth"),
    ("six", "sixth", "half"),
    ("seven", "seventh"),
    ("eight", "eighth"),
    ("nine", "ninth"),
    ("ten", "tenth", "decade"),
    ("eleven", "eleventh"),
    ("twelve", "twelfth", "dozen"),
    ("thirteen", "thirteenth"),
    ("fourteen", "fourteenth", "fortnight"),
    ("fifteen", "fifteenth"),
    ("sixteen", "sixteenth"),
    ("seventeen", "seventeenth"),
    ("eighteen", "eighteenth"),
    ("nineteen", "nineteenth"),
)
"""Words for 0 to 19."""
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_LARGE = (
    *("hundred", "hundreds", "thousand", "thousands", "million", "millions", "billion", "billions"),
    *("dozen", "dozens", "century"),
)
_PARTS = (
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
)


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
        return not words.isdisjoint(_SMALL[value])
    if value < 100:
        return any(word.startswith(_TENS[value // 10 - 2][:-1]) for word in words)
    return not words.isdisjoint(_LARGE) or any(
        word in _TENS or word.endswith("teen") for word in words
    )


ROW_TOKENS = 110
"""Estimated tokens of a question with its answer and quotation."""
_SAMPLE = 50
"""Approximate number of chunks that an estimate samples."""
_Place = tuple[str, int]
"""A chunk: its document's digest and its number there."""


class ChunksExhausted(AjetError, RuntimeError):
    """All chunks were used, and rows are missing."""


class FromDocs(Generation[DocsAttempt]):
    """A run of `from-docs`: `await run()` once. `result` and the endpoint's budget are readable
    meanwhile."""

    config: DocsConfig

    def __init__(
        self,
        corpus: Corpus,
        config: DocsConfig,
        endpoint: ModelClient,
        checks: Checks = NO_CHECKS,
        *,
        seeds: Sequence[Row] = (),
    ) -> None:
        if not any(entry.chunks for entry in corpus.held):
            raise TaskError("no document could be read, so there is nothing to ask about")
        if "few-shot" in config.kinds and not seeds:
            raise ConfigError("few-shot tasks follow the style of examples; pass --seeds FILE")
        named = next((row.where for row in seeds if "quote" in row.values), None)
        if named is not None:
            raise ConfigError(
                f"{named} has the reserved field 'quote'; rename it (--map"
                " quote=metadata.quotation)"
            )
        self.corpus = corpus
        self.shape = RowShape.infer(seeds, free_language=bool(config.languages)) if seeds else None
        examples = as_examples(seeds)
        fields = self.shape.describe() if self.shape is not None else ()
        super().__init__(config, endpoint, examples, checks, fields=fields)
        validation_share = corpus.share("validation")
        share = (
            validation_share
            if config.validation is None or not validation_share
            else config.validation
        )
        self._sides = split_sides(examples, config, share, self.result, of_seeds=validation_share)
        self._chunks = {name: corpus.chunks(name, config.seed) for name in self._sides}
        """Chunks of each side, in order of use."""
        self._waiting = {name: deque[Chunk]() for name in self._sides}
        self._passed = Counter[str]()
        self._before: dict[_Place, list[str]] = {}
        """Earlier questions about a chunk."""

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks, in the order of the first pass."""
        return [chunk for chunks in self._chunks.values() for chunk in chunks]

    def preview(self, chunk: Chunk, number: int = 0) -> DocsAttempt:
        """Returns a call without sending it or changing state."""
        name = next(name for name, chunks in self._chunks.items() if chunk in chunks)
        return self._compose(chunk, self._sides[name].as_begun(), number)

    def outlook(self) -> Outlook:
        """Estimates the calls and tokens left: each chunk once, or the calls that the rows need."""
        config, chunks, calls_made = self.config, self.chunks, self.result.calls
        calls = max(0, len(chunks) - calls_made)
        if config.count is not None:
            calls = min(
                self._calls_left(config.count), max(0, len(chunks) * config.passes - calls_made)
            )
        looked_at = chunks[:: max(1, len(chunks) // _SAMPLE)]
        prompt = sum(tokens_of(self.preview(chunk).messages) for chunk in looked_at) / len(
            looked_at
        )
        passage = sum(tokens_of(chunk.text) for chunk in looked_at) / len(looked_at)
        return Outlook(calls, prompt, ROW_TOKENS, ROW_TOKENS / 2, passage + 300)

    def _finish(self) -> None:
        result, wanted = self.result, self.config.count
        if result.stopped is not None:
            return
        unanswered = result.refused["no reply"]
        if wanted is not None and result.accepted < wanted:
            times = "once" if self.config.passes == 1 else f"{self.config.passes} times"
            result.stopped = ChunksExhausted(
                f"the documents gave {result.accepted:,} of {wanted:,} rows, after every part was"
                f" asked {times}. Add documents, raise --passes, or lower --chunk-size"
            )
        elif wanted is None and unanswered:
            result.stopped = ChunksExhausted(
                f"{unanswered:,} of {result.calls:,} parts got no answer (see rejected.jsonl) and"
                " gave no rows"
            )
        elif not result.accepted:
            result.stopped = NoProgress(
                f"no row was accepted (rejected: {self._reasons()}); see rejected.jsonl and"
                " --show-prompt"
            )

    def _next(self, number: int, each: float) -> DocsAttempt | None:
        for side in (
            self._sides.values()
        ):  # start a pass after all results of the last one, which the prompts list
            if not self._waiting[side.name] and not side.composed and not self._is_exhausted(side):
                self._passed[side.name] += 1
                self._waiting[side.name].extend(self._chunks[side.name])
        sides = [side for side in self._sides.values() if self._waiting[side.name]]
        if not sides:
            return None
        side = min(sides, key=lambda candidate: candidate.progress(each))
        return self._compose(self._waiting[side.name].popleft(), side, number)

    def _is_exhausted(self, side: Side) -> bool:
        passes = 1 if self.config.count is None else self.config.passes
        return not self._waiting[side.name] and self._passed[side.name] >= passes

    def _compose(self, chunk: Chunk, side: Side, number: int) -> DocsAttempt:
        """Composes call `number` for a chunk; all random draws depend on the number."""
        config, shape, count = self.config, self.shape, self.config.per_call
        chance = random.Random(f"{config.seed}:{number}")
        kind = config.kinds[number % len(config.kinds)]
        language = (
            config.languages[number // len(config.kinds) % len(config.languages)]
            if config.languages
            else ""
        )
        examples = side.draw(config.shots, chance) if kind == "few-shot" else []
        prompt = config.prompt(kind)
        text = prompt.render(
            document=chunk.document.name,
            heading=chunk.blocks[0].heading,
            page=chunk.blocks[0].page,
            passage=chunk.text,
            count=count,
            language=language,
            before=self._before.get((chunk.document.digest, chunk.number), []),
            examples=(
                [shape.example(example.values) for example in examples] if shape is not None else []
            ),
            fields=shape.describe() if shape is not None else [],
            kind=kind,
        )
        seed = chance.getrandbits(31)
        origin = {
            "source": "from-docs",
            "document": {"name": chunk.document.name, "digest": chunk.document.digest},
            "seeds": [example.id for example in examples],
            "roots": list(dict.fromkeys(root for example in examples for root in example.roots)),
            "splits": splits_from(examples, side.name),
        }
        parameters = {
            "kind": kind,
            **({"language": language} if language else {}),
            "chunk_size": config.chunk_size,
        }
        provenance = config.provenance(prompt, self.endpoint.model, seed, origin, parameters)
        system = prompts.load("from-docs/system").render()
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return DocsAttempt(number, side.name, count, messages, seed, provenance, chunk, kind)

    def _read_row(
        self, attempt: DocsAttempt, row: object
    ) -> tuple[dict[str, object], Mapping[str, object]]:
        return read_question(attempt, row, self.shape if attempt.kind == "few-shot" else None)

    def _row_for_verifier(
        self, attempt: DocsAttempt, candidate: Candidate, verifier: Verifier
    ) -> Mapping[str, object]:
        """Adds the chunk for verifiers that ask a model, which may not know the facts."""
        return (
            open_book(candidate.values, attempt.chunk.text) if verifier.calls else candidate.values
        )

    def _record_decision(
        self, attempt: DocsAttempt, side: Side, candidate: Candidate, sound: bool
    ) -> None:
        place = attempt.chunk.document.digest, attempt.chunk.number
        self._before.setdefault(place, []).append(text_of(candidate.values))
