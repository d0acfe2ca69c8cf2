"""What a row asks and answers is read alike by all commands, in every shape of row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.tasks.lineage import same_tasks
from ajet_sdk.tasks.questions import answer_of, question_of, text_of
from ajet_sdk.tasks.task_rows import Row, to_task
from ajet_tools.cli.app import app
from ajet_tools.dataset.curation.formats import converter
from ajet_tools.dataset.curation.validate import validate
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.dedup import RowFacts, find


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


PASSAGE = (
    "The Danube rises in the Black Forest, flows through ten countries and ends in the Black Sea;"
    " its basin is home to more than eighty million people, and barges have carried grain and"
    " timber on it since the Romans built forts here."
)


def alpaca(number: int) -> dict[str, Any]:
    return {
        "instruction": "Add the numbers.",
        "input": f"{number} and {number + 1}",
        "output": str(2 * number + 1),
    }


SHAPES = {
    "alpaca": alpaca,
    "dolly": lambda n: {"instruction": "Who is it?", "context": f"Person {n} sings.", "response": f"Person {n}"},
    "passage": lambda n: {"passage": f"Ann has {n} cats.", "question": "How many cats has Ann?", "answer": str(n)},
    "choices": lambda n: {"question": "Which is right?", "choices": [f"red {n}", f"blue {n}"], "label": f"red {n}"},
    "options": lambda n: {"question": "Which one?", "options": {"A": f"{n}", "B": f"{n + 7}"}, "answer": f"{n}"},
    "letters": lambda n: {"question": "Which one?", "A": f"ape {n}", "B": f"bee {n}", "gold": f"ape {n}"},
    "arc": lambda n: {"question": "Which?", "choices": {"text": [f"x{n}", "y"], "label": ["A", "B"]}, "answerKey": n},
    "sql": lambda n: {"db_id": f"shop{n}", "question": "How many rows?", "sql": f"SELECT {n}"},
    "spider": lambda n: {"db_id": f"shop{n}", "question": "How many rows?", "query": f"SELECT {n}"},
    "schema": lambda n: {"question": "How many?", "schema": f"CREATE TABLE t{n} (a int)", "answer": f"SELECT {n}"},
    "system": lambda n: {"system": f"Count in base {n}.", "question": "What comes after 1?", "answer": f"{n}"},
    "pair": lambda n: {"premise": f"{n} people run.", "hypothesis": "Somebody runs.", "label": n},
    "text": lambda n: {"text": f"A film of {n} stars.", "label": f"label {n}"},
    "task": lambda n: {"main_query": "How long is it?", "metadata": {"context": f"It has {n} m.", "answer": f"{n}"}},
    "solution": lambda n: {"main_query": f"What is {n} plus 1?", "metadata": {"solution": f"{n + 1}"}},
    "messages": lambda n: {"messages": [
        {"role": "system", "content": f"Base {n}"}, {"role": "user", "content": "Again?"},
        {"role": "assistant", "content": f"{n}"},
    ]},
    "conversation": lambda n: {"messages": [
        {"role": "user", "content": f"Take {n}."}, {"role": "assistant", "content": "Taken."},
        {"role": "user", "content": "yes"}, {"role": "assistant", "content": f"It is {n}"},
    ]},
    "sharegpt": lambda n: {"conversations": [
        {"from": "system", "value": "Be short."}, {"from": "human", "value": f"Say {n}"},
        {"from": "gpt", "value": f"{n}"},
    ]},
    "prompt": lambda n: {"prompt": [{"role": "user", "content": f"Say {n}"}], "completion": f"{n}"},
    "verl": lambda n: {
        "prompt": [{"role": "user", "content": f"Say {n}"}], "reward_model": {"style": "rule", "ground_truth": f"{n}"},
    },
    "chosen": lambda n: {"prompt": f"Say {n}", "chosen": f"{n}", "rejected": "no"},
    "chosen messages": lambda n: {
        "prompt": f"Say {n}", "rejected": [],
        "chosen": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n}"}],
    },
    "squad": lambda n: {"context": f"She is {n}.", "question": "Her age?", "answers": {"text": [f"{n}"], "start": [7]}},
}  # fmt: skip
"""Rows that differ in one part of the question, by shape."""
EVERY = pytest.mark.parametrize("shape", SHAPES)


@EVERY
def test_rows_that_differ_in_any_part_of_the_question_are_no_duplicates(shape: str) -> None:
    rows = [SHAPES[shape](number) for number in (12, 45, 78)]
    assert not find([RowFacts.of(str(index), row) for index, row in enumerate(rows)]).duplicates


@EVERY
def test_copies_are_duplicates_and_leaks_whatever_they_answer(shape: str) -> None:
    row = SHAPES[shape](12)
    assert len(find([RowFacts.of("a", row), RowFacts.of("b", dict(row))]).duplicates) == 1
    leaks = Leaks([("eval", text_of(row))])
    assert leaks(row) is not None
    assert leaks({"question": "Why is the sky blue?"}) is None


@EVERY
def test_the_answer_is_found_and_is_no_part_of_the_question(shape: str) -> None:
    row = SHAPES[shape](1234)
    answer = answer_of(row)
    assert "1234" in str(answer) or "1235" in str(answer) or answer == "2469"
    if shape == "spider":
        assert "SELECT" not in question_of(row).plain


@EVERY
def test_the_prompt_holds_all_that_is_asked(shape: str) -> None:
    prompts = []
    for number in (12, 45):
        prompt = converter("trl-prompt")(SHAPES[shape](number))["prompt"]
        prompts.append(json.dumps(prompt))
        replied = converter("messages")(SHAPES[shape](number))["messages"]
        assert isinstance(replied, list)
        assert replied[:-1] == prompt
    assert prompts[0] != prompts[1]


@EVERY
def test_a_task_of_the_row_asks_the_same(shape: str) -> None:
    tasks = [to_task(Row("a row", SHAPES[shape](number)), {}) for number in (12, 45)]
    same = [task.model_copy(update={"task_id": "another"}) for task in tasks[:1]]
    assert [place for place, _ in same_tasks(tasks, same)] == [0]


@EVERY
def test_leaks_are_found_and_nothing_else_is_dropped(shape: str, tmp_path: Path) -> None:
    evals = write(tmp_path / "eval.jsonl", *(SHAPES[shape](number) for number in range(100, 160)))
    train = write(tmp_path / "train.jsonl", *(SHAPES[shape](number) for number in range(130, 190)))
    arguments = [
        "dataset",
        "dedup",
        train,
        "--against",
        evals,
        "-o",
        str(tmp_path / "clean.jsonl"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    kept = [text_of(row) for row in read(tmp_path / "clean.jsonl")]
    assert kept == [text_of(SHAPES[shape](number)) for number in range(160, 190)]


@EVERY
def test_validate_finds_no_problem_in_different_rows(shape: str, tmp_path: Path) -> None:
    first = write(tmp_path / "train.jsonl", *(SHAPES[shape](number) for number in range(3)))
    second = write(tmp_path / "test.jsonl", *(SHAPES[shape](number) for number in range(2, 5)))
    report = validate({"train": first, "test": second})
    assert report.counts["duplicate"] == report.counts["contradiction"] == 0
    assert report.counts["leakage"] == 1


def test_questions_about_one_passage_are_no_near_copies() -> None:
    rows = [
        {"passage": PASSAGE, "question": question}
        for question in ("Where does it rise?", "Where does it end?")
    ]
    assert not find([RowFacts.of(str(index), row) for index, row in enumerate(rows)]).duplicates
    edited = {"passage": PASSAGE.replace("countries", "nations"), "question": "Where does it rise?"}
    found = find([RowFacts.of("a", rows[0]), RowFacts.of("b", edited)]).duplicates
    assert [each.kind for each in found] == ["near"]


def test_an_evaluation_row_leaks_through_another_shape() -> None:
    question = "How many litres of water does the pump of the old mill lift in seven hours?"
    shared = (
        "Answer the question below, and give the reason for each of your steps before the answer"
        " itself."
    )
    rows = [
        {"instruction": shared, "input": question},
        {
            "instruction": shared,
            "input": "Which of the two rivers of the valley is the longer one?",
        },
    ]
    path_leaks = Leaks(
        [("eval", text_of(row)) for row in rows], alone=[question_of(row).asking for row in rows]
    )
    assert path_leaks({"question": question}) is not None
    assert path_leaks({"messages": [{"role": "user", "content": question}]}) is not None
    assert path_leaks({"instruction": shared, "input": "Why do cats purr at night?"}) is None


def test_a_system_prompt_hides_no_leak_but_makes_another_row(tmp_path: Path) -> None:
    plain = {"question": "Who wrote Hamlet?", "answer": "Shakespeare"}
    with_system = {"system": "You are a terse assistant.", **plain}
    assert Leaks([("eval", text_of(plain))])(with_system) is not None
    assert Leaks([("eval", text_of(with_system))])(plain) is not None
    assert not find([RowFacts.of("a", plain), RowFacts.of("b", with_system)]).duplicates
    report = validate(
        {
            "train": write(tmp_path / "a.jsonl", with_system),
            "test": write(tmp_path / "b.jsonl", plain),
        }
    )
    assert report.counts["leakage"] == 1


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "right", "label": True},
        {"question": "q", "response": "right", "correct": False},
    ],
)
def test_what_a_reply_is_worth_is_no_answer(row: dict[str, Any]) -> None:
    assert answer_of(row) == "right"


def test_a_rendered_row_is_not_asked_beside_its_parts() -> None:
    row = {
        "instruction": "Add.",
        "input": "1 and 2",
        "output": "3",
        "text": "### Add.\n1 and 2\n### Response: 3",
    }
    assert question_of(row).plain == "Add.\n\n1 and 2"
