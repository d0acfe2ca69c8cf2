"""Causes of the gap between the log-probabilities of sampler and trainer for the same tokens.

A call belongs to the first cause that applies: an older policy sampled it (staleness); top_p,
top_k, penalties, bias or a grammar changed its distribution (sampling); neither (numerics: data
type, kernels, quantisation).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ajet_sdk.protocols import Sampling

LARGE_GAP = 0.1
"""Mean absolute difference per token, in nats, above which the gap is reported."""
_TURNS = 4
"""Turns to list; the last includes all later ones."""

GAPS = """
    WITH gaps AS (
        SELECT t.call_id, unnest(t.logprobs) AS trainer, unnest(c.logprobs) AS sampler,
            generate_subscripts(c.logprobs, 1) - 1 AS place
        FROM trained t JOIN calls c USING (call_id, episode_id) WHERE t.run_id = $1 AND t.step = $2)
    SELECT c.policy_version + len(list_filter(coalesce(c.weight_updates, []), lambda u: u <= place))
            AS policy_version,
        c.sampling, c.index, sum(abs(trainer - sampler)) AS gap, count(*) AS tokens,
        (SELECT max_by(value, step)::BIGINT FROM metrics
            WHERE run_id = $1 AND step < $2 AND name = 'train/policy_version') AS trained_version
    FROM gaps JOIN calls c USING (call_id)
    WHERE isfinite(trainer) AND isfinite(sampler) GROUP BY ALL"""
"""SQL: the trained tokens of run $1 and step $2 by call settings and policy version, with their
summed gap in nats and their number, and the trainer's version before the step, if it is known."""

_ADVICE = {
    "staleness": "lower rollout.max_staleness",
    "sampling": "sample without limits (rollout.top_p: 1, top_k: -1), penalties and grammars",
    "numerics": (
        "set model.dtype: float32, or the same type and no quantisation for sampler and trainer"
    ),
}


def gap_by_cause(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, int]]:
    """Sums gaps and counts tokens by cause and by turn (`turn 1`, …); `rows` are results of
    `GAPS`."""
    # All tokens of a step may be older than the weights that it trains.
    newest = max((row["policy_version"] or 0 for row in rows), default=0)
    for row in rows:
        newest = max(newest, row.get("trained_version") or 0)
    sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for row in rows:
        sampling = Sampling.of(json.loads(row["sampling"] or "{}"))
        limited = (
            sampling.processed or sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        )
        changed = limited or bool(sampling.grammar)
        if (row["policy_version"] or 0) < newest:
            cause = "staleness"
        elif changed:
            cause = "sampling"
        else:
            cause = "numerics"
        for name in (cause, f"turn {min(row['index'] + 1, _TURNS)}"):
            gap, tokens = sums[name]
            sums[name] = gap + row["gap"], tokens + row["tokens"]
    return dict(sums)


def gap_message(parts: Mapping[str, tuple[float, int]], service: str = "") -> str:
    """Describes a step's gap: its mean, the shares of causes and turns, and advice on the largest
    cause.

    `service` is the name of the service that samples and trains, whose numerics no setting here
    changes.
    """
    causes = {name: part for name, part in parts.items() if name in _ADVICE}
    total, tokens = (sum(column) for column in zip(*causes.values(), strict=True))
    ordered = sorted(causes, key=lambda name: -causes[name][0])
    shares = ", ".join(
        f"{causes[name][0] / total:.0%} {name} ({_mean(causes[name]):.2f})" for name in ordered
    )
    turns = [f"{_mean(parts[name]):.2f}" for name in sorted(set(parts) - set(causes))]
    by_turn = f"; by turn {', '.join(turns)}" if len(turns) > 1 else ""
    advice = _ADVICE[ordered[0]]
    if service and ordered[0] == "numerics":
        advice = (
            f"{service} samples and trains with other probabilities: report it to whoever runs the"
            " service"
        )
    else:
        advice = f"{advice[0].upper()}{advice[1:]}"
    # The ratios of older tokens are what they should be; they are only far from 1.
    effect = "" if ordered[0] == "staleness" else ", so ratios are wrong"
    return (
        f"log-probabilities of sampler and trainer differ by {total / tokens:.2f} per"
        f" token{effect}: {shares}{by_turn}. {advice}"
    )


def _mean(part: tuple[float, int]) -> float:
    return part[0] / max(1, part[1])
