"""Which episodes and replies are worth imitating: whole replies of episodes that earned something.

A reply that was cut at its limit (`max_tokens`) has no end; a conversation of it teaches an end
that was never sampled.
"""

from __future__ import annotations

from collections.abc import Mapping

from ajet_sdk.dialects.finish import finish_of
from ajet_sdk.types import Call

NOTHING = "episodes that earned nothing"
UNREWARDED = "episodes without a reward"


def is_cut(call: Call) -> bool:
    """Whether a reply was cut at its maximum length."""
    reason: object = call.finish_reason
    choices = call.response.get("choices")
    if reason is None and isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        reason = choices[0].get("finish_reason")
    return finish_of(reason) == "length"


def worthless(rewards: Mapping[str, float | None]) -> dict[str, str]:
    """Returns the episodes that are no example to follow, each with the reason; none if nothing was
    rewarded.

    Nothing was earned with a reward of 0 or less; if no reward is above 0 (as with penalties), with
    the lowest.
    """
    known = [reward for reward in rewards.values() if reward is not None]
    if not known:
        return {}
    lowest = min(known)
    highest = max(known)
    reasons: dict[str, str] = {}
    for episode_id, reward in rewards.items():
        if reward is None:
            reasons[episode_id] = UNREWARDED
        elif reward <= 0 and (highest > 0 or reward == lowest):
            reasons[episode_id] = NOTHING
    return reasons
