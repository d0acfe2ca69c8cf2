"""Evaluation rows in disguise: every sixth word changed, in a document, in other words; and seeds
within rows.

`leaks.jsonl` has forty questions, each with a paraphrase and another task that is near to it,
written by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_tools.cli.app import app
from ajet_tools.dataset.similarity.decontaminate import Leaks

ROWS = [
    json.loads(line) for line in (Path(__file__).parent / "leaks.jsonl").read_text().splitlines()
]
KNOWN = [(f"eval line {number}", row["question"]) for number, row in enumerate(ROWS, 1)]
OTHER = (
    "river",
    "lamp",
    "quiet",
    "seven",
    "table",
    "green",
    "often",
    "market",
    "yellow",
    "pencil",
    "under",
    "summer",
)
LONG = [row for row in ROWS if len(row["question"].split()) >= 12]


def altered(text: str) -> str:
    """Every sixth word is another, but for numbers, which make another task."""
    words = text.split(" ")
    for at in range(5, len(words), 6):
        if not re.search(r"\d", words[at]):
            words[at] = re.sub(r"\w.*\w|\w", OTHER[at % len(OTHER)], words[at])
    return " ".join(words)


def found(leaks: Leaks, texts: list[str]) -> int:
    return sum(leaks({"main_query": text}) is not None for text in texts)


def test_every_sixth_word_changed_is_found_by_itself_and_in_a_document() -> None:
    leaks = Leaks(KNOWN)
    around = "Notes of the course follow here, in no order at all. " * 3
    assert found(leaks, [altered(row["question"]) for row in LONG]) == len(LONG) == 36
    assert found(leaks, [around + altered(row["question"]) + around for row in LONG]) == len(LONG)
    evidence = leaks({"main_query": around + altered(LONG[0]["question"])})
    assert evidence is not None and "83% of the words of eval line 1:" in evidence


def test_another_task_on_the_same_subject_is_none_but_where_it_quotes_thirteen_words() -> None:
    assert found(Leaks(KNOWN), [row["other"] for row in ROWS]) == 1


def test_another_number_makes_another_task() -> None:
    text = altered(ROWS[0]["question"])
    assert (
        Leaks(KNOWN)({"main_query": text})
        and Leaks(KNOWN)({"main_query": text.replace("48", "49")}) is None
    )


@pytest.mark.parametrize(
    ("text", "leaks"),
    [
        ("Please compute: what is 12 + 34?", True),
        ("Name it, then answer. What is 12 + 34? Thank you.", True),
        ("What is 12 + 34 + 5?", False),
        ("What is 12 + 35?", False),
        ("Who is it, and where is he?", False),
    ],
)
def test_a_short_question_with_a_number_is_found_among_other_words(text: str, leaks: bool) -> None:
    known = [("line 1", "What is 12 + 34?"), ("line 2", "Who is it?")]
    assert (Leaks(known)({"main_query": text}) is not None) == leaks


WRITER = """
import json

ROWS = [json.loads(line) for line in open("leaks.jsonl")]
CALLS = []

def reply(ask):
    CALLS.append(1)
    row = ROWS[len(CALLS) % len(ROWS)]
    seed = "A gardener waters 7 tomatoes, 9 beans and 4 roses every evening; how many plants does he water in a week?"
    made = [(row["paraphrase"], "1"), (row["other"], "2"), (f"First read this. {seed} Then multiply it by 3.", "420")]
    return [json.dumps([{"main_query": q, "metadata": {"answer": a}} for q, a in made])] * ask.sampling.n
"""


def test_expand_refuses_rows_of_the_evaluation_set_and_rows_that_hold_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_server: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "writer.py").write_text(WRITER)
    (tmp_path / "eval.jsonl").write_text(
        "".join(json.dumps({"main_query": row["question"]}) + "\n" for row in ROWS)
    )
    seed = (
        "A gardener waters 7 tomatoes, 9 beans and 4 roses every evening; how many plants does he"
        " water in a week?"
    )
    seeds = [
        {"main_query": seed, "metadata": {"answer": "140"}},
        {"main_query": "2 + 2?", "metadata": {"answer": "4"}},
    ]
    (tmp_path / "seeds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seeds))
    given = ["dataset", "expand", "seeds.jsonl", "--count", "9", "--out", "data", "--model",
             "writer.py:reply,concurrency=1", "--verify", "none", "--eval", "eval.jsonl", "--json"]  # fmt: skip
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["refused"]["in the evaluation set"] and report["refused"]["near duplicate"]
    rows = [json.loads(line) for line in Path("data/train.jsonl").read_text().splitlines()]
    assert not {row["main_query"] for row in rows} & {row["question"] for row in ROWS}
    rejected = [json.loads(line) for line in Path("data/rejected.jsonl").read_text().splitlines()]
    details = [
        one["rejected"]["detail"]
        for one in rejected
        if one["rejected"]["reason"] == "in the evaluation set"
    ]
    assert any("eval.jsonl line" in text for text in details)


def test_an_instruction_that_seeds_share_is_no_seed_in_the_row() -> None:
    told = (
        "Solve the following problem step by step and give the final answer as one number inside a"
        " box:"
    )
    seeds = Leaks(
        [("seed a", f"{told} 12 plus 5"), ("seed b", f"{told} 30 minus 8")], share=0.9, common=1
    )
    assert seeds.quotation({"main_query": f"{told} 44 plus 17"}) is None
    assert seeds.quotation({"main_query": f"Look. {told} 12 plus 5 And then rest."}) is not None
