"""Composes the calls of `from-docs`: questions whose answers are in a quotation that is verified
against the document."""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ajet_sdk.errors import AjetError, ConfigError, TaskError
from ajet_sdk.tasks.questions import answer_of, plain_question, text_of
from ajet_tools.dataset import prompts
from ajet_tools.dataset.card import Facts
from ajet_tools.dataset.curation.schema import Misfit, RowShape, query_of
from ajet_tools.dataset.documents.chunks import Chunk
from ajet_tools.dataset.documents.corpus import Corpus
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.directory import digest_of
from ajet_tools.dataset.generate.pipeline import Source, calls_for
from ajet_tools.dataset.generate.quotation import Searchable, Span, long_enough, may_be_spelt
from ajet_tools.dataset.generate.records import (
    Call,
    Candidate,
    GenerationResult,
    NoProgress,
    Unusable,
)
from ajet_tools.dataset.generate.seeds import Side, as_examples, lineage_of, split_sides
from ajet_tools.dataset.generate.settings import DocsConfig
from ajet_tools.dataset.prompts import Prompt

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


def open_book(values: Mapping[str, object], passage: str) -> dict[str, object]:
    """Adds the chunk to the question, for verifiers that have to find the answer there."""
    text = prompts.load("from-docs/open-book").render(
        passage=passage, question=plain_question(values)
    )
    return {**values, query_of(values) or "main_query": text, "closed_book": values}


_KNOWLEDGE = RowShape.infer([Row("", {"question": "Which?", "answer": "This one."})])


def _task_of(row: object, shape: RowShape | None) -> tuple[dict[str, Any], str]:
    """Returns the task row and the quotation. Raises Misfit."""
    if not isinstance(row, Mapping):
        raise Misfit("a row is not an object")
    fields = {name: value for name, value in row.items() if name != "quote"}
    quote = row.get("quote")
    if not isinstance(quote, str) or not quote.strip():
        raise Misfit("quote is missing" if "quote" not in row else "quote is not text")
    if shape is not None:
        return shape.fit(fields), quote
    answer = fields.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        fields["answer"] = str(answer)
    task = _KNOWLEDGE.fit(fields)
    values = {
        "main_query": str(task["question"]).strip(),
        "metadata": {"answer": str(task["answer"]).strip()},
    }
    return values, quote


def _problem(
    values: Mapping[str, object], quote: str, span: Span | None, chunk: Chunk, kind: str
) -> tuple[str, str] | None:
    """Returns why a row is no valid task about the document: reason and detail."""
    if span is None:
        where = f"chunk {chunk.number} of {chunk.document.name}"
        return "quote not in the document", f"{_short(quote)} is not in {where}"
    if not long_enough(span.text):
        return "quote too short", f"{_short(quote)} is too short to be evidence"
    if len(span.text) > _LONGEST_QUOTE:
        return "quote too long", f"{len(span.text):,} characters are no quotation but a passage"
    name = query_of(values)
    about = _ABOUT_TEXT.search(str(values[name])) if name else None
    if about:
        return "asks about the text", f"{about[0]!r}: the solver does not have the text"
    answer = answer_of(values)
    if kind == "knowledge" and answer is not None:
        figure = _unsupported_figure(str(answer), span.text)
        if figure is not None:
            detail = f"{figure} is in the answer and not in {_short(span.text)}"
            return "answer not in the quote", detail
    return None


def _unsupported_figure(answer: str, quote: str) -> str | None:
    """Returns a figure of the answer that the quotation neither has nor, without any figures,
    may spell out."""
    quoted = {figure.replace(",", "") for figure in _FIGURE.findall(quote)}
    for figure in _FIGURE.findall(answer):
        plain = figure.replace(",", "")
        if plain not in quoted and (quoted or not may_be_spelt(plain, quote)):
            return str(figure)
    return None


def _short(text: str) -> str:
    shown = repr(" ".join(text.split()))
    return shown if len(shown) <= 120 else shown[:119] + "…"


_Place = tuple[str, int]
"""A chunk: its document's digest and its number there."""


class ChunksExhausted(AjetError, RuntimeError):
    """All chunks were used, and rows are missing."""


class FromDocs(Source):
    """The calls of `from-docs`; `seeds` are examples for few-shot tasks."""

    command: ClassVar[str] = "from-docs"
    config: DocsConfig

    def __init__(self, corpus: Corpus, config: DocsConfig, seeds: Sequence[Row] = ()) -> None:
        if not any(entry.chunks for entry in corpus.held):
            raise TaskError("no document could be read, so there is nothing to ask about")
        if "few-shot" in config.kinds and not seeds:
            raise ConfigError("few-shot tasks follow the style of examples; pass --seeds FILE")
        for row in seeds:
            if "quote" in row.values:
                raise ConfigError(
                    f"{row.where} has the reserved field 'quote'; rename it (`ajet dataset"
                    " filter --map quote=metadata.quotation`)"
                )
        self.config = config
        self.context_tokens = config.chunk_size // 4
        self._corpus = corpus
        self.documents = corpus.as_rows()
        self._seeds_digest = digest_of(seeds) if seeds else None
        self.shape: RowShape | None = None
        if seeds:
            self.shape = RowShape.infer(seeds, free_language=bool(config.languages))
            self.fields = self.shape.describe()
        self.examples = as_examples(seeds)
        of_chunks = corpus.validation_share
        share = of_chunks
        if config.validation is not None and of_chunks:
            share = config.validation
        self.sides = split_sides(self.examples, config, share, of_seeds=of_chunks)
        self._passes = config.passes if config.count is not None else 1
        self._chunks = {name: corpus.chunks(name, config.seed) for name in self.sides}
        """Chunks of each side, in order of use."""
        self._by_place: dict[_Place, Chunk] = {}
        for chunks in self._chunks.values():
            for chunk in chunks:
                self._by_place[chunk.document.digest, chunk.number] = chunk
        self._waiting = {name: deque[Chunk]() for name in self.sides}
        """The chunks of the present pass that are not asked yet."""
        self._times_asked: Counter[_Place] = Counter()
        self._questions: dict[_Place, list[str]] = {}
        """Earlier questions about a chunk."""

    @property
    def settings(self) -> dict[str, object]:
        return {
            "source": "from-docs",
            "documents": self._corpus.digest,
            "options": self.config.as_json(),
            "seeds": self._seeds_digest,
        }

    def card(self) -> Facts:
        config = self.config
        corpus = self._corpus
        counts = Counter(f"documents for {entry.side}" for entry in corpus.held)
        return Facts(
            counts={
                **dict(sorted(counts.items())),
                "documents that could not be read": len(corpus.unreadable),
                "documents that are copies": len(corpus.copies),
                "chunks": sum(len(entry.chunks) for entry in corpus.held),
                "seeds": len(self.examples),
            },
            parameters={
                "chunk size": config.chunk_size,
                "prompts": ", ".join(config.prompt(kind).label for kind in config.kinds),
                "languages": ", ".join(config.languages) or "those of the documents",
            },
            notes=[
                "Each answer is in a quotation verified in its document; a document is on one side"
                " of the split only."
            ],
        )

    def previews(self) -> list[tuple[Call, Prompt]]:
        side = next(side for name, side in self.sides.items() if self._chunks[name])
        previews = []
        for number, kind in enumerate(self.config.kinds):
            call = self._compose(number, "MODEL", self._chunks[side.name][0], side)
            previews.append((call, self.config.prompt(kind)))
        return previews

    def calls_left(self, result: GenerationResult) -> int:
        chunks = sum(map(len, self._chunks.values()))
        calls = max(0, chunks * self._passes - result.calls)
        if self.config.count is None:
            return calls
        return min(calls, calls_for(self.config.count, result, self.config.per_call))

    def shortfall(self, result: GenerationResult) -> AjetError | None:
        count = self.config.count
        unanswered = result.refused["no reply"]
        if count is not None and result.accepted < count:
            times = "once" if self._passes == 1 else f"{self._passes} times"
            return ChunksExhausted(
                f"the documents gave {result.accepted:,} of {count:,} rows, after every part was"
                f" asked {times}. Add documents, raise passes, or lower chunk_size (--with)"
            )
        if count is None and unanswered:
            return ChunksExhausted(
                f"{unanswered:,} of {result.calls + unanswered:,} parts got no answer (see"
                " rejected.jsonl) and gave no rows; --resume asks them again"
            )
        if not result.accepted:
            return NoProgress(
                f"no row was accepted (rejected: {result.reasons()}); see rejected.jsonl and"
                " --dry-run"
            )
        return None

    def next_call(self, number: int, model: str, rate: float) -> Call | None:
        ready = []
        for side in self.sides.values():
            if side.lacks(rate) > 0 and self._has_chunk(side):
                ready.append(side)
        if not ready:
            return None
        side = min(ready, key=lambda each: each.progress(rate))
        return self._compose(number, model, self._waiting[side.name].popleft(), side)

    def _has_chunk(self, side: Side) -> bool:
        """Whether a chunk is left to ask; starts the next pass if the last one is decided, since
        its prompts list the earlier questions."""
        waiting = self._waiting[side.name]
        if waiting:
            return True
        chunks = self._chunks[side.name]
        least = min((self._times_asked[_place(chunk)] for chunk in chunks), default=self._passes)
        if least >= self._passes or (least and side.in_flight):
            return False
        waiting.extend(chunk for chunk in chunks if self._times_asked[_place(chunk)] == least)
        return True

    def count(self, call: Call) -> None:
        document = call.provenance["document"]
        self._times_asked[document["digest"], document["chunk"]] += 1
        self.sides[call.side].used.update(call.provenance["seeds"])

    def _compose(self, number: int, model: str, chunk: Chunk, side: Side) -> Call:
        config = self.config
        chance = random.Random(f"{config.seed}:{number}")
        kind = config.kinds[number % len(config.kinds)]
        parameters: dict[str, Any] = {"kind": kind}
        language = ""
        if config.languages:
            language = config.languages[number // len(config.kinds) % len(config.languages)]
            parameters["language"] = language
        parameters["chunk_size"] = config.chunk_size
        if kind == "few-shot":
            examples = side.draw(config.shots, chance)
        else:
            examples = []
        shown = []
        if self.shape is not None:
            shown = [self.shape.example(example.values) for example in examples]
        prompt = config.prompt(kind)
        text = prompt.render(
            document=chunk.document.name,
            heading=chunk.blocks[0].heading,
            page=chunk.blocks[0].page,
            passage=chunk.text,
            count=config.per_call,
            language=language,
            before=self._questions.get(_place(chunk), []),
            examples=shown,
            fields=self.fields,
            kind=kind,
        )
        origin = {
            "source": "from-docs",
            "document": {
                "name": chunk.document.name,
                "digest": chunk.document.digest,
                "chunk": chunk.number,
            },
            **lineage_of(examples, side.name),
        }
        provenance = config.provenance(
            prompt, model, chance.getrandbits(31), origin=origin, parameters=parameters
        )
        messages = config.messages("from-docs/system", text)
        return Call(number, side.name, config.per_call, provenance, messages)

    def read_row(self, call: Call, row: object) -> Candidate:
        chunk = self._chunk(call)
        kind = call.parameters["kind"]
        try:
            values, quote = _task_of(row, self.shape if kind == "few-shot" else None)
        except Misfit as misfit:
            origin = _located(call, chunk, None)
            raise Unusable("wrong format", str(misfit), origin) from misfit
        span = Searchable(chunk.text).find(quote)
        provenance = _located(call, chunk, span)
        if problem := _problem(values, quote, span, chunk, kind):
            raise Unusable(*problem, provenance)
        return Candidate(values, provenance)

    def row_for_verifier(
        self, call: Call, values: Mapping[str, Any], verifier: Verifier
    ) -> Mapping[str, Any]:
        """Adds the chunk for verifiers that ask a model, which may not know the facts."""
        if verifier.calls:
            return open_book(values, self._chunk(call).text)
        return values

    def record(self, call: Call, values: Mapping[str, Any], *, sound: bool) -> None:
        self._questions.setdefault(_place(self._chunk(call)), []).append(text_of(values))

    def _chunk(self, call: Call) -> Chunk:
        document = call.provenance["document"]
        return self._by_place[document["digest"], document["chunk"]]


def _place(chunk: Chunk) -> _Place:
    return chunk.document.digest, chunk.number


def _located(call: Call, chunk: Chunk, span: Span | None) -> dict[str, Any]:
    """Returns the provenance with the position of the quotation, else of the chunk."""
    block = chunk.block_at(span.start) if span is not None else chunk.blocks[0]
    document = dict(call.provenance["document"])
    if block.page is not None:
        document["page"] = block.page
    if block.heading:
        document["heading"] = block.heading
    provenance = {**call.provenance, "document": document}
    if span is not None:
        provenance["span"] = {"quote": span.text, "start": span.start, "end": span.end}
    return provenance
