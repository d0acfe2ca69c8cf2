"""`tests.library`: results kept once per key, compared by seed, and a page that is current."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import ajet
from tests.library.__main__ import app
from tests.library.report import Library, Point, Record, compared, page

ROOT = Path(__file__).parents[1]


def record(
    reward: float, seed: int = 0, version: str = ajet.__version__, task: str = "sums"
) -> Record:
    curve = (Point(0, 0.1, 0.2, 0.0, 0, 0), Point(4, reward, None, 9.5, 1200, 64))
    return Record(
        task, "local", version, seed, (), "a machine", "3.12", "2026-01-01", 60.0, 50.0, 0.5, curve
    )


def library(folder: Path, *records: Record, tasks: dict[str, list[str]] | None = None) -> Library:
    text = {"tasks": tasks or {"sums": ["sums.yaml"]}, "records": [asdict(one) for one in records]}
    (folder / "bench.json").write_text(json.dumps(text))
    return Library.open(folder)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_a_second_run_with_the_same_key_replaces_the_first(tmp_path: Path) -> None:
    made = library(tmp_path, record(0.5), record(0.6, seed=1))
    made.keep(record(0.9, seed=1))
    kept = Library.open(tmp_path).records
    assert [(one.seed, one.curve[-1].reward) for one in kept] == [(0, 0.5), (1, 0.9)]
    assert kept == made.records


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=5))
def test_a_comparison_is_paired_by_seed(pairs: list[tuple[float, float]]) -> None:
    then = [record(a, seed, "0.0.1") for seed, (a, _) in enumerate(pairs)]
    now = [record(b, seed) for seed, (_, b) in enumerate(pairs)]
    (one,) = compared([*then, *reversed(now), record(0.5, seed=99)], "0.0.1")
    change = sum(b - a for a, b in pairs) / len(pairs)
    assert one.now - one.other == pytest.approx(change)
    assert one.seeds == tuple(range(len(pairs)))


@pytest.mark.parametrize(
    ("rewards", "code"), [((0.9, 0.9), 0), ((0.5, 0.52), 1), ((0.89, 0.88), 0), ((0.2, 0.95), 0)]
)
def test_a_clear_loss_against_the_last_version_exits_with_1(
    tmp_path: Path, rewards: tuple[float, float], code: int
) -> None:
    then = [record(0.9, seed, "0.0.9") for seed in range(2)]
    older = [record(0.1, seed, "0.0.10") for seed in range(2)]
    now = [record(reward, seed) for seed, reward in enumerate(rewards)]
    library(tmp_path, *then, *now)
    done = invoke("--no-run", "--library", str(tmp_path), "--compare", "last")
    assert done.exit_code == code, done.output
    assert ("not worse" in done.output) == (code == 0)
    library(tmp_path, *then, *older, *now)
    assert "in 0.0.10" in invoke("--no-run", "--library", str(tmp_path), "--compare", "last").output


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    assert "does not exist" in str(invoke("--library", str(tmp_path / "none")).output)
    library(tmp_path, record(0.5))
    refused = invoke("products", "--library", str(tmp_path))
    assert refused.exit_code == 2 and "tasks: sums" in refused.output
    refused = invoke("--no-run", "--compare", "0.0.1", "--library", str(tmp_path))
    assert refused.exit_code == 2 and "versions: none" in refused.output
    alone = invoke("--no-run", "--compare", "last", "--library", str(tmp_path))
    assert (
        alone.exit_code == 0
        and "no earlier version to compare with" in alone.output
        and "sums" in alone.output
    )
    (tmp_path / "bench.json").write_text("{}")
    assert "does not contain results" in invoke("--library", str(tmp_path)).output


@pytest.mark.slow
def test_a_run_that_fails_is_reported_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(
        "ajet:\n  model: {path: nowhere}\n  rollout: {user_workflow: none.py->solve}\n"
    )
    library(tmp_path, record(0.5))
    done = invoke("sums", "--seed", "4", "--seed", "5", "--library", str(tmp_path))
    assert done.exit_code == 1
    assert "sums, seed 4: sums.yaml ended with exit code 2" in done.output
    assert "sums, seed 5: sums.yaml ended with exit code 2" in done.output
    assert [one.seed for one in Library.open(tmp_path).records] == [0]


@pytest.mark.slow
def test_the_page_and_its_pictures_are_current(tmp_path: Path) -> None:
    shelf = Library.open(ROOT / "tutorial")
    assert (ROOT / "docs/bench.md").read_text() == page(shelf), (
        "run `python -m tests.library --no-run --report docs`"
    )
    assert all(
        (ROOT / "tutorial" / config).is_file()
        for configs in shelf.tasks.values()
        for config in configs
    )
    done = invoke(
        "--no-run", "--library", str(ROOT / "tutorial"), "--report", str(tmp_path), "--json"
    )
    assert done.exit_code == 0
    assert {p.name for p in tmp_path.glob("pictures/*")} == {
        p.name for p in ROOT.glob("docs/pictures/bench-*.svg")
    }


@pytest.mark.long
@pytest.mark.slow
def test_two_steps_of_the_calculator_are_measured(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tutorial/example_math_agent", tmp_path / "example_math_agent")
    library(tmp_path, tasks={"calculator": ["example_math_agent/math_agent.yaml"]})
    keys = {"total_steps": 2, "val_tasks": 16, "test_freq": 1}
    overrides = [f"ajet.trainer_common.{key}={value}" for key, value in keys.items()]
    done = invoke("--seed", "3", "--library", str(tmp_path), *overrides)
    assert done.exit_code == 0, done.output
    (found,) = Library.open(tmp_path).records
    assert [point.step for point in found.curve] == [0, 1, 2]
    assert found.cpu_seconds > 0 and found.memory_gib > 0.1
    assert 0 < found.curve[1].tokens < found.curve[2].tokens
    assert found.curve[2].episodes == 2 * found.curve[1].episodes == 256
