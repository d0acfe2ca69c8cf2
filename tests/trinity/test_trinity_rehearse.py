"""`ajet rehearse` says at the desk what the real run would fail with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

from .experiments import ROOT, Experiment


@pytest.fixture
def project(tmp_path: Path, tiny: Path) -> Experiment:
    one = Experiment(tmp_path / "project", tiny, ["broken 1", "broken 2"])
    one.folder.mkdir()
    one.write()
    return one


def rehearse(one: Experiment, *overrides: str, **roots: Any) -> subprocess.CompletedProcess[str]:
    document = yaml.safe_load((one.folder / "job.yaml").read_text())
    (one.folder / "job.yaml").write_text(yaml.safe_dump({**document, **roots}))
    return subprocess.run(
        [sys.executable, "-m", "ajet", "rehearse", "--conf", "job.yaml", *overrides],
        cwd=one.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


GPUS = (
    "ajet.trainer_common.nnodes=4",
    "ajet.trainer_common.n_gpus_per_node=8",
    "ajet.rollout.tensor_parallel_size=2",
)


def test_engines_that_leave_no_whole_machine_are_found_at_the_desk(project: Experiment) -> None:
    done = rehearse(project, *GPUS, "ajet.rollout.n_vllm_engine=10")
    assert done.returncode == 2 and "set it to 4, 8, 12, 13, 14, 15, or null" in done.stderr
    assert "The rehearsal succeeded" not in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("own", "named"),
    [
        (
            {"explorer": {"rollout_model": {"engine_num": 10}}},
            "Trainer must use an integer number of nodes",
        ),
        (
            {"trainer": {"save_hf_checkpoint": "sometimes"}},
            "Invalid trainer.save_hf_checkpoint: sometimes",
        ),
    ],
)
def test_what_trinitys_own_validators_refuse_is_found_at_the_desk(
    project: Experiment, own: dict[str, Any], named: str
) -> None:
    """Of the config of the real run, by validators that the small one on the CPU would pass."""
    done = rehearse(project, *GPUS, trinity=own)
    assert done.returncode == 2 and f"Trinity rejected the config: {named}" in done.stderr
    assert "The rehearsal succeeded" not in done.stdout and "Traceback" not in done.stderr


def test_without_gpus_they_look_at_the_real_config_too(project: Experiment) -> None:
    done = rehearse(project, trinity={"explorer": {"over_rollout": {"ratio": 0.5}}})
    assert done.returncode == 2 and "over_rollout is not compatible" in done.stderr


@pytest.mark.slow
def test_a_workflow_that_always_fails_says_why(project: Experiment) -> None:
    done = rehearse(project)
    assert done.returncode == 1
    assert "8 of 8 episodes failed:\n  8 × RuntimeError: this agent is broken (" in done.stderr
    assert "The rehearsal succeeded" not in done.stdout and "Traceback" not in done.stderr
