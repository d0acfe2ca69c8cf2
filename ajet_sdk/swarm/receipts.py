"""What became of an episode and of each token that it sampled; and the rewards that ended it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from ajet_sdk.errors import QueryError
from ajet_sdk.samples.draft import sampled_tokens
from ajet_sdk.swarm.messages import CallTokens, End, EpisodeState, Receipt, RewardItem
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Episode, Reward

if TYPE_CHECKING:
    import pyarrow as pa

    from ajet_sdk.trace.writer import TraceWriter

ABANDONED = "Abandoned"
"""Cause of episodes that nobody ended."""


def rewards_of(end: End) -> tuple[Reward, ...]:
    """The rewards of an end: a number, one for each agent, or several that are added."""
    reward = end.reward
    if reward is None:
        return ()
    if isinstance(reward, dict):
        return tuple(Reward(agent=agent, value=value) for agent, value in reward.items())
    if not isinstance(reward, list):
        return (Reward(value=reward),)
    rewards = []
    for number, item in enumerate(reward):
        if isinstance(item, RewardItem):
            named = item.model_dump()
        else:
            named = {"name": f"reward.{number}", "value": item}
        rewards.append(Reward.model_validate(named))
    return tuple(rewards)


def receipt_of(episode: Episode, state: EpisodeState, outcome: str, client_id: str) -> Receipt:
    """The receipt of an episode whose tokens all have one outcome, or are `pending`."""
    calls = []
    total: Counter[str] = Counter()
    for call in episode.calls:
        count = sampled_tokens(call)
        if not (call.trainable and call.phase == "rollout") or not count:
            continue
        total[outcome] += count
        calls.append(
            CallTokens(
                call_id=call.call_id,
                policy_version=call.policy_version,
                tokens={outcome: count},
            )
        )
    return Receipt(
        episode_id=episode.episode_id,
        state=state,
        status=episode.status,
        cause=episode.cause,
        error=episode.error,
        task_id=episode.task.task_id,
        group_id=episode.group_id,
        step=episode.step,
        split="val" if episode.split == "val" else "train",
        reward=episode.reward,
        tokens=dict(total),
        calls=tuple(calls),
        client_id=client_id,
    )


def with_outcomes(receipt: Receipt, calls: Mapping[str, Mapping[str, int]]) -> Receipt:
    """A receipt with the tokens of its calls by outcome."""
    total: Counter[str] = Counter()
    known = []
    for call in receipt.calls:
        tokens = dict(calls.get(call.call_id, call.tokens))
        total.update(tokens)
        known.append(call.model_copy(update={"tokens": tokens}))
    return receipt.model_copy(update={"tokens": dict(total), "calls": tuple(known)})


_STORED = """
    SELECT task_id, group_id, step, split, status, cause, error, client,
        (SELECT sum(value * weight) FROM rewards r WHERE r.episode_id = e.episode_id) AS reward
    FROM episodes e WHERE episode_id = ?"""
_STORED_CALLS = """
    SELECT c.call_id, c.policy_version, coalesce(l.outcome, 'pending') AS outcome,
        coalesce(l.tokens, coalesce(len(c.output_ids), 0) + coalesce(c.cut_tokens, 0)) AS tokens
    FROM calls c LEFT JOIN ledger l USING (call_id)
    WHERE c.episode_id = ? AND c.trainable AND c.phase = 'rollout' ORDER BY c.index"""


def stored_receipt(writer: TraceWriter, episode_id: str) -> Receipt | None:
    """The receipt of an episode that is over, from the trace; None if it has none."""
    with suppress(QueryError):
        if writer.is_open:
            writer.flush()
            return _stored_in(writer, episode_id)
    with open_trace(writer.path) as trace:  # the run is over
        return _stored_in(trace, episode_id)


class _Queried(Protocol):
    def query(self, sql: str, parameters: Sequence[object]) -> pa.Table: ...


def _stored_in(trace: _Queried, episode_id: str) -> Receipt | None:
    found = trace.query(_STORED, [episode_id]).to_pylist()
    if not found:
        return None
    row = found[0]
    by_call: dict[str, CallTokens] = {}
    total: Counter[str] = Counter()
    for call in trace.query(_STORED_CALLS, [episode_id]).to_pylist():
        if not call["tokens"]:
            continue
        known = by_call.get(call["call_id"])
        tokens = {} if known is None else known.tokens
        by_call[call["call_id"]] = CallTokens(
            call_id=call["call_id"],
            policy_version=call["policy_version"],
            tokens={**tokens, call["outcome"]: call["tokens"]},
        )
        total[call["outcome"]] += call["tokens"]
    state: EpisodeState = "ended"
    if row["cause"] == ABANDONED:
        state = "abandoned"
    elif row["status"] == "aborted":
        state = "aborted"
    elif row["status"] != "succeeded":
        state = "failed"
    return Receipt(
        episode_id=episode_id,
        state=state,
        status=row["status"],
        cause=row["cause"],
        error=row["error"],
        task_id=row["task_id"],
        group_id=row["group_id"],
        step=row["step"],
        split="val" if row["split"] == "val" else "train",
        reward=row["reward"],
        tokens=dict(total),
        calls=tuple(by_call.values()),
        client_id=row["client"] or "",
    )
