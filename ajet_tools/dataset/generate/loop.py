"""Rows made by a model, call after call: what `expand` and `from-docs` have in common.

A run is a function of what it is given, its config and the replies: calls are numbered, what comes back is taken in by
number, and the prompt of a call depends on nothing but what was taken in `window` calls before. So the same replies
give the same bytes, at any speed; and a run that was killed is resumed by running it again, with the replies that are
kept.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ajet_sdk.errors import AjetError, ContextOverflow
from ajet_tools.dataset.files.tables import text_of
from ajet_tools.dataset.generate.examples import Example
from ajet_tools.dataset.generate.records import (
    Attempt,
    CallSettings,
    Candidate,
    GenerationResult,
    Interrupted,
    NoProgress,
    Rejected,
    SplitTarget,
)
from ajet_tools.dataset.model.endpoint import Endpoint, EndpointError
from ajet_tools.dataset.rows.forms import form_of, given_away
from ajet_tools.dataset.similarity.near import NearIndex
from ajet_tools.dataset.verify.combined import endpoints_of

if TYPE_CHECKING:
    from ajet_tools.dataset.similarity.decontaminate import Leaks
    from ajet_tools.dataset.similarity.meaning import MeaningIndex, Vectors
    from ajet_tools.dataset.verify.verdict import Verdict, Verifier

__all__ = ["FAILED", "NO_PROGRESS", "PROBE", "Generation", "run_generation"]

log = logging.getLogger("ajet.dataset")

PROBE = 4
"""Calls under way until the first row is accepted: a wrong key or a prompt that fails costs no more."""
NO_PROGRESS = 30
"""Calls in a row without a row that can be kept, after which a run stops."""
FAILED = 3
"""Calls in a row that the endpoint fails, after which a run stops."""
_REPEATED = {"exact": "exact duplicate", "near": "near duplicate", "meaning": "duplicate by meaning"}
_EARLY = 100
"""Accepted rows after which it is said that they are alike."""
GRACE = 30.0
"""Seconds that calls under way have to come back when a run stops: they are paid for."""


@dataclass
class _Outcome:
    """What one call came to, before it is taken in."""

    rows: Sequence[Candidate] = ()
    """The rows that hold by themselves, and what they mean, where that counts."""
    vectors: Vectors | None = None
    candidates: list[Candidate] = field(default_factory=list)
    """Of those, the new ones."""
    verdicts: list[Verdict] = field(default_factory=list)
    refused: list[Rejected] = field(default_factory=list)
    error: AjetError | None = None


A = TypeVar("A", bound=Attempt)
S = TypeVar("S", bound=SplitTarget)


class Generation(ABC, Generic[A, S]):
    """One run: `await run()` once. `result` and the endpoint's budget may be looked at meanwhile."""

    def __init__(
        self,
        pace: CallSettings,
        endpoint: Endpoint,
        examples: Iterable[Example],
        *,
        verifier: Verifier | None = None,
        leaks: Leaks | None = None,
        meanings: MeaningIndex | None = None,
        counts: Sequence[int] = (),
        on_change: Callable[[GenerationResult], None] | None = None,
    ) -> None:
        """`counts` is how many rows were asked for at first, and each time that more were; one number, mostly."""
        self.endpoint = endpoint
        self.result = GenerationResult()
        self.stop = asyncio.Event()
        """Set it to end the run as soon as what is under way has come back."""
        self.on_change = on_change
        """Called after each call that was taken in."""
        self._settings, self._verifier, self._leaks, self._meanings = pace, verifier, leaks, meanings
        self._more = list(counts[1:])
        self._sides: dict[str, S] = {}
        self._near = NearIndex(pace.similarity, pace.seed)
        self._forms: Counter[str] = Counter()
        """Rows found by their form."""
        self._seeds = {f"seed {example.id}": text_of(example.values) for example in examples}
        for key, text in self._seeds.items():
            self._near.add(key, text)
        self._calls: dict[int, tuple[A, asyncio.Task[_Outcome]]] = {}
        """Under way."""
        self._screened: dict[int, asyncio.Event] = {}
        self._attempts = self._without_progress = 0
        self._warned = False
        self._failed: list[AjetError] = []
        """Of the calls taken in since the last that was answered."""
        self._given = 0
        """Rows that the calls taken in were asked for."""

    # What a kind of making says

    @abstractmethod
    def _next(self, number: int, each: float) -> A | None:
        """The call of that number, where of each row asked for `each` is accepted; None: nothing is to be asked."""

    @abstractmethod
    def _read_reply(self, attempt: A, reply: str) -> tuple[Sequence[Candidate], list[Rejected]]:
        """The rows of a reply that hold by themselves, and those that do not."""

    @abstractmethod
    def _targets(self, count: int) -> Mapping[str, int]:
        """How many rows each side is to have, of so many in all."""

    def _row_for_verifier(self, attempt: A, candidate: Candidate, verifier: Verifier) -> Mapping[str, Any]:
        """The row as a verifier sees it."""
        return candidate.values

    def _record_decision(self, attempt: A, side: S, candidate: Candidate, accepted: bool) -> None:
        """A row was decided on."""

    def _finish(self) -> None:
        """There is nothing more to ask, or the run was stopped: the last chance to say what lacks."""

    # The run

    async def run(self) -> GenerationResult:
        """Until there are as many rows as the config says, or it has to stop: `result.stopped` says why."""
        stopping: asyncio.Task[Any] = asyncio.create_task(self.stop.wait())
        number = 0
        try:
            await self._learn_seeds()
            while self.result.stopped is None:
                self._dispatch(number)
                if number not in self._calls:
                    if self._more:
                        self._ask_for(self._more.pop(0))
                        continue
                    break
                attempt, task = self._calls[number]
                await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
                if self.stop.is_set():
                    self.result.stopped = Interrupted("stopped: what was accepted is kept, and --resume goes on")
                    break
                del self._calls[number]
                self._take_in(attempt, task.result())
                number += 1
            await self._drain()
            self._finish()
            self._warn_of_forms(1)
        finally:
            left: list[asyncio.Task[Any]] = [stopping, *(task for _, task in self._calls.values())]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        return self.result

    def _ask_for(self, count: int) -> None:
        """There are as many rows as were asked for, and are to be more: sound rows that were left over come first."""
        targets = self._targets(count)
        for name, side in self._sides.items():
            side.target = targets[name] if len(self._sides) > 1 else count
            while side.spare and len(side.rows) < side.target:
                attempt, candidate, provenance = side.spare.pop(0)
                self.result.surplus -= 1
                side.rows.append({**candidate.values, "provenance": dict(provenance)})
                self._record_decision(cast(A, attempt), side, candidate, True)

    async def _learn_seeds(self) -> None:
        """What the seeds mean, before the first row is paid for."""
        if self._meanings is None or not self._seeds:
            return
        try:
            vectors = await self._meanings.vectors(list(self._seeds.values()))
            for (key, text), vector in zip(self._seeds.items(), vectors, strict=True):
                self._meanings.add(key, text, vector)
        except AjetError as error:
            self.result.stopped = error

    async def aclose(self) -> None:
        """The endpoints are not asked any more."""
        for endpoint in (self.endpoint, *endpoints_of(self._verifier)):
            await endpoint.aclose()
        if self._meanings is not None:
            await self._meanings.embedder.aclose()

    async def _drain(self) -> None:
        """After a stop: what is on its way is waited for, for it is paid for, and taken in where it is whole."""
        if not self._calls:
            return
        for endpoint in (self.endpoint, *endpoints_of(self._verifier)):
            endpoint.halt()
        done, _ = await asyncio.wait({task for _, task in self._calls.values()}, timeout=GRACE)
        for number in sorted(self._calls):
            attempt, task = self._calls[number]
            if task in done and task.result().error is None:
                self._take_in(attempt, task.result())

    def _dispatch(self, taken_in: int) -> None:
        """Make the calls that can be made, knowing what was taken in so far."""
        window = self._settings.window if self.result.accepted else min(PROBE, self._settings.window)
        while self._attempts < taken_in + window:
            each = max(0.1, (self.result.accepted + 1) / (self._given + 1)) if self.result.accepted else 1.0
            attempt = self._next(self._attempts, each)
            if attempt is None:
                return
            self._sides[attempt.side].under_way[attempt.number] = attempt.count
            self._screened[attempt.number] = asyncio.Event()
            self._calls[attempt.number] = (attempt, asyncio.create_task(self._answer(attempt)))
            self._attempts += 1

    async def _answer(self, attempt: A) -> _Outcome:
        """The call, its rows screened in the order of the calls, and verified."""
        outcome, pace = _Outcome(), self._settings
        try:
            try:
                [reply] = await self.endpoint.chat(
                    attempt.messages, temperature=pace.temperature, max_tokens=pace.max_tokens, seed=attempt.seed
                )
                outcome.rows, outcome.refused = self._read_reply(attempt, reply)
                if self._meanings is not None and outcome.rows:
                    outcome.vectors = await self._meanings.vectors([text_of(one.values) for one in outcome.rows])
            except AjetError as error:
                outcome.error = error
            if attempt.number:
                await self._screened[attempt.number - 1].wait()
                del self._screened[attempt.number - 1]
            if outcome.error is None:
                self._screen(outcome)
        finally:
            self._screened[attempt.number].set()
        if outcome.candidates and self._verifier is not None:
            await self._verify(attempt, outcome, self._verifier)
        return outcome

    async def _verify(self, attempt: A, outcome: _Outcome, verifier: Verifier) -> None:
        rows = [self._row_for_verifier(attempt, candidate, verifier) for candidate in outcome.candidates]
        for said in await asyncio.gather(*(verifier.check(row, self.endpoint) for row in rows), return_exceptions=True):
            if isinstance(said, AjetError):
                outcome.error = said
            elif isinstance(said, BaseException):
                raise said
            else:
                outcome.verdicts.append(said)

    def _screen(self, outcome: _Outcome) -> None:
        """Which rows of a reply are new."""
        for index, one in enumerate(outcome.rows):
            why = self._reason_to_reject(one.values, None if outcome.vectors is None else outcome.vectors[index])
            if why is None:
                outcome.candidates.append(one)
            else:
                outcome.refused.append(Rejected(*why, one.values, one.provenance))

    def _reason_to_reject(self, values: Mapping[str, Any], vector: Vectors | None) -> tuple[str, str] | None:
        """Why a row is not new, where it is not: reason and detail. A new one is remembered."""
        if self._leaks is not None and (evidence := self._leaks(values)) is not None:
            return "in the evaluation set", evidence
        if (said := given_away(values)) is not None:
            return "answer in the question", said
        text, key = text_of(values), f"row {values['task_id']}"
        match = self._near.find(text)
        if match is None and self._meanings is not None and vector is not None:
            match = self._meanings.find(text, vector)
        if match is not None:
            kind = "the same as" if match.kind == "exact" else f"{match.similarity:.2f} like"
            return _REPEATED[match.kind], f"{kind} {match.key}"
        form = form_of(text)
        if self._settings.max_same_form is not None and self._forms[form] >= self._settings.max_same_form:
            return "same form", f"{self._forms[form]} rows say the same but for numbers and names: {form}"
        self._forms[form] += 1
        self._near.add(key, text)
        if self._meanings is not None and vector is not None:
            self._meanings.add(key, text, vector)
        return None

    def _take_in(self, attempt: A, outcome: _Outcome) -> None:
        """Accept or refuse what a call came to; calls are taken in in their order."""
        self.result.calls += 1
        side = self._sides[attempt.side]
        del side.under_way[attempt.number]
        if outcome.error is not None:
            self._fail(attempt, outcome.error)
            return
        self.endpoint.keep_failures([one for one in self._failed if isinstance(one, EndpointError)])
        self._failed.clear()
        self._given += attempt.count
        self.result.rejected += outcome.refused
        before = self.result.accepted + self.result.surplus
        for index, candidate in enumerate(outcome.candidates):
            self._decide(attempt, side, candidate, outcome.verdicts[index] if outcome.verdicts else None)
        self._without_progress = (
            0 if self.result.accepted + self.result.surplus > before else self._without_progress + 1
        )
        if self._without_progress >= NO_PROGRESS and self.result.stopped is None:
            self.result.stopped = NoProgress(
                f"{NO_PROGRESS} calls in a row gave no row that could be kept (refused so far: {self._reasons()}). "
                "rejected.jsonl says why for each; --show-prompt shows what was asked"
            )
        self._warn_of_forms(_EARLY)
        if self.on_change is not None:
            self.on_change(self.result)

    def _warn_of_forms(self, rows: int) -> None:
        """Once, where there are as many rows: early enough to stop a run that costs money."""
        if self._warned or self.result.accepted < rows:
            return
        self._warned = True
        diversity = self.result.diversity()
        if diversity.is_low:
            bound = (
                "" if self._settings.max_same_form is not None else "; --max-same-form 5 takes five of each and no more"
            )
            log.warning("%s%s", diversity.as_text(), bound)

    def _reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in self.result.refused.most_common(3)) or "none"

    def _decide(self, attempt: A, side: S, candidate: Candidate, verdict: Verdict | None) -> None:
        said = None
        if verdict is not None and self._verifier is not None:
            said = verdict.as_json(self._verifier.name)
        provenance = {**candidate.provenance, "verdict": said}
        accepted = False
        if verdict is not None and not verdict.ok:
            self.result.rejected.append(Rejected(verdict.reason, _short(verdict.details), candidate.values, provenance))
        elif side.target is not None and len(side.rows) >= side.target:
            self.result.surplus += 1
            side.spare.append((attempt, candidate, provenance))
        else:
            side.rows.append({**candidate.values, "provenance": provenance})
            accepted = True
        self._record_decision(attempt, side, candidate, accepted)

    def _fail(self, attempt: A, error: AjetError) -> None:
        """One call may fail; several in a row, or one that says so of all, end the run."""
        self._failed.append(error)
        passing = isinstance(error, ContextOverflow) or (isinstance(error, EndpointError) and not error.permanent)
        if passing:
            self.result.rejected.append(Rejected("no answer", str(error), None, attempt.provenance))
        if (not passing or len(self._failed) >= FAILED) and self.result.stopped is None:
            self.result.stopped = error


def _short(details: Mapping[str, Any]) -> str:
    text = "; ".join(f"{name}: {value}" for name, value in details.items())
    return text if len(text) <= 400 else text[:399] + "…"


async def run_generation(generation: Generation[Any, Any]) -> GenerationResult:
    """Run it and close its endpoints. The first Ctrl-C lets what is under way come back; the second is as ever."""
    try:
        with _stop_on_ctrl_c(generation.stop):
            return await generation.run()
    finally:
        await generation.aclose()


@contextmanager
def _stop_on_ctrl_c(stop: asyncio.Event) -> Iterator[None]:
    """Only the main thread hears it."""
    loop = asyncio.get_running_loop()

    def request_stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    with suppress(ValueError, NotImplementedError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, request_stop)
    try:
        yield
    finally:
        with suppress(ValueError, NotImplementedError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
