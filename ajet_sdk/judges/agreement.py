"""Agreement of scores with labels, with confidence intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_NORMAL = 1.959964
"""97.5 % quantile of the standard normal distribution."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def concordance(
    scores: Sequence[float], labels: Sequence[float], groups: Sequence[str] | None = None
) -> float | None:
    """Share of pairs with different labels whose scores have the same order; equal scores count
    half.

    0.5 is chance. With two distinct labels it is the area under the ROC curve, else Harrell's C.
    With `groups` only pairs within a group count. None if all labels are equal.
    """
    right = pairs = 0.0
    for i in range(len(labels)):
        for j in range(i):
            if labels[i] == labels[j] or (groups is not None and groups[i] != groups[j]):
                continue
            pairs += 1
            ahead = (scores[i] - scores[j]) * (1 if labels[i] > labels[j] else -1)
            right += 1.0 if ahead > 0 else 0.5 if ahead == 0 else 0.0
    return right / pairs if pairs else None


def kappa(first: Sequence[bool], second: Sequence[bool]) -> float | None:
    """Cohen's kappa of two binary raters: agreement beyond chance. None if chance agreement is 1.

    Cohen 1960, A Coefficient of Agreement for Nominal Scales.
    """
    n = len(first)
    if not n:
        return None
    agreed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    yes = sum(first) / n
    second_yes = sum(second) / n
    chance = yes * second_yes + (1 - yes) * (1 - second_yes)
    return None if chance == 1 else (agreed - chance) / (1 - chance)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, with mean ranks for ties. None if either is constant."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    array = np.asarray(values, float)
    return [float((array < value).sum() + ((array == value).sum() - 1) / 2) for value in array]


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % Wilson interval (1927) of a share in `count` independent trials; (0, 1) without a trial.

    It stays wide for a few trials with equal outcomes, where a bootstrap collapses.
    """
    if not count:
        return 0.0, 1.0
    middle = share + _NORMAL**2 / (2 * count)
    half = _NORMAL * math.sqrt(share * (1 - share) / count + _NORMAL**2 / (4 * count**2))
    whole = 1 + _NORMAL**2 / count
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


def bootstrap(
    statistic: Callable[[Sequence[int]], float | None], count: int, *, seed: int = 0
) -> Interval | None:
    """Computes a statistic of row indices with its 95 % bootstrap interval. None if it is undefined
    for all rows."""
    value = statistic(range(count))
    if value is None:
        return None
    draw = random.Random(seed)
    resampled = [statistic(draw.choices(range(count), k=count)) for _ in range(1000)]
    known = sorted(estimate for estimate in resampled if estimate is not None)
    low, high = np.quantile(known, [0.025, 0.975]) if known else (value, value)
    return Interval(value, float(low), float(high))
