"""Faults of the policy's replies: endless repetition, unparsable tool calls, excessive length."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.protocols import Engine
from ajet_sdk.rollout.outcomes import solved
from ajet_sdk.samples.draft import output_tokens
from ajet_sdk.samples.prefixes import is_trained
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.types import Call, Episode, Reward

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

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
    """Whether a text of at most 100 characters occurs ten times or more in a row, over at least 200 characters."""
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    for period in range(1, min(_LONGEST, len(letters) // _TIMES) + 1):
        same = letters[period:] == letters[:-period]
        ends = np.flatnonzero(~same)
        longest = np.diff(ends, prepend=-1, append=len(same)).max() - 1
        if longest + period >= max(_LEAST, _TIMES * period):
            return True
    return False


def fault_in(call: Call, checklist: Sequence[str], engine: Engine) -> str | None:
    """The first fault of the checklist (`nonsense`, `wrong_toolcall`) in a reply of the policy, or None."""
    if not is_trained(call) or call.error is not None:
        return None
    if "nonsense" in checklist and repeats(_text_of(call, engine)):
        return "nonsense"
    return "wrong_toolcall" if "wrong_toolcall" in checklist and _unread(call) and not _cut(call) else None


def _unread(call: Call) -> bool:
    """Whether a reply contains an unparsable tool call."""
    choices = call.response.get("choices") or [{}]
    return choices[0].get("unread_tool_call") is True


def _cut(call: Call) -> bool:
    return call.finish_reason == "length"


def metrics_of(calls: Sequence[Call]) -> dict[str, float]:
    """Counts the policy's replies with an unparsable tool call, and those of them cut at the maximum length; empty if
    no tool was offered."""
    offered = [call for call in calls if is_trained(call) and call.request.get("tools")]
    unread = [call for call in offered if _unread(call)]
    metrics = {"unread_tool_calls": float(len(unread)), "cut_tool_calls": float(sum(map(_cut, unread)))}
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
    """The function `EpisodeSpec.stop_after`, which ends an episode after a faulty reply; None if disabled."""
    rollout = config.rollout
    if not rollout.agent_madness_termination or not rollout.compute_madness_checklist:
        return None
    return lambda call: fault_in(call, rollout.compute_madness_checklist, engine)


def verdict_on_stopped(stopped: str | None, config: Config) -> Verdict | None:
    """The verdict on an episode that a faulty reply ended, if any."""
    if stopped is None:
        return None
    return Verdict((Reward(name=MADNESS, value=config.rollout.agent_madness_reward, reason=stopped),), False)


def with_rewards_of_replies(
    episode: Episode, calls: Sequence[Call], config: Config, engine: Engine
) -> dict[str, object]:
    """The episode's `rewards`, with one for each faulty reply that sets its value to the configured one.

    In training, replies that reach into `overlong_buffer` get a penalty, with `is_success` unaffected by it.
    """
    rollout, rewards = config.rollout, list[Reward]()
    for call in calls if rollout.compute_madness_checklist and not rollout.agent_madness_termination else ():
        fault = fault_in(call, rollout.compute_madness_checklist, engine)
        if fault is not None:
            value = rollout.agent_madness_reward - (episode.value(call.agent, call.call_id) or 0.0)
            rewards.append(Reward(name=MADNESS, value=value, reason=fault, agent=call.agent, call_id=call.call_id))
    earned = (*episode.rewards, *rewards)
    longest, buffer = rollout.max_response_length_in_one_turn, rollout.overlong_buffer
    lost = overlong(calls, longest, buffer, rollout.overlong_penalty) if episode.split == "train" and buffer else []
    if not lost:
        return {"rewards": earned}
    return {"rewards": (*earned, *lost), "is_success": solved(episode.model_copy(update={"rewards": earned}))}


def overlong(calls: Sequence[Call], longest: int, buffer: int, penalty: float) -> list[Reward]:
    """Penalties for overlong replies of the policy: Yu et al. 2025 (DAPO), arXiv:2503.14476, equation 13.

    They grow linearly from 0 at `longest - buffer` tokens to `penalty` at `longest`.
    """
    rewards = []
    for call in calls:
        beyond = output_tokens(call) - (longest - buffer)
        if is_trained(call) and beyond > 0:
            value = -penalty * min(beyond / buffer, 1.0)
            reason = f"{output_tokens(call)} of {longest} tokens"
            rewards.append(Reward(name=OVERLONG, value=value, reason=reason, agent=call.agent, call_id=call.call_id))
    return rewards


def log_replies(episode_id: str, calls: Sequence[Call], config: Config, engine: Engine) -> None:
    """Log unparsable tool calls and splits of timelines, as `context_tracker` requests."""
    tracker = config.context_tracker
    for call in calls if tracker.log_tool_format_check else ():
        if fault_in(call, ("wrong_toolcall",), engine):
            text = f": {_text_of(call, engine)!r:.2000}" if tracker.log_tool_format_error_detail else ""
            log.warning("Episode %s, call %s: a tool call could not be parsed%s", episode_id, call.call_id, text)
    if tracker.detect_timeline_snap:
        tokenizer = getattr(engine, "tokenizer", None)
        known = (None, None) if tokenizer is None else (tokenizer.decode, ChatTemplate.known(tokenizer))
        for split in merge(calls, *known).splits:
            log.warning(
                "Episode %s: call %s starts a new timeline at token %d (%s). %s",
                episode_id, split.call_id, split.at_token, split.cause, split.hint,
            )  # fmt: skip
