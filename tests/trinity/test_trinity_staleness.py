"""A run whose explorer may be ahead of its trainer: what is trained is as old as the bound allows,
and no older."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

from ajet_sdk.trace.reader import ledger_balance, open_trace

from .experiments import Experiment

pytestmark = pytest.mark.slow

STEPS = 8
VALIDATION = {"task_reader": {"jsonl_dataset_file": {"validation": {"file_path": "val.jsonl"}}}}


@pytest.mark.parametrize(
    ("staleness", "questions"),
    [(1, ["slow 1", "plain 1"]), (2, ["turns 1", "fork 1", "plain 1"])],
    ids=["a slow sampler", "a fast sampler"],
)
def test_the_sampler_runs_ahead_and_no_token_is_too_old(
    experiment: Callable[..., Experiment], staleness: int, questions: list[str]
) -> None:
    config = {
        "rollout": {"max_staleness": staleness},
        "trainer_common": {"total_steps": STEPS, "test_freq": 4},
        **VALIDATION,
    }
    one = experiment(questions, config)
    one.start("--with-ray")
    assert one.wait() == 0, one.output()
    rows = one.query(
        "SELECT l.step, c.policy_version AS version, l.outcome FROM ledger l JOIN calls c USING"
        " (call_id) JOIN episodes e ON e.episode_id = c.episode_id"
        " WHERE l.tokens > 0 AND e.split = 'train'"
    )
    trained = [row for row in rows if row["outcome"] == "trained"]
    ages = {row["step"] - 1 - row["version"] for row in trained}
    assert ages <= set(range(staleness + 1))
    assert max(ages) > 0, "the explorer was ahead at least once"
    assert {row["step"] for row in trained} == set(range(1, STEPS + 1))
    assert {row["outcome"] for row in rows} <= {"trained", "zero_advantage"}, "nothing thrown away"
    measured = one.query(
        "SELECT step, value FROM metrics WHERE name = 'train/staleness' ORDER BY step"
    )
    assert len(measured) == STEPS and max(row["value"] for row in measured) > 0
    validated = one.query(
        "SELECT DISTINCT e.step, c.policy_version AS version FROM episodes e JOIN calls c USING"
        " (episode_id) WHERE e.split = 'val' ORDER BY e.step"
    )
    # the last one is of the exported model, which has no version
    assert [(row["step"], row["version"]) for row in validated] == [(4, 4), (STEPS, None)]
    with open_trace(one.directory) as trace:
        assert ledger_balance(trace, one.run_id) == []


@pytest.mark.parametrize(("style", "bound"), [("fixed", None), ("trainer_driven", 0)])
def test_weights_that_travel_every_other_step(
    experiment: Callable[..., Experiment], style: str, bound: int | None
) -> None:
    """The guide's example trains every token; where a bound forbids half of them, the run says so
    while it lasts."""
    rollout = {} if bound is None else {"max_staleness": bound}
    own = {"synchronizer": {"sync_interval": 2, "sync_style": style}}
    one = experiment(
        ["turns 1", "plain 1"],
        {"rollout": rollout, "trainer_common": {"total_steps": 4}},
        trinity=own,
    )
    one.start("--with-ray")
    assert one.wait() == 0, one.output()
    sql = """SELECT outcome, max(l.step - 1 - c.policy_version) AS age FROM ledger l JOIN calls c USING (call_id)
             WHERE l.tokens > 0 AND outcome <> 'zero_advantage' GROUP BY outcome ORDER BY outcome"""
    ages = {row["outcome"]: row["age"] for row in one.query(sql)}
    assert ages == ({"trained": 1} if bound is None else {"trained": 0, "stale": 1})
    said = (
        "of the sampled tokens were not trained" in one.output()
        and "stale (sampled more updates ago" in one.output()
    )
    assert said == (bound is not None)
