"""A live run is asked so seldom that it does not notice, and as often as that allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_tools.tui.trace.screen import RefreshRate

COSTS = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=30)


class Run:
    """What answers have cost it."""

    spent = 0.0

    def rate(self, longest: float = 60) -> RefreshRate:
        return RefreshRate(lambda: self.spent, patience=50, longest=longest)

    def answer(self, rate: RefreshRate, seconds: float) -> None:
        rate.begin_query()
        self.spent += seconds
        rate.end_query()


def share(run: Run, rate: RefreshRate, costs: list[float], late: float = 0.0) -> float:
    """Of the run's time that answers cost, when a change is always there to be told; each answer is
    `late`."""
    at = began = 0.0
    for cost in costs:
        while not rate.is_due(at):
            at += 0.0005
        rate.record_refresh(at)
        at += cost + late
        run.answer(rate, cost)
    while not rate.is_due(at):
        at += 0.0005
    return sum(costs) / (at - began)


@pytest.mark.slow
@given(cost=st.floats(0.001, 0.2), rounds=st.integers(1, 8))
def test_answers_that_take_alike_take_one_part_of_so_many(cost: float, rounds: int) -> None:
    run = Run()
    assert share(run, run.rate(), [cost] * rounds) == pytest.approx(1 / 50, rel=0.05)


def test_a_busy_run_that_answers_late_is_asked_as_often() -> None:
    """Its answers cost it what they cost, and asking less often would make none of them quicker."""
    run = Run()
    assert share(run, run.rate(), [0.01] * 8, late=0.4) == pytest.approx(1 / 50, rel=0.05)


def test_one_dear_answer_keeps_nobody_waiting() -> None:
    run = Run()
    rate = run.rate()
    share(run, rate, [0.01, 0.01])
    assert share(run, rate, [0.5]) > 0.3, "told again soon after, for those before were cheap"


def test_a_round_of_which_a_part_is_answered_is_not_over() -> None:
    run = Run()
    rate = run.rate()
    rate.record_refresh(0.0)
    run.answer(rate, 0.01)
    rate.begin_query()
    assert not rate.is_due(1.0), "the dear part is still being answered"
    run.spent += 1.0
    rate.end_query()
    assert not rate.is_due(50.0) and rate.is_due(50.6)
    rate.record_refresh(60.0)
    rate.begin_query()
    assert rate.is_due(120.0), "but nothing holds it up for longer than it may"


def test_what_a_screen_reads_at_first_is_no_round() -> None:
    run = Run()
    rate = run.rate()
    run.answer(rate, 3.0)
    assert rate.is_due(0.0)
    rate.record_refresh(0.0)
    run.answer(rate, 0.01)
    assert not rate.is_due(0.4) and rate.is_due(0.5)
    run.answer(rate, 1.0)
    rate.reset(rate.patience)
    assert rate.is_due(0.5), "another screen"


@given(COSTS)
def test_it_never_waits_longer_than_it_may(costs: list[float]) -> None:
    run = Run()
    rate = run.rate(longest=2)
    at = 0.0
    for cost in costs:
        assert rate.is_due(at + 2)
        at += 2
        rate.record_refresh(at)
        run.answer(rate, cost)
