"""The tutorials that learn from more than rewards: their data, their configs, and one small run of each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ajet_sdk.config.config import load_config
from tests.tiny_models import save_tiny

TUTORIALS = Path(__file__).parents[1] / "tutorial"
DISTILLATION, LORA, FLYWHEEL = (TUTORIALS / f"example_{name}" for name in ("distillation", "lora", "flywheel"))


def test_the_walks_are_what_their_program_writes_and_reach_the_goal(tmp_path: Path) -> None:
    for name in ("example_distillation", "example_frozenlake"):
        shutil.copytree(TUTORIALS / name, tmp_path / name)
    written = tmp_path / "example_distillation" / "walks.jsonl"
    written.unlink()
    subprocess.run([sys.executable, written.with_name("walks.py")], check=True, timeout=300)
    assert written.read_text() == (DISTILLATION / "walks.jsonl").read_text()
    held_out = {row["main_query"] + str(row["lake"]) for row in rows(TUTORIALS / "example_frozenlake" / "val.jsonl")}
    assert all(row["main_query"] + str(row["lake"]) not in held_out for row in rows(written))


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("file", "estimator"),
    [
        (DISTILLATION / "teacher.yaml", "sft"),
        (DISTILLATION / "student.yaml", "opd"),
        (LORA / "lora.yaml", "sft"),
        (FLYWHEEL / "flywheel.yaml", "sft"),
    ],
)
def test_their_configs_name_what_is_there(file: Path, estimator: str) -> None:
    config = load_config(file)
    assert config.trainer_common.algorithm.adv_estimator == estimator
    assert config.load(config.rollout.user_workflow or "") is not None
    files = config.task_reader.jsonl_dataset_file
    for given in (files.training.file_path, files.validation.file_path):
        assert given is None or config.resolve(given).is_file()


def run(program: list[str], place: Path) -> str:
    done = subprocess.run([sys.executable, *program], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_a_student_is_distilled_in_two_steps(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    small = ["ajet.trainer_common.total_steps=2", "ajet.trainer_common.val_tasks=4", "ajet.data.train_batch_size=4"]
    own = [f"ajet.model.path={model}", "ajet.model.recipe=null", *small]
    for job in ("teacher", "student"):
        said = run(["-m", "ajet", "--conf", str(DISTILLATION / f"{job}.yaml"), *own], tmp_path)
        assert "validation: reward" in said


@pytest.mark.slow
def test_a_round_without_a_thumb_up_promotes_nothing(tmp_path: Path) -> None:
    """A model of random weights reaches no goal; the served walks are in a trace all the same."""
    model = save_tiny(tmp_path / "tiny")
    given = ["--rounds", "1", "--walks", "8", "--held-out", "4", "--model", str(model)]
    said = run([str(FLYWHEEL / "flywheel.py"), *given], tmp_path)
    assert "round 0: held-out reward 0.000" in said and "nothing to learn from" in said
    assert not (tmp_path / "launcher_record/flywheel/current").exists()
    assert (tmp_path / "launcher_record/flywheel/round-1/served/trace.duckdb").exists()
