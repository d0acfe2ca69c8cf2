"""How any judge is called: a function whose parameters are filled by name, or an object with `compute_reward`.

A judge of a group is a function with `@ajet.judge(group=True)`, or an object with `compute_rewards(episodes)` whose
`group` is true.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajet_sdk.agent.decorators import bind, spec_of
from ajet_sdk.agent.workflow import WorkflowOutput, WorkflowTask
from ajet_sdk.judges.rewards import Verdict, judged, judged_group
from ajet_sdk.types import Episode, Task


@dataclass(frozen=True)
class JudgeCall:
    """A judge with its arguments."""

    name: str
    timeout: float | None
    """Seconds; None: the run's own limit."""
    function: Callable[[], Any]


def is_group_judge(judge: Any) -> bool:
    """Whether it judges all attempts at a task at once."""
    if judge is None or isinstance(judge, type):
        return False
    if hasattr(judge, "compute_reward") or hasattr(judge, "compute_rewards"):
        return bool(getattr(judge, "group", False))
    return spec_of(judge, "judge").group


def call_judge(
    judge: Any, task: Task, output: object, episode: Episode, *, given: Mapping[str, object], attempt: WorkflowTask
) -> JudgeCall:
    """The call that judges one output.

    Args:
        episode: as the judge sees it: with its output and its calls, and without rewards.
        given: what a function may take beside these: `model`, `env`.
        attempt: the task as an object with `compute_reward` gets it.
    """
    if hasattr(judge, "compute_reward"):
        if not isinstance(output, WorkflowOutput):
            output = WorkflowOutput(metadata={"final_answer": output})
        timeout = getattr(judge, "timeout", None)
        return JudgeCall(type(judge).__name__, timeout, functools.partial(judge.compute_reward, attempt, output))
    spec = spec_of(judge, "judge")
    whole = {"task": task, **given, "episode": episode, "output": output}
    timeout = spec.timeout or getattr(judge, "timeout", None)
    return JudgeCall(spec.name, timeout, functools.partial(spec.function, **bind(spec, task, whole)))


def call_group_judge(judge: Any, episodes: Sequence[Episode], *, given: Mapping[str, object]) -> JudgeCall:
    """The call that judges a group; it returns a list, one for each episode."""
    if hasattr(judge, "compute_rewards"):
        timeout = getattr(judge, "timeout", None)
        return JudgeCall(type(judge).__name__, timeout, functools.partial(judge.compute_rewards, list(episodes)))
    spec, task = spec_of(judge, "judge"), episodes[0].task
    whole = {"task": task, **given, "episodes": list(episodes)}
    return JudgeCall(spec.name, spec.timeout, functools.partial(spec.function, **bind(spec, task, whole)))


async def answer_of(call: JudgeCall) -> Any:
    """The result of a judge outside of a run's workers; a blocking judge runs in a thread of its own."""
    target = getattr(call.function, "func", call.function)
    if inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__):
        return await call.function()
    value = await asyncio.to_thread(call.function)
    return await value if inspect.isawaitable(value) else value


async def judge_stored(
    judge: object, episodes: Sequence[Episode], ask: Callable[[JudgeCall], Awaitable[object]] = answer_of
) -> list[Verdict]:
    """The verdicts of any judge on episodes that have their output, in their order; a group's judge sees all of them.

    `ask` makes the call. Raises what the judge raises, NoReward for what is no reward.
    """
    if is_group_judge(judge):
        call = call_group_judge(judge, episodes, given={})
        return judged_group(await ask(call), call.name, len(episodes))
    verdicts = []
    for episode in episodes:
        attempt = workflow_task(episode.task, episode)
        call = call_judge(judge, episode.task, output_of(episode), episode, given={}, attempt=attempt)
        verdicts.append(judged(await ask(call), call.name))
    return verdicts


def output_of(episode: Episode) -> Any:
    """The output of a stored episode as its judge got it: a trace keeps a WorkflowOutput as its fields."""
    value = episode.output
    if isinstance(value, Mapping) and set(WorkflowOutput.model_fields) <= set(value):
        return WorkflowOutput(**{str(name): field_value for name, field_value in value.items()})
    return value


def workflow_task(task: Task, episode: Episode, **more: Any) -> WorkflowTask:
    """The attempt as `execute` and `compute_reward` get it; `more` are further fields of it."""
    messages = task.init_messages
    if not messages and task.main_query:
        messages = [{"role": "user", "content": task.main_query}]
    return WorkflowTask(
        task=task.model_copy(update={"init_messages": messages}),
        env_type=task.env_type,
        task_id=task.task_id,
        task_thread_index=episode.attempt,
        task_batch_index=episode.step,
        task_tag=episode.split,
        episode_uuid=episode.episode_id,
        **more,
    )
