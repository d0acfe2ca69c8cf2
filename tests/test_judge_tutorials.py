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

import ajet

ROOT = Path(__file__).parents[1]
RUBRIC = ROOT / "tutorial" / "example_rubric_judge"


@pytest.mark.slow
def test_a_rubric_of_ten_examples_agrees_better_than_the_plain_judge() -> None:
    ran = subprocess.run(
        [sys.executable, RUBRIC / "compare.py"], capture_output=True, text=True, check=True, timeout=250
    )
    assert ran.stdout in (RUBRIC / "README.md").read_text()
    plain, rubric, *_ = [float(line.split("agreement ")[1].split()[0]) for line in ran.stdout.splitlines()[:2]]
    assert rubric > plain + 0.2


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


def test_a_doctors_questions_are_judged_over_http(doctor: Any, tmp_path: Path) -> None:
    dialogues, served = doctor("dialogues"), doctor("judge_model").served
    rows = [json.loads(line) for line in (ASK / "val.jsonl").read_text().splitlines()][:6]
    (tmp_path / "replies.py").write_text(
        "def reply(ask):\n"
        f"    return {dialogues.ASK['fever']!r}\n"
    )  # fmt: skip
    with served() as url:
        overrides = [
            f"ajet.task_judge.llm.base_url={url}", f"ajet.model.scripted={tmp_path / 'replies.py'}:reply",
            f"ajet.experiment_dir={tmp_path / 'run'}",
        ]  # fmt: skip
        config = ajet.load_config(ASK / "learn2ask.yaml", overrides)
        report = ajet.run(config, tasks=rows, k=1)
    assert [episode.status for episode in report.episodes] == ["succeeded"] * 6, report.failures
    for row, episode in zip(rows, report.episodes, strict=True):
        [reward] = episode.rewards
        assert (reward.value == 1.0) == (row["answer"] == dialogues.ASK["fever"]) and reward.reason
        judges = [call for call in episode.calls if call.phase == "judge"]
        assert len(judges) == 1 and "full marks" in str(judges[0].request) and not judges[0].trainable


def test_the_consultations_are_those_that_the_script_writes(tmp_path: Path) -> None:
    shutil.copy(ASK / "dialogues.py", tmp_path)
    subprocess.run([sys.executable, tmp_path / "dialogues.py"], check=True)
    train, val = (set((tmp_path / f"{name}.jsonl").read_text().splitlines()) for name in ("train", "val"))
    assert not train & val
    for name in ("train.jsonl", "val.jsonl"):
        assert filecmp.cmp(ASK / name, tmp_path / name, shallow=False)
