"""Episodes as a trace has them -> what is compared of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ajet_sdk.protocols import TraceReader
from ajet_sdk.types import Call
from ajet_tools.trace.align import Attempt, Said
from ajet_tools.trace.messages import conversation
from ajet_tools.trace.queries.tokens import EpisodeFacts, episode_facts, recomputed_advantages
from ajet_tools.trace.token_view import episode_tokens

__all__ = ["attempt_of", "read_attempts", "said"]

_Floats = npt.NDArray[np.float32]


def read_attempts(reader: TraceReader, episode_ids: Sequence[str]) -> list[Attempt]:
    """The episodes to compare, in the order asked. Raises QueryError where the trace knows nothing of one."""
    facts = episode_facts(reader, *dict.fromkeys(episode_ids))
    unknown = [f.episode.episode_id for f in facts if _trained(f) and not f.scores]
    recomputed = recomputed_advantages(reader, *unknown) if unknown else {}
    return [attempt_of(f, recomputed) for f in facts]


def attempt_of(facts: EpisodeFacts, recomputed: Mapping[str, _Floats]) -> Attempt:
    """What is compared of one episode; `recomputed` has advantages by call where none were recorded."""
    episode, tokens = facts.episode, episode_tokens(facts)
    values = [scores.advantages for scores in facts.scores.values()]
    if not values:
        values = [recomputed[call.call_id] for call in episode.calls if call.call_id in recomputed]
    return Attempt(
        episode_id=episode.episode_id,
        run_id=episode.run_id,
        task_id=episode.task.task_id,
        question=episode.task.main_query,
        attempt=episode.attempt,
        step=episode.step,
        split=episode.split,
        status=episode.status if facts.ended else "running",
        cause=episode.cause or "",
        reward=episode.reward,
        advantage=_mean(values),
        recomputed=bool(values) and not facts.scores,
        sampled=sum(int(timeline.loss_mask.sum()) for timeline in tokens.merged.timelines),
        trained=_trained(facts),
        messages=said(episode.calls),
        timelines=tuple(timeline.token_ids for timeline in tokens.merged.timelines),
        homes=dict(tokens.homes),
    )


def said(calls: Sequence[Call]) -> tuple[Said, ...]:
    """The conversation of an episode: each message once, those of several agents in the order of their calls."""
    by_agent: dict[str, list[Call]] = {}
    for call in calls:
        if call.phase == "rollout":
            by_agent.setdefault(call.agent, []).append(call)
    place = {call.call_id: i for i, call in enumerate(calls)}
    told = [
        (place[message.call_id], Said(message.role, agent, message.text, message.call_id))
        for agent, chain in by_agent.items()
        for message in conversation(chain)
    ]
    return tuple(one for _, one in sorted(told, key=lambda pair: pair[0]))


def _trained(facts: EpisodeFacts) -> int:
    return sum(row.tokens for booked in facts.ledger.values() for row in booked if row.outcome == "trained")


def _mean(values: Sequence[_Floats]) -> float | None:
    """Over every value that is known; None where there is none."""
    known = [array[np.isfinite(array)] for array in values]
    return float(np.concatenate(known).mean()) if any(array.size for array in known) else None
