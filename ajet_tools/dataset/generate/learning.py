"""Selects rows by learning value: the policy tries each, and should solve it sometimes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from ajet_sdk.engines.client import Halted, ModelClient
from ajet_sdk.errors import TaskError
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.types import Episode, Task
from ajet_tools.dataset.calibrate import (
    Band,
    Inconclusive,
    Measurement,
    Measurements,
    measurement,
    outside_band,
    task_of_row,
    with_difficulty,
)
from ajet_tools.dataset.verify.combined import CombinedVerifier, VerifierPart, single_verdicts
from ajet_tools.dataset.verify.verdict import RowVerdict

_FRUITLESS = 8
"""Stop after this many tasks if no attempt was usable."""


class Policy(Protocol):
    """An agent and its model, which attempts tasks, such as `ajet_sdk.run.OpenRun`."""

    async def attempt(self, attempts: Sequence[Attempt]) -> list[Episode]:
        """Makes the attempts and returns the episodes in order."""
        ...

    async def check(self) -> None:
        """Raises an error that prevents all attempts, before the first row is paid for."""
        return

    async def aclose(self) -> None:
        return


@dataclass
class LearningValue:
    """A verifier of rows: the policy must solve the task in some of k attempts, but not in all.

    A trial depends on the task only: seeds derive from the task's id, and results in `known` are
    reused.
    """

    name: ClassVar[str] = "policy"
    calls: ClassVar[int] = 0
    needs_answer: ClassVar[bool] = False

    policy: Policy
    model: str
    """The policy's name, for the dataset card."""
    known: Measurements
    k: int = 8
    band: Band = field(default_factory=lambda: Band(0.2, 0.8))
    seed: int | None = 0
    """None: attempts are not seeded."""
    at_once: int = 16
    """Maximum number of tasks tried concurrently."""
    halted: bool = False
    """If set, tasks without a result raise Halted."""

    def __post_init__(self) -> None:
        self._room = asyncio.Semaphore(self.at_once)
        self._tried = self._inconclusive = 0

    def after(self, verifier: CombinedVerifier | None) -> CombinedVerifier:
        """Returns a verifier that runs the given one first."""
        before = verifier.parts if verifier is not None else ()
        if verifier is not None:
            name = f"{verifier.name},{self.name}"
        else:
            name = self.name
        return CombinedVerifier(name, [*before, VerifierPart(self)])

    def as_json(self) -> dict[str, Any]:
        """Returns the settings that determine verdicts, to compare when a run is resumed."""
        return {
            "attempts": self.k,
            "pass_rate": str(self.band),
            "conditions": self.known.held_under,
        }

    async def check(self, row: Mapping[str, object], endpoint: ModelClient | None) -> RowVerdict:
        """Returns the verdict with the measurement as details. Raises TaskError if no trial is
        usable."""
        try:
            measured = await self._measure(task_of_row("row", row))
        except Inconclusive as error:
            return RowVerdict(False, "difficulty not measured", {"why": str(error)}, failed=True)
        problem, _, solved = outside_band(measured, self.band).partition(": ")
        if measured.pass_rate in self.band:
            return RowVerdict(True, solved, asdict(measured))
        return RowVerdict(False, f"{problem} for the policy", asdict(measured))

    async def _measure(self, task: Task) -> Measurement:
        if (measured := self.known.get(task)) is not None:
            return measured
        if self.halted:
            raise Halted("not tried: no further calls are made")
        async with self._room:
            episodes = await self.policy.attempt(
                [self._attempt(task, number) for number in range(self.k)]
            )
        try:
            measured = measurement(episodes)
        except Inconclusive as error:
            self._inconclusive += 1
            if self._inconclusive >= _FRUITLESS and not self._tried:
                raise TaskError(
                    f"the policy could not try any of {_FRUITLESS} tasks; the last: {error}"
                ) from error
            raise
        self._tried += 1
        self.known.put(task, measured)
        return measured

    def _attempt(self, task: Task, number: int) -> Attempt:
        shared = seed_of(self.seed, task.task_id, "group")
        own_seed = None
        if self.seed is not None:
            own_seed = seed_of(self.seed, task.task_id, number)
        return Attempt(
            task,
            run_id="",
            group_id=f"{task.task_id}/{shared}",
            attempt=number,
            step=0,
            split="val",
            seed=own_seed,
            group_seed=shared,
        )


def seed_of(*parts: object) -> int:
    """Returns a 32-bit seed derived from the parts."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def with_pass_rate(row: Mapping[str, Any]) -> dict[str, Any]:
    """Sets the `metadata.pass_rate` and `metadata.difficulty` of an accepted row's trial, if
    any."""
    for verdict in single_verdicts(row["provenance"].get("verdict") or {}):
        if verdict["verifier"] == "policy":
            return with_difficulty(row, Measurement(**verdict["details"]))
    return dict(row)
