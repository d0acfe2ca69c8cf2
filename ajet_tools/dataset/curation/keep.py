"""Filters rows by expression or judge, and records the reason for each rejection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ajet_tools.dataset.curation.sql import Where
from ajet_tools.dataset.files.blocks import Block

if TYPE_CHECKING:
    from ajet_tools.dataset.verify.verdict import Verifier

Kept = tuple[Block, list[int]]
_AT_ONCE = 64  # a judge may wait for a model


@dataclass
class Keep:
    """The conditions on rows, combined by AND, and counts of rejections."""

    where: Where | None = None
    judge: Verifier | None = None
    """Checks the answers of rows that meet the other conditions."""
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
            matching = set(self.where.matching(block))
            rejected = [index for index in indices if index not in matching]
            self._reject(block, rejected, "not matching the expression")
            indices = [index for index in indices if index in matching]
        if self.judge is not None:
            import asyncio  # a filter without a judge starts faster

            indices = asyncio.run(self._verified(block, indices, self.judge))
        return indices

    def _reject(self, block: Block, indices: Sequence[int], reason: str) -> None:
        if not indices:
            return
        self.left_out[reason] += len(indices)
        if self.on_left_out is not None:
            self.on_left_out(block.take(indices), reason)

    async def _verified(self, block: Block, indices: Sequence[int], judge: Verifier) -> list[int]:
        import asyncio

        rows = list(block.rows())
        kept: list[int] = []
        for start in range(0, len(indices), _AT_ONCE):
            some = indices[start : start + _AT_ONCE]
            checks = [judge.check(rows[index].values, None) for index in some]
            for index, verdict in zip(some, await asyncio.gather(*checks), strict=True):
                if verdict.ok:
                    kept.append(index)
                    continue
                self._reject(block, [index], verdict.reason)
                if verdict.failed and len(self.failures) < 5:
                    error = verdict.details.get("error", verdict.reason)
                    self.failures.append(f"{block.where(index)}: {error}")
        return kept
