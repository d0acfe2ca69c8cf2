"""A run's metrics as pictures, thinned without losing a spike; a run in words; the bars of one
line."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Metric, Run
from ajet_tools.text.tables import compact, lasting
from ajet_tools.trace import queries
from ajet_tools.trace.locate import state_of
from ajet_tools.trace.queries.runs import (
    Curve,
    Panel,
    failures_in_words,
    is_constant,
    panels,
    quiet_seconds,
    seconds_of,
    steps_of,
    thin,
)

NOON = datetime(2026, 1, 2, 12, tzinfo=timezone.utc)


def metric(step: int, name: str, value: float, minutes: int = 0) -> Metric:
    return Metric(
        run_id="r", step=step, name=name, value=value, at=NOON + timedelta(minutes=minutes)
    )


def test_panels_hold_what_is_read_together(tmp_path: Path) -> None:
    file = tmp_path / "t.duckdb"
    with TraceWriter(file) as writer:
        writer.put(Run(run_id="r", status="finished"))
        writer.put(
            metric(1, "val/reward", 0.5),
            metric(2, "train/reward", 0.25),
            metric(1, "train/reward", 0.125),
        )
        writer.put(metric(2, "train/reward", 0.75, minutes=5), metric(1, "mine", 3.0))
        writer.put(metric(1, "cost/prefilled_tokens", 90.0), metric(1, "cost/sampled_tokens", 8.0))
        writer.put(metric(1, "train/tokens_sampled", 300.0), metric(1, "train/episodes", 4.0))
        writer.put(metric(2, "train/tokens_sampled", 300.0), metric(2, "train/episodes", 0.0))
        for i, version in enumerate((4, 4, 7, 7)):
            writer.put(
                Call(episode_id=f"e{i}", policy_version=version),
                Episode(episode_id=f"e{i}", run_id="r", step=3),
            )
    reader = open_trace(file)
    made = {
        panel.title: {c.label: list(c.points) for c in panel.curves}
        for panel in panels(reader, "r")
    }
    assert made["reward"] == {
        "train": [(1, 0.125), (2, 0.75)],
        "val": [(1, 0.5)],
    }, "a step taken again counts once"
    assert made["mine"] == {"": [(1, 3.0)]} and list(made)[-1].startswith("train/tokens_sampled")
    assert made["tokens per episode"] == {"": [(1, 75.0)]}
    assert made["tokens at the service"] == {"prefilled": [(1, 90.0)], "sampled": [(1, 8.0)]}
    assert made["versions behind"] == {"": [(3, 1.5)]}
    assert "loss" not in made, "no picture without a point"
    assert panels(reader, "another") == []


@pytest.mark.parametrize(
    ("title", "values", "constant"),
    [
        ("train/lr", [1e-6, 1e-6], True),
        ("train/lr", [1e-6, 2e-6], False),
        ("KL", [3.3e-10, 1.67e-9, 0.0], True),
        ("KL", [3.3e-10, 0.002], False),
        ("reward", [0.0, 0.0], False),
        ("loss", [0.5], False),
    ],
)
def test_what_is_constant_or_rounding_is_not_drawn(
    title: str, values: list[float], constant: bool
) -> None:
    assert is_constant(Panel(title, (Curve("", [*enumerate(values)]),))) is constant


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=2000), st.integers(1, 120))
def test_thinning_keeps_the_lowest_the_highest_and_the_order(
    values: list[float], columns: int
) -> None:
    points = list(enumerate(values))
    (curve,) = thin(Panel("", (Curve("", points),)), columns).curves
    kept = [value for _, value in curve.points]
    assert min(kept) == min(values) and max(kept) == max(values)
    assert (
        len(kept) <= 2 * columns
        and sorted(curve.points) == list(curve.points)
        and set(curve.points) <= set(points)
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, ""),
        (0, "0"),
        (950, "950"),
        (12_345, "12.3k"),
        (999_999, "1000k"),
        (4_560_000, "4.56M"),
        (2e13, "20T"),
    ],
)
def test_counts(count: float | None, text: str) -> None:
    assert compact(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (3.21, "3.2 s"),
        (42, "42 s"),
        (185, "3m 05s"),
        (7_810, "2h 10m"),
        (200_000, "2d 07h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert lasting(seconds) == text


def run(**named: Any) -> dict[str, Any]:
    row = {
        "status": "running",
        "started_at": NOON,
        "ended_at": None,
        "last_at": None,
        "last_step": None,
    }
    return {**row, "total_steps": None, "causes": [], **named}


def test_a_run_in_words() -> None:
    later, end = NOON + timedelta(seconds=90), NOON + timedelta(seconds=60)
    assert seconds_of(run(), later) == 90 and quiet_seconds(run(last_at=end), later) == 30
    assert seconds_of(run(status="interrupted", last_at=end), later) == 60
    assert seconds_of(run(status="interrupted"), later) is None
    assert seconds_of(run(status="finished", ended_at=end), later) == 60
    assert quiet_seconds(run(status="finished", ended_at=end), later) is None
    assert steps_of(run()) == "" and steps_of(run(last_step=3)) == "3"
    assert (
        steps_of(run(last_step=3, total_steps=9)) == "3/9" and steps_of(run(total_steps=9)) == "0/9"
    )
    assert (
        failures_in_words(
            run(causes=[{"cause": "A\x1b", "episodes": 1200}, {"cause": "B", "episodes": 1}])
        )
        == "1,200 A\\x1b, 1 B"
    )


def test_the_state_differs_with_news_and_not_without(tmp_path: Path) -> None:
    file = tmp_path / "t.duckdb"
    with TraceWriter(file) as writer, Gateway(writer):
        writer.put(Run(run_id="r"))
        writer.flush()
        states = [state_of(tmp_path)]
        assert (
            states[0].live
            and queries.overview(open_trace(tmp_path))
            and state_of(tmp_path) == states[0]
        )
        writer.put(Call(episode_id="e"))
        writer.flush()
        states.append(state_of(tmp_path))
    states.append(state_of(tmp_path))
    assert not states[-1].live and len(set(states)) == 3
    queries.overview(open_trace(tmp_path))
    assert state_of(tmp_path) == states[-1]
