"""Tasks made from documents: questions whose answers stand in a quotation that is verified to be in the source.

A run is a function of its documents, its recipe and the replies, as that of `expand` is: calls are numbered, and what
comes back is taken in by number. So the same replies give the same bytes, and a run that was killed is resumed by
running it again, with the replies that are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import AjetError, ConfigError, ContextOverflow, TaskError
from ajet_tools.dataset.chunks import Chunk
from ajet_tools.dataset.corpus import Corpus
from ajet_tools.dataset.docs_recipe import DocsRecipe
from ajet_tools.dataset.drawing import Example, Pool
from ajet_tools.dataset.endpoint import Endpoint, EndpointError
from ajet_tools.dataset.expand import FAILED, FRUITLESS, GRACE, PROBE
from ajet_tools.dataset.expanded import Expanded, Fruitless, Interrupted, Refused
from ajet_tools.dataset.questions import DocsAsked, Found, ask_about, found_in, open_book
from ajet_tools.dataset.seeds import as_example
from ajet_tools.dataset.shape import RowShape
from ajet_tools.dataset.similar import Near
from ajet_tools.dataset.tables import Row, text_of

if TYPE_CHECKING:
    from ajet_tools.dataset.leaks import Leaks
    from ajet_tools.dataset.verify import Verdict, Verifier

__all__ = ["Exhausted", "FromDocs"]

_Place = tuple[str, int]
"""A chunk: its document's digest and its number there."""


class Exhausted(AjetError, RuntimeError):
    """Every chunk was asked, and there are fewer rows than there should be."""


@dataclass
class _Side:
    """One side of the split: its documents' chunks in the order in which they are asked, and its own seeds."""

    name: str
    target: int | None
    chunks: list[Chunk]
    pool: Pool | None
    rows: list[dict[str, Any]]
    waiting: deque[Chunk] = field(default_factory=deque)
    passes: int = 0
    under_way: dict[int, int] = field(default_factory=dict)

    def lacks(self, each: float) -> float:
        """Rows still to be asked for, where of each one asked for `each` is accepted."""
        if self.target is None:
            return float(len(self.waiting))
        return self.target - len(self.rows) - each * sum(self.under_way.values())


@dataclass
class _Outcome:
    """What one call came to, before it is taken in."""

    candidates: list[Found] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    error: AjetError | None = None


class FromDocs:
    """One run: `await run()` once. `result` and the endpoint's budget may be looked at meanwhile."""

    def __init__(
        self,
        corpus: Corpus,
        recipe: DocsRecipe,
        endpoint: Endpoint,
        *,
        seeds: Sequence[Row] = (),
        verifier: Verifier | None = None,
        leaks: Leaks | None = None,
    ) -> None:
        if not any(one.chunks for one in corpus.held):
            raise TaskError("there is no document that can be read, so there is nothing to ask about")
        if "few-shot" in recipe.kinds and not seeds:
            raise ConfigError("few-shot tasks are in the style of examples: give --seeds FILE")
        named = next((row.where for row in seeds if "quote" in row.values), None)
        if named is not None:
            raise ConfigError(
                f"{named} has a field 'quote', which is the name of the evidence that is asked for; give it another "
                "name by --map quote=metadata.quotation"
            )
        self.corpus, self.recipe, self.endpoint = corpus, recipe, endpoint
        self.shape = RowShape.infer(seeds, free_language=bool(recipe.languages)) if seeds else None
        self.result = Expanded()
        self.stop = asyncio.Event()
        """Set it to end the run as soon as what is under way has come back."""
        self.on_change: Callable[[Expanded], None] | None = None
        """Called after each call that was taken in."""
        self._verifier, self._leaks = verifier, leaks
        examples = [as_example(row) for row in seeds]
        self._near = Near(recipe.similarity, recipe.seed)
        for example in examples:
            self._near.add(f"seed {example.id}", text_of(example.values))
        self._sides = _sides(corpus, recipe, examples, self.result)
        self._before: dict[_Place, list[str]] = {}
        """The questions that a chunk has had."""
        self._calls: dict[int, tuple[DocsAsked, asyncio.Task[_Outcome]]] = {}
        self._screened: dict[int, asyncio.Event] = {}
        self._asked = self._barren = self._given = 0
        self._failed: list[AjetError] = []
        """Of the calls taken in since the last that was answered."""

    @property
    def chunks(self) -> list[Chunk]:
        """Every chunk, in the order in which they are asked the first time."""
        return [chunk for side in self._sides for chunk in side.chunks]

    def preview(self, chunk: Chunk, number: int = 0) -> DocsAsked:
        """A call as it would be made; nothing is sent and nothing changes."""
        side = next(side for side in self._sides if chunk in side.chunks)
        pool = Pool(side.pool.seeds) if side.pool is not None else None
        return self._compose(chunk, side, pool, number, self.recipe.per_call)

    async def run(self) -> Expanded:
        """Until there are the rows that the recipe asks for, or it has to stop: `result.stopped` says why."""
        stopping = asyncio.create_task(self.stop.wait())
        number = 0
        try:
            while self.result.stopped is None:
                self._dispatch(number)
                if number not in self._calls:
                    break
                asked, task = self._calls[number]
                await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if self.stop.is_set():
                    self.result.stopped = Interrupted("stopped: what was accepted is kept, and --resume goes on")
                    break
                del self._calls[number]
                self._take_in(asked, task.result())
                number += 1
            await self._drain()
            self._see_what_lacks()
        finally:
            left: list[asyncio.Task[Any]] = [stopping, *(task for _, task in self._calls.values())]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        return self.result

    async def _drain(self) -> None:
        """After a stop: what is on its way is waited for, for it is paid for, and taken in where it is whole."""
        if not self._calls:
            return
        self.endpoint.halt()
        done, _ = await asyncio.wait({task for _, task in self._calls.values()}, timeout=GRACE)
        for number in sorted(self._calls):
            asked, task = self._calls[number]
            if task in done and task.result().error is None:
                self._take_in(asked, task.result())

    def _see_what_lacks(self) -> None:
        result, wanted = self.result, self.recipe.count
        if result.stopped is not None:
            return
        unanswered = result.refused["no answer"]
        if wanted is not None and result.accepted < wanted:
            result.stopped = Exhausted(
                f"the documents gave {result.accepted:,} of {wanted:,} rows, and every part of them was asked "
                f"{_times(self.recipe.passes)}. Add documents, raise --passes, or make --chunk-size smaller"
            )
        elif wanted is None and unanswered:
            result.stopped = Exhausted(
                f"{unanswered:,} of {result.calls:,} parts got no answer (rejected.jsonl says why), and there are no "
                "rows of them"
            )
        elif not result.accepted:
            reasons = ", ".join(f"{count} {reason}" for reason, count in result.refused.most_common(3))
            result.stopped = Fruitless(
                f"no row could be kept (refused: {reasons or 'none, for none was written'}). rejected.jsonl says why "
                "for each; --show-prompt shows what was asked"
            )

    # Asking

    def _dispatch(self, taken_in: int) -> None:
        """Make the calls that can be made, knowing what was taken in so far."""
        recipe = self.recipe
        window = recipe.window if self.result.accepted else min(PROBE, recipe.window)
        while self._asked < taken_in + window:
            for side in self._sides:
                self._next_pass(side)
            each = max(0.1, (self.result.accepted + 1) / (self._given + 1)) if self.result.accepted else 1.0
            sides = [side for side in self._sides if side.waiting and side.lacks(each) > 0]
            if not sides:
                return
            side = max(sides, key=lambda one: one.lacks(each) / (one.target or len(one.chunks)))
            count = recipe.per_call
            if side.target is not None:
                count = max(1, min(count, round(side.lacks(each) / each)))
            asked = self._compose(side.waiting.popleft(), side, side.pool, self._asked, count)
            side.under_way[asked.number] = count
            self._screened[asked.number] = asyncio.Event()
            self._calls[asked.number] = (asked, asyncio.create_task(self._answered(asked)))
            self._asked += 1

    def _next_pass(self, side: _Side) -> None:
        """Ask the chunks again, when all that was asked of them is back: the prompts say what they have had."""
        most = 1 if side.target is None else self.recipe.passes
        if not side.waiting and not side.under_way and side.passes < most:
            side.passes += 1
            side.waiting.extend(side.chunks)

    def _compose(self, chunk: Chunk, side: _Side, pool: Pool | None, number: int, count: int) -> DocsAsked:
        before = self._before.get((chunk.document.digest, chunk.number), ())
        return ask_about(
            chunk, self.recipe, self.endpoint.model, side=side.name, number=number, count=count, shape=self.shape,
            pool=pool, before=before,
        )  # fmt: skip

    async def _answered(self, asked: DocsAsked) -> _Outcome:
        """The call, its rows screened in the order of the calls, and verified."""
        outcome, reply, recipe = _Outcome(), "", self.recipe
        try:
            try:
                [reply] = await self.endpoint.chat(
                    asked.messages, temperature=recipe.temperature, max_tokens=recipe.max_tokens, seed=asked.seed
                )
            except AjetError as error:
                outcome.error = error
            if asked.number:
                await self._screened[asked.number - 1].wait()
                del self._screened[asked.number - 1]
            if outcome.error is None:
                self._screen(asked, reply, outcome)
        finally:
            self._screened[asked.number].set()
        if outcome.candidates and self._verifier is not None:
            await self._verify(asked, outcome, self._verifier)
        return outcome

    async def _verify(self, asked: DocsAsked, outcome: _Outcome, verifier: Verifier) -> None:
        """A check that asks a model shows it the chunk: what is in no one's memory can still be right."""
        rows = [open_book(one.values, asked.chunk.text) if verifier.calls else one.values for one in outcome.candidates]
        for said in await asyncio.gather(*(verifier.check(row, self.endpoint) for row in rows), return_exceptions=True):
            if isinstance(said, AjetError):
                outcome.error = said
            elif isinstance(said, BaseException):
                raise said
            else:
                outcome.verdicts.append(said)

    # Judging

    def _screen(self, asked: DocsAsked, reply: str, outcome: _Outcome) -> None:
        """Which rows of a reply are grounded in the chunk, and new."""
        found, outcome.refused = found_in(asked, reply, self.shape)
        for one in found:
            why = self._known(one.values)
            if why is None:
                outcome.candidates.append(one)
            else:
                outcome.refused.append(Refused(*why, one.values, one.provenance))

    def _known(self, values: Mapping[str, Any]) -> tuple[str, str] | None:
        """Why a row is not new, where it is not: reason and detail. A new one is remembered."""
        if self._leaks is not None and (evidence := self._leaks(values)) is not None:
            return "in the evaluation set", evidence
        text = text_of(values)
        match = self._near.find(text)
        if match is not None:
            kind = "the same as" if match.kind == "exact" else f"{match.similarity:.2f} like"
            return f"{match.kind} duplicate", f"{kind} {match.key}"
        self._near.add(f"row {values['task_id']}", text)
        return None

    def _take_in(self, asked: DocsAsked, outcome: _Outcome) -> None:
        """Accept or refuse what a call came to; calls are taken in in their order."""
        self.result.calls += 1
        side = next(side for side in self._sides if side.name == asked.side)
        del side.under_way[asked.number]
        if outcome.error is not None:
            self._fail(asked, outcome.error)
            return
        self.endpoint.keep_failures([one for one in self._failed if isinstance(one, EndpointError)])
        self._failed.clear()
        self._given += asked.count
        self.result.rejected += outcome.refused
        before = self.result.accepted + self.result.surplus
        for index, one in enumerate(outcome.candidates):
            self._decide(asked, side, one, outcome.verdicts[index] if outcome.verdicts else None)
        self._barren = 0 if self.result.accepted + self.result.surplus > before else self._barren + 1
        if self._barren >= FRUITLESS and self.result.stopped is None:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.result.refused.most_common(3))
            self.result.stopped = Fruitless(
                f"{FRUITLESS} calls in a row gave no row that could be kept (refused so far: {reasons or 'none'}). "
                "rejected.jsonl says why for each; --show-prompt shows what was asked"
            )
        if self.on_change is not None:
            self.on_change(self.result)

    def _decide(self, asked: DocsAsked, side: _Side, found: Found, verdict: Verdict | None) -> None:
        self._before.setdefault((asked.chunk.document.digest, asked.chunk.number), []).append(text_of(found.values))
        said = None
        if verdict is not None and self._verifier is not None:
            said = verdict.as_json(self._verifier.name)
        provenance = {**found.provenance, "verdict": said}
        if verdict is not None and not verdict.ok:
            detail = "; ".join(f"{name}: {value}" for name, value in verdict.details.items())
            self.result.rejected.append(Refused(verdict.reason, detail[:400], found.values, provenance))
        elif side.target is not None and len(side.rows) >= side.target:
            self.result.surplus += 1
        else:
            side.rows.append({**found.values, "provenance": provenance})

    def _fail(self, asked: DocsAsked, error: AjetError) -> None:
        """One call may fail; several in a row, or one that says so of all, end the run."""
        self._failed.append(error)
        passing = isinstance(error, ContextOverflow) or (isinstance(error, EndpointError) and not error.permanent)
        if passing:
            self.result.rejected.append(Refused("no answer", str(error), None, asked.provenance))
        if (not passing or len(self._failed) >= FAILED) and self.result.stopped is None:
            self.result.stopped = error


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _sides(corpus: Corpus, recipe: DocsRecipe, seeds: Sequence[Example], result: Expanded) -> list[_Side]:
    """Both sides, or one: chunks by the document's side, seeds by a hash, so that no example stands on both."""
    share = corpus.share("validation")
    apart = min(max(1, round(share * len(seeds))), len(seeds) - 1) if share and len(seeds) > 1 else 0
    order = sorted(seeds, key=lambda one: hashlib.blake2b(f"{recipe.seed}:{one.id}".encode()).digest())
    kept = {one.id for one in order[:apart]}
    target = None
    if recipe.count is not None:
        wanted = recipe.validation if recipe.validation is not None else share
        target = min(max(1, round(wanted * recipe.count)), recipe.count - 1) if share else 0
    pools = [Pool([s for s in seeds if (s.id in kept) == held]) if seeds else None for held in (False, True)]
    train = None if recipe.count is None or target is None else recipe.count - target
    sides = [_Side("train", train, corpus.chunks("train", recipe.seed), pools[0], result.train)]
    if share and target != 0:
        validation = corpus.chunks("validation", recipe.seed)
        sides.append(_Side("validation", target, validation, pools[1], result.validation))
    return sides
