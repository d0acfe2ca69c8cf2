"""Reads the results of workflows and judges as rewards. A result that is not a reward is an error,
never 0."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from ajet_sdk.agent.agentscope import is_output
from ajet_sdk.agent.workflow import WorkflowOutput
from ajet_sdk.errors import NoReward
from ajet_sdk.types import Call, Reward

_LISTED = 10
"""Ids of calls that a message lists."""


@dataclass(frozen=True)
class Verdict:
    """The rewards of an episode, and whether it solved its task (None: unknown)."""

    rewards: tuple[Reward, ...]
    is_success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def returned(output: Any, name: str) -> Verdict | None:
    """Reads rewards from a workflow's output; None if there are none, so that a judge decides.

    A `Reward`, a list of them, and a `WorkflowOutput` with a reward are rewards; a bare number is
    an output. A list of numbers in a `WorkflowOutput` becomes one reward each, and their sum
    counts. Raises NoReward for NaN and the like.
    """
    if isinstance(output, Reward):
        return Verdict((output,))
    if is_output(output):
        if output.reward is None:
            return None
        return Verdict(_several(output.reward, f"workflow {name}"))
    if _rewards(output):
        return Verdict(tuple(output))
    if not isinstance(output, WorkflowOutput) or output.reward is None:
        return None
    return Verdict(_several(output.reward, f"workflow {name}"), output.is_success)


def judged(value: Any, name: str) -> Verdict:
    """Reads a judge's result: a number, a bool, a `Reward` or a list of them,
    `(reward, is_success)`, a `Verdict`, or AgentScope Tuner's `JudgeOutput`.

    Raises NoReward for anything else, including None, NaN and an empty list.
    """
    source = f"judge {name}"
    if isinstance(value, Verdict):
        return value
    success: bool | None = None
    if isinstance(value, tuple):
        if len(value) != 2 or not (value[1] is None or isinstance(value[1], (bool, np.bool_))):
            raise NoReward(
                f"{source} returned {_short(value)}; a tuple must be (reward, is_success)"
            )
        value, success = value[0], None if value[1] is None else bool(value[1])
    elif type(value) in (bool, np.bool_):
        success = bool(value)
    if isinstance(value, Reward):
        return Verdict((value,), success)
    if is_output(value):
        reward = Reward(name=name, value=_number(value.reward, source))
        return Verdict((reward,), metrics=numbers(value.metrics or {}))
    if _rewards(value):
        return Verdict(tuple(value), success)
    return Verdict((Reward(name=name, value=_number(value, source)),), success)


def judged_group(values: object, name: str, count: int) -> list[Verdict]:
    """Reads a group judge's results for `count` episodes, in order. Raises NoReward as `judged`
    does."""
    if not isinstance(values, (list, tuple)) or len(values) != count:
        if isinstance(values, (list, tuple)):
            returned_count = f"{len(values)}"
        else:
            returned_count = _short(values)
        raise NoReward(
            f"judge {name} returned {returned_count} for {count} episodes; a group judge must"
            " return a list with one reward for each"
        )
    return [judged(value, name) for value in values]


def check_names(rewards: Sequence[Reward], calls: Sequence[Call], agents: Collection[str]) -> None:
    """Raise NoReward for a reward that names an unknown agent or call, and would therefore be
    ignored.

    `agents` have a handle, but may have made no call.
    """
    agent_of = {call.call_id: call.agent for call in calls if call.phase == "rollout"}
    known = sorted({*agents, *agent_of.values()})
    for reward in rewards:
        if reward.agent is not None and reward.agent not in known:
            raise NoReward(
                f"reward {reward.name!r} is for agent {_short(reward.agent)}, which is not in the"
                f" episode; its agents: {', '.join(known) or 'none'}"
            )
        if reward.call_id is None:
            continue
        if reward.call_id not in agent_of:
            listed = ", ".join([*agent_of][:_LISTED]) + (", ..." if len(agent_of) > _LISTED else "")
            raise NoReward(
                f"reward {reward.name!r} is for call {_short(reward.call_id)}, which is not one of"
                f" the workflow's; its calls: {listed or 'none'}"
            )
        if reward.agent not in (None, agent_of[reward.call_id]):
            raise NoReward(
                f"reward {reward.name!r} names call {reward.call_id} and agent"
                f" {_short(reward.agent)}, but the call is {agent_of[reward.call_id]}'s"
            )


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a mapping as floats."""
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def _several(value: Any, source: str) -> tuple[Reward, ...]:
    if _rewards(value):
        return tuple(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise NoReward(f"{source} returned an empty list of rewards")
        return tuple(
            Reward(name=f"reward.{i}", value=_number(number, source))
            for i, number in enumerate(value)
        )
    return (Reward(value=_number(value, source)),)


def _rewards(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(item, Reward) for item in value)
    )


def _number(value: Any, source: str) -> float:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, (Real, np.bool_)):
        raise NoReward(
            f"{source} returned {_short(value)} ({type(value).__name__}), which is not a reward;"
            " return a number, a bool, a Reward, a list of Rewards, or (reward, is_success)"
        )
    number = float(value)
    if not math.isfinite(number):
        raise NoReward(f"{source} returned {number}, which is not a reward: it must be finite")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
