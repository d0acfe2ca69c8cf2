"""Judges an episode, or a group once its last attempt has ended, and adds rewards for faults of
replies.

Faults are endless repetition, unparsable tool calls and excessive length.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ajet_sdk.errors import AjetError, NoReward
from ajet_sdk.gateway.recorder import RunningEpisode
from ajet_sdk.judges.call import JudgeCall, call_group_judge, call_judge, is_group_judge
from ajet_sdk.judges.rewards import Verdict, judged, judged_group
from ajet_sdk.protocols import Engine
from ajet_sdk.rollout.outcomes import EpisodeFault, is_last_call_lost, solved
from ajet_sdk.rollout.threads import Workers
from ajet_sdk.samples.draft import output_tokens
from ajet_sdk.samples.prefixes import is_trained
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.types import Call, Episode, Reward, Task

if TYPE_CHECKING:
    from ajet_sdk.agent.workflow import WorkflowTask
    from ajet_sdk.config.config import Config


class Runner(Protocol):
    """The parts of a running episode that judging needs."""

    judge: object
    config: Config
    workers: Workers
    member: Member | None
    opened: RunningEpisode | None
    task: Task
    episode: Episode

    def settle(self, **fields: object) -> None:
        """Set fields of the episode."""

    def attempt_task(self) -> WorkflowTask:
        """The task for `compute_reward`."""

    def reserved_arguments(
        self, opened: RunningEpisode, function: object, output: object = None
    ) -> dict[str, object]:
        """Values of the reserved parameters of a judge; `function` is None for an object."""


async def judge_episode(runner: Runner, output: object) -> Verdict:
    """Judge an episode with the run's judge. Raises EpisodeFault, or NoReward without a judge."""
    opened = runner.opened
    judge = runner.judge
    assert opened is not None
    if judge is None and not runner.config.trainer_common.algorithm.needs_reward:
        return Verdict(())
    if judge is None:
        raise NoReward(
            "the workflow returned no reward and there is no judge; return an ajet.Reward, or set a"
            " judge (task_judge.judge_protocol, --judge)"
        )
    if is_group_judge(judge):
        return await (runner.member or Member(Group(judge, 1))).verdict(runner)
    async with opened.judging():
        episode = _to_be_judged(runner)
        instance = judge(runner.config) if isinstance(judge, type) else judge
        reserved = runner.reserved_arguments(
            opened, None if hasattr(instance, "compute_reward") else judge, output
        )
        call = call_judge(
            instance, runner.task, output, episode, given=reserved, attempt=runner.attempt_task()
        )
        return judged(await _called(runner, opened, call), call.name)


def _to_be_judged(runner: Runner) -> Episode:
    """The episode as shown to the judge."""
    assert runner.opened is not None
    runner.settle(calls=runner.opened.calls, events=tuple(runner.opened.events))
    return runner.episode.model_copy(update={"status": "succeeded", "error": None, "cause": None})


async def _called(runner: Runner, opened: RunningEpisode, call: JudgeCall) -> object:
    """Call the judge and return its result. Raises EpisodeFault."""
    before = len(opened.errors)
    timeout = call.timeout or runner.config.rollout.judge_timeout
    outcome = await runner.workers.call(
        call.function, {}, timeout=timeout, label=f"judge {call.name}"
    )
    await opened.update(outcome.error)
    if outcome.error is not None:
        fault = EpisodeFault(outcome.error, f"judge {call.name}: ")
        # If the judge's model failed, the judge's client raises its own exception.
        fault.fields["infrastructure"] |= any(
            error.infrastructure for error in opened.errors[before:]
        )
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
            verdicts = await self._ask(
                [runner for runner, _, _ in members], [episode for _, episode, _ in members]
            )
        except Exception as error:  # noqa: BLE001  any error is recorded on each of the episodes
            prefix = "" if isinstance(error, AjetError) else "judge: "
            if isinstance(error, EpisodeFault):
                first = error
            else:
                first = EpisodeFault(error, prefix)
            for number, future in enumerate(futures):
                if not future.done():
                    fault = EpisodeFault(
                        error
                    )  # an exception shared by tasks would collect their tracebacks
                    fault.fields = dict(first.fields)
                    fault.metrics = (
                        {} if number else first.metrics
                    )  # the first trace has the judge's calls
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


log = logging.getLogger("ajet")

MADNESS = "agent_madness"
"""Name of the reward for a faulty reply."""
OVERLONG = "overlong"
"""Name of the penalty for a reply near the maximum length."""

_LEAST = 200
"""Minimum length of a repetition, in characters."""
_TIMES = 10
"""Minimum number of repeats."""
_LONGEST = 100
"""Maximum length of the repeated text, in characters."""


def repeats(text: str) -> bool:
    """Whether a text of at most 100 characters occurs ten times or more in a row, over at least 200
    characters."""
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    for period in range(1, min(_LONGEST, len(letters) // _TIMES) + 1):
        same = letters[period:] == letters[:-period]
        ends = np.flatnonzero(~same)
        longest = np.diff(ends, prepend=-1, append=len(same)).max() - 1
        if longest + period >= max(_LEAST, _TIMES * period):
            return True
    return False


def fault_in(call: Call, checklist: Sequence[str], engine: Engine) -> str | None:
    """The first fault of the checklist (`nonsense`, `wrong_toolcall`) in a reply of the policy, or
    None."""
    if not is_trained(call) or call.error is not None:
        return None
    if "nonsense" in checklist and repeats(_text_of(call, engine)):
        return "nonsense"
    if "wrong_toolcall" in checklist and _unread(call) and not _cut(call):
        return "wrong_toolcall"
    return None


def _unread(call: Call) -> bool:
    """Whether a reply contains an unparsable tool call."""
    choices = call.response.get("choices") or [{}]
    return choices[0].get("unread_tool_call") is True


def _cut(call: Call) -> bool:
    return call.finish_reason == "length"


def metrics_of(calls: Sequence[Call]) -> dict[str, float]:
    """Counts the policy's replies with an unparsable tool call, and those of them cut at the
    maximum length; empty if no tool was offered."""
    offered = [call for call in calls if is_trained(call) and call.request.get("tools")]
    unread = [call for call in offered if _unread(call)]
    metrics = {
        "unread_tool_calls": float(len(unread)),
        "cut_tool_calls": float(sum(map(_cut, unread))),
    }
    return metrics if offered else {}


def _text_of(call: Call, engine: Engine) -> str:
    """The sampled text; without a tokenizer the content of the client's chat message."""
    tokenizer = getattr(engine, "tokenizer", None)
    if tokenizer is not None and call.output_ids is not None:
        ids = call.output_ids.tolist()
        text: str = tokenizer.decode(ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids)
        return text
    choices = call.response.get("choices") or [{}]
    return str((choices[0].get("message") or {}).get("content") or "")


def check_of(config: Config, engine: Engine) -> Callable[[Call], str | None] | None:
    """The function `EpisodeSpec.stop_after`, which ends an episode after a faulty reply; None if
    disabled."""
    rollout = config.rollout
    if not rollout.agent_madness_termination or not rollout.compute_madness_checklist:
        return None
    return lambda call: fault_in(call, rollout.compute_madness_checklist, engine)


def verdict_on_stopped(stopped: str | None, config: Config) -> Verdict | None:
    """The verdict on an episode that a faulty reply ended, if any."""
    if stopped is None:
        return None
    return Verdict(
        (Reward(name=MADNESS, value=config.rollout.agent_madness_reward, reason=stopped),), False
    )


def with_rewards_of_replies(
    episode: Episode, calls: Sequence[Call], config: Config, engine: Engine
) -> dict[str, object]:
    """The episode's `rewards`, with one for each faulty reply that sets its value to the configured
    one.

    In training, replies that reach into `overlong_buffer` get a penalty, with `is_success`
    unaffected by it.
    """
    rollout = config.rollout
    rewards = list[Reward]()
    for call in (
        calls if rollout.compute_madness_checklist and not rollout.agent_madness_termination else ()
    ):
        fault = fault_in(call, rollout.compute_madness_checklist, engine)
        if fault is not None:
            value = rollout.agent_madness_reward - (episode.value(call.agent, call.call_id) or 0.0)
            rewards.append(
                Reward(
                    name=MADNESS, value=value, reason=fault, agent=call.agent, call_id=call.call_id
                )
            )
    earned = (*episode.rewards, *rewards)
    longest = rollout.max_response_length_in_one_turn
    buffer = rollout.overlong_buffer
    if episode.split == "train" and buffer:
        lost = overlong(calls, longest, buffer, rollout.overlong_penalty)
    else:
        lost = []
    if not lost:
        return {"rewards": earned}
    return {
        "rewards": (*earned, *lost),
        "is_success": solved(episode.model_copy(update={"rewards": earned})),
    }


def overlong(calls: Sequence[Call], longest: int, buffer: int, penalty: float) -> list[Reward]:
    """Penalties for overlong replies of the policy: Yu et al. 2025 (DAPO), arXiv:2503.14476,
    equation 13.

    They grow linearly from 0 at `longest - buffer` tokens to `penalty` at `longest`.
    """
    rewards = []
    for call in calls:
        beyond = output_tokens(call) - (longest - buffer)
        if is_trained(call) and beyond > 0:
            value = -penalty * min(beyond / buffer, 1.0)
            reason = f"{output_tokens(call)} of {longest} tokens"
            rewards.append(
                Reward(
                    name=OVERLONG,
                    value=value,
                    reason=reason,
                    agent=call.agent,
                    call_id=call.call_id,
                )
            )
    return rewards


def log_replies(episode_id: str, calls: Sequence[Call], config: Config, engine: Engine) -> None:
    """Log unparsable tool calls and splits of timelines, as `context_tracker` requests."""
    tracker = config.context_tracker
    for call in calls if tracker.log_tool_format_check else ():
        if fault_in(call, ("wrong_toolcall",), engine):
            if tracker.log_tool_format_error_detail:
                text = f": {_text_of(call, engine)!r:.2000}"
            else:
                text = ""
            log.warning(
                "Episode %s, call %s: a tool call could not be parsed%s",
                episode_id,
                call.call_id,
                text,
            )
    if tracker.detect_timeline_snap:
        tokenizer = getattr(engine, "tokenizer", None)
        known = (
            (None, None) if tokenizer is None else (tokenizer.decode, ChatTemplate.known(tokenizer))
        )
        for split in merge(calls, *known).splits:
            log.warning(
                "Episode %s: call %s starts a new timeline at token %d (%s). %s",
                episode_id,
                split.call_id,
                split.at_token,
                split.cause,
                split.hint,
            )
