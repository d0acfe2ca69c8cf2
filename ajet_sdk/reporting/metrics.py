"""Metrics of a step or a validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ajet_sdk.reporting.notices import answer_metrics
from ajet_sdk.rollout.outcomes import pass_at_k, solved
from ajet_sdk.samples.build import Batch
from ajet_sdk.samples.prefixes import is_trained
from ajet_sdk.types import Episode


def add_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Adds `prefix/` to names without a prefix."""
    return {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}


def rewards(episodes: Iterable[Episode]) -> list[float]:
    return [e.reward for e in episodes if e.status == "succeeded" and e.reward is not None]


def mean_reward(episodes: Iterable[Episode]) -> float:
    """Mean reward of the sound episodes; NaN if there are none."""
    return _mean(rewards(episodes))


def episode_metrics(prefix: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean reward of the sound episodes, shares of failed and solved ones, and the means of their own metrics."""
    by_name: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            by_name.setdefault(name, []).append(value)
    calls = [len(e.calls) for e in episodes]
    return {
        f"{prefix}/reward": mean_reward(episodes),
        f"{prefix}/solved_share": _mean([float(solved(e)) for e in episodes]),
        f"{prefix}/failed_share": _mean([float(e.status != "succeeded") for e in episodes]),
        f"{prefix}/calls_per_episode": _mean(calls),
        **answer_metrics(prefix, episodes),
        **{f"{prefix}/{name}": _mean(values) for name, values in by_name.items()},
    }


def group_metrics(prefix: str, episodes: Sequence[Episode], size: int) -> dict[str, float]:
    """pass@1 and pass@size of consecutive groups of `size` episodes."""
    solved_counts = [sum(map(solved, episodes[i : i + size])) for i in range(0, len(episodes), size)]
    return {f"{prefix}/pass@{k}": _mean([pass_at_k(size, n, k) for n in solved_counts]) for k in sorted({1, size})}


def staleness(episodes: Sequence[Episode], updates: int) -> dict[str, float]:
    """Updates between the policy that sampled a call and the policy being trained: mean and maximum."""
    calls = [call for episode in episodes for call in episode.calls if is_trained(call)]
    lags = [updates - call.policy_version for call in calls if call.policy_version is not None]
    return {"train/staleness": _mean(lags), "train/staleness_max": max(lags)} if lags else {}


def reason_for_no_samples(
    batch: Batch, episodes: Sequence[Episode], estimator: str, earlier: Mapping[int, float] | None = None
) -> str:
    """Explains why a batch has no training samples, with advice.

    Args:
        batch: the batch without samples.
        episodes: its episodes, with the attempts at a task in succession.
        estimator: `adv_estimator`.
        earlier: mean rewards of earlier steps, by step; empty if none of them updated the weights.
    """
    outcomes: dict[str, int] = {}
    for entry in batch.ledger:
        outcomes[entry.outcome] = outcomes.get(entry.outcome, 0) + entry.tokens
    if not outcomes:
        return (
            "no call to the policy was captured, so there is nothing to train on; does the agent use a client that "
            "ajet captures?"
        )
    if set(outcomes) == {"zero_advantage"}:
        if all(map(solved, episodes)):
            return f"solved: every attempt solved its task ({_solved_at(episodes)}); to go on, choose harder tasks"
        same = "episodes of the batch" if estimator == "reinforce_plus_plus" else "attempts at each task"
        cause = f"the rewards have no variance: all {same} got the same reward, so there is nothing to learn from"
        return f"{cause} ({_solved_at(episodes)}); {_advice_without_variance(episodes, estimator, earlier or {})}"
    shares = ", ".join(f"{tokens} tokens {outcome}" for outcome, tokens in sorted(outcomes.items()))
    return f"no tokens are left to train on ({shares})"


def _solved_at(episodes: Sequence[Episode]) -> str:
    size = len(episodes) // max(1, len({e.group_id for e in episodes}))
    passed = group_metrics("", episodes, size) if size and len(episodes) % size == 0 else {}
    shown = "".join(f", {name.removeprefix('/')} {value:.2f}" for name, value in passed.items())
    return f"mean reward {mean_reward(episodes):.3g}{shown}"


def _advice_without_variance(episodes: Sequence[Episode], estimator: str, earlier: Mapping[int, float]) -> str:
    count, mean = sum(map(solved, episodes)), mean_reward(episodes)
    best = max(earlier, key=lambda step: earlier[step], default=0)
    if not count and best and earlier[best] > mean:
        return (
            f"step {best} had {earlier[best]:.3g}, so an update broke the policy: lower trainer_common.optim.lr, and "
            "start again"
        )
    if not count:
        return (
            "no attempt solved its task: choose easier tasks or a stronger model, teach it with demonstrations first "
            "(trainer_common.algorithm.adv_estimator: sft), or let the judge give partial credit"
        )
    size = "data.train_batch_size" if estimator == "reinforce_plus_plus" else "rollout.num_repeat"
    return f"raise {size} or rollout.temperature, or choose tasks of medium difficulty (ajet dataset calibrate)"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
