"""The generation loop of `expand` and `from-docs`.

A run is a function of its inputs, its config and the replies: calls are numbered, results are
processed in order, and call N is composed when the result of call N - `window` is processed; it is
sent when it is needed. Equal replies therefore give equal bytes, at any speed and for any number of
rows, and a run can be resumed or extended from cached replies.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ajet_sdk.engines.client import Halted, ModelClient
from ajet_sdk.errors import AjetError, ContextOverflow, EngineUnavailable, RequestRefused
from ajet_tools.dataset.generate.coverage import Axis, Collapsed, Coverage
from ajet_tools.dataset.generate.examples import Example, Side, task_id_of
from ajet_tools.dataset.generate.records import (
    CallSettings,
    Candidate,
    Checks,
    GenerationResult,
    Interrupted,
    NoProgress,
    Outlook,
    Rejected,
    Unusable,
    WriterCall,
)
from ajet_tools.dataset.generate.screen import Screen
from ajet_tools.dataset.model.replies import rows_in
from ajet_tools.dataset.verify.combined import endpoints_of

if TYPE_CHECKING:
    from ajet_tools.dataset.similarity.near import Vectors
    from ajet_tools.dataset.verify.verdict import RowVerdict, Verifier

log = logging.getLogger("ajet.dataset")
PROBE = 4
"""Concurrent calls until the first row is accepted, to limit the cost of a wrong key or prompt."""
NO_PROGRESS = 30
"""Consecutive calls without a sound row after which a run stops."""
FAILED = 3
"""Consecutive failed calls after which a run stops."""
_EARLY = 100
"""Accepted rows after which low diversity is reported."""
KEPT = 0.8
"""Acceptance rate that estimates assume."""
GRACE = 30.0
"""Seconds to wait for calls in flight when a run stops, since they are paid for."""


@dataclass
class _Outcome:
    """The result of a call, before it is processed."""

    rows: Sequence[Candidate] = ()
    """Valid rows; their embeddings, if used."""
    vectors: Vectors | None = None
    candidates: list[Candidate] = field(default_factory=list)
    """The new rows among them."""
    verdicts: list[RowVerdict] = field(default_factory=list)
    refused: list[Rejected] = field(default_factory=list)
    error: AjetError | None = None


A = TypeVar("A", bound=WriterCall)


class Generation(ABC, Generic[A]):
    """A generation run: `await run()` once. `result` and the endpoint's budget are readable
    meanwhile."""

    def __init__(
        self,
        config: CallSettings,
        endpoint: ModelClient,
        examples: Sequence[Example],
        checks: Checks,
        *,
        axes: Sequence[Axis] = (),
        fields: Sequence[str] = (),
    ) -> None:
        """`fields` are the prompt's lines about the fields of a row."""
        self.config, self.endpoint, self.checks = config, endpoint, checks
        self.result = GenerationResult()
        self.stop = asyncio.Event()
        """Set it to end the run after the calls in flight."""
        self.stopped_by = signal.SIGINT
        self.on_change: Callable[[GenerationResult], None] | None = None
        """Called after each processed call."""
        self._screen = Screen(config, examples, checks, fields)
        self._sides: dict[str, Side] = {}
        self.coverage = Coverage(
            axes, [example.values for example in examples], config.min_new_forms
        )
        self._composed: deque[A] = deque()
        """Calls not sent yet."""
        self._calls: dict[int, tuple[A, asyncio.Task[_Outcome]]] = {}
        """Calls in flight."""
        self._screened: dict[int, asyncio.Event] = {}
        self._attempts = self._without_progress = 0
        self._warned = False
        self._failed: list[AjetError] = []
        """Errors since the last answered call."""

    quiet = 60.0
    """Seconds without a reply after which the cause is logged."""

    @abstractmethod
    def outlook(self) -> Outlook:
        """Estimates the calls and tokens left."""

    @abstractmethod
    def _next(self, number: int, each: float) -> A | None:
        """Returns the next call at an acceptance rate of `each`, or None if nothing is left to ask.

        Must not depend on the number of rows requested.
        """

    @abstractmethod
    def _read_row(self, attempt: A, row: object) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Returns a row of a reply with its provenance. Raises Unusable for an invalid row."""

    def _is_exhausted(self, side: Side) -> bool:
        return False

    def _row_for_verifier(
        self, attempt: A, candidate: Candidate, verifier: Verifier
    ) -> Mapping[str, Any]:
        """Returns the row as verifiers see it."""
        return candidate.values

    def _record_decision(self, attempt: A, side: Side, candidate: Candidate, sound: bool) -> None:
        """Called for each decided row; a sound row may exceed the target."""

    def _finish(self) -> None:
        """Called at the end, to report missing rows."""

    async def run(self) -> GenerationResult:
        """Runs until there are enough rows, or it has to stop, with the reason in
        `result.stopped`."""
        stopping: asyncio.Task[object] = asyncio.create_task(self.stop.wait())
        number = 0
        try:
            try:
                await self._screen.learn_seeds()
            except AjetError as error:
                self.result.stopped = error
            while self.result.stopped is None:
                self._dispatch(number)
                if number not in self._calls:
                    break
                attempt, task = self._calls[number]
                while not (task.done() or self.stop.is_set()):
                    await asyncio.wait(
                        [task, stopping], timeout=self.quiet, return_when=asyncio.FIRST_COMPLETED
                    )
                    if not (task.done() or self.stop.is_set()):
                        log.warning(
                            "no reply in %.0f s: waiting for %s",
                            self.quiet,
                            self.describe_wait(0.0),
                        )
                if self.stop.is_set():
                    self.result.stopped = Interrupted(self.stopped_by)
                    break
                del self._calls[number]
                self._take_in(attempt, task.result())
                number += 1
            await self._drain()
            self._finish()
            if not isinstance(self.result.stopped, Halted):
                self._warn_of_forms()
            self.result.coverage = self.coverage.as_json()
            self.result.coverage_text = "; ".join(self.coverage.parts())
        finally:
            left: list[asyncio.Task[Any]] = [stopping, *(task for _, task in self._calls.values())]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        return self.result

    @property
    def _endpoints(self) -> list[ModelClient]:
        meanings = self.checks.meanings
        embedders = [meanings.embedder] if meanings is not None else []
        return [self.endpoint, *endpoints_of(self.checks.verifier), *embedders]

    def describe_wait(self, slow: float = 10.0) -> str:
        """Returns why the endpoints' requests wait, as in `ModelClient.describe_wait`."""
        waits = dict.fromkeys(endpoint.describe_wait(slow) for endpoint in self._endpoints)
        return "; ".join(filter(None, waits))

    def halt(self) -> None:
        """Stops sending; only cached replies are processed."""
        for endpoint in self._endpoints:
            endpoint.halt()

    async def aclose(self) -> None:
        """Closes the endpoints."""
        for endpoint in self._endpoints:
            await endpoint.aclose()

    async def _drain(self) -> None:
        """After a stop, waits for calls in flight, which are paid for, and processes complete
        results.

        If the rows themselves ended the run, results are only cached, for reproducibility.
        """
        if not self._calls:
            return
        self.halt()
        done, _ = await asyncio.wait({task for _, task in self._calls.values()}, timeout=GRACE)
        for number in sorted(self._calls):
            attempt, task = self._calls[number]
            if (
                task in done
                and task.result().error is None
                and not isinstance(self.result.stopped, NoProgress)
            ):
                self._take_in(attempt, task.result())

    def _dispatch(self, taken_in: int) -> None:
        """Composes calls from the processed results, and sends those that are needed."""
        each = (
            max(0.1, (self.result.sound + 1) / (self.result.asked + 1))
            if self.result.sound
            else 1.0
        )
        while self._attempts < taken_in + self.config.window:
            attempt = self._next(self._attempts, each)
            if attempt is None:
                break
            self._sides[attempt.side].composed += attempt.count
            self._composed.append(attempt)
            self._attempts += 1
        most = self.config.window if self.result.sound else min(PROBE, self.config.window)
        while self._composed and len(self._calls) < most and self._is_short(each):
            attempt = self._composed.popleft()
            self._sides[attempt.side].sent += attempt.count
            self._screened[attempt.number] = asyncio.Event()
            self._calls[attempt.number] = (attempt, asyncio.create_task(self._answer(attempt)))

    def _calls_left(self, count: int) -> int:
        """Estimates the calls until there are `count` rows, from the acceptance rate so far."""
        result = self.result
        share = result.sound / result.asked if result.sound else KEPT
        return max(0, math.ceil((count - result.accepted) / share / self.config.per_call))

    def _is_short(self, each: float) -> bool:
        """Whether a side lacks rows beyond the calls in flight, and can be asked for more."""
        return any(
            side.lacks(each) > 0 and (side.composed > side.sent or not self._is_exhausted(side))
            for side in self._sides.values()
        )

    async def _answer(self, attempt: A) -> _Outcome:
        """Makes the call; screens its rows in the order of calls, and verifies them."""
        outcome, config = _Outcome(), self.config
        try:
            try:
                [reply] = await self.endpoint.chat(
                    attempt.messages,
                    temperature=config.temperature,
                    max_tokens=config.max_tokens,
                    seed=attempt.seed,
                )
                outcome.rows, outcome.refused = self._read_reply(attempt, reply)
                outcome.vectors = await self._screen.vectors(outcome.rows)
            except AjetError as error:
                outcome.error = error
            if attempt.number:
                await self._screened[attempt.number - 1].wait()
                del self._screened[attempt.number - 1]
            if outcome.error is None:
                outcome.candidates, refused = self._screen.sort(outcome.rows, outcome.vectors)
                outcome.refused += refused
        finally:
            self._screened[attempt.number].set()
        if outcome.candidates and self.checks.verifier is not None:
            await self._verify(attempt, outcome, self.checks.verifier)
        return outcome

    def _read_reply(self, attempt: A, reply: str) -> tuple[list[Candidate], list[Rejected]]:
        candidates, refused = list[Candidate](), list[Rejected]()
        rows, problem = rows_in(reply)
        if problem is not None:
            reason, _, detail = problem.partition(": ")
            refused.append(Rejected(reason, detail, None, attempt.origin(), reply))
        for row in rows[: 2 * attempt.count]:
            try:
                values, provenance = self._read_row(attempt, row)
                candidates.append(Candidate({"task_id": task_id_of(values), **values}, provenance))
            except Unusable as why:
                shown = row if isinstance(row, dict) else {"row": row}
                refused.append(Rejected(why.reason, why.detail, shown, why.provenance))
        return candidates, refused

    async def _verify(self, attempt: A, outcome: _Outcome, verifier: Verifier) -> None:
        rows = [
            self._row_for_verifier(attempt, candidate, verifier) for candidate in outcome.candidates
        ]
        checks = (verifier.check(row, self.endpoint) for row in rows)
        for verdict in await asyncio.gather(*checks, return_exceptions=True):
            if isinstance(verdict, AjetError):
                outcome.error = verdict
            elif isinstance(verdict, BaseException):
                raise verdict
            else:
                outcome.verdicts.append(verdict)

    def _take_in(self, attempt: A, outcome: _Outcome) -> None:
        """Processes the result of a call; results are processed in order."""
        self.result.calls += 1
        side = self._sides[attempt.side]
        side.composed -= attempt.count
        side.sent -= attempt.count
        if outcome.error is not None:
            self._fail(attempt, outcome.error)
            return
        self.endpoint.keep_failures(self._failed)
        self._failed.clear()
        self.result.asked += attempt.count
        self.result.rejected += outcome.refused
        before = self.result.sound
        for index, candidate in enumerate(outcome.candidates):
            self._decide(
                attempt, side, candidate, outcome.verdicts[index] if outcome.verdicts else None
            )
        self._without_progress = 0 if self.result.sound > before else self._without_progress + 1
        if self._without_progress >= NO_PROGRESS and self.result.stopped is None:
            self.result.stopped = NoProgress(
                f"{NO_PROGRESS} calls in a row gave no row ({self._reasons()}); see rejected.jsonl"
                " and --show-prompt"
            )
        self._watch_forms()
        if self.on_change is not None:
            self.on_change(self.result)

    def _watch_forms(self) -> None:
        """Warns early if the writer repeats itself, and ends the run if that persists."""
        try:
            warning = self.coverage.collapse()
        except Collapsed as error:
            self.result.stopped = self.result.stopped or error
            return
        if warning is not None or (not self._warned and self.result.accepted >= _EARLY):
            self._warn_of_forms(warning)

    def _warn_of_forms(self, warning: str | None = None) -> None:
        if warning is None and not self._warned and (diversity := self.result.diversity()).is_low:
            warning = diversity.as_text()
            if self.config.max_same_form is None:
                warning += "; --max-same-form 5 keeps at most five of each"
        self._warned = True
        if warning is not None:
            log.warning("%s", warning)

    def _reasons(self) -> str:
        return (
            ", ".join(f"{count} {reason}" for reason, count in self.result.refused.most_common(3))
            or "none"
        )

    def _decide(
        self, attempt: A, side: Side, candidate: Candidate, verdict: RowVerdict | None
    ) -> None:
        verdict_record = None
        if verdict is not None and self.checks.verifier is not None:
            verdict_record = verdict.as_json(self.checks.verifier.name)
        provenance = {**candidate.provenance, "verdict": verdict_record}
        sound = verdict is None or verdict.ok
        if verdict is not None and not sound:
            self.result.rejected.append(
                Rejected(verdict.reason, _short(verdict.details), candidate.values, provenance)
            )
        elif side.target is not None and len(side.rows) >= side.target:
            self.result.surplus += 1
        else:
            side.rows.append({**candidate.values, "provenance": provenance})
        side.sound += sound
        if sound:
            self.coverage.add(candidate.values, attempt.cell)
        self._record_decision(attempt, side, candidate, sound)

    def _fail(self, attempt: A, error: AjetError) -> None:
        """Records a failed call; several in a row, or an error that affects all calls, end the
        run."""
        self._failed.append(error)
        limited = isinstance(error, EngineUnavailable) and error.status == 429
        passing = (
            isinstance(error, ContextOverflow | RequestRefused | EngineUnavailable) and not limited
        )
        if passing:
            self.result.rejected.append(Rejected("no reply", str(error), None, attempt.provenance))
        if (not passing or len(self._failed) >= FAILED) and self.result.stopped is None:
            self.result.stopped = error


def _short(details: Mapping[str, Any]) -> str:
    """Describes a verdict's evidence; of several verifiers, the last, which decided."""
    details = details["parts"][-1]["details"] if details.get("parts") else details
    text = "; ".join(f"{name}: {value}" for name, value in details.items())
    return text if len(text) <= 400 else text[:399] + "…"
