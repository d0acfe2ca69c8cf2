"""The calculator tutorial, two steps of verl on a GPU. Skips where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs verl, see CONTRIBUTING.md")
pytest.importorskip(
    "flash_attn", reason="needs flash-attn: pip install flash-attn --no-build-isolation"
)

import torch

import ajet_sdk
from ajet_sdk.trace.reader import ledger_balance, open_trace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(ajet_sdk.__file__).parent.parent
CONFIG = ROOT / "tutorial" / "example_math_agent" / "math_agent.yaml"


def test_two_steps_of_the_calculator(tmp_path: Path) -> None:
    overrides = {
        "experiment_dir": tmp_path / "run",
        "data.train_batch_size": 8,
        "rollout.gpu_memory_utilization": 0.3,
        "trainer_common.n_gpus_per_node": 1,
        "trainer_common.nnodes": 1,
        "trainer_common.total_steps": 2,
        "trainer_common.val_tasks": 4,
        "trainer_common.optim.lr_scheduler_type": "constant",
        "trainer_common.mini_batch_num": 1,
    }
    words = [f"ajet.{name}={value}" for name, value in overrides.items()]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ajet",
            "train",
            "--conf",
            str(CONFIG),
            "--backbone",
            "verl",
            "--with-ray",
            *words,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    with open_trace(tmp_path / "run") as trace:
        run_id = trace.query("SELECT run_id FROM runs").to_pylist()[0]["run_id"]
        assert not ledger_balance(trace, run_id)
        versions = trace.query(
            "SELECT DISTINCT e.step, c.policy_version FROM calls c JOIN episodes e USING"
            " (episode_id) WHERE e.split = 'train' AND c.phase = 'rollout'"
        ).to_pylist()
        assert {(row["step"], row["policy_version"]) for row in versions} == {
            (1, 0),
            (2, 1),
        }, "new weights are sampled"
        gaps = trace.query("SELECT value FROM metrics WHERE name = 'train/grad_norm'").to_pylist()
        assert len(gaps) == 2 and all(row["value"] > 0 for row in gaps)
    assert any((tmp_path / "run" / "checkpoint" / run_id / "model").glob("*.safetensors"))
