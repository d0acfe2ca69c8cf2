"""A LoRA adapter trained as on GPUs, with the devices of a CPU: verl's FSDP2 worker on two gloo
ranks, and a real vLLM that loads each step's adapter."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("verl", reason="needs verl: just install-trinity")
if find_spec("vllm") is None:
    pytest.skip("needs vLLM: ajet install vllm", allow_module_level=True)

from safetensors.torch import load_file

from ajet_sdk.config.config import load_config
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.samples.build import build
from ajet_sdk.trace.reader import episodes, ledger_balance, open_trace
from ajet_sdk.types import Call
from tests.oracle import gradients, local_loss

from .experiments import Experiment, begin_on_devices, kill_engines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 3
RANK, ALPHA = 4, 8
TARGETS = ["q_proj", "v_proj", "down_proj"]


def begin(
    folder: Path,
    model: Path,
    cluster: Any,
    trinity: dict[str, Any],
    rollout: dict[str, Any] | None = None,
    **common: Any,
) -> Experiment:
    """One GPU for sampling and two for training, a reference, validation before and after."""
    config = {
        "model": {
            "dtype": "float32",
            "lora": {"enabled": True, "r": RANK, "alpha": ALPHA, "target_modules": TARGETS},
        },
        "rollout": {"n_vllm_engine": 1, **(rollout or {})},
        "task_reader": {"jsonl_dataset_file": {"validation": {"file_path": "val.jsonl"}}},
        "trainer_common": {
            "total_steps": STEPS,
            "n_gpus_per_node": 3,
            "val_before_train": True,
            "use_kl_loss": True,
            "kl_loss_coef": 0.3,
            "optim": {"lr": 0.05},
            "keep_checkpoints": STEPS,
            **common,
        },
    }
    return begin_on_devices(folder, model, ["turns 1", "fork 1"], cluster, config, trinity)


@pytest.fixture(scope="module")
def run(gpus: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    """A run that came to its end."""
    one = begin(tmp_path_factory.mktemp("lora") / "project", tiny, gpus, {})
    try:
        assert one.wait(1500) == 0, one.output()
    finally:
        kill_engines(one)
    yield one


def adapter(run: Experiment, step: int) -> Path:
    return run.trinity / f"global_step_{step}" / "actor" / "lora_adapter"


def test_every_step_is_trained_on_calls_of_the_adapter_before_it(run: Experiment) -> None:
    with open_trace(run.directory) as trace:
        assert ledger_balance(trace, run.run_id) == []
    rows = run.query(
        "SELECT DISTINCT l.step, c.policy_version AS version FROM ledger l JOIN calls c USING"
        " (call_id) WHERE l.outcome = 'trained' ORDER BY ALL"
    )
    assert [(row["step"], row["version"]) for row in rows] == [
        (step, step - 1) for step in range(1, STEPS + 1)
    ]


def check_versions(run: Experiment, calls: list[Call]) -> dict[int, int]:
    """Compare the log-probabilities of calls with transformers', of the adapter that each says it
    was sampled with. Returns the number of calls by version."""
    base = load_model(run.model, dtype="float32", device="cpu")
    models: dict[int, Any] = {0: base}
    apart = []
    for call in calls:
        version = call.policy_version
        assert version is not None and call.output_ids is not None
        if version not in models:
            models[version] = load_model(adapter(run, version), dtype="float32", device="cpu")
        ids = torch.tensor([[*call.prompt_ids, *call.output_ids]])
        start = len(call.prompt_ids) - 1
        expected_T = score(models[version], ids)[start:]
        torch.testing.assert_close(
            torch.tensor(call.logprobs), expected_T, atol=1e-4, rtol=0, msg=lambda text: text
        )
        other = score(models[0 if version else max(models)], ids)[start:]
        apart.append(float((other - expected_T).abs().max()))
    assert max(apart) > 0.01, "another version would be seen"
    return Counter(call.policy_version for call in calls)


def score(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the tokens from the second on, at temperature 1."""
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    return logprobs_TV.gather(1, ids[0, 1:, None])[:, 0]


def calls_of(run: Experiment) -> list[Call]:
    with open_trace(run.directory) as trace:
        found = episodes(trace, run.run_id)
    return [call for episode in found for call in episode.calls if call.logprobs is not None]


def test_each_call_was_sampled_by_the_adapter_of_its_version(run: Experiment) -> None:
    assert set(check_versions(run, calls_of(run))) == set(range(STEPS + 1))


def test_the_trainer_finds_the_log_probabilities_of_the_sampler(run: Experiment) -> None:
    """They were sampled with the adapter that the trainer has: with the base model, or the adapter
    before it, they differ, as the adapter changes the policy by more than the tolerance."""
    gaps = run.query("SELECT step, value FROM metrics WHERE name = 'actor/ppo_kl' ORDER BY step")
    assert [row["step"] for row in gaps] == list(range(1, STEPS + 1))
    assert max(abs(row["value"]) for row in gaps) < 1e-5
    kl = run.query("SELECT step, value FROM metrics WHERE name = 'actor/kl_loss' ORDER BY step")
    assert kl[0]["value"] == pytest.approx(0, abs=1e-6), "an adapter begins as the base model"
    assert kl[-1]["value"] > 1e-3, "the adapter moved, and the reference is the base model"


def test_the_gradient_of_the_second_step_is_the_local_one(run: Experiment) -> None:
    """Of the adapter after step 1, over the episodes of step 2, through the local loss."""
    with open_trace(run.directory) as trace:
        found = episodes(trace, run.run_id, 2, split="train")
    config = load_config(run.folder / "job.yaml")
    path = adapter(run, 1)
    model = load_model(path, dtype="float32", device="cpu", lora=config.model.lora)
    base = load_model(run.model, dtype="float32", device="cpu")
    local_loss(model, build(found).samples, config, reference=base, temperature=1.0)
    norm = sum(float(value.square().sum()) for value in gradients(model).values()) ** 0.5
    (theirs,) = run.query("SELECT value FROM metrics WHERE name = 'actor/grad_norm' AND step = 2")
    assert theirs["value"] == pytest.approx(norm, rel=1e-4)


def test_the_exported_model_is_the_base_with_the_last_adapter(run: Experiment) -> None:
    (exported,) = run.directory.glob("checkpoint/*/model/model.safetensors")
    merged, base = load_file(exported), load_file(run.model / "model.safetensors")
    weights = load_file(adapter(run, STEPS) / "adapter_model.safetensors")
    settings = json.loads((adapter(run, STEPS) / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (RANK, ALPHA)
    assert {name.rpartition(".")[2] for name in settings["target_modules"]} == set(TARGETS)
    changed = []
    for name, before in base.items():
        prefix = "base_model.model." + name.removesuffix(".weight")
        after = before
        if f"{prefix}.lora_A.weight" in weights:
            product = weights[f"{prefix}.lora_B.weight"] @ weights[f"{prefix}.lora_A.weight"]
            after = before + product * (ALPHA / RANK)
            changed.append(name)
        torch.testing.assert_close(merged[name], after)
    assert len(changed) == len(settings["target_modules"]) == len(weights) // 2
    assert any(not torch.allclose(merged[name], base[name]) for name in changed)


def test_both_validations_are_of_the_policy(run: Experiment) -> None:
    rows = run.query(
        "SELECT DISTINCT e.step, c.policy_version AS version FROM calls c JOIN episodes e USING"
        " (episode_id) WHERE e.split = 'val' ORDER BY ALL"
    )
    assert [(row["step"], row["version"]) for row in rows] == [(0, 0), (STEPS, STEPS)]


def test_old_adapters_are_removed_beside_the_checkpoints(run: Experiment) -> None:
    left = {path.name for path in (run.trinity / "adapters").iterdir()}
    assert "step_1" not in left
    assert f"step_{STEPS}" in left


@pytest.fixture(scope="module")
def ahead(gpus: Any, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Experiment]:
    """A run that samples up to two steps ahead, stopped after a step and resumed."""
    one = begin(
        tmp_path_factory.mktemp("ahead") / "project",
        tiny,
        gpus,
        {},
        rollout={"max_staleness": 2},
        total_steps=6,
        keep_checkpoints=6,
        val_before_train=False,
    )
    try:
        one.until(lambda: one.steps_saved() >= 2, 900)
        assert one.process is not None
        one.process.kill()
        one.process.wait()
        kill_engines(one)
        one.start("--with-ray-cluster", gpus.address, "--resume")
        assert one.wait(1500) == 0, one.output()
    finally:
        kill_engines(one)
    yield one


def test_ahead_no_token_is_older_than_the_bound_and_each_is_of_its_adapter(
    ahead: Experiment,
) -> None:
    assert len(ahead.query("SELECT DISTINCT run_id FROM runs")) == 1, "it was resumed"
    with open_trace(ahead.directory) as trace:
        assert ledger_balance(trace, ahead.run_id) == []
    ages = ahead.query(
        "SELECT l.step - 1 - c.policy_version AS age, count(*) AS n FROM ledger l JOIN calls c USING"
        " (call_id) WHERE l.outcome = 'trained' GROUP BY ALL"
    )
    assert {row["age"] for row in ages} <= {0, 1, 2}
    assert {row["age"] for row in ages} & {1, 2}, "it sampled ahead"
    steps = ahead.query("SELECT DISTINCT step FROM ledger WHERE outcome = 'trained' ORDER BY step")
    assert [row["step"] for row in steps] == list(range(1, 7))
    check_versions(ahead, calls_of(ahead))
