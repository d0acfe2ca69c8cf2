"""The tutorial of dataset expansion: its commands make what its README says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.config.config import load_config
from ajet_sdk.tasks.load import load_tasks
from ajet_tools.cli.app import app

pytestmark = pytest.mark.slow

TUTORIAL = Path(__file__).parents[3] / "tutorial"
HERE, MATH = TUTORIAL / "example_dataset_expansion", TUTORIAL / "example_math_agent"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_right(row: dict[str, Any]) -> bool:
    a, operator, b = re.fullmatch(r"What is (\d+)([-+*])(\d+)\?", row["question"]).groups()  # type: ignore[union-attr]
    return {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator] == int(
        row["answer"]
    )


HELD_OUT = {row["question"] for row in rows_of(MATH / "val.jsonl")}


def test_the_seeds_are_eight_right_ones_and_none_is_held_out() -> None:
    seeds = rows_of(HERE / "seeds.jsonl")
    assert len({row["question"] for row in seeds}) == 8
    assert all(is_right(row) for row in seeds)
    assert not HELD_OUT & {row["question"] for row in seeds}


def test_eight_seeds_become_500_right_tasks_although_the_teacher_errs(tmp_path: Path) -> None:
    arguments = ["expand", str(HERE / "seeds.jsonl"), "--count", "500", "--out", str(tmp_path / "out"), "--model",
                 f"{HERE / 'teacher.py'}:reply", "--strategy", "same-style", "--verify", "agreement:3",
                 "--eval", str(MATH / "val.jsonl"), "--validation", "0", "--yes"]  # fmt: skip
    assert CliRunner().invoke(app, ["dataset", *arguments]).exit_code == 0
    made, refused = (rows_of(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "rejected"))
    assert len({row["question"] for row in made}) == 500
    assert sum(not is_right(row) for row in made) <= 2
    assert not HELD_OUT & {row["question"] for row in made}
    reasons = {row["rejected"]["reason"] for row in refused}
    assert {
        "exact duplicate",
        "independent answers agree on a different answer",
        "in the evaluation set",
    } <= reasons
    assert sum("question" in row and not is_right(row) for row in refused) > 30


def test_a_biased_teachers_products_are_refused_by_calculation_or_by_another_model(
    tmp_path: Path,
) -> None:
    reasons = []
    for name, more in (
        ("own", ()),
        ("other", ("--verify-model", f"scripted:{HERE / 'checker.py'}:reply")),
    ):
        arguments = ["expand", str(HERE / "seeds.jsonl"), "--count", "200", "--out", str(tmp_path / name), "--model",
                     f"{HERE / 'teacher.py'}:biased", "--strategy", "same-style", "--verify", "agreement:3", *more,
                     "--validation", "0"]  # fmt: skip
        assert CliRunner().invoke(app, ["dataset", *arguments]).exit_code == 0
        assert all(is_right(row) for row in rows_of(tmp_path / name / "train.jsonl"))
        reasons.append(
            Counter(
                row["rejected"]["reason"] for row in rows_of(tmp_path / name / "rejected.jsonl")
            )
        )
    calculated = "the answer is not the result of the calculation"
    agreed = "independent answers agree on a different answer"
    assert reasons[0][calculated] > 20, "the teacher agrees with itself on them"
    assert reasons[1][calculated] == 0 and reasons[1][agreed] > 20


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_makefile_runs_only_the_steps_that_have_to_run(tmp_path: Path) -> None:
    program = tmp_path / "ajet"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ajet "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(TUTORIAL.parent), os.environ.get("PYTHONPATH", "")]
    )

    def make() -> list[str]:
        arguments = ["make", "-C", str(HERE), f"OUT={tmp_path / 'out'}", "COUNT=20"]
        printed = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, check=True
        ).stdout
        return re.findall(r"^ajet dataset (\w+)", printed, re.MULTILINE)

    assert make() == ["expand", "filter", "export"]
    assert (tmp_path / "out/train.parquet").exists()
    assert make() == []
    (tmp_path / "out/filtered.jsonl").unlink()
    assert make() == ["filter", "export"]


@pytest.mark.parametrize("count", [40])
def test_the_job_makes_its_own_tasks(tmp_path: Path, count: int) -> None:
    more = [f"ajet.experiment_dir={tmp_path}", f"ajet.task_reader.data_generation.task_num={count}"]
    config = load_config(HERE / "expansion.yaml", more)
    assert not config.notices()
    tasks = load_tasks(config)
    assert len(tasks.train) == count
    assert {task.metadata["question"] for task in tasks.val} == HELD_OUT


def test_a_check_of_the_job_makes_no_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    said = CliRunner().invoke(app, ["config", "check", str(HERE / "expansion.yaml")])
    assert "tasks: made when the job runs" in said.stdout
    assert said.exit_code == 0
    assert not list(tmp_path.iterdir())
