"""Filters rows by expression, language or judge, and records the reason for each rejection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.curation.language import LANGUAGES, language_of
from ajet_tools.dataset.curation.sql import Where
from ajet_tools.dataset.files.blocks import Block, Row

if TYPE_CHECKING:
    from ajet_tools.dataset.verify.verdict import RowVerdict, Verifier

Kept = tuple[Block, npt.NDArray[np.integer[Any]]]
_AT_ONCE = 64


@dataclass
class Keep:
    """The conditions on rows, combined by AND, and counts of rejections."""

    where: Where | None = None
    languages: Sequence[str] = ()
    judge: Verifier | None = None
    """Checks the answers of rows that meet the other conditions."""
    reward: float | None = None
    """Minimum reward. Default: the judge's full marks."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Rejected rows by their first reason."""
    on_left_out: Callable[[Row, str], None] | None = None
    """Called with each rejected row and the reason."""
    failures: list[str] = field(default_factory=list)
    """The first few failures of the judge, with locations."""

    def __post_init__(self) -> None:
        for language in self.languages:
            if language not in (*LANGUAGES, "und"):
                raise ConfigError(
                    f"--language {language} is unknown; languages: {', '.join(LANGUAGES)}, und"
                )

    def of(self, blocks: Iterable[Block]) -> Iterator[Kept]:
        """Yields each block with the indices of its accepted rows, in order."""
        for block in blocks:
            yield block, self._kept(block)

    def _kept(self, block: Block) -> npt.NDArray[np.integer[Any]]:
        left = np.ones(len(block), bool)
        for fitting, reason in self._conditions(block):
            out = left & ~fitting
            left &= fitting
            for index in np.flatnonzero(out) if callable(reason) or self.on_left_out else ():
                self._reject(block, int(index), reason(int(index)) if callable(reason) else reason)
            if out.any() and not (callable(reason) or self.on_left_out):
                self.left_out[str(reason)] += int(out.sum())
        kept = np.flatnonzero(left)
        return self._verify(block, kept) if self.judge else kept

    def _conditions(
        self, block: Block
    ) -> Iterator[tuple[npt.NDArray[np.bool_], str | Callable[[int], str]]]:
        """Yields a mask for each condition, and the reason for rejections."""
        if self.languages:
            detected = [language_of(text) for text in block.texts]
            yield (
                np.isin(detected, list(self.languages)),
                lambda index: f"in another language ({detected[index]})",
            )
        if self.where:
            yield self.where.mask(block), "not matching the expression"

    def _reject(self, block: Block, index: int, reason: str) -> bool:
        self.left_out[reason] += 1
        if self.on_left_out:
            self.on_left_out(next(iter(block.rows([index]))), reason)
        return False

    def _verify(
        self, block: Block, indices: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.integer[Any]]:
        judge = self.judge
        assert judge is not None
        import asyncio

        async def verdicts(rows: Sequence[Row]) -> list[RowVerdict]:
            return list(await asyncio.gather(*(judge.check(row.values, None) for row in rows)))

        loop, kept, left = asyncio.new_event_loop(), list[int](), iter(indices)
        try:
            while some := [int(index) for index in islice(left, _AT_ONCE)]:
                rows = list(block.rows(some))
                for index, row, verdict in zip(
                    some, rows, loop.run_until_complete(verdicts(rows)), strict=True
                ):
                    if self._accept(block, index, row, verdict):
                        kept.append(index)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        return np.array(kept, np.int64)

    def _accept(self, block: Block, index: int, row: Row, verdict: RowVerdict) -> bool:
        if verdict.failed:
            if len(self.failures) < 5:
                self.failures.append(f"{row.where}: {verdict.details.get('error', verdict.reason)}")
            return self._reject(block, index, verdict.reason)
        reward = verdict.details.get("reward")
        if self.reward is not None and isinstance(reward, int | float):
            return reward >= self.reward or self._reject(
                block, index, f"with a reward below {self.reward:g}"
            )
        return verdict.ok or self._reject(block, index, verdict.reason)
