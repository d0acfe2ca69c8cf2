"""Generates tasks from documents: questions whose answers are in a quotation that is verified against the source."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ajet_sdk.engines.budget import tokens_of
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import AjetError, ConfigError, TaskError
from ajet_tools.dataset import prompts
from ajet_tools.dataset.curation.schema import RowShape
from ajet_tools.dataset.documents.chunks import Chunk
from ajet_tools.dataset.documents.corpus import Corpus
from ajet_tools.dataset.files.blocks import Row, text_of
from ajet_tools.dataset.generate.examples import Side, as_example, split_sides, splits_from
from ajet_tools.dataset.generate.loop import Generation
from ajet_tools.dataset.generate.questions import DocsAttempt, open_book, read_question
from ajet_tools.dataset.generate.records import (
    NO_CHECKS,
    Candidate,
    Checks,
    DocsConfig,
    NoProgress,
    Outlook,
)

if TYPE_CHECKING:
    from ajet_tools.dataset.verify.verdict import Verifier

ROW_TOKENS = 110
"""Estimated tokens of a question with its answer and quotation."""

_SAMPLE = 50
"""Approximate number of chunks that an estimate samples."""

_Place = tuple[str, int]
"""A chunk: its document's digest and its number there."""


class ChunksExhausted(AjetError, RuntimeError):
    """All chunks were used, and rows are missing."""


class FromDocs(Generation[DocsAttempt]):
    """A run of `from-docs`: `await run()` once. `result` and the endpoint's budget are readable meanwhile."""

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
                f"{named} has a field 'quote', which is reserved for the evidence; rename it with --map "
                "quote=metadata.quotation"
            )
        self.corpus = corpus
        self.shape = RowShape.infer(seeds, free_language=bool(config.languages)) if seeds else None
        examples = [as_example(row) for row in seeds]
        fields = self.shape.describe() if self.shape is not None else ()
        super().__init__(config, endpoint, examples, checks, fields=fields)
        validation_share = corpus.share("validation")
        share = validation_share if config.validation is None or not validation_share else config.validation
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
            calls = min(self._calls_left(config.count), max(0, len(chunks) * config.passes - calls_made))
        looked_at = chunks[:: max(1, len(chunks) // _SAMPLE)]
        prompt = sum(tokens_of(self.preview(chunk).messages) for chunk in looked_at) / len(looked_at)
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
                f"the documents gave {result.accepted:,} of {wanted:,} rows, after every part was asked {times}. Add "
                "documents, raise --passes, or lower --chunk-size"
            )
        elif wanted is None and unanswered:
            result.stopped = ChunksExhausted(
                f"{unanswered:,} of {result.calls:,} parts got no answer (see rejected.jsonl) and gave no rows"
            )
        elif not result.accepted:
            result.stopped = NoProgress(
                f"no row was accepted (rejected: {self._reasons()}). See rejected.jsonl for the reasons and "
                "--show-prompt for the prompts"
            )

    def _next(self, number: int, each: float) -> DocsAttempt | None:
        for side in self._sides.values():  # start a pass after all results of the last one, which the prompts list
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
        language = config.languages[number // len(config.kinds) % len(config.languages)] if config.languages else ""
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
            examples=[shape.example(example.values) for example in examples] if shape is not None else [],
            fields=shape.describe() if shape is not None else [],
            kind=kind,
        )
        seed = chance.getrandbits(31)
        origin = {
            "source": "from-docs",
            "document": {"name": chunk.document.name, "digest": chunk.document.digest},
            "seeds": [example.id for example in examples],
            "splits": splits_from(examples, side.name),
        }
        parameters = {"kind": kind, **({"language": language} if language else {}), "chunk_size": config.chunk_size}
        provenance = config.provenance(prompt, self.endpoint.model, seed, origin, parameters)
        messages = [
            {"role": "system", "content": prompts.load("from-docs/system").render()},
            {"role": "user", "content": text},
        ]
        return DocsAttempt(number, side.name, count, messages, seed, provenance, chunk, kind)

    def _read_row(self, attempt: DocsAttempt, row: object) -> tuple[dict[str, object], Mapping[str, object]]:
        return read_question(attempt, row, self.shape if attempt.kind == "few-shot" else None)

    def _row_for_verifier(self, attempt: DocsAttempt, candidate: Candidate, verifier: Verifier) -> Mapping[str, object]:
        """Adds the chunk for verifiers that ask a model, which may not know the facts."""
        return open_book(candidate.values, attempt.chunk.text) if verifier.calls else candidate.values

    def _record_decision(self, attempt: DocsAttempt, side: Side, candidate: Candidate, sound: bool) -> None:
        place = attempt.chunk.document.digest, attempt.chunk.number
        self._before.setdefault(place, []).append(text_of(candidate.values))
