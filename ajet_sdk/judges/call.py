"""Calls any judge: a function whose parameters are filled by name, or an object with
`compute_reward`.

A group judge is a function with `@ajet.judge(group=True)`, or an object with
`compute_rewards(episodes)` and a true `group`.
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
    """Seconds; None: the limit of the run."""
    function: Callable[[], Any]


def is_group_judge(judge: Any) -> bool:
    """Whether a judge compares all attempts at a task."""
    if judge is None or isinstance(judge, type):
        return False
    if hasattr(judge, "compute_reward") or hasattr(judge, "compute_rewards"):
        return bool(getattr(judge, "group", False))
    return spec_of(judge, "judge").group


def call_judge(
    judge: Any,
    task: Task,
    output: object,
    episode: Episode,
    *,
    given: Mapping[str, object],
    attempt: WorkflowTask,
) -> JudgeCall:
    """Binds a judge to one output.

    Args:
        episode: with its output and calls, without rewards.
        given: further arguments that a function may take: `model`, `env`.
        attempt: the task for an object with `compute_reward`.
    """
    if hasattr(judge, "compute_reward"):
        if not isinstance(output, WorkflowOutput):
            output = WorkflowOutput(metadata={"final_answer": output})
        timeout = getattr(judge, "timeout", None)
        return JudgeCall(
            type(judge).__name__, timeout, functools.partial(judge.compute_reward, attempt, output)
        )
    spec = spec_of(judge, "judge")
    whole = {"task": task, **given, "episode": episode, "output": output}
    timeout = spec.timeout or getattr(judge, "timeout", None)
    return JudgeCall(
        spec.name, timeout, functools.partial(spec.function, **bind(spec, task, whole))
    )


def call_group_judge(
    judge: Any, episodes: Sequence[Episode], *, given: Mapping[str, object]
) -> JudgeCall:
    """Binds a judge to a group; the call returns a list with a result for each episode."""
    if hasattr(judge, "compute_rewards"):
        timeout = getattr(judge, "timeout", None)
        return JudgeCall(
            type(judge).__name__, timeout, functools.partial(judge.compute_rewards, list(episodes))
        )
    spec = spec_of(judge, "judge")
    task = episodes[0].task
    whole = {"task": task, **given, "episodes": list(episodes)}
    return JudgeCall(
        spec.name, spec.timeout, functools.partial(spec.function, **bind(spec, task, whole))
    )


async def answer_of(call: JudgeCall) -> Any:
    """Runs a judge outside of a run's workers; a blocking judge runs in a thread."""
    target = getattr(call.function, "func", call.function)
    if inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__):
        return await call.function()
    value = await asyncio.to_thread(call.function)
    return await value if inspect.isawaitable(value) else value


async def judge_stored(
    judge: object,
    episodes: Sequence[Episode],
    ask: Callable[[JudgeCall], Awaitable[object]] = answer_of,
) -> list[Verdict]:
    """Judges finished episodes, in order; a group judge gets all of them at once.

    `ask` makes the call. Raises whatever the judge raises, and NoReward for an invalid result.
    """
    if is_group_judge(judge):
        call = call_group_judge(judge, episodes, given={})
        return judged_group(await ask(call), call.name, len(episodes))
    verdicts = []
    for episode in episodes:
        attempt = workflow_task(episode.task, episode)
        call = call_judge(
            judge, episode.task, output_of(episode), episode, given={}, attempt=attempt
        )
        verdicts.append(judged(await ask(call), call.name))
    return verdicts


def output_of(episode: Episode) -> Any:
    """Restores an episode's output as its judge got it; a trace stores a WorkflowOutput as a
    mapping."""
    value = episode.output
    if isinstance(value, Mapping) and set(WorkflowOutput.model_fields) <= set(value):
        return WorkflowOutput(**{str(name): field_value for name, field_value in value.items()})
    return value


def workflow_task(task: Task, episode: Episode, **more: Any) -> WorkflowTask:
    """Builds the task object for `execute` and `compute_reward`; `more` are further fields."""
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
