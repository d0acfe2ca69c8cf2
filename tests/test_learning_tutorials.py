"""The tutorials that learn from more than rewards: their data, their configs, and one small run of
each."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ajet_sdk.config.config import load_config
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, Run
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("audited")

TUTORIALS = Path(__file__).parents[1] / "tutorial"
DISTILLATION, LORA, FLYWHEEL = (
    TUTORIALS / f"example_{name}" for name in ("distillation", "lora", "flywheel")
)


@pytest.mark.slow
def test_the_walks_are_what_their_program_writes_and_reach_the_goal(tmp_path: Path) -> None:
    for name in ("example_distillation", "example_frozenlake"):
        shutil.copytree(TUTORIALS / name, tmp_path / name)
    written = tmp_path / "example_distillation" / "walks.jsonl"
    written.unlink()
    subprocess.run([sys.executable, written.with_name("walks.py")], check=True, timeout=300)
    assert written.read_text() == (DISTILLATION / "walks.jsonl").read_text()
    held_out = {
        row["main_query"] + str(row["lake"])
        for row in rows(TUTORIALS / "example_frozenlake" / "val.jsonl")
    }
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
    done = subprocess.run(
        [sys.executable, *program], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.slow
def test_a_student_is_distilled_in_two_steps(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    small = [
        "ajet.trainer_common.total_steps=2",
        "ajet.trainer_common.val_tasks=4",
        "ajet.data.train_batch_size=4",
    ]
    own = [f"ajet.model.path={model}", "ajet.model.recipe=null", *small]
    for job in ("teacher", "student"):
        said = run(["-m", "ajet", "--conf", str(DISTILLATION / f"{job}.yaml"), *own], tmp_path)
        assert "validation: reward" in said


@pytest.mark.long
@pytest.mark.slow
def test_a_round_without_a_thumb_up_promotes_nothing(tmp_path: Path) -> None:
    """A model of random weights reaches no goal; the served walks are in a trace all the same."""
    model = save_tiny(tmp_path / "tiny")
    given = ["--rounds", "1", "--walks", "8", "--held-out", "4", "--model", str(model)]
    said = run([str(FLYWHEEL / "flywheel.py"), *given], tmp_path)
    assert "round 0: held-out reward 0.000" in said and "nothing to learn from" in said
    assert not (tmp_path / "launcher_record/flywheel/current").exists()
    assert (tmp_path / "launcher_record/flywheel/round-1/served/trace.duckdb").exists()


@pytest.mark.long
@pytest.mark.slow
def test_a_flywheel_goes_on_from_the_model_in_service_and_with_a_round_that_was_killed(
    tmp_path: Path,
) -> None:
    """The walks of round 2 are there, and what it learnt of them is not: they are learnt, and none
    is walked again."""
    model, home = save_tiny(tmp_path / "tiny"), tmp_path / "launcher_record/flywheel"
    walks = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}]
    with TraceWriter(home / "round-2/served/trace.duckdb") as writer:
        call = Call(
            episode_id="liked",
            request={"messages": walks[:1]},
            response={"choices": [{"message": walks[1]}]},
        )
        writer.put(call, Run(run_id="r", backbone="run"), Episode(episode_id="liked", run_id="r"))
        writer.put(Feedback(episode_id="liked", score=1.0))
    (home / "round-2/said.json").write_text("[1, 0]")
    (home / "state.json").write_text(
        json.dumps({"round": 1, "model": str(model), "rewards": [0.0] * 4})
    )
    given = [str(FLYWHEEL / "flywheel.py"), "--rounds", "1", "--walks", "8", "--held-out", "4"]
    said = run(given, tmp_path)
    assert (
        "round 1: held-out reward 0.000" in said
        and "round 2: 1 thumbs up, 0 down; held-out reward" in said
    )
    done = json.loads((home / "state.json").read_text())
    assert done["round"] == 2 and done["model"] == str(model)
    (home / "state.json").write_text(json.dumps({**done, "round": 1}))  # killed before it was noted
    assert "round 2: 1 thumbs up, 0 down" in run(given, tmp_path)
