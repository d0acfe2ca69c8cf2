"""The dataset card: what it says is what the rows are; the same rows, the same bytes."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ajet_sdk.errors import TaskError
from ajet_tools.dataset.card import Facts, write_card

WORDS = {
    "bread": ["flour", "oven", "dough", "yeast", "butter", "sugar", "kneading", "baking"],
    "space": ["planet", "orbit", "star", "gravity", "telescope", "galaxy", "rocket", "comet"],
    "code": ["function", "list", "loop", "string", "integer", "array", "index", "dictionary"],
}


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        kind = rng.choice(list(WORDS))
        query = f"Question {number}: {' and '.join(rng.sample(WORDS[kind], 4))}?"
        metadata = {"answer": str(number), "pass_rate": rng.randint(0, 8) / 8}
        verdict = {"ok": True, "reason": "3 of 3 independent answers agree"}
        provenance = {
            "source": "expand",
            "parameters": {"strategy": rng.choice(["harder", "easier"])},
            "verdict": verdict,
        }
        made.append({"main_query": query, "metadata": metadata, "provenance": provenance})
    return made


FACTS = Facts(
    title="Sums | and more",
    made_by="ajet dataset expand seeds.jsonl --count 200",
    counts={"seeds": 5},
    refused={"near duplicate": 7, "the judge rejects the answer": 11},
    parameters={"model": "m", "seed": 0, "strategies": ["harder", "easier"]},
    notes=["The budget was spent before all rows were made."],
    files={"train": "train.jsonl", "validation": "validation.jsonl"},
)


def test_a_card_says_what_the_rows_are(tmp_path: Path) -> None:
    made = rows(200)
    path = write_card(tmp_path, {"train": made[:150], "validation": made[150:]}, FACTS)
    text = path.read_text()
    assert path == tmp_path / "README.md"
    for line in (
        "| rows | 200 |", "| rows in train | 150 |", "| rows in validation | 50 |", "| rows with an answer | 200 |",
        "| seeds | 5 |", "| refused | 18 |", "| near duplicate | 7 |", "| expand | 200 |",
        "| 3 of 3 independent answers agree | 200 |",
        "> The budget was spent before all rows were made.", "| model | `m` |",
    ):  # fmt: skip
        assert line in text, line
    assert text.index("| the judge rejects") < text.index(
        "| near duplicate"
    )  # the most frequent first
    head = yaml.safe_load(text.split("---")[1])
    assert head["configs"][0]["data_files"][1] == {
        "split": "validation",
        "path": "validation.jsonl",
    }
    longest = max(len(row["main_query"]) for row in made[:150])
    assert "| question, train |" in text and f"| {longest} |" in text
    mean = sum(row["metadata"]["pass_rate"] for row in made) / 200
    assert f"mean pass rate of 200 measured rows is {mean:.2f}" in text


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes_also_in_another_process(tmp_path: Path) -> None:
    write_card(tmp_path / "a", {"train": iter(rows(100))}, FACTS)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from pathlib import Path;"
        f" from test_dataset_card import *; write_card(Path({str(tmp_path / 'b')!r}), {{'train': rows(100)}},"
        " FACTS)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["README.md"]
    assert (tmp_path / "a/README.md").read_bytes() == (tmp_path / "b/README.md").read_bytes()


def test_a_readme_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("Mine.\n")
    assert write_card(tmp_path, {"train": rows(3)}, Facts()) == tmp_path / "CARD.md"
    assert (tmp_path / "README.md").read_text() == "Mine.\n"
    (tmp_path / "README.md").unlink()
    one = write_card(tmp_path, {"train": rows(3)}, Facts(title="one"))
    assert (
        write_card(tmp_path, {"train": rows(3)}, Facts(title="two")) == one
        and "# two" in one.read_text()
    )


@pytest.mark.parametrize(
    "made",
    [
        [],
        [{}],
        [{"main_query": ""}, {"main_query": "x" * 5_000_000, "metadata": {"answer": None}}],
        [
            {
                "main_query": "```\n# not a heading\n```` | <b>",
                "metadata": {"answer": {"a": ["|", "\ud800"]}},
            }
        ],
        [{"messages": [{"role": "user", "content": "hi"}], "metadata": "text", "provenance": 3}]
        * 30,
        [{"main_query": f"What is {i} + {i}?", "metadata": {"pass_rate": True}} for i in range(50)],
        [
            {"main_query": f"第{i}题：计算{'加法减法乘法'[i % 6]}与分数的和，苹果香蕉"}
            for i in range(40)
        ],
    ],
    ids=["none", "empty", "huge", "marks", "odd", "numbers", "chinese"],
)
def test_odd_rows_make_a_card_all_the_same(
    tmp_path: Path, made: list[dict[str, Any]], recwarn: Any
) -> None:
    text = write_card(tmp_path, {"train": made}, Facts()).read_text()
    assert f"| rows in train | {len(made)} |" in text or not made
    assert len(text) < 20_000
    assert [str(one.message) for one in recwarn] == []  # no missing glyphs, no empty slices


def test_an_example_cannot_leave_its_fence(tmp_path: Path) -> None:
    text = write_card(
        tmp_path, {"train": [{"main_query": "```\n# Out\n```````"}]}, Facts()
    ).read_text()
    assert "\n````````text\n" in text


@pytest.mark.slow
def test_rows_are_streamed(tmp_path: Path) -> None:
    def many() -> Iterator[dict[str, Any]]:
        for number in range(30_000):
            yield {"main_query": f"row {number}"}

    assert (
        "| rows in train | 30,000 |" in write_card(tmp_path, {"train": many()}, Facts()).read_text()
    )


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TaskError, match="cannot write the card"):
        write_card(tmp_path / "file" / "inside", {"train": rows(3)}, Facts())
