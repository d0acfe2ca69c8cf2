"""Trinity exits with 0 when a part of it fails; a run of ours ends soon, with the first cause and
its log."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

from ajet_sdk.trace.reader import ledger_balance, open_trace

from .experiments import Experiment

pytestmark = pytest.mark.slow

SOON = 60.0
"""Seconds from a failure to the end of the run."""
MANY = {"trainer_common": {"total_steps": 50}}


def sampling(one: Experiment) -> bool:
    return bool(one.query("SELECT 1 FROM calls LIMIT 1"))


def ends_soon(one: Experiment, since: float) -> str:
    """What the run says at its end. One message, no traceback, no process left."""
    code = one.wait(5 * SOON)
    seconds, said = time.monotonic() - since, one.output()
    assert code not in (0, None), said
    assert seconds < SOON, f"took {seconds:.0f} s:\n{said}"
    assert "Traceback" not in said, said
    assert (
        sum(line.startswith(("TrainingError: ", "ConfigError: ")) for line in said.splitlines())
        == 1
    ), said
    assert one.query("SELECT status FROM runs")[0]["status"] == "failed"
    assert one.gone() == {}
    return said


def books_balance(one: Experiment) -> None:
    with open_trace(one.directory) as trace:
        assert ledger_balance(trace, one.run_id) == []
    twice = (
        "SELECT call_id FROM ledger WHERE outcome = 'trained' GROUP BY call_id HAVING count(*) > 1"
    )
    assert one.query(twice) == []


def process_of(one: Experiment, title: str) -> int:
    """A process of the run by its title."""
    found = one.until(lambda: [pid for pid, command in one.processes().items() if title in command])
    return int(found[0])


def test_an_agent_that_always_raises_stops_the_run(
    experiment: Callable[..., Experiment], nodes: Any
) -> None:
    one = experiment(["broken 1", "broken 2"], {**MANY, "rollout": {"min_sound_share": 0.5}})
    one.start("--with-ray-cluster", nodes.address)
    assert one.wait() != 0
    said = ends_soon(one, time.monotonic())
    assert "this agent is broken" in said and "min_sound_share" in said
    lasted = (
        "SELECT epoch(any_value(r.ended_at) - min(e.ended_at)) AS s FROM runs r JOIN episodes e"
        " USING (run_id)"
    )
    assert one.query(lasted)[0]["s"] < SOON, "from the first failed episode on"


def test_a_dead_explorer_is_told(experiment: Callable[..., Experiment], nodes: Any) -> None:
    import ray

    one = experiment(["single 1", "single 2"], MANY)
    one.start("--with-ray-cluster", nodes.address)
    one.until(lambda: sampling(one))
    ray.kill(ray.get_actor("explorer", namespace=f"ajet/{one.run_id}"))
    said = ends_soon(one, time.monotonic())
    assert str(one.trinity / "log") in said


def test_a_dead_learner_is_told(experiment: Callable[..., Experiment], nodes: Any) -> None:
    one = experiment(["single 1", "single 2"], MANY)
    one.start("--with-ray-cluster", nodes.address)
    one.until(lambda: sampling(one))
    os.kill(process_of(one, "trinity.learner"), signal.SIGKILL)
    said = ends_soon(one, time.monotonic())
    assert "log" in said and "--resume" in said


def test_a_killed_runner_costs_its_attempts_and_nothing_else(
    experiment: Callable[..., Experiment], nodes: Any
) -> None:
    one = experiment(["slow 1", "slow 2", "turns 1"], {"trainer_common": {"total_steps": 3}})
    one.start("--with-ray-cluster", nodes.address)
    one.until(lambda: sampling(one))
    before = {row["call_id"] for row in one.query("SELECT call_id FROM calls")}
    os.kill(process_of(one, "WorkflowRunner"), signal.SIGKILL)
    assert one.wait() == 0, one.output()
    after = {row["call_id"] for row in one.query("SELECT call_id FROM calls")}
    assert before <= after, "what was recorded stays recorded"
    assert one.steps_saved() == 3
    assert "a runner process died" in one.output()
    books_balance(one)
    assert one.gone() == {}
