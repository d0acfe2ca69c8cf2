"""Filters rows by expression or judge, and records the reason for each rejection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ajet_tools.dataset.curation.sql import Where
from ajet_tools.dataset.files.blocks import Block, Row

if TYPE_CHECKING:
    from ajet_tools.dataset.verify.verdict import RowVerdict, Verifier

Kept = tuple[Block, list[int]]
_AT_ONCE = 64


@dataclass
class Keep:
    """The conditions on rows, combined by AND, and counts of rejections."""

    where: Where | None = None
    judge: Verifier | None = None
    """Checks the answers of rows that meet the other conditions."""
    reward: float | None = None
    """Minimum reward. Default: the judge's full marks."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rejected rows by their first reason."""
    on_left_out: Callable[[Block, str], None] | None = None
    """Called with rejected rows and the reason."""
    failures: list[str] = field(default_factory=list)
    """The first few failures of the judge, with locations."""

    def of(self, blocks: Iterable[Block]) -> Iterator[Kept]:
        """Yields each block with the indices of its accepted rows, in order."""
        for block in blocks:
            yield block, self._kept(block)

    def _kept(self, block: Block) -> list[int]:
        indices = list(range(len(block)))
        if self.where is not None:
            indices = self._matching(block, indices, self.where)
        if self.judge is not None:
            indices = self._verified(block, indices, self.judge)
        return indices

    def _matching(self, block: Block, indices: Sequence[int], where: Where) -> list[int]:
        matching = set(where.matching(block))
        rejected = [index for index in indices if index not in matching]
        self._reject(block, rejected, "not matching the expression")
        return [index for index in indices if index in matching]

    def _reject(self, block: Block, indices: Sequence[int], reason: str) -> None:
        if not indices:
            return
        self.left_out[reason] += len(indices)
        if self.on_left_out is not None:
            self.on_left_out(block.take(indices), reason)

    def _verified(self, block: Block, indices: Sequence[int], judge: Verifier) -> list[int]:
        import asyncio

        rows = list(block.rows())

        async def verdicts(some: Sequence[int]) -> list[RowVerdict]:
            checks = [judge.check(rows[index].values, None) for index in some]
            return list(await asyncio.gather(*checks))

        kept: list[int] = []
        with asyncio.Runner() as runner:
            for start in range(0, len(indices), _AT_ONCE):
                some = indices[start : start + _AT_ONCE]
                for index, verdict in zip(some, runner.run(verdicts(some)), strict=True):
                    reason = self._problem(rows[index], verdict)
                    if reason is None:
                        kept.append(index)
                    else:
                        self._reject(block, [index], reason)
        return kept

    def _problem(self, row: Row, verdict: RowVerdict) -> str | None:
        """Returns the reason for a rejection, or None."""
        if verdict.failed:
            if len(self.failures) < 5:
                self.failures.append(f"{row.where}: {verdict.details.get('error', verdict.reason)}")
            return verdict.reason
        reward = verdict.details.get("reward")
        if self.reward is not None and isinstance(reward, int | float):
            if reward < self.reward:
                return f"with a reward below {self.reward:g}"
        elif not verdict.ok:
            return verdict.reason
        return None
