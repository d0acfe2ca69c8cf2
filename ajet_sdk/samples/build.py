"""Builds training samples with advantages from episodes, and the ledger that accounts for every
sampled token.

`grpo` and `rloo` compare the attempts at one task. `grpo` subtracts the group's mean and, if asked,
divides by its standard deviation (Shao et al. 2024, DeepSeekMath, section 4.1.2). `rloo` subtracts
the mean of the other attempts (Ahmadian et al. 2024, Back to Basics, section 3.3). In both, each
episode counts once in its baseline, regardless of its number of calls or timelines: its weight is
divided equally among its role's calls, which matters if rewards name single calls. `opo` subtracts
the mean over the group's sampled tokens, so that long episodes count more (Hao et al. 2025,
arXiv:2505.23585).

`reinforce_plus_plus` normalizes each token's return by mean and standard deviation over all tokens
of the batch, so that one attempt per task suffices (Hu et al. 2025, arXiv:2501.03262, global
advantage normalization; the variant without subtracting a group mean first). The return is
undiscounted and without the paper's KL penalty, which is in the loss here (`use_kl_loss`). Each
role is normalized separately.

A role is a target tag, or else an agent. All estimators compare calls of the same role only: the
rewards of roles may have different scales, and the agents of a role may vary between attempts.

`sft` and `opd` weight all tokens equally, with an advantage of 1 (which `opd` replaces by the
teacher's). `dpo` pairs the best (1) and the worst (-1) attempt of each group, role by role.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from ajet_sdk.config.trainer_schema import Estimator
from ajet_sdk.errors import ConfigError
from ajet_sdk.samples.draft import Draft, Lengths, output_tokens, sampled_tokens
from ajet_sdk.samples.prefixes import is_trained
from ajet_sdk.samples.timelines import Decode, merge
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.trace.counted import counted_reward
from ajet_sdk.types import Call, Episode, LedgerEntry, Outcome, Sample, Split

_EPSILON = 1e-6
_UNREWARDED = ("sft", "opd")
"""Estimators that don't require a reward."""
_UNSCORED = ("sft", "dpo")
"""Estimators that don't require the sampler's log-probabilities."""


@dataclass(frozen=True)
class Batch:
    """The training samples of a step, and the outcome of every other token."""

    samples: tuple[Sample, ...]
    ledger: tuple[LedgerEntry, ...]
    """Entries for every call, whose tokens sum to those sampled in it."""
    splits: tuple[Split, ...]
    metrics: dict[str, float]
    """Metrics `train/...` of the episodes in split `train`; empty without any."""


def build(
    episodes: Sequence[Episode],
    *,
    estimator: Estimator = "grpo",
    normalize_std: bool = True,
    policy_version: int | None = None,
    max_staleness: int | None = None,
    max_tokens: int | None = None,
    max_lengths: Lengths = (None, None),
    max_samples: int | None = None,
    gamma: float = 1.0,
    failure_reward: float | None = None,
    overlong_filtering: bool = False,
    decode: Decode | None = None,
    template: ChatTemplate | None = None,
    scorable: Callable[[Call], bool] | None = None,
) -> Batch:
    """Build the samples of a step.

    Args:
        episodes: complete groups; those of splits `val` and `trial` only get ledger entries.
        estimator: computes advantages from rewards.
        normalize_std: divide by the group's standard deviation (`grpo` only).
        policy_version: of the policy to be trained.
        max_staleness: leave out calls sampled more updates before `policy_version`; None: no limit.
        max_tokens: maximum length of a training sequence; tokens beyond it are left out.
        max_lengths: maximum length of prompt and response; the excess of a longer first prompt counts as response.
            None: no limit.
        max_samples: maximum number of trained timelines per episode; of more, a random choice is trained.
        gamma: discount per later turn of the call's agent, for all rewards but those of the call itself.
        failure_reward: value of an episode whose workflow raised or whose context overflowed; None: such episodes are
            left out. Never used for infrastructure faults.
        overlong_filtering: leave out replies that end at their maximum length; see `Draft.mask_overlong`.
        decode: see `merge`.
        template: see `merge`.
        scorable: whether trainer and teacher can compute a call's sampling distribution; if not, the call is left out
            as `unmaskable`. None: always.
    """
    if estimator not in get_args(Estimator):
        known = ", ".join(get_args(Estimator))
        raise ConfigError(
            f"trainer_common.algorithm.adv_estimator must be one of {known} (got {estimator!r})"
        )
    rewarded = estimator not in _UNREWARDED
    scored = estimator not in _UNSCORED
    drafts = [
        Draft(
            episode, merge(episode.calls, decode, template), failure_reward, gamma, rewarded, scored
        )
        for episode in episodes
    ]
    if policy_version is None or max_staleness is None:
        newest = None
    else:
        newest = policy_version - max_staleness
    for draft in drafts:
        draft.rule_out(newest, scorable)
    _advantages([draft for draft in drafts if draft.counts], estimator, normalize_std)
    if overlong_filtering:
        for draft in drafts:
            draft.mask_overlong()
    limits = (max_tokens, max_lengths, max_samples)
    samples = [sample for draft in drafts for sample in draft.samples(*limits)]
    if estimator == "dpo":
        samples = _whole_pairs(samples, drafts)
    ledger = tuple(row for draft in drafts for row in draft.ledger())
    splits = tuple(split for draft in drafts for split in draft.merged.splits)
    return Batch(tuple(samples), ledger, splits, _metrics(drafts, samples, ledger))


_Values = list[tuple[Draft, list[tuple[Call, float]]]]
"""Calls of a role in each episode of a group, with their values."""


def _advantages(drafts: Sequence[Draft], estimator: Estimator, normalize_std: bool) -> None:
    """Sets each call's advantage or outcome `zero_advantage`."""
    batch = estimator == "reinforce_plus_plus"
    compared = [drafts] if batch else _groups(drafts)
    for together in compared:
        for role in dict.fromkeys(role for draft in together for role in draft.candidates):
            if estimator in _UNREWARDED:
                for draft in together:
                    draft.advantages |= {
                        call.call_id: 1.0 for call in draft.candidates.get(role, ())
                    }
                continue
            episodes, callless = _values(together, role)
            if estimator == "reinforce_plus_plus":
                _batch(episodes)
            elif estimator == "dpo":
                _pair(episodes)
            else:
                _group(episodes, callless, estimator, normalize_std)


def _groups(drafts: Iterable[Draft]) -> list[list[Draft]]:
    groups: dict[str, list[Draft]] = defaultdict(list)
    for draft in drafts:
        groups[draft.episode.group_id or draft.episode.episode_id].append(draft)
    return list(groups.values())


def _values(drafts: Sequence[Draft], role: str) -> tuple[_Values, list[float]]:
    """Values of a role's calls, and of each episode without any call."""
    values: _Values = []
    callless: list[float] = []
    for draft in drafts:
        if not draft.candidates:
            value = draft.value(role)
            callless += [] if value is None else [value]
            continue
        valued: list[tuple[Call, float]] = []
        for call in draft.candidates.get(role, ()):
            value = draft.value(call.agent, call.call_id)
            if value is None:  # no reward names it
                draft.outcomes.setdefault(call.call_id, "zero_advantage")
            else:
                valued.append((call, value))
        if valued:
            values.append((draft, valued))
    return values, callless


def _group(
    episodes: _Values, callless: Sequence[float], estimator: Estimator, normalize_std: bool
) -> None:
    """Sets the advantages of a role's calls in a group, or rules them out if their values are equal
    or there is one."""
    means = [_mean([value for _, value in valued]) for _, valued in episodes] + [*callless]
    n = len(means)
    varied = n > 1 and _varied([*_earned(episodes), *callless])
    mean = float(np.mean(means)) if means else 0.0
    spreads = [_mean([(value - mean) ** 2 for _, value in valued]) for _, valued in episodes]
    spreads += [(value - mean) ** 2 for value in callless]
    deviation = (sum(spreads) / (n - 1)) ** 0.5 if n > 1 else 0.0
    weighted = [(sampled_tokens(call), value) for _, valued in episodes for call, value in valued]
    token_mean = math.fsum(size * value for size, value in weighted) / max(
        1, sum(size for size, _ in weighted)
    )
    for (draft, valued), episode_mean in zip(episodes, means, strict=False):
        for call, value in valued:
            if not varied:
                draft.outcomes.setdefault(call.call_id, "zero_advantage")
            elif estimator == "rloo":
                draft.advantages[call.call_id] = value - (mean * n - episode_mean) / (n - 1)
            elif estimator == "opo":
                draft.advantages[call.call_id] = value - token_mean
            else:
                draft.advantages[call.call_id] = (value - mean) / (
                    deviation + _EPSILON if normalize_std else 1.0
                )


def _batch(episodes: _Values) -> None:
    """Sets the advantages of a role's calls in the batch, by mean and deviation over tokens, or
    rules them out if all tokens have the same value."""
    values = np.array([value for _, valued in episodes for _, value in valued])
    tokens = np.array([output_tokens(call) for _, valued in episodes for call, _ in valued])
    varied = _varied(_earned(episodes, least_tokens=1))
    mean = math.fsum(tokens * values) / int(tokens.sum()) if varied else 0.0
    if varied:
        deviation = (math.fsum(tokens * (values - mean) ** 2) / (int(tokens.sum()) - 1)) ** 0.5
    else:
        deviation = 0.0
    for draft, valued in episodes:
        for call, value in valued:
            if varied:
                draft.advantages[call.call_id] = (value - mean) / (deviation + _EPSILON)
            else:
                draft.outcomes.setdefault(call.call_id, "zero_advantage")


def _pair(episodes: _Values) -> None:
    """Pairs the best and the worst attempt of a group, the first among equals; rules out the
    others, and ties."""
    means = [_mean([value for _, value in valued]) for _, valued in episodes]
    if _varied(means):
        sides = {means.index(max(means)): 1.0, means.index(min(means)): -1.0}
    else:
        sides = {}
    for place, (draft, valued) in enumerate(episodes):
        for call, _ in valued:
            if place in sides:
                draft.advantages[call.call_id] = sides[place]
            else:
                draft.outcomes.setdefault(call.call_id, "zero_advantage")


def _whole_pairs(samples: Sequence[Sample], drafts: Sequence[Draft]) -> list[Sample]:
    """Adds the role to each sample's `group_id`, which then identifies the pair; rules out pairs
    with only one side."""
    roles = {
        call.call_id: role
        for draft in drafts
        for role, calls in draft.candidates.items()
        for call in calls
    }
    pairs: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        pair = f"{sample.group_id}/{roles[sample.timeline.spans[0].call_id]}"
        pairs[pair].append(sample.model_copy(update={"group_id": pair}))
    lone = [
        sides
        for sides in pairs.values()
        if len({bool((sample.advantages > 0).any()) for sample in sides}) < 2
    ]
    out = {span.call_id for sides in lone for sample in sides for span in sample.timeline.spans}
    for draft in drafts:
        draft.outcomes |= dict.fromkeys(out & draft.advantages.keys(), "zero_advantage")
    return [sample for sides in pairs.values() if sides not in lone for sample in sides]


def _earned(episodes: _Values, least_tokens: int = 0) -> list[float]:
    """Undiscounted values of calls: the discount depends on a turn's position, not on its
    quality."""
    calls = [
        (draft, call)
        for draft, valued in episodes
        for call, _ in valued
        if output_tokens(call) >= least_tokens
    ]
    values = [draft.value(call.agent, call.call_id, discounted=False) for draft, call in calls]
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float:
    """The mean, independent of the order of values."""
    return math.fsum(values) / len(values)


def _varied(values: Sequence[float]) -> bool:
    return len(values) > 1 and max(values) - min(values) > 1e-8 * max(1.0, *map(abs, values))


def has_signal(group: Iterable[Episode]) -> bool:
    """Whether the rewards of a task's sound attempts differ."""
    return _varied([e.reward for e in group if e.status == "succeeded" and e.reward is not None])


def _metrics(
    drafts: Sequence[Draft],
    samples: Sequence[Sample],
    ledger: Sequence[LedgerEntry],
) -> dict[str, float]:
    """Metrics of the step; see docs for each name."""
    drafts = [draft for draft in drafts if draft.episode.split == "train"]
    if not drafts:
        return {}
    values = [
        counted_reward(draft.episode, draft.failure_reward) for draft in drafts if draft.counts
    ]
    rewards = [value for value in values if value is not None]
    groups = _groups(drafts)
    calls = {call.call_id: call for draft in drafts for call in draft.episode.calls}
    tokens = sum(len(sample.timeline.token_ids) for sample in samples)
    alone = [calls[span.call_id] for sample in samples for span in sample.timeline.spans]
    apart = sum(
        output_tokens(call) + (0 if call.prompt_ids is None else len(call.prompt_ids))
        for call in alone
    )
    splits = Counter(split.cause for draft in drafts for split in draft.merged.splits)
    metrics: dict[str, float] = {
        "train/episodes": len(drafts),
        "train/groups": len(groups),
        "train/groups_zero_variance": sum(
            not any(draft.advantages for draft in group) for group in groups
        ),
        "train/timelines": len(samples),
        "train/merge_ratio": apart / tokens if tokens else 1.0,
        "train/tokens_in_samples": tokens,
        "train/tokens_sampled": sum(
            sampled_tokens(call) for call in calls.values() if is_trained(call)
        ),
        "train/splits": splits.total(),
    }
    metrics |= token_metrics((row.outcome, row.tokens) for row in ledger)
    metrics |= {f"train/splits_{cause}": n for cause, n in splits.items()}
    if rewards:
        metrics |= {
            "train/reward": float(np.mean(rewards)),
            "train/reward_std": float(np.std(rewards)),
        }
    return {name: float(value) for name, value in metrics.items()}


def token_metrics(ledger: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Metrics of tokens by outcome, from the outcome and tokens of ledger entries."""
    tokens = Counter({"trained": 0})
    for outcome, count in ledger:
        tokens[outcome] += count
    return {
        f"train/tokens_{outcome}": float(n)
        for outcome, n in tokens.items()
        if outcome != "evaluation"
    }


def balance(ledger: Iterable[LedgerEntry], calls: Iterable[Call]) -> list[str]:
    """Mismatches between a ledger and its calls; empty if it balances."""
    accounted: Counter[str] = Counter()
    seen: set[tuple[str, Outcome]] = set()
    problems: list[str] = []
    for row in ledger:
        if row.tokens < 0:
            problems.append(f"call {row.call_id}: {row.tokens} tokens {row.outcome}")
        if (row.call_id, row.outcome) in seen:
            problems.append(f"call {row.call_id}: two ledger rows with outcome {row.outcome}")
        seen.add((row.call_id, row.outcome))
        accounted[row.call_id] += row.tokens
    known = {call.call_id: call for call in calls}
    for call_id, call in known.items():
        sampled = sampled_tokens(call)
        if call_id not in accounted:
            if is_trained(call):
                problems.append(f"call {call_id}: {sampled} tokens sampled, none in the ledger")
        elif accounted[call_id] != sampled:
            problems.append(
                f"call {call_id}: {sampled} tokens sampled, {accounted[call_id]} in the ledger"
            )
    problems += [
        f"call {call_id}: in the ledger, but the call does not exist"
        for call_id in accounted.keys() - known
    ]
    return problems
