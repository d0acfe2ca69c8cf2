"""Numbers of a step or a validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ajet_sdk.reporting.notices import answer_metrics
from ajet_sdk.rollout.outcomes import pass_at_k, solved
from ajet_sdk.samples.build import Batch
from ajet_sdk.samples.timelines import is_trained
from ajet_sdk.types import Episode

__all__ = [
    "add_prefix",
    "episode_metrics",
    "group_metrics",
    "mean_reward",
    "reason_for_no_samples",
    "rewards",
    "staleness",
]


def add_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics with `prefix/` before each name that has none."""
    return {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}


def rewards(episodes: Iterable[Episode]) -> list[float]:
    """The rewards of the sound episodes."""
    return [e.reward for e in episodes if e.status == "succeeded" and e.reward is not None]


def mean_reward(episodes: Iterable[Episode]) -> float:
    """The mean reward of the sound episodes; NaN where there is none."""
    return _mean(rewards(episodes))


def episode_metrics(prefix: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean reward of the sound episodes, shares of failed and solved ones, and the means of their own metrics."""
    own: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            own.setdefault(name, []).append(value)
    calls = [len(e.calls) for e in episodes]
    return {
        f"{prefix}/reward": mean_reward(episodes),
        f"{prefix}/solved_share": _mean([float(solved(e)) for e in episodes]),
        f"{prefix}/failed_share": _mean([float(e.status != "succeeded") for e in episodes]),
        f"{prefix}/calls_per_episode": _mean(calls),
        **answer_metrics(prefix, episodes),
        **{f"{prefix}/{name}": _mean(values) for name, values in own.items()},
    }


def group_metrics(prefix: str, episodes: Sequence[Episode], size: int) -> dict[str, float]:
    """pass@1 and pass@size of groups of `size` episodes that stand one behind the other."""
    found = [sum(map(solved, episodes[i : i + size])) for i in range(0, len(episodes), size)]
    return {f"{prefix}/pass@{k}": _mean([pass_at_k(size, n, k) for n in found]) for k in sorted({1, size})}


def staleness(episodes: Sequence[Episode], updates: int) -> dict[str, float]:
    """By how many updates the policy that sampled a call was behind the one to be trained: the mean and the most."""
    calls = [call for episode in episodes for call in episode.calls if is_trained(call)]
    lags = [updates - call.policy_version for call in calls if call.policy_version is not None]
    return {"train/staleness": _mean(lags), "train/staleness_max": max(lags)} if lags else {}


def reason_for_no_samples(batch: Batch, estimator: str) -> str:
    """Why a batch left no sample, in plain words."""
    outcomes: dict[str, int] = {}
    for entry in batch.ledger:
        outcomes[entry.outcome] = outcomes.get(entry.outcome, 0) + entry.tokens
    if not outcomes:
        return (
            "no call to the policy was captured, so there is nothing to train on; does the agent use a client that "
            "ajet captures?"
        )
    if set(outcomes) == {"zero_advantage"} and estimator == "reinforce_plus_plus":
        return (
            "the rewards have no variance: all episodes of the batch got the same reward, so there is nothing to "
            "learn from; raise data.train_batch_size or rollout.temperature, or choose easier or harder tasks"
        )
    if set(outcomes) == {"zero_advantage"}:
        return (
            "the rewards have no variance: all attempts at each task got the same reward, so there is nothing to "
            "learn from; raise rollout.num_repeat or temperature, or choose easier or harder tasks"
        )
    shares = ", ".join(f"{tokens} tokens {outcome}" for outcome, tokens in sorted(outcomes.items()))
    return f"no tokens are left to train on ({shares})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


# Scoring
