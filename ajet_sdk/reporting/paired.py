"""Paired differences: a sign-flip permutation test of their mean, with the corresponding confidence
interval.

If two runs perform equally well, the difference on a task is as likely to be d as -d. The test
counts how many of the 2^n choices of signs give a mean as far from 0 as observed (Fisher 1935, The
Design of Experiments, section 21). The interval inverts the test: the means of all subsets of the
differences cut the line into 2^n parts, each equally likely to contain the true mean if the
differences are distributed symmetrically about it (Hartigan 1969, Using Subsample Values as Typical
Values, JASA 64). Both are exact up to `EXACT` pairs, and sampled above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

EXACT = 16
"""Largest number of pairs for the exact test."""
_DRAWS = 20_000
"""Random choices of signs for more pairs."""
_CHUNK = 500
_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """Mean of n paired differences. `p`, `low` and `high` are None if n is too small."""

    n: int
    mean: float
    p: float | None
    """Two-sided."""
    low: float | None
    high: float | None
    level: float | None
    """Coverage of the interval; slightly above the requested level if exact."""
    exact: bool
    smallest_p: float
    """Smallest p possible with n pairs; above 0.05, no difference can be significant."""


def paired(differences: Sequence[float], *, level: float = 0.95, seed: int = 0) -> Paired:
    """Test whether the mean of paired differences is 0.

    Args:
        differences: one per pair.
        level: minimum coverage of the interval; 1 - 0.05 / m for m simultaneous comparisons (Bonferroni).
        seed: random seed for more than `EXACT` pairs.

    Raises:
        ValueError: there are no differences.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if not n:
        raise ValueError("there are no pairs to compare")
    exact = n <= EXACT
    smallest = 2.0 ** (1 - n)
    mean = float(values.mean())
    if not int((1 - level) / 2 * (2**n if exact else _DRAWS)):
        return Paired(n, mean, None, None, None, None, exact, smallest)
    sums = np.zeros(1)
    sizes = np.zeros(1)
    if exact:
        for value in values:  # sum and size of each subset
            sums = np.concatenate((sums, sums + value))
            sizes = np.concatenate((sizes, sizes + 1))
    else:
        sums, sizes = _drawn_subsets(values, seed)
    total = float(values.sum())
    slack = 1e-9 * float(np.abs(values).sum())
    extreme = int((np.abs(2 * sums - total) >= abs(total) - slack).sum())
    p = extreme / len(sums) if exact else (extreme + 1) / (len(sums) + 1)
    means = np.sort(sums[sizes > 0] / sizes[sizes > 0])
    parts = len(means) + 1
    outside = int((1 - level) / 2 * parts)
    low = float(means[outside - 1])
    high = float(means[len(means) - outside])
    return Paired(n, mean, p, low, high, 1 - 2 * outside / parts, exact, smallest)


def _drawn_subsets(values: _Array, seed: int) -> tuple[_Array, _Array]:
    """Sums and sizes of random subsets."""
    draw = np.random.default_rng(seed)
    parts = []
    for _ in range(_DRAWS // _CHUNK):
        chosen = draw.integers(0, 2, (_CHUNK, len(values)), np.uint8).astype(np.float64)
        parts.append((chosen @ values, chosen.sum(axis=1)))
    return np.concatenate([s for s, _ in parts]), np.concatenate([n for _, n in parts])
