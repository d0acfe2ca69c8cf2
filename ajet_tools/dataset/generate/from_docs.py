"""Tasks made from documents: questions whose answers stand in a quotation that is verified to be in the source."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ajet_sdk.engines.reply_cache import tokens_of
from ajet_sdk.errors import AjetError, ConfigError, TaskError
from ajet_tools.dataset import prompts
from ajet_tools.dataset.documents.chunks import Chunk
from ajet_tools.dataset.documents.corpus import Corpus
from ajet_tools.dataset.files.tables import Row, text_of
from ajet_tools.dataset.generate.examples import Example, Pool, as_example
from ajet_tools.dataset.generate.loop import Generation
from ajet_tools.dataset.generate.questions import DocsAttempt, open_book, read_questions
from ajet_tools.dataset.generate.records import (
    NO_CHECKS,
    Candidate,
    Checks,
    DocsConfig,
    GenerationResult,
    NoProgress,
    Outlook,
    Rejected,
    SplitTarget,
)
from ajet_tools.dataset.model.endpoint import Endpoint
from ajet_tools.dataset.rows.schema import RowShape

if TYPE_CHECKING:
    from ajet_tools.dataset.verify.verdict import Verifier

__all__ = ["ChunksExhausted", "FromDocs"]

ROW_TOKENS = 110
"""What an estimate takes a question with its answer and its quotation to be long."""

_SAMPLE = 50
"""Chunks that an estimate looks at, about."""

_Place = tuple[str, int]
"""A chunk: its document's digest and its number there."""


class ChunksExhausted(AjetError, RuntimeError):
    """Every chunk was asked, and there are fewer rows than there should be."""


@dataclass(kw_only=True)
class _Target(SplitTarget):
    """Its documents' chunks in the order in which they are asked, and its own seeds."""

    chunks: list[Chunk]
    pool: Pool | None
    waiting: deque[Chunk] = field(default_factory=deque)
    passes: int = 0


class FromDocs(Generation[DocsAttempt, _Target]):
    """One run: `await run()` once. `result` and the endpoint's budget may be looked at meanwhile."""

    def __init__(
        self,
        corpus: Corpus,
        config: DocsConfig,
        endpoint: Endpoint,
        checks: Checks = NO_CHECKS,
        *,
        seeds: Sequence[Row] = (),
    ) -> None:
        if not any(one.chunks for one in corpus.held):
            raise TaskError("no document could be read, so there is nothing to ask about")
        if "few-shot" in config.kinds and not seeds:
            raise ConfigError("few-shot tasks follow the style of examples; pass --seeds FILE")
        named = next((row.where for row in seeds if "quote" in row.values), None)
        if named is not None:
            raise ConfigError(
                f"{named} has a field 'quote', which is reserved for the evidence; rename it with --map "
                "quote=metadata.quotation"
            )
        self.corpus, self.config = corpus, config
        self.shape = RowShape.infer(seeds, free_language=bool(config.languages)) if seeds else None
        examples = [as_example(row) for row in seeds]
        super().__init__(config, endpoint, examples, checks)
        self._sides = {side.name: side for side in _sides(corpus, config, examples, self.result)}
        self._before: dict[_Place, list[str]] = {}
        """The questions that a chunk has had."""

    @property
    def chunks(self) -> list[Chunk]:
        """Every chunk, in the order in which they are asked the first time."""
        return [chunk for side in self._sides.values() for chunk in side.chunks]

    def preview(self, chunk: Chunk, number: int = 0) -> DocsAttempt:
        """A call as it would be made; nothing is sent and nothing changes."""
        side = next(side for side in self._sides.values() if chunk in side.chunks)
        pool = Pool(side.pool.seeds) if side.pool is not None else None
        return self._compose(chunk, side.name, pool, number)

    def outlook(self) -> Outlook:
        """What is left to do: each chunk once, or as many calls as the rows take."""
        config, chunks, made = self.config, self.chunks, self.result.calls
        calls = max(0, len(chunks) - made)
        if config.count is not None:
            calls = min(self._calls_left(config.count), max(0, len(chunks) * config.passes - made))
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
            result.stopped = ChunksExhausted(
                f"the documents gave {result.accepted:,} of {wanted:,} rows, after every part was asked "
                f"{_times(self.config.passes)}. Add documents, raise --passes, or lower --chunk-size"
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
        for side in self._sides.values():
            self._next_pass(side)
        sides = [side for side in self._sides.values() if side.waiting]
        if not sides:
            return None
        side = min(sides, key=lambda one: one.progress(each))
        return self._compose(side.waiting.popleft(), side.name, side.pool, number)

    def _is_exhausted(self, side: _Target) -> bool:
        return not side.waiting and side.passes >= self._passes(side)

    def _passes(self, side: _Target) -> int:
        return 1 if side.target is None else self.config.passes

    def _next_pass(self, side: _Target) -> None:
        """Ask the chunks again, when all that was asked of them is back: the prompts say what they have had."""
        if not side.waiting and not side.composed and side.passes < self._passes(side):
            side.passes += 1
            side.waiting.extend(side.chunks)

    def _compose(self, chunk: Chunk, side: str, pool: Pool | None, number: int) -> DocsAttempt:
        """Call `number`, which asks for rows about a chunk; what is drawn is drawn by its number."""
        config, shape, count = self.config, self.shape, self.config.per_call
        chance = random.Random(f"{config.seed}:{number}")
        kind = config.kinds[number % len(config.kinds)]
        language = config.languages[number // len(config.kinds) % len(config.languages)] if config.languages else ""
        examples = pool.draw(config.shots, chance) if kind == "few-shot" and pool is not None else []
        prompt = config.prompt(kind)
        text = prompt.render(
            document=chunk.document.name,
            heading=chunk.heading,
            page=chunk.page,
            passage=chunk.text,
            count=count,
            language=language,
            before=self._before.get((chunk.document.digest, chunk.number), []),
            examples=[shape.example(one.values) for one in examples] if shape is not None else [],
            fields=shape.describe() if shape is not None else [],
            kind=kind,
        )
        seed = chance.getrandbits(31)
        origin = {
            "source": "from-docs",
            "document": {"name": chunk.document.name, "digest": chunk.document.digest},
            "seeds": [one.id for one in examples],
        }
        parameters = {"kind": kind, **({"language": language} if language else {}), "chunk_size": config.chunk_size}
        provenance = config.provenance(prompt, self.endpoint.model, seed, origin, parameters)
        messages = [
            {"role": "system", "content": prompts.load("from-docs/system").render()},
            {"role": "user", "content": text},
        ]
        return DocsAttempt(number, side, count, messages, seed, provenance, chunk, kind)

    def _read_reply(self, attempt: DocsAttempt, reply: str) -> tuple[Sequence[Candidate], list[Rejected]]:
        """Which rows of a reply are grounded in the chunk."""
        return read_questions(attempt, reply, self.shape)

    def _row_for_verifier(self, attempt: DocsAttempt, candidate: Candidate, verifier: Verifier) -> Mapping[str, Any]:
        """A check that asks a model shows it the chunk: what is in no one's memory can still be right."""
        return open_book(candidate.values, attempt.chunk.text) if verifier.calls else candidate.values

    def _record_decision(self, attempt: DocsAttempt, side: _Target, candidate: Candidate, sound: bool) -> None:
        self._before.setdefault((attempt.chunk.document.digest, attempt.chunk.number), []).append(
            text_of(candidate.values)
        )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _sides(corpus: Corpus, config: DocsConfig, seeds: Sequence[Example], result: GenerationResult) -> Iterator[_Target]:
    """Both sides, or one: chunks by the document's side, seeds by a hash, so that no example stands on both."""
    held = corpus.share("validation")
    share = held if config.validation is None or not held else config.validation
    apart = min(max(1, round(held * len(seeds))), len(seeds) - 1) if held and len(seeds) > 1 else 0
    order = sorted(seeds, key=lambda one: hashlib.blake2b(f"{config.seed}:{one.id}".encode()).digest())
    kept = {one.id for one in order[:apart]}
    count = config.count
    apart = min(max(1, round(share * count)), count - 1) if count is not None and held else 0
    for name, part, rows in (("train", 1 - share, result.train), ("validation", share, result.validation)):
        if name == "train" or held:
            yield _Target(
                name=name,
                share=part,
                target=None if count is None else apart if name == "validation" else count - apart,
                rows=rows,
                chunks=corpus.chunks(name, config.seed),
                pool=Pool([one for one in seeds if (one.id in kept) == (name == "validation")]) if seeds else None,
            )
