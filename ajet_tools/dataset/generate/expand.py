"""Growing a dataset from few examples: what `Generation` asks for, and from which seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ajet_tools.dataset.files.tables import Row, text_of
from ajet_tools.dataset.generate.coverage import axes_of
from ajet_tools.dataset.generate.examples import Example, Pool, as_example, compose, compose_as, task_id_of
from ajet_tools.dataset.generate.loop import Generation
from ajet_tools.dataset.generate.records import (
    Attempt,
    Candidate,
    GenerationConfig,
    GenerationResult,
    Rejected,
    SplitTarget,
)
from ajet_tools.dataset.model.endpoint import Endpoint
from ajet_tools.dataset.model.replies import rows_in
from ajet_tools.dataset.rows.schema import Misfit, RowShape

if TYPE_CHECKING:
    from ajet_tools.dataset.similarity.decontaminate import Leaks
    from ajet_tools.dataset.similarity.meaning import MeaningIndex
    from ajet_tools.dataset.verify.verdict import Verifier

__all__ = ["Expansion"]

SMALL = 5
"""With fewer seeds, none is kept apart for validation unless that is asked for."""


@dataclass(kw_only=True)
class _Target(SplitTarget):
    """No seed and no row of one side is ever an example on the other."""

    pool: Pool


class Expansion(Generation[Attempt, _Target]):
    """One run: `await run()` once. `result` and the endpoint's budget may be looked at meanwhile."""

    def __init__(
        self,
        seeds: Sequence[Row],
        config: GenerationConfig,
        endpoint: Endpoint,
        *,
        verifier: Verifier | None = None,
        leaks: Leaks | None = None,
        meanings: MeaningIndex | None = None,
        known: Sequence[Row] = (),
        on_change: Callable[[GenerationResult], None] | None = None,
    ) -> None:
        self.config = config
        self.shape = RowShape.infer(seeds, free_language=bool(config.languages))
        axes = axes_of(seeds, config.cells)
        for axis in axes:
            self.shape.allow(axis.path, axis.values)
        examples = [as_example(row) for row in seeds]
        there = {one.id: one for one in (*examples, *map(as_example, known))}.values()
        super().__init__(
            config,
            endpoint,
            list(there),
            axes=axes,
            verifier=verifier,
            leaks=leaks,
            meanings=meanings,
            on_change=on_change,
        )
        share = config.validation if config.validation is not None else 0.1 if len(examples) >= SMALL else 0.0
        self._sides = _split(examples, config, share, self.result)

    def preview(self, strategy: str) -> Attempt:
        """The first call as it would be made with a strategy; nothing is sent and nothing changes."""
        pool = Pool(self._sides["train"].pool.seeds)
        return compose_as(strategy, self.config, self.shape, self.endpoint.model, pool, self.coverage, "train", 0)

    @property
    def seeds_by_side(self) -> dict[str, list[Example]]:
        return {side.name: side.pool.seeds for side in self._sides.values()}

    def _next(self, number: int, each: float) -> Attempt | None:
        side = min(self._sides.values(), key=lambda one: one.progress(each))
        made = compose(self.config, self.shape, self.endpoint.model, side.pool, self.coverage, side.name, number)
        self.coverage.ask(made.cell)
        return made

    def _read_reply(self, attempt: Attempt, reply: str) -> tuple[list[Candidate], list[Rejected]]:
        """Which rows of a reply have the shape of the dataset's."""
        candidates, refused = list[Candidate](), list[Rejected]()
        rows, problem = rows_in(reply)
        if problem is not None:
            reason, _, detail = problem.partition(": ")
            refused.append(Rejected(reason, detail, None, attempt.provenance, reply))
        for row in rows[: 2 * attempt.count]:
            try:
                values = self.shape.fit(row)
            except Misfit as misfit:
                shown = row if isinstance(row, dict) else {"row": row}
                refused.append(Rejected("wrong format", str(misfit), shown, attempt.provenance))
                continue
            candidates.append(Candidate({"task_id": task_id_of(values), **values}, attempt.provenance))
        return candidates, refused

    def _record_decision(self, attempt: Attempt, side: _Target, candidate: Candidate, sound: bool) -> None:
        if sound:
            values, seeds = candidate.values, candidate.provenance["seeds"]
            side.pool.accepted.append(Example.of(values["task_id"], values, text_of(values), seeds))


def _split(
    seeds: Sequence[Example], config: GenerationConfig, share: float, result: GenerationResult
) -> dict[str, _Target]:
    """The seeds of each side, by a hash of what they are."""
    apart = min(max(1, round(share * len(seeds))), len(seeds) - 1) if share else 0
    order = sorted(seeds, key=lambda one: hashlib.blake2b(f"{config.seed}:{one.id}".encode()).digest())
    kept = {one.id for one in order[:apart]}
    target = min(max(1, round(share * config.count)), config.count - 1) if share else 0
    train, validation = (Pool([seed for seed in seeds if (seed.id in kept) == held]) for held in (False, True))
    sides = {
        "train": _Target(name="train", share=1 - share, target=config.count - target, rows=result.train, pool=train)
    }
    if share:
        sides["validation"] = _Target(
            name="validation", share=share, target=target, rows=result.validation, pool=validation
        )
    return sides
