"""The tutorials on judges, as their READMEs say."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUBRIC = ROOT / "tutorial" / "example_rubric_judge"


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
