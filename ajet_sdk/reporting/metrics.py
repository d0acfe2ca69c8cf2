"""Metrics of a step or a validation, and why a step trained nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ajet_sdk.reporting.answers import answer_metrics
from ajet_sdk.reporting.notices import STEPS
from ajet_sdk.rollout.outcomes import RETRY, pass_at_k, solved
from ajet_sdk.samples.build import Batch
from ajet_sdk.samples.draft import sampled_tokens
from ajet_sdk.samples.prefixes import is_trained
from ajet_sdk.trace.counted import counted_rewards
from ajet_sdk.types import Episode, LedgerEntry


def add_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Adds `prefix/` to names without a prefix."""
    return {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}


def mean_reward(episodes: Iterable[Episode], failure_reward: float | None) -> float:
    """Mean reward of the episodes that count; NaN if there are none."""
    return _mean(counted_rewards(episodes, failure_reward))


def episode_metrics(
    prefix: str, episodes: Sequence[Episode], failure_reward: float | None
) -> dict[str, float]:
    """Mean reward of the episodes that count, shares of failed and solved ones, and the means of
    their own metrics."""
    by_name: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            if name != RETRY:
                by_name.setdefault(name, []).append(value)
    calls = [len(e.calls) for e in episodes]
    return {
        f"{prefix}/reward": mean_reward(episodes, failure_reward),
        f"{prefix}/solved_share": _mean([float(solved(e)) for e in episodes]),
        f"{prefix}/failed_share": _mean([float(e.status != "succeeded") for e in episodes]),
        f"{prefix}/calls_per_episode": _mean(calls),
        **answer_metrics(prefix, episodes),
        **{f"{prefix}/{name}": _mean(values) for name, values in by_name.items()},
    }


def group_metrics(prefix: str, episodes: Sequence[Episode], size: int) -> dict[str, float]:
    """pass@1 and pass@size of consecutive groups of `size` episodes."""
    solved_counts = [
        sum(map(solved, episodes[i : i + size])) for i in range(0, len(episodes), size)
    ]
    return {
        f"{prefix}/pass@{k}": _mean([pass_at_k(size, n, k) for n in solved_counts])
        for k in sorted({1, size})
    }


def staleness(episodes: Sequence[Episode], updates: int) -> dict[str, float]:
    """Updates between the policy that sampled a token and the policy being trained: mean and
    maximum."""
    calls = [call for episode in episodes for call in episode.calls if is_trained(call)]
    versions = [call.versions for call in calls if call.versions is not None]
    if not any(map(len, versions)):
        return {}
    ages = updates - np.concatenate(versions)
    return {"train/staleness": float(ages.mean()), "train/staleness_max": float(ages.max())}


def length_of_trained(
    episodes: Sequence[Episode], ledger: Iterable[LedgerEntry]
) -> dict[str, float]:
    """Mean sampled tokens of the episodes that were trained, over the mean of all sampled ones.

    Groups without signal, and episodes that failed or were cut, aren't left out by chance.
    """
    trained = {entry.episode_id for entry in ledger if entry.outcome == "trained"}
    lengths = {e.episode_id: sum(map(sampled_tokens, e.calls)) for e in episodes}
    sampled = [length for length in lengths.values() if length]
    if not trained or not sampled:
        return {}
    of_trained = [lengths[episode] for episode in trained]
    return {"train/length_of_trained": _mean(of_trained) / _mean(sampled)}


def reason_for_no_samples(
    batch: Batch,
    episodes: Sequence[Episode],
    estimator: str,
    failure_reward: float | None,
    earlier: Mapping[int, float] | None = None,
) -> str:
    """Explains why a batch has no training samples, with advice.

    Args:
        batch: the batch without samples.
        episodes: its episodes, with the attempts at a task in succession.
        estimator: `adv_estimator`.
        failure_reward: `rollout.failure_reward`.
        earlier: mean rewards of earlier steps, by step; empty if none of them updated the weights.
    """
    outcomes: dict[str, int] = {}
    for entry in batch.ledger:
        outcomes[entry.outcome] = outcomes.get(entry.outcome, 0) + entry.tokens
    if not outcomes:
        return (
            "no call to the policy was captured, so there is nothing to train on; does the agent"
            " use a client that ajet captures?"
        )
    if set(outcomes) == {"zero_advantage"}:
        if all(map(solved, episodes)):
            reached = _solved_at(episodes, failure_reward)
            return (
                f"solved: every attempt solved its task ({reached}); to go on, choose harder tasks"
            )
        if estimator == "reinforce_plus_plus":
            same = "episodes of the batch"
        else:
            same = "attempts at each task"
        cause = (
            f"the rewards have no variance: all {same} got the same reward, so there is nothing to"
            " learn from"
        )
        advice = _advice_without_variance(episodes, estimator, failure_reward, earlier or {})
        return f"{cause} ({_solved_at(episodes, failure_reward)}); {advice}"
    shares = ", ".join(f"{tokens} tokens {outcome}" for outcome, tokens in sorted(outcomes.items()))
    return f"no tokens are left to train on ({shares})"


def _solved_at(episodes: Sequence[Episode], failure_reward: float | None) -> str:
    size = len(episodes) // max(1, len({e.group_id for e in episodes}))
    if size and len(episodes) % size == 0:
        passed = group_metrics("", episodes, size)
    else:
        passed = {}
    shown = "".join(f", {name.removeprefix('/')} {value:.2f}" for name, value in passed.items())
    return f"mean reward {mean_reward(episodes, failure_reward):.3g}{shown}"


def _advice_without_variance(
    episodes: Sequence[Episode],
    estimator: str,
    failure_reward: float | None,
    earlier: Mapping[int, float],
) -> str:
    count = sum(map(solved, episodes))
    mean = mean_reward(episodes, failure_reward)
    if not count and (fall := _fall(earlier, mean, len(episodes))):
        return fall
    if not count:
        return (
            "no attempt solved its task: choose easier tasks or a stronger model, teach it with"
            " demonstrations first (trainer_common.algorithm.adv_estimator: sft), or let the judge"
            " give partial credit"
        )
    if estimator == "reinforce_plus_plus":
        size = "data.train_batch_size"
    else:
        size = "rollout.num_repeat"
    return (
        f"raise {size} or rollout.temperature, or choose tasks of medium difficulty (ajet run"
        " --out measures it)"
    )


_FALL = 4.0
"""Standard deviations of the mean reward over steps, below which the reward of one step is no
accident of its tasks."""
_ATTEMPTS = 16
"""Minimum number of attempts for that."""


def _fall(earlier: Mapping[int, float], mean: float, attempts: int) -> str:
    """What is known if no attempt of a step solved its task, and earlier steps had more reward;
    else empty.

    Other tasks and a judge that changed look the same as a policy that got worse, so the cause
    isn't claimed.
    """
    steps = sorted(earlier)[-STEPS:]
    usual = [earlier[step] for step in steps]
    if not usual or max(usual) <= mean:
        return ""
    best = max(steps, key=lambda step: earlier[step])
    compared = (
        "`ajet trace compare` of the two steps shows whether tasks, judge or replies are other ones"
    )
    enough = len(usual) == STEPS and attempts >= _ATTEMPTS
    if (
        enough
        and mean < min(usual)
        and float(np.mean(usual)) - mean > _FALL * float(np.std(usual, ddof=1))
    ):
        spread = float(np.std(usual, ddof=1))
        return (
            f"the {STEPS} steps before had {float(np.mean(usual)):.3g} ± {spread:.2g}, so this is"
            f" more than chance. {compared}; if the replies got worse, lower"
            " trainer_common.optim.lr, and start again from a checkpoint before"
        )
    return (
        f"step {best} had {earlier[best]:.3g}; a single step doesn't tell why. {compared}, and a"
        " validation (trainer_common.test_freq) measures the same tasks each time"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
