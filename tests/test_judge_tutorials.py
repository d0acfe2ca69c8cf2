"""The tutorials on judges, as their READMEs say."""

from __future__ import annotations

import filecmp
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ajet
from ajet_sdk.types import Task
from ajet_tools.cli.app import app
from ajet_tools.dataset.similarity.held_out import near_copies

pytestmark = pytest.mark.usefixtures("audited")

ROOT = Path(__file__).parents[1]
RUBRIC = ROOT / "tutorial" / "example_rubric_judge"


@pytest.mark.slow
def test_a_rubric_of_ten_examples_agrees_better_than_the_plain_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "judge_model", raising=False)
    agreements, readme = [], (RUBRIC / "README.md").read_text()
    for judge in ([f"llm:{RUBRIC / 'plain.yaml'}"], ["--conf", str(RUBRIC / "rubric_judge.yaml")]):
        options = ["--labels", str(RUBRIC / "held_out.jsonl"), "--repeats", "1", "--json"]
        done = CliRunner().invoke(app, ["judge", "eval", *judge, *options])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        value, low, high = (found["agreement"][name] for name in ("value", "low", "high"))
        assert f"{value:.3f} [{low:.3f}, {high:.3f}]" in readme
        agreements.append(value)
    assert agreements[1] > agreements[0] + 0.2
    assert all(point in readme for point in found["rubric"]["points"])


def test_the_scored_replies_are_those_that_the_script_writes(tmp_path: Path) -> None:
    shutil.copy(RUBRIC / "make_data.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "make_data.py"], check=True)
    for name in ("scored.jsonl", "held_out.jsonl"):
        assert filecmp.cmp(RUBRIC / name, tmp_path / name, shallow=False)


ASK = ROOT / "tutorial" / "example_learn2ask"


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The tutorial's own modules, gone afterwards: the other tutorial has a `judge_model` too."""
    names = ("dialogues", "doctor", "doctor_recipe", "judge_model")
    before = {name: sys.modules.pop(name, None) for name in names}
    monkeypatch.syspath_prepend(str(ASK))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update({name: module for name, module in before.items() if module is not None})


def test_a_doctors_questions_are_judged_by_a_function(doctor: Any, tmp_path: Path) -> None:
    dialogues = doctor("dialogues")
    rows = [json.loads(line) for line in (ASK / "val.jsonl").read_text().splitlines()][:6]
    (tmp_path / "replies.py").write_text(
        f"def reply(ask):\n    return {dialogues.ASK['fever']!r}\n"
    )
    overrides = [
        f"ajet.model.scripted={tmp_path / 'replies.py'}:reply", f"ajet.experiment_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    report = ajet.run(ajet.load_config(ASK / "learn2ask.yaml", overrides), tasks=rows, k=1)
    assert [episode.status for episode in report.episodes] == ["succeeded"] * 6, report.failures
    for row, episode in zip(rows, report.episodes, strict=True):
        [reward] = episode.rewards
        assert (reward.value == 1.0) == (row["answer"] == dialogues.ASK["fever"]) and reward.reason
        judges = [call for call in episode.calls if call.phase == "judge"]
        assert (
            len(judges) == 1 and "full marks" in str(judges[0].request) and not judges[0].trainable
        )


def test_the_consultations_are_those_that_the_script_writes(tmp_path: Path) -> None:
    shutil.copy(ASK / "dialogues.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "dialogues.py"], check=True)
    train, val = (
        set((tmp_path / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "val")
    )
    assert not train & val
    dialogues = {
        name: [Task(init_messages=json.loads(line)["init_messages"]) for line in lines]
        for name, lines in (("train", train), ("val", val))
    }
    assert near_copies(dialogues["train"], dialogues["val"]) == []
    for name in ("train.jsonl", "val.jsonl"):
        assert filecmp.cmp(ASK / name, tmp_path / name, shallow=False)
