"""A run as eight GPUs have it, with the devices of a CPU: verl's FSDP2 worker on gloo, a real vLLM,
Trinity between."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("verl", reason="needs verl: just install-trinity")
if find_spec("vllm") is None:
    pytest.skip("needs vLLM: ajet install vllm", allow_module_level=True)

from ajet_sdk.config.config import load_config
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.samples.build import build
from ajet_sdk.trace.reader import episodes, ledger_balance, open_trace
from tests.oracle import gradients, local_loss

from .experiments import Experiment, begin_on_devices, kill_engines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 3
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coef": 0.05}


def begun(folder: Path, model: Path, cluster: Any, **rollout_model: Any) -> Experiment:
    """One GPU for sampling and two for training, a reference and an entropy bonus, validation
    before and after."""
    config = {
        "model": {"dtype": "float32"},
        "rollout": {"n_vllm_engine": 1},
        "task_reader": {"jsonl_dataset_file": {"validation": {"file_path": "val.jsonl"}}},
        "trainer_common": {
            "total_steps": STEPS,
            "n_gpus_per_node": 3,
            "val_before_train": True,
            **TERMS,
        },
    }
    trinity = {"explorer": {"rollout_model": {"extra_engine_args": rollout_model}}}
    return begin_on_devices(folder, model, ["turns 1", "fork 1"], cluster, config, trinity)


@pytest.fixture(scope="module")
def run(gpus: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    """A run that came to its end."""
    one = begun(tmp_path_factory.mktemp("verl") / "project", tiny, gpus)
    try:
        assert one.wait(1500) == 0, one.output()
    finally:
        kill_engines(one)
    yield one


def test_it_trains_every_step_and_its_books_balance(run: Experiment) -> None:
    with open_trace(run.directory) as trace:
        assert ledger_balance(trace, run.run_id) == []
    steps = run.query("SELECT DISTINCT step FROM ledger WHERE outcome = 'trained' ORDER BY step")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    twice = (
        "SELECT call_id FROM ledger WHERE outcome = 'trained' GROUP BY call_id HAVING count(*) > 1"
    )
    assert run.query(twice) == []


def test_new_weights_reach_the_sampler(run: Experiment) -> None:
    rows = run.query(
        "SELECT DISTINCT l.step, c.policy_version AS version FROM ledger l JOIN calls c USING"
        " (call_id) WHERE l.outcome = 'trained' ORDER BY ALL"
    )
    assert [(row["step"], row["version"]) for row in rows] == [
        (step, step - 1) for step in range(1, STEPS + 1)
    ]


def test_the_trainer_finds_the_log_probabilities_of_the_sampler(run: Experiment) -> None:
    """The old log-probabilities are the sampler's, so the mean of the difference is 0 before an
    update: with stale or half-loaded weights, another temperature or another precision it is
    not."""
    gaps = run.query("SELECT step, value FROM metrics WHERE name = 'actor/ppo_kl' ORDER BY step")
    assert [row["step"] for row in gaps] == list(range(1, STEPS + 1))
    assert max(abs(row["value"]) for row in gaps) < 1e-5
    moved = run.query("SELECT min(value) AS least FROM metrics WHERE name = 'actor/grad_norm'")
    assert moved[0]["least"] > 0


def test_the_gradient_of_two_ranks_is_the_local_one(run: Experiment, tiny: Path) -> None:
    """The first step's episodes, as the trace has them, through the local loss."""
    with open_trace(run.directory) as trace:
        found = episodes(trace, run.run_id, 1, split="train")
    model, config = (
        load_model(tiny, dtype="float32", device="cpu"),
        load_config(run.folder / "job.yaml"),
    )
    local_loss(model, build(found).samples, config, reference=model, temperature=1.0)
    norm = sum(float(value.square().sum()) for value in gradients(model).values()) ** 0.5
    (theirs,) = run.query("SELECT value FROM metrics WHERE name = 'actor/grad_norm' AND step = 1")
    assert theirs["value"] == pytest.approx(norm, rel=1e-4)


def test_a_model_comes_out_that_has_moved(run: Experiment, tiny: Path) -> None:
    from safetensors.numpy import load_file

    (trained,) = run.directory.glob("checkpoint/*/model/*.safetensors")
    after, before = load_file(trained), load_file(tiny / "model.safetensors")
    assert {name: value.shape for name, value in before.items()}.items() <= {
        name: value.shape for name, value in after.items()
    }.items()
    assert all(np.isfinite(value).all() for value in after.values())
    assert any(not np.allclose(after[name], value) for name, value in before.items())


def test_it_is_validated_before_and_after(run: Experiment) -> None:
    said = run.query(
        "SELECT step, name FROM metrics WHERE name IN ('val/reward', 'val/greedy_reward') ORDER"
        " BY ALL"
    )
    assert [(row["step"], row["name"]) for row in said] == [
        (step, name) for step in (0, STEPS) for name in ("val/greedy_reward", "val/reward")
    ]


def test_weights_that_do_not_arrive_stop_the_run_with_the_cause(
    gpus: Any, tiny: Path, tmp_path: Path
) -> None:
    one = begun(tmp_path / "project", tiny, gpus, test_loses_version=1)
    try:
        one.until(lambda: one.steps_saved() >= 1, 900)
        assert one.wait(120) != 0
    finally:
        kill_engines(one)
    said = one.output()
    assert "the weights were lost on their way" in said and "Traceback" not in said
    assert str(one.trinity / "log") in said
