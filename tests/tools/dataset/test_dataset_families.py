"""Lineage over generations: what was grown from a held-out task is found, and families stay on one
side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.lineage import Descent, descended, families
from ajet_sdk.tasks.load import _check_apart
from ajet_sdk.tasks.task_rows import Row as TaskRow
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.cli.app import app
from ajet_tools.dataset.curation.validate import validate
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.seeds import as_examples, read_seeds, split_sides
from ajet_tools.dataset.generate.settings import GenerationConfig

REPLIES = """
import json, random, re

def reply(ask):
    text = ask.body["messages"][-1]["content"]
    chance = random.Random(text + str(ask.body.get("seed")))
    words = "amber birch cedar dune ember fjord grove heath inlet knoll larch marsh oak pine quay reed".split()
    count = int(re.search(r"array of (\\d+)", text)[1])
    rows = [" ".join(chance.choices(words, k=16)) for _ in range(count)]
    return json.dumps([{"main_query": f"Sort these: {row}?", "metadata": {"answer": row[:5]}} for row in rows])
"""


def ajet(*arguments: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["dataset", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def seed(number: int) -> dict[str, Any]:
    words = (
        "crab",
        "elk",
        "goat",
        "ibex",
        "lynx",
        "mole",
        "newt",
        "owl",
        "puma",
        "rat",
        "seal",
        "toad",
    )
    return {
        "main_query": f"Where does the {words[number]} sleep in winter?",
        "metadata": {"answer": f"den {number}"},
    }


def expand(source: Path, out: str, *more: Any) -> list[dict[str, Any]]:
    Path("replies.py").write_text(REPLIES)
    options = ["--count", 6, "--model", "replies.py:reply", "--verify", "none", "-y", "-o", out]
    ajet("expand", source, *options, *more)
    return [
        row
        for name in ("train", "validation")
        if (p := Path(out, f"{name}.jsonl")).exists()
        for row in read(p)
    ]


def check_job(train: list[dict[str, Any]], val: list[dict[str, Any]]) -> None:
    sides = [
        [(to_task(TaskRow("", row), {}), f"line {i}") for i, row in enumerate(rows)]
        for rows in (train, val)
    ]
    _check_apart(*sides)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_grandchild_of_a_held_out_task_is_refused() -> None:
    seeds = [seed(number) for number in range(4)]
    children = expand(write(Path("seeds.jsonl"), *seeds), "one", "--validation", 0)
    grandchildren = expand(write(Path("children.jsonl"), *children), "two", "--validation", 0)
    third = expand(write(Path("again.jsonl"), *grandchildren), "three", "--validation", 0)
    ids = {example.id for example in as_examples([Row("", row) for row in seeds])}
    for row in (*children, *grandchildren, *third):
        assert set(row["provenance"]["roots"]) <= ids
    held_out = [{**row, "metadata": {**row["metadata"], "pass_rate": 0.5}} for row in seeds]
    for generation in (children, grandchildren, third):
        with pytest.raises(TaskError):
            check_job(generation, held_out)
        report = validate({
            "train": str(write(Path("t.jsonl"), *generation)), "test": str(write(Path("h.jsonl"), *seeds)),
        })  # fmt: skip
        assert report.counts["leakage"] > 0
    # the task between is held out: it is named by no later row
    with pytest.raises(TaskError):
        check_job(third, children[:1])
    check_job(children, [seed(9)])


def test_rows_without_roots_are_understood() -> None:
    held = {"main_query": "held", "task_id": "s", "metadata": {"answer": "1"}}
    child = {
        "main_query": "child",
        "task_id": "c",
        "provenance": {"seeds": ["s"], "splits": ["train"]},
    }
    grandchild = {
        "main_query": "grandchild",
        "task_id": "g",
        "provenance": {"seeds": ["c"], "splits": ["train"]},
    }
    with pytest.raises(TaskError):
        check_job([child, grandchild], [held])
    rows = [Descent.named(row, row["task_id"]) for row in (grandchild, child)]
    assert [place for place, _ in descended(rows, [Descent(frozenset({"s"}))])] == [0, 1]
    [example, _] = as_examples([Row("", grandchild), Row("", child)])
    assert example.roots == ("s",)


def test_brothers_are_a_family_and_strangers_are_not() -> None:
    rows = [
        Descent(frozenset({"a"})), Descent(frozenset({"b"})),
        Descent(frozenset({"c"}), frozenset({"a"})), Descent(frozenset({"d"}), frozenset({"c"}), frozenset({"x"})),
        Descent(frozenset({"e"}), frozenset({"x"}), frozenset({"x"})),
    ]  # fmt: skip
    assert families(rows) == [0, 1, 0, 0, 0]


def test_split_keeps_families_together_and_marks_the_held_out() -> None:
    rows = [{**seed(number), "task_id": f"s{number}"} for number in range(12)]
    for number in range(60):
        parents = [f"s{number % 12}"]
        provenance = {"seeds": parents, "roots": parents, "splits": ["train"]}
        rows.append(
            {"main_query": f"grown {number}", "task_id": f"g{number}", "provenance": provenance}
        )
    ajet("split", write(Path("all.jsonl"), *rows), "--fractions", "0.3", "-o", "data")
    train, validation = (read(Path("data", f"{name}.jsonl")) for name in ("train", "validation"))
    assert train and validation and len(train) + len(validation) == len(rows)
    named = {row["task_id"] for row in validation}
    assert not [row for row in train if named & set(row.get("provenance", {}).get("seeds", ()))]
    check_job(train, validation)
    assert all("val" in row["provenance"]["splits"] for row in validation)
    assert not any("val" in row.get("provenance", {}).get("splits", ()) for row in train)


@pytest.mark.parametrize("name", ["heldout.jsonl", "test-final.jsonl", "piped"])
def test_a_renamed_held_out_file_gives_no_training_data(name: str) -> None:
    rows = [seed(number) for number in range(12)]
    ajet("split", write(Path("all.jsonl"), *rows), "--fractions", "0.5", "-o", "data")
    Path(name).write_bytes(Path("data/validation.jsonl").read_bytes())
    with pytest.raises(TaskError):
        read_seeds(name)
    assert len(read_seeds(name, include_validation=True)) > 1


@pytest.mark.parametrize(
    "command",
    [
        ("filter", "test.jsonl", "chars>1", "-o", "other.jsonl"),
        ("dedup", "test.jsonl", "-o", "other.jsonl"),
        ("dedup", "test.jsonl", "--against", "eval.jsonl", "-o", "other.jsonl"),
    ],
)
def test_a_held_out_file_stays_one_under_another_name(command: tuple[str, ...]) -> None:
    write(Path("test.jsonl"), seed(0), seed(1), seed(2))
    write(Path("eval.jsonl"), {"main_query": "Why is the sky blue in the morning?"})
    ajet(*command)
    assert len(read(Path("other.jsonl"))) == 3
    with pytest.raises(TaskError):
        read_seeds("other.jsonl")


def test_one_family_gives_no_validation_rows() -> None:
    grown = [
        Row(
            "",
            {
                "main_query": f"q{n}",
                "task_id": f"{n}",
                "provenance": {"seeds": ["s"], "roots": ["s"]},
            },
        )
        for n in range(6)
    ]
    config = GenerationConfig(10)
    sides = split_sides(as_examples(grown), config, 0.3, of_seeds=0.3)
    assert list(sides) == ["train"]
    two = [*grown, Row("", seed(1))]
    sides = split_sides(as_examples(two), config, 0.3, of_seeds=0.3)
    assert [len(side.seeds) for side in sides.values()] == [6, 1]
