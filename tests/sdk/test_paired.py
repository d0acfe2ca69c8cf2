"""The paired test against other ways to the same numbers: every sign by hand, and the test turned
round."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest

from ajet_sdk.reporting.paired import EXACT, paired


def by_hand(differences: list[Fraction]) -> float:
    """The p-value in exact arithmetic: every choice of signs, one by one."""
    observed = abs(sum(differences))
    signs = list(itertools.product((1, -1), repeat=len(differences)))
    extreme = sum(
        abs(sum(s * d for s, d in zip(row, differences, strict=True))) >= observed for row in signs
    )
    return extreme / len(signs)


def test_p_is_the_share_of_signs_as_extreme() -> None:
    draw = random.Random(0)
    for n in (6, 7, 9, 12):
        differences = [Fraction(draw.randint(-8, 12), 8) for _ in range(n)]
        assert paired([float(d) for d in differences]).p == by_hand(differences)


def test_a_known_case() -> None:
    """Darwin's maize (Fisher 1935): 15 pairs, sum 314 eighths of an inch; 1,726 of 32,768 choices
    are as extreme."""
    darwin = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    found = paired(darwin)
    assert found.exact and found.p == 1726 / 32768 and found.mean == pytest.approx(314 / 15)
    assert found.low is not None and found.high is not None and found.low < 0 < found.high


def test_the_interval_is_the_test_turned_round() -> None:
    draw = random.Random(1)
    differences = [draw.gauss(0.3, 1) for _ in range(10)]
    found = paired(differences)
    assert found.low is not None and found.high is not None and found.level is not None
    assert 0.95 <= found.level < 0.96 and found.low < found.mean < found.high
    inside = [
        paired([d - at for d in differences]).p for at in (found.low + 1e-6, found.high - 1e-6)
    ]
    outside = [
        paired([d - at for d in differences]).p for at in (found.low - 1e-6, found.high + 1e-6)
    ]
    assert all(p is not None and p > 1 - found.level - 1e-9 for p in inside)
    assert all(p is not None and p <= 1 - found.level + 1e-9 for p in outside)


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    draw = random.Random(2)
    held = 0
    for _ in range(400):
        found = paired([draw.gauss(0.5, 1) for _ in range(7)])
        assert found.low is not None and found.high is not None
        held += found.low <= 0.5 <= found.high
    assert 0.92 < held / 400 < 0.99


def test_many_pairs_are_drawn_and_agree_with_all() -> None:
    draw = random.Random(3)
    differences = [draw.gauss(0.4, 1) for _ in range(EXACT)]
    whole, drawn = (
        paired(differences),
        paired([*differences, 0.0]),
    )  # a pair that is the same tells nothing more
    assert whole.exact and not drawn.exact
    assert whole.p is not None and drawn.p == pytest.approx(whole.p, abs=0.01)
    assert drawn.p == paired([*differences, 0.0]).p, "the draws are seeded"
    assert drawn.p is not None and drawn.p > 0
    far = paired([1.0 + i / 100 for i in range(60)])
    assert far.p is not None and far.p < 1e-4 and far.low is not None and far.low > 0.9


def test_too_few_pairs_claim_nothing() -> None:
    for n in (1, 2, 5):
        found = paired([1.0] * n)
        assert (found.p, found.low, found.high) == (
            None,
            None,
            None,
        ) and found.smallest_p == 2.0 ** (1 - n)
        assert found.mean == 1.0
    assert paired([1.0] * 6).p == 2 / 64
    with pytest.raises(ValueError, match="no pair"):
        paired([])


def test_pairs_without_a_difference() -> None:
    found = paired([0.0] * 8)
    assert found.p == 1.0 and (found.low, found.high) == (0.0, 0.0)
