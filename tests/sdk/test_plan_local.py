"""`ajet plan` of a run on one device: the numbers of the run itself, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.backbones.plan import mend, plan, with_changes
from ajet_sdk.backbones.shared.fit import GB, shape_for
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.local.loading import enable_checkpointing, load_model
from ajet_sdk.learn.estimate import conversations_at_once, memory_parts
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_tools.cli.app import app
from tests.sdk.test_plan import QWEN_7B


def job(path: Path, model: dict[str, Any] | None = None, **rollout: Any) -> Config:
    return load_config(
        values={
            "backbone": "local",
            "model": {"path": str(path), **(model or {})},
            "rollout": {"max_model_len": 4096, **rollout},
        }
    )


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """A directory with a config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parts_are_those_of_the_loaded_model(
    tiny_model: Path, lora: bool, checkpointing: bool, dtype: str
) -> None:
    config = job(
        tiny_model,
        {
            "device": "cpu",
            "dtype": dtype,
            "lora": {"enabled": lora},
            "gradient_checkpointing": checkpointing,
        },
        max_model_len=64,
    )
    shape = shape_for(config)
    assert shape is not None
    planned = plan(config, shape, 8 * GB).cards[0].parts
    model = load_model(
        tiny_model, dtype=dtype, device="cpu", lora=config.model.lora if lora else None
    )
    if checkpointing:
        enable_checkpointing(model)
    trainer = Trainer(model, TrainerSettings.of(config, lr=0.0, steps=1))
    loaded = memory_parts(
        config,
        trainer,
        tokens=trainer.micro_batch_tokens,
        rows=conversations_at_once(config),
        longest=64,
    )
    assert planned == loaded


@pytest.mark.slow
def test_a_7b_model_fits_one_gpu_with_an_adapter_and_not_whole(qwen: Path) -> None:
    config = job(qwen)
    shape = shape_for(config)
    assert shape is not None
    whole = plan(config, shape, 80 * GB)
    assert whole.problems
    # 16 bits, a float32 copy, its gradient and AdamW's two moments, and the reference's 16 bits
    parameters = shape.parameters
    assert whole.cards[0].parts["weights and optimizer"] == pytest.approx(20 * parameters, rel=0.01)
    changes = mend(config, shape, 80 * GB)
    assert changes is not None and changes["model.lora.enabled"] is True
    mended = plan(with_changes(config, changes), shape, 80 * GB)
    assert mended.problems == []
    assert mended.cards[0].parts["weights and optimizer"] < 3 * parameters
    assert mended.kv_tokens > 4096
    # a pass, or keys and values of a batch; the weights of 16 bits aren't copied to sample
    assert mended.cards[0].used < 60 * GB


@pytest.mark.slow
def test_the_command_says_what_a_gpu_holds_and_what_would_fit(qwen: Path) -> None:
    arguments = ["plan", f"ajet.model.path={qwen}", "ajet.rollout.max_model_len=4096"]
    done = CliRunner().invoke(app, [*arguments, "--backbone", "local", "--memory", "40", "--json"])
    document = json.loads(done.output)
    assert done.exit_code == 1 and document["fits"] is False
    [gpu] = document["gpus"]
    assert gpu["kind"] == "GPU" and gpu["used_gb"] > 40
    assert document["changes"]["model.lora.enabled"] is True
