"""The pipeline of `expand` and `from-docs`: compose a call, ask, screen, verify, accept.

Each call is a task of its own, and a call is composed when there is room for it, from the rows
accepted so far. Which rows a run gives therefore depends on the speed of the replies, except with
one call at a time (`window` 1).

The `Journal` has each reply before it is used, and what became of its rows. A later process takes
the decided calls from there, decides those that were only answered, and asks for the rest.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ajet_sdk.engines.client import Halted, ModelClient
from ajet_sdk.engines.reply_cache import IN_MEMORY, ReplyCache
from ajet_sdk.errors import (
    AjetError,
    ContextOverflow,
    EngineUnavailable,
    RequestRefused,
    TaskError,
)
from ajet_sdk.tasks.row_texts import strings
from ajet_tools.dataset.card import Facts
from ajet_tools.dataset.generate.directory import Journal
from ajet_tools.dataset.generate.records import (
    NO_CHECKS,
    Call,
    Candidate,
    Checks,
    GenerationResult,
    Interrupted,
    NoProgress,
    Outcome,
    Rejected,
    Unusable,
)
from ajet_tools.dataset.generate.screen import Screen
from ajet_tools.dataset.generate.seeds import Example, Side, task_id_of
from ajet_tools.dataset.generate.settings import CallSettings
from ajet_tools.dataset.model.replies import misread_escape, rows_in
from ajet_tools.dataset.prompts import Prompt

if TYPE_CHECKING:
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
_KEPT = 0.8
"""Acceptance rate that estimates assume before the first row."""
_LEAST_KEPT = 0.1
"""A lower rate does not raise the number of calls in flight further."""
GRACE = 30.0
"""Seconds to wait for calls in flight when a run stops, since they are paid for."""
_LONGEST_DETAIL = 400


class Source(ABC):
    """Where a run's calls come from: it composes them and reads their rows."""

    command: ClassVar[str]
    config: CallSettings
    sides: Mapping[str, Side]
    examples: Sequence[Example]
    """The rows that no generated row may repeat."""
    fields: Sequence[str] = ()
    """The prompt's lines about the fields of a row."""
    documents: Sequence[Mapping[str, object]] = ()
    """Rows of `documents.jsonl`."""
    context_tokens = 0
    """Approximate tokens that a verifier sees beside a row."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, object]:
        """What the rows depend on, besides models and checks."""

    @abstractmethod
    def card(self) -> Facts:
        """Returns what a dataset card says of the sources and the prompts."""

    @abstractmethod
    def previews(self) -> list[tuple[Call, Prompt]]:
        """Composes a call of each prompt, to be shown, and to estimate the tokens of all."""

    @abstractmethod
    def calls_left(self, result: GenerationResult) -> int:
        """Estimates the calls until there are enough rows."""

    @abstractmethod
    def next_call(self, number: int, model: str, rate: float) -> Call | None:
        """Composes the next call at this acceptance rate, or returns None if nothing is left to
        ask at the moment."""

    @abstractmethod
    def count(self, call: Call) -> None:
        """Counts a call, composed now or by an earlier process."""

    @abstractmethod
    def read_row(self, call: Call, row: object) -> Candidate:
        """Returns a row of a reply with its provenance. Raises Unusable for an invalid row."""

    @abstractmethod
    def record(self, call: Call, values: Mapping[str, Any], *, sound: bool) -> None:
        """Called for each decided row; a sound row may exceed the target."""

    def row_for_verifier(self, call: Call, values: Mapping[str, Any], _: Verifier) -> Any:
        """Returns the row as verifiers see it."""
        return values

    def shortfall(self, result: GenerationResult) -> AjetError | None:
        """Returns the reason why rows are missing, when nothing is left to ask."""
        return None


class Pipeline:
    """A generation run: `await run()` once. `result` and the endpoint's budget are readable
    meanwhile; with the journal of an earlier process, `result` begins as that one ended."""

    quiet = 60.0
    """Seconds without a reply after which the cause is logged."""

    def __init__(
        self,
        source: Source,
        endpoint: ModelClient,
        checks: Checks = NO_CHECKS,
        journal: Journal | None = None,
    ) -> None:
        self.source = source
        self.config = source.config
        self.endpoint = endpoint
        self.checks = checks
        self.result = GenerationResult(source.sides)
        self.stop = asyncio.Event()
        """Set it to end the run after the calls in flight."""
        self.stopped_by = signal.SIGINT
        self.on_change: Callable[[GenerationResult], None] | None = None
        """Called after each decided call."""
        self._journal = journal or Journal(ReplyCache(IN_MEMORY))
        self._screen = Screen(self.config, source.examples, checks, source.fields)
        self._answered: deque[tuple[Call, str]] = deque()
        """Calls of an earlier process whose rows are not decided."""
        self._flights: set[asyncio.Task[None]] = set()
        self._composed = 0
        self._without_progress = 0
        self._warned = False
        self._failed: list[AjetError] = []
        """Errors since the last decided call."""
        self._resume()

    async def run(self) -> GenerationResult:
        """Runs until there are enough rows, or it has to stop, with the reason in
        `result.stopped`."""
        stopping: asyncio.Task[Any] = asyncio.create_task(self.stop.wait())
        try:
            try:
                await self._generate(stopping)
            except AjetError as error:
                self.result.stopped = error
            if self._flights:
                self.halt()
                done, _ = await asyncio.wait(self._flights, timeout=GRACE)
                for flight in done:
                    flight.result()  # raises what is a mistake of ours
        finally:
            unfinished = [stopping, *self._flights]
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        if not isinstance(self.result.stopped, Halted):
            self._warn_of_forms()
        return self.result

    def _resume(self) -> None:
        """Takes the calls of earlier processes from the journal. Nothing is asked."""
        for call, reply, outcome in self._journal.entries():
            self.source.count(call)
            self._composed = max(self._composed, call.number + 1)
            self.endpoint.budget.record_cached()
            if outcome is None:
                self._answered.append((call, reply))
            else:
                self._screen.learn(outcome)
                self._take(call, outcome)

    async def _generate(self, stopping: asyncio.Task[Any]) -> None:
        while self.result.stopped is None and not self.result.is_complete:
            self._start_calls()
            if not self._flights:
                self.result.stopped = self.source.shortfall(self.result)
                return
            done, _ = await asyncio.wait(
                {stopping, *self._flights},
                timeout=self.quiet,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self.stop.is_set():
                self.result.stopped = Interrupted(self.stopped_by)
            if not done:
                wait = self.describe_wait(0.0)
                log.warning("no reply in %.0f s: waiting for %s", self.quiet, wait)
            for flight in done & self._flights:
                self._flights.remove(flight)
                flight.result()  # raises what is a mistake of ours

    def _start_calls(self) -> None:
        """Fills the room for calls in flight, as long as rows are missing."""
        room = self.config.window if self.result.sound else min(PROBE, self.config.window)
        while len(self._flights) < room and self._is_short():
            reply: str | None = None
            if self._answered:
                call, reply = self._answered.popleft()
            else:
                composed = self.source.next_call(self._composed, self.endpoint.model, self._rate())
                if composed is None:
                    return
                call = composed
                self.source.count(call)
                self._composed += 1
            self.source.sides[call.side].in_flight += call.count
            self._flights.add(asyncio.create_task(self._fly(call, reply)))

    def _is_short(self) -> bool:
        """Whether a side lacks rows beyond those that the calls in flight will give."""
        rate = self._rate()
        return any(side.lacks(rate) > 0 for side in self.source.sides.values())

    def _rate(self) -> float:
        """Returns the expected number of sound rows per requested row."""
        if not self.result.sound:
            return 1.0
        return max(_LEAST_KEPT, (self.result.sound + 1) / (self.result.asked + 1))

    async def _fly(self, call: Call, reply: str | None) -> None:
        """Makes a call, unless its reply is stored, and decides its rows."""
        try:
            if reply is None:
                [answer] = await self.endpoint.reply(
                    call.messages,
                    temperature=self.config.temperature,
                    max_tokens=self.config.max_tokens,
                    seed=call.parameters["seed"],
                )
                reply = answer.text
                self._journal.put(call, reply)
            outcome = await self._decide(call, reply)
            self._journal.put(call, reply, outcome)
        except AjetError as error:
            self._fail(call, error)
        else:
            self._take(call, outcome)
        finally:
            self.source.sides[call.side].in_flight -= call.count

    async def _decide(self, call: Call, reply: str) -> Outcome:
        outcome = Outcome()
        candidates = self._read_reply(call, reply, outcome)
        candidates, repeated = self._screen.sort(candidates)
        outcome.refused += repeated
        verifier = self.checks.verifier
        if verifier is None or not candidates:
            for candidate in candidates:
                provenance = {**candidate.provenance, "verdict": None}
                outcome.sound.append(Candidate(candidate.values, provenance))
            return outcome
        rows = [self.source.row_for_verifier(call, each.values, verifier) for each in candidates]
        verdicts: list[RowVerdict | BaseException] = await asyncio.gather(
            *(verifier.check(row, self.endpoint) for row in rows), return_exceptions=True
        )
        for candidate, verdict in zip(candidates, verdicts, strict=True):
            if isinstance(verdict, BaseException):
                raise verdict
            record = verdict.as_json(verifier.name)
            provenance = {**candidate.provenance, "verdict": record}
            if verdict.ok:
                outcome.sound.append(Candidate(candidate.values, provenance))
            else:
                detail = _evidence(verdict.details)
                refuted = Rejected(verdict.reason, detail, candidate.values, provenance)
                outcome.refuted.append(refuted)
        return outcome

    def _read_reply(self, call: Call, reply: str, outcome: Outcome) -> list[Candidate]:
        """Returns the valid rows; the others go to the outcome."""
        candidates = list[Candidate]()
        rows, problem = rows_in(reply)
        for row in rows[: 2 * call.count]:
            try:
                candidates.append(self._read_row(call, row))
            except Unusable as why:
                shown = row if isinstance(row, dict) else {"row": row}
                outcome.refused.append(Rejected(why.reason, why.detail, shown, why.provenance))
        if problem is not None:
            reason, _, detail = problem.partition(": ")
            unread = Rejected(reason, detail, None, call.provenance, reply)
            outcome.refused.append(unread)
        return candidates

    def _read_row(self, call: Call, row: object) -> Candidate:
        candidate = self.source.read_row(call, row)
        if (place := misread_escape("\n".join(strings(candidate.values)))) is not None:
            detail = f"a backslash is not doubled: {place!r}"
            raise Unusable("wrong format", detail, candidate.provenance)
        try:
            task_id = task_id_of(candidate.values)
        except TaskError as error:  # such as half of a surrogate pair, which no file can hold
            raise Unusable("wrong format", str(error), candidate.provenance) from error
        return Candidate({"task_id": task_id, **candidate.values}, candidate.provenance)

    def _take(self, call: Call, outcome: Outcome) -> None:
        """Adds the outcome of a call to the result."""
        result = self.result
        self._failed.clear()
        result.calls += 1
        result.asked += call.count
        result.rejected += [*outcome.refused, *outcome.refuted]
        for rejected in outcome.refuted:
            self.source.record(call, rejected.row or {}, sound=False)
        for candidate in outcome.sound:
            row = {**candidate.values, "provenance": candidate.provenance}
            self.source.sides[call.side].accept(row)
            self.source.record(call, row, sound=True)
        self._without_progress = 0 if outcome.sound else self._without_progress + 1
        if self._without_progress >= NO_PROGRESS and result.stopped is None:
            result.stopped = NoProgress(
                f"{NO_PROGRESS} calls in a row gave no row ({result.reasons()}); see rejected.jsonl"
                " and --dry-run"
            )
        if result.accepted >= _EARLY:
            self._warn_of_forms()
        if self.on_change is not None:
            self.on_change(result)

    def _warn_of_forms(self) -> None:
        """Warns once if the writer repeats its sentences."""
        if self._warned:
            return
        self._warned = True
        diversity = self.result.diversity()
        if diversity.is_low:
            more = ""
            if self.config.max_same_form is None:
                more = "; --with max_same_form=5 keeps at most five of each"
            log.warning("%s%s", diversity.as_text(), more)

    def _fail(self, call: Call, error: AjetError) -> None:
        """Records a failed call; several in a row, or an error that affects all calls, end the
        run. A resumed run makes the call, or decides its reply, again."""
        if isinstance(error, Halted):
            return  # the run is ending
        self._failed.append(error)
        is_limited = isinstance(error, EngineUnavailable) and error.status == 429
        is_single = isinstance(error, ContextOverflow | RequestRefused | EngineUnavailable)
        if is_single and not is_limited:
            self.result.rejected.append(Rejected("no reply", str(error), None, call.provenance))
            if len(self._failed) < FAILED:
                return
        if self.result.stopped is None:
            self.result.stopped = error

    @property
    def _endpoints(self) -> list[ModelClient]:
        verifier = self.checks.verifier
        return [self.endpoint, *(verifier.endpoints if verifier is not None else ())]

    def describe_wait(self, slow: float = 10.0) -> str:
        """Returns why the endpoints' requests wait, as in `ModelClient.describe_wait`."""
        waits = dict.fromkeys(endpoint.describe_wait(slow) for endpoint in self._endpoints)
        return "; ".join(filter(None, waits))

    def halt(self) -> None:
        """Stops sending; only stored replies are used."""
        for endpoint in self._endpoints:
            endpoint.halt()

    async def aclose(self) -> None:
        """Closes the endpoints and the journal."""
        for endpoint in self._endpoints:
            await endpoint.aclose()
        self._journal.close()


def calls_for(count: int, result: GenerationResult, per_call: int) -> int:
    """Estimates the calls until there are `count` rows, from the acceptance rate so far."""
    share = result.sound / result.asked if result.sound else _KEPT
    return max(0, math.ceil((count - result.accepted) / share / per_call))


def _evidence(details: Mapping[str, Any]) -> str:
    """Describes a verdict's evidence; of several verifiers, the last, which decided."""
    if details.get("parts"):
        details = details["parts"][-1]["details"]
    text = "; ".join(f"{name}: {value}" for name, value in details.items())
    if len(text) <= _LONGEST_DETAIL:
        return text
    return text[: _LONGEST_DETAIL - 1] + "…"
