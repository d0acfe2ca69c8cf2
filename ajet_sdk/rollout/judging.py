"""Judges an episode, or a group once its last attempt has ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ajet_sdk.errors import AjetError, NoReward
from ajet_sdk.gateway.episode import OpenEpisode
from ajet_sdk.judges.call import JudgeCall, call_group_judge, call_judge, is_group_judge
from ajet_sdk.judges.rewards import Verdict, judged, judged_group
from ajet_sdk.rollout.outcomes import EpisodeFault, is_last_call_lost
from ajet_sdk.rollout.threads import Workers
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    from ajet_sdk.agent.workflow import WorkflowTask
    from ajet_sdk.config.config import Config


class Runner(Protocol):
    """The parts of a running episode that judging needs."""

    judge: object
    config: Config
    workers: Workers
    member: Member | None
    opened: OpenEpisode | None
    task: Task
    episode: Episode

    def settle(self, **fields: object) -> None:
        """Set fields of the episode."""

    def attempt_task(self) -> WorkflowTask:
        """The task for `compute_reward`."""

    def reserved_arguments(self, opened: OpenEpisode, function: object, output: object = None) -> dict[str, object]:
        """Values of the reserved parameters of a judge; `function` is None for an object."""


async def judge_episode(runner: Runner, output: object) -> Verdict:
    """Judge an episode with the run's judge. Raises EpisodeFault, or NoReward without a judge."""
    opened, judge = runner.opened, runner.judge
    assert opened is not None
    if judge is None and not runner.config.trainer_common.algorithm.needs_reward:
        return Verdict(())
    if judge is None:
        raise NoReward(
            "the workflow returned no reward and there is no judge; return an ajet.Reward, or set a judge "
            "(task_judge.judge_protocol, --judge)"
        )
    if is_group_judge(judge):
        return await (runner.member or Member(Group(judge, 1))).verdict(runner)
    async with opened.judging():
        episode = _to_be_judged(runner)
        instance = judge(runner.config) if isinstance(judge, type) else judge
        reserved = runner.reserved_arguments(opened, None if hasattr(instance, "compute_reward") else judge, output)
        call = call_judge(instance, runner.task, output, episode, given=reserved, attempt=runner.attempt_task())
        return judged(await _called(runner, opened, call), call.name)


def _to_be_judged(runner: Runner) -> Episode:
    """The episode as shown to the judge."""
    assert runner.opened is not None
    runner.settle(calls=runner.opened.calls, events=tuple(runner.opened.events))
    return runner.episode.model_copy(update={"status": "succeeded", "error": None, "cause": None})


async def _called(runner: Runner, opened: OpenEpisode, call: JudgeCall) -> object:
    """Call the judge and return its result. Raises EpisodeFault."""
    before = len(opened.errors)
    timeout = call.timeout or runner.config.rollout.judge_timeout
    outcome = await runner.workers.call(call.function, {}, timeout=timeout, label=f"judge {call.name}")
    if outcome.error is not None:
        fault = EpisodeFault(outcome.error, f"judge {call.name}: ")
        # If the judge's model failed, the judge's client raises its own exception.
        fault.fields["infrastructure"] |= any(error.infrastructure for error in opened.errors[before:])
        raise fault
    if len(opened.errors) > before and is_last_call_lost(opened, "judge"):
        raise EpisodeFault(opened.errors[-1], f"judge {call.name}: ")
    return outcome.value


class Group:
    """Attempts at a task that a group judge compares once all of them have ended.

    The judge's calls are recorded in the first episode.
    """

    def __init__(self, judge: object, size: int) -> None:
        self.judged = False
        self._judge = judge
        self._expected = size
        self._waiting: list[tuple[Runner, Episode, asyncio.Future[Verdict]]] = []
        self._work: asyncio.Task[None] | None = None

    async def verdict(self, runner: Runner) -> Verdict:
        """Wait for the other attempts and the judge."""
        assert runner.opened is not None
        async with runner.opened.judging():  # its workflow is over
            episode = _to_be_judged(runner)
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append((runner, episode, future))
        self._begin_if_complete()
        try:
            return await future
        except asyncio.CancelledError:
            if self._work is not None:
                self._work.cancel()
            raise

    def leave(self) -> None:
        """Record that an attempt has ended, so that the others do not wait for it."""
        if not self.judged:
            self._expected -= 1
            self._begin_if_complete()

    def _begin_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._expected and not self.judged:
            self.judged = True
            self._work = asyncio.create_task(self._run())

    async def _run(self) -> None:
        members = sorted(self._waiting, key=lambda member: member[1].attempt)
        futures = [future for _, _, future in members]
        try:
            verdicts = await self._ask([runner for runner, _, _ in members], [episode for _, episode, _ in members])
        except Exception as error:  # noqa: BLE001  any error is recorded on each of the episodes
            prefix = "" if isinstance(error, AjetError) else "judge: "
            first = error if isinstance(error, EpisodeFault) else EpisodeFault(error, prefix)
            for number, future in enumerate(futures):
                if not future.done():
                    fault = EpisodeFault(error)  # an exception shared by tasks would collect their tracebacks
                    fault.fields = dict(first.fields)
                    fault.metrics = {} if number else first.metrics  # the first trace has the judge's calls
                    future.set_exception(fault)
        else:
            for future, verdict in zip(futures, verdicts, strict=True):
                if not future.done():
                    future.set_result(verdict)

    async def _ask(self, runners: Sequence[Runner], episodes: Sequence[Episode]) -> list[Verdict]:
        first = runners[0]
        assert first.opened is not None
        async with first.opened.judging():
            call = call_group_judge(self._judge, episodes, given={"model": first.opened.model()})
            return judged_group(await _called(first, first.opened, call), call.name, len(episodes))


@dataclass
class Member:
    """An attempt's membership in a group; `make_room` lets another attempt run while it waits."""

    group: Group
    make_room: Callable[[], None] = lambda: None

    async def verdict(self, runner: Runner) -> Verdict:
        self.make_room()
        return await self.group.verdict(runner)


def groups_of(group_ids: Iterable[str], judge: object) -> dict[str, Group]:
    """A group for each id, if the judge is a group judge; otherwise none."""
    sizes = Counter(group_ids) if is_group_judge(judge) else {}
    return {group_id: Group(judge, size) for group_id, size in sizes.items() if group_id}
