"""Growing a dataset from few examples.

A run is a function of its seeds, its recipe and the replies: calls are numbered, what comes back is taken in by number,
and the prompt of a call depends on nothing but what was taken in `window` calls before. So the same replies give the
same bytes, at any speed; and a run that was killed is resumed by running it again, with the replies that are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import AjetError, ContextOverflow
from ajet_tools.dataset.composing import compose, compose_as
from ajet_tools.dataset.drawing import Example, Pool
from ajet_tools.dataset.endpoint import Endpoint, EndpointError
from ajet_tools.dataset.expanded import Asked, Expanded, Fruitless, Interrupted, Refused
from ajet_tools.dataset.recipe import Recipe
from ajet_tools.dataset.replies import rows_in
from ajet_tools.dataset.seeds import as_example, task_id_of
from ajet_tools.dataset.shape import Misfit, RowShape
from ajet_tools.dataset.similar import Near
from ajet_tools.dataset.tables import Row, text_of

if TYPE_CHECKING:
    from ajet_tools.dataset.leaks import Leaks
    from ajet_tools.dataset.verify import Verdict, Verifier

__all__ = ["Expansion"]

PROBE = 4
"""Calls under way until the first row is accepted: a wrong key or a prompt that fails costs no more."""
FRUITLESS = 30
"""Calls in a row without a row that can be kept, after which a run stops."""
FAILED = 3
"""Calls in a row that the endpoint fails, after which a run stops."""
GRACE = 30.0
"""Seconds that calls under way have to come back when a run stops: they are paid for."""
SMALL = 5
"""With fewer seeds, none is kept apart for validation unless that is asked for."""


@dataclass
class _Side:
    """One side of the split: no seed and no row is ever an example on the other."""

    name: str
    target: int
    pool: Pool
    rows: list[dict[str, Any]]
    under_way: dict[int, int] = field(default_factory=dict)
    """Rows asked for in each call under way."""

    def lacks(self, each: float) -> float:
        """Rows still to be asked for, where of each one asked for `each` is accepted."""
        return self.target - len(self.rows) - each * sum(self.under_way.values())


@dataclass
class _Outcome:
    """What one call came to, before it is taken in."""

    candidates: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    error: AjetError | None = None


class Expansion:
    """One run: `await run()` once. `result` and the endpoint's budget may be looked at meanwhile."""

    def __init__(
        self,
        seeds: Sequence[Row],
        recipe: Recipe,
        endpoint: Endpoint,
        *,
        verifier: Verifier | None = None,
        leaks: Leaks | None = None,
        on_change: Callable[[Expanded], None] | None = None,
    ) -> None:
        self.recipe, self.endpoint = recipe, endpoint
        self.shape = RowShape.infer(seeds, free_language=bool(recipe.languages))
        self.result = Expanded()
        self.stop = asyncio.Event()
        """Set it to end the run as soon as what is under way has come back."""
        self._verifier, self._leaks, self._on_change = verifier, leaks, on_change
        self._sides = _split([as_example(row) for row in seeds], recipe, self.result)
        self._near = Near(recipe.similarity, recipe.seed)
        for side in self._sides.values():
            for example in side.pool.seeds:
                self._near.add(f"seed {example.id}", text_of(example.values))
        self._calls: dict[int, tuple[Asked, asyncio.Task[_Outcome]]] = {}
        """Under way."""
        self._screened: dict[int, asyncio.Event] = {}
        self._asked = self._barren = 0
        self._failed: list[AjetError] = []
        """Of the calls taken in since the last that was answered."""
        self._given = 0
        """Rows that the calls taken in were asked for."""

    def preview(self, strategy: str) -> Asked:
        """The first call as it would be made with a strategy; nothing is sent and nothing changes."""
        pool = Pool(self._sides["train"].pool.seeds)
        return compose_as(
            strategy, self.recipe, self.shape, self.endpoint.model, pool, "train", 0, self.recipe.per_call
        )

    @property
    def seeds_by_side(self) -> dict[str, list[Example]]:
        return {side.name: side.pool.seeds for side in self._sides.values()}

    async def run(self) -> Expanded:
        """Until there are as many rows as the recipe says, or it has to stop: `result.stopped` says why."""
        stopping: asyncio.Task[Any] = asyncio.create_task(self.stop.wait())
        number = 0
        try:
            while self.result.stopped is None:
                self._dispatch(number)
                if number not in self._calls:
                    break
                asked, task = self._calls[number]
                await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
                if self.stop.is_set():
                    self.result.stopped = Interrupted("stopped: what was accepted is kept, and --resume goes on")
                    break
                del self._calls[number]
                self._take_in(asked, task.result())
                number += 1
            await self._drain()
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

    # Asking

    def _dispatch(self, taken_in: int) -> None:
        """Make the calls that can be made, knowing what was taken in so far."""
        recipe = self.recipe
        window = recipe.window if self.result.accepted else min(PROBE, recipe.window)
        while self._asked < taken_in + window:
            each = max(0.1, (self.result.accepted + 1) / (self._given + 1)) if self.result.accepted else 1.0
            side = max(self._sides.values(), key=lambda one: one.lacks(each) / one.target)
            lacking = side.lacks(each)
            if lacking <= 0:
                return
            count = max(1, min(recipe.per_call, round(lacking / each)))
            asked = compose(recipe, self.shape, self.endpoint.model, side.pool, side.name, self._asked, count)
            side.under_way[asked.number] = count
            self._screened[asked.number] = asyncio.Event()
            self._calls[asked.number] = (asked, asyncio.create_task(self._answered(asked)))
            self._asked += 1

    async def _answered(self, asked: Asked) -> _Outcome:
        """The call, its rows screened in the order of the calls, and verified."""
        outcome, reply = _Outcome(), ""
        recipe = self.recipe
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
            await self._verify(outcome, self._verifier)
        return outcome

    async def _verify(self, outcome: _Outcome, verifier: Verifier) -> None:
        checks = [verifier.check(values, self.endpoint) for values in outcome.candidates]
        for said in await asyncio.gather(*checks, return_exceptions=True):
            if isinstance(said, AjetError):
                outcome.error = said
            elif isinstance(said, BaseException):
                raise said
            else:
                outcome.verdicts.append(said)

    # Judging

    def _screen(self, asked: Asked, reply: str, outcome: _Outcome) -> None:
        """Which rows of a reply have the shape of the dataset's, and are new."""
        rows, problem = rows_in(reply)
        if problem is not None:
            reason, _, detail = problem.partition(": ")
            outcome.refused.append(Refused(reason, detail, None, asked.provenance, reply))
        for row in rows[: 2 * asked.count]:
            try:
                values = self.shape.fit(row)
            except Misfit as misfit:
                shown = row if isinstance(row, dict) else {"row": row}
                outcome.refused.append(Refused("other shape", str(misfit), shown, asked.provenance))
                continue
            values = {"task_id": task_id_of(values), **values}
            why = self._known(values)
            if why is None:
                outcome.candidates.append(values)
            else:
                outcome.refused.append(Refused(*why, values, asked.provenance))

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

    def _take_in(self, asked: Asked, outcome: _Outcome) -> None:
        """Accept or refuse what a call came to; calls are taken in in their order."""
        self.result.calls += 1
        side = self._sides[asked.side]
        del side.under_way[asked.number]
        if outcome.error is not None:
            self._fail(asked, outcome.error)
            return
        self.endpoint.keep_failures([one for one in self._failed if isinstance(one, EndpointError)])
        self._failed.clear()
        self._given += asked.count
        self.result.rejected += outcome.refused
        before = self.result.accepted + self.result.surplus
        for index, values in enumerate(outcome.candidates):
            self._decide(asked, side, values, outcome.verdicts[index] if outcome.verdicts else None)
        self._barren = 0 if self.result.accepted + self.result.surplus > before else self._barren + 1
        if self._barren >= FRUITLESS and self.result.stopped is None:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.result.refused.most_common(3))
            self.result.stopped = Fruitless(
                f"{FRUITLESS} calls in a row gave no row that could be kept (refused so far: {reasons}). "
                "rejected.jsonl says why for each; --show-prompt shows what was asked"
            )
        if self._on_change is not None:
            self._on_change(self.result)

    def _decide(self, asked: Asked, side: _Side, values: dict[str, Any], verdict: Verdict | None) -> None:
        said = None
        if verdict is not None and self._verifier is not None:
            said = verdict.as_json(self._verifier.name)
        provenance = {**asked.provenance, "verdict": said}
        if verdict is not None and not verdict.ok:
            self.result.rejected.append(Refused(verdict.reason, _short(verdict.details), values, provenance))
        elif len(side.rows) >= side.target:
            self.result.surplus += 1
        else:
            side.rows.append({**values, "provenance": provenance})
            seeds = provenance["seeds"]
            side.pool.accepted.append(Example.of(values["task_id"], values, text_of(values), seeds))

    def _fail(self, asked: Asked, error: AjetError) -> None:
        """One call may fail; several in a row, or one that says so of all, end the run."""
        self._failed.append(error)
        passing = isinstance(error, ContextOverflow) or (isinstance(error, EndpointError) and not error.permanent)
        if passing:
            self.result.rejected.append(Refused("no answer", str(error), None, asked.provenance))
        if (not passing or len(self._failed) >= FAILED) and self.result.stopped is None:
            self.result.stopped = error


def _split(seeds: Sequence[Example], recipe: Recipe, result: Expanded) -> dict[str, _Side]:
    """The seeds of each side, by a hash of what they are; a side without rows to make is left out."""
    share = recipe.validation
    if share is None:
        share = 0.1 if len(seeds) >= SMALL else 0.0
    target = round(share * recipe.count)
    if share and not target:
        target = 1 if recipe.count > 1 else 0
    apart = min(max(1, round(share * len(seeds))), len(seeds) - 1) if target else 0
    order = sorted(seeds, key=lambda one: hashlib.blake2b(f"{recipe.seed}:{one.id}".encode()).digest())
    kept = {one.id for one in order[:apart]}
    sides = {"train": _Side("train", recipe.count - target, Pool([s for s in seeds if s.id not in kept]), result.train)}
    if target:
        pool = Pool([s for s in seeds if s.id in kept])
        sides["validation"] = _Side("validation", target, pool, result.validation)
    return sides


def _short(details: Mapping[str, Any]) -> str:
    text = "; ".join(f"{name}: {value}" for name, value in details.items())
    return text if len(text) <= 400 else text[:399] + "…"
