"""Warnings about many untrained tokens, about episodes chosen by their length, and about training
metrics that leave their range."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

STEPS = 8
"""Steps in each of the two spans that are compared."""
_DISCARDED = 0.05
"""Share of untrained sampled tokens above which it is reported."""
_SHORT = 0.75
"""Length of trained episodes against all sampled ones below which, or above whose inverse, it is
reported."""
_CAUSES = {
    "stale": (
        "sampled more updates ago than rollout.max_staleness allows: raise it, or let the trainer"
        " hand over its weights more often"
    ),
    "failed": (
        "of episodes without a reward: `ajet trace ls -f \"status = 'failed'\"` lists those that"
        " failed"
    ),
    "cancelled": (
        "the agent's client left, or its episode ended, while the reply was sampled: raise the time"
        " limit"
    ),
    "undelivered": "the agent's client did not take the reply: raise its time limit",
    "abandoned": (
        "clients of the swarm were lost or too slow for their steps: see `ajet trace receipts`,"
        " raise swarm.grace or rollout.max_staleness"
    ),
    "truncated": (
        "beyond the longest training sequence or the batch's rows: raise rollout.max_model_len,"
        " data.max_response_length, rollout.multi_turn.max_sample_per_task or (verl)"
        " rollout.multi_turn.expected_steps"
    ),
    "unmaskable": "sampled under a grammar whose mask the trainer cannot apply: use backbone local",
    "overlong": (
        "of attempts that ended at the maximum length, which rollout.overlong_filtering leaves out:"
        " raise rollout.max_response_length_in_one_turn or rollout.max_model_len, or let"
        " rollout.overlong_buffer teach shorter replies"
    ),
    "superseded": (
        "sampled after the checkpoint that the run was resumed at, or for steps that it did not"
        " come to: lower trainer_common.save_freq or rollout.max_staleness"
    ),
}
"""Advice by outcome of untrained tokens; other outcomes need none."""


def discarded(tokens: Mapping[str, float]) -> str:
    """A warning with the share of untrained tokens and its causes; empty up to 5 %.

    `tokens`: number of tokens by outcome of the ledger.
    """
    total = sum(
        count for outcome, count in tokens.items() if outcome not in ("evaluation", "untrainable")
    )
    lost = {outcome: tokens[outcome] for outcome in _CAUSES if tokens.get(outcome)}
    if sum(lost.values()) <= _DISCARDED * total:
        return ""
    listed = sorted(lost.items(), key=lambda item: -item[1])
    causes = "; ".join(
        f"{count / total:.1%} {outcome} ({_CAUSES[outcome]})" for outcome, count in listed
    )
    return f"{sum(lost.values()) / total:.1%} of the sampled tokens were not trained: {causes}"


def selective(lengths: Mapping[int, float]) -> str:
    """A warning that mainly short or long episodes are trained; empty before `STEPS` steps.

    `lengths`: the metric `train/length_of_trained` by step.
    """
    newest = sorted(lengths)[-STEPS:]
    if len(newest) < STEPS:
        return ""
    ratio = float(np.median([lengths[step] for step in newest]))
    if _SHORT <= ratio <= 1 / _SHORT:
        return ""
    return (
        f"trained episodes have {ratio:.2f} times the tokens of all sampled ones: `ajet trace"
        " explain` says which are left out, and why"
    )


_LOWER_LR = "lower trainer_common.optim.lr"
_RANGES = {
    "train/entropy": (
        0.1,
        0.0,
        f"replies hardly vary any more: raise rollout.temperature or entropy_coef, or {_LOWER_LR}",
    ),
    "train/grad_norm": (10.0, 0.0, f"{_LOWER_LR} or optim.grad_clip"),
    "train/loss": (10.0, 0.5, _LOWER_LR),
    "train/logprob_gap_mean": (
        5.0,
        0.02,
        "sampler and trainer disagree: set model.dtype: float32, or lower max_staleness",
    ),
}
"""Factor of the median magnitude of the first `STEPS` steps (below 1: a fall), and minimum
magnitude, at which a metric is out of range."""
_SOLVED = 0.9


def unstable(history: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
    """Warnings, by metric, about training metrics that left the range of the first `STEPS` steps in
    both of the two newest steps. Low entropy is fine if nearly all tasks are solved."""
    messages = {}
    for name, (times, least, advice) in _RANGES.items():
        values = history.get(name, {})
        steps = sorted(values)
        if len(steps) < STEPS + 2:
            continue
        usual = float(np.median([abs(values[step]) for step in steps[:STEPS]]))
        newest = [abs(values[step]) for step in steps[-2:]]
        if times < 1:
            solved = history.get("train/solved_share", {}).get(steps[-1], 0.0) >= _SOLVED
            outside = not solved and max(newest) < times * usual
        else:
            outside = min(newest) > max(times * usual, least)
        if outside:
            way = "fell" if times < 1 else "rose"
            messages[name] = (
                f"{name} {way} from {usual:.3g} (first {STEPS} steps) to {newest[-1]:.3g}; {advice}"
            )
    return messages
