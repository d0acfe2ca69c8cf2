"""A whole run on a Ray of its own: it learns, its driver is killed, it goes on, and its books
balance."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

import numpy as np
import torch

from ajet_sdk.trace.reader import episodes, ledger_balance, open_trace, trace_files
from ajet_sdk.types import Call

from .experiments import ROOT, Experiment

pytestmark = pytest.mark.slow

STEPS = 4
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Experiment:
    """A run that was killed while it sampled with weights that it had trained, and was resumed."""
    one = Experiment(
        tmp_path_factory.mktemp("run") / "project",
        tiny,
        ["slow 1", "turns 1", "team 1", "fork 1", "slow 2"],
        {
            "rollout": {"temperature": TEMPERATURE},
            "trainer_common": {"total_steps": STEPS, "val_pass_n": 2},
        },
    )
    one.start("--with-ray", "--val-tasks", "val.jsonl")
    try:
        one.until(lambda: one.steps_saved() >= 1)
        one.until(lambda: one.query("SELECT 1 FROM calls WHERE policy_version >= 1 LIMIT 1"))
        assert one.process is not None
        one.process.kill()
        one.wait()
        assert one.gone(240) == {}, (
            "nothing outlives a killed driver for long: Ray's own agents take minutes"
        )
        one.start("--with-ray", "--val-tasks", "val.jsonl", "--resume")
        assert one.wait() == 0, one.output()
    finally:
        if one.process is not None and one.process.poll() is None:
            one.process.kill()
    return one


def calls_of(one: Experiment) -> list[Call]:
    with open_trace(one.directory) as trace:
        return [call for episode in episodes(trace, superseded=True) for call in episode.calls]


def test_a_resumed_run_goes_on_from_its_checkpoint(finished: Experiment) -> None:
    assert "resuming after step" in finished.output()
    assert finished.steps_saved() == STEPS
    rows = finished.query("SELECT status FROM runs")
    assert [row["status"] for row in rows] == ["finished"]
    outcomes = {
        row["outcome"]: int(row["tokens"])
        for row in finished.query(
            "SELECT outcome, sum(tokens) AS tokens FROM ledger GROUP BY outcome"
        )
    }
    assert outcomes["superseded"] > 0, "what was sampled after the checkpoint was not trained"
    assert outcomes["trained"] > 0 and outcomes["evaluation"] > 0


def test_the_ledger_balances_across_processes(finished: Experiment) -> None:
    assert len(trace_files(finished.directory)) > 2, (
        "the driver's file, and one of each runner of both starts"
    )
    with open_trace(finished.directory) as trace:
        assert ledger_balance(trace, finished.run_id) == []
    twice = (
        "SELECT call_id FROM ledger WHERE outcome = 'trained' GROUP BY call_id HAVING count(*) > 1"
    )
    assert finished.query(twice) == []
    trained = {
        row["step"]
        for row in finished.query("SELECT DISTINCT step FROM ledger WHERE outcome = 'trained'")
    }
    assert trained <= set(range(1, STEPS + 1)) and len(trained) > 1


def test_every_step_has_its_metrics(finished: Experiment) -> None:
    rows = finished.query("SELECT step, name, value FROM metrics")
    steps: dict[str, set[int]] = {}
    for row in rows:
        steps.setdefault(row["name"], set()).add(row["step"])
    every = set(range(1, STEPS + 1))
    for name in (
        "train/reward",
        "train/timelines",
        "train/policy_version",
        "actor/grad_norm",
        "actor/pg_loss",
    ):
        assert steps.get(name, set()) >= every, name
    assert steps["val/reward"] and steps["val/greedy_reward"]
    versions = {row["step"]: row["value"] for row in rows if row["name"] == "train/policy_version"}
    assert versions == {step: step for step in every}


def test_new_weights_reach_the_sampler(finished: Experiment, tiny: Any) -> None:
    """Calls of version 0 are the first model's, to the digit; those of later versions are
    another's."""
    from ajet_sdk.engines.local.loading import load_model

    model = load_model(tiny, dtype="float32", device="cpu").eval()
    apart: dict[int, list[float]] = {}
    calls = [
        call
        for call in calls_of(finished)
        if call.trainable and call.sampling.get("temperature") == TEMPERATURE
    ]
    for call in calls:
        assert (
            call.prompt_ids is not None
            and call.output_ids is not None
            and call.logprobs is not None
        )
        ids = torch.tensor(np.concatenate([call.prompt_ids, call.output_ids])).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(call.prompt_ids) - 1 : -1] / TEMPERATURE
        scored = torch.log_softmax(logits, -1).gather(1, ids[len(call.prompt_ids) :, None])[:, 0]
        assert call.policy_version is not None
        apart.setdefault(call.policy_version, []).append(
            float((scored - torch.tensor(call.logprobs)).abs().max())
        )
    assert set(apart) >= set(range(STEPS)), "every version of the weights sampled"
    assert max(apart[0]) < 1e-4
    for version in range(1, STEPS):
        assert np.mean(apart[version]) > 1e-3, version
    assert np.mean(apart[STEPS - 1]) > np.mean(apart[1])


def test_the_result_is_a_checkpoint_that_loads(finished: Experiment, tiny: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = finished.directory / "checkpoint" / finished.run_id / "model"
    trained = AutoModelForCausalLM.from_pretrained(path).state_dict()
    start = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in trained.items())
    assert AutoTokenizer.from_pretrained(path).chat_template
    assert str(path) in finished.output()


def test_nothing_is_left_running(finished: Experiment) -> None:
    assert finished.gone(60) == {}


def test_a_run_is_over_when_the_last_step_is_saved_and_no_news_of_it_is_lost(
    experiment: Callable[..., Experiment],
) -> None:
    """News of each step is two seconds late. Taken up again when it is over, the run exports what
    is there."""
    late = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "late_news"), str(ROOT)])}
    one = experiment(
        ["turns 1", "turns 2"], {"trainer_common": {"total_steps": 2}}, environment=late
    )
    one.start("--with-ray", "--val-tasks", "val.jsonl")
    assert one.wait() == 0, one.output()
    told = one.query(
        "SELECT DISTINCT step FROM metrics WHERE name = 'actor/grad_norm' ORDER BY step"
    )
    assert [row["step"] for row in told] == [1, 2]
    model = one.directory / "checkpoint" / one.run_id / "model"
    weights, calls = (
        (model / "model.safetensors").read_bytes(),
        one.query("SELECT count(*) AS n FROM calls"),
    )
    shutil.rmtree(model)
    one.start("--with-ray", "--val-tasks", "val.jsonl", "--resume")
    assert one.wait() == 0, one.output()
    assert (
        "resuming after step 2 of 2" in one.output()
        and one.output().count("trained model saved to") == 2
    )
    assert (model / "model.safetensors").read_bytes() == weights
    assert one.query("SELECT count(*) AS n FROM calls") == calls, "it was validated already"
    assert [row["status"] for row in one.query("SELECT status FROM runs")] == ["finished"]


def test_a_missing_model_is_told_before_anything_starts(
    experiment: Callable[..., Experiment],
) -> None:
    one = experiment(["single 1", "single 2"], {"model": {"path": "./nowhere"}})
    one.start("--with-ray")
    assert one.wait() != 0
    assert "nowhere" in one.output() and "Traceback" not in one.output()
    assert "starting Ray" not in one.output()
    assert one.gone() == {}
