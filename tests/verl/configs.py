"""Configs of ours for eight GPUs, and what verl gets of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ajet_sdk.backbones.verl.mapping import VerlPlace, to_verl
from ajet_sdk.config.config import load_config
from tests.oracle import TEMPERATURE


def config_of(**trainer_common: Any) -> Any:
    """A config of ours for eight GPUs."""
    return load_config(
        values={
            "backbone": "verl",
            "experiment_name": "oracle",
            "model": {"path": "org/model"},
            "data": {"train_batch_size": 2},
            "rollout": {
                "temperature": TEMPERATURE,
                "num_repeat": 4,
                "multi_turn": {"expected_steps": 4},
            },
            "trainer_common": {"use_kl_loss": False, "clip_ratio_low": 0.1, **trainer_common},
        }
    )


def mapping_of(config: Any, store: Path, model: str = "org/model") -> dict[str, Any]:
    """What verl gets of it."""
    return to_verl(
        config, VerlPlace(run_id="r", model=model, steps=4, lr=1e-3, checkpoints=store, val_tasks=3)
    )
