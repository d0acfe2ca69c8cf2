"""Each kind of problem is found, with its place, and sound data has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.questions import Reading
from ajet_sdk.tasks.task_rows import to_task
from ajet_sdk.types import Task
from ajet_tools.dataset.curation.facts import facts_of
from ajet_tools.dataset.curation.validate import Report, validate
from ajet_tools.dataset.files.blocks import Row


def written(path: Path, *rows: Any) -> str:
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return str(path)


def found(report: Report, kind: str) -> list[tuple[str, str]]:
    return [(problem.where, problem.message) for problem in report.problems if problem.kind == kind]


def task(query: str, answer: Any = "1", **more: Any) -> dict[str, Any]:
    return {"main_query": query, "metadata": {"answer": answer}, **more}


def test_sound_files_have_no_problem(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", task("a", "1"), task("b", "2"))
    val = written(tmp_path / "val.jsonl", task("c", "3"))
    report = validate({"train": train, "val": val})
    assert report.rows == {"train": 2, "val": 1}
    assert (report.errors, report.warnings, report.problems) == (0, 0, [])


@pytest.mark.parametrize(
    ("kind", "rows", "where", "message"),
    [
        ("unreadable", [task("a"), '{"main_query": \n'], "line 2", "is not JSON"),
        ("unreadable", [task("a"), "[1]\n"], "line 2", "must be an object with keys, not a list"),
        (
            "no task",
            [task("a"), {"main_query": "b", "metadata": 3}],
            "line 2",
            "metadata must be an object",
        ),
        ("asks nothing", [task("a"), {"text": "b"}], "line 2", "it has text"),
        (
            "id",
            [task("a", task_id="7"), task("b", task_id="7")],
            "line 2",
            "another task, f.jsonl line 1",
        ),
        (
            "contradiction",
            [task("Is it?", "1"), task("is  IT?", "2")],
            "line 2",
            "line 1, but has a different answer",
        ),
        (
            "duplicate",
            [task("Is it?"), task("is it?")],
            "line 2",
            "asks the same as f.jsonl line 1",
        ),
        (
            "prompt",
            [task("a"), task("Keep to  this:\n- What is it?")],
            "line 2",
            "prompt: keep to this:",
        ),
        (
            "prompt",
            [task("a"), task("Work each answer out before you write it. What?")],
            "line 2",
            "prompt: ",
        ),
        (
            "answer",
            [task("a"), {"main_query": "b", "metadata": {}}],
            "f",
            "missing in 1 of 2 rows, the first",
        ),
        ("shape", [task("a", "1"), task("b", 2)], "f", "metadata.answer is of several kinds: "),
        (
            "shape",
            [task("a", x=1), task("b", x=1), task("c")],
            "f",
            "x is missing in 1 of 3 rows, the first",
        ),
        ("empty", [], "f", "has no rows"),
    ],
)
def test_a_problem_is_found_with_its_place(
    tmp_path: Path, kind: str, rows: list[Any], where: str, message: str
) -> None:
    report = validate({"f": written(tmp_path / "f.jsonl", *rows)})
    problems = found(report, kind)
    assert len(problems) == report.counts[kind] == 1, report.problems
    assert problems[0][0].endswith(where)
    assert message in problems[0][1]
    assert bool(report.errors) == (kind not in ("duplicate", "prompt", "answer", "shape"))


def test_a_task_in_two_files_leaks_whatever_its_answer_and_spelling(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", task("Is it?"), task("b"))
    val = written(tmp_path / "val.jsonl", task("c"), task("IS  it?", "9"))
    report = validate({"train": train, "val": val})
    assert found(report, "leakage") == [("val.jsonl line 2", "asks the same as train.jsonl line 1")]
    assert report.counts.keys() == {"leakage"}


def test_messages_before_a_question_make_it_another(tmp_path: Path) -> None:
    def chat(first: str) -> dict[str, Any]:
        said = [{"role": "user", "content": first}, {"role": "assistant", "content": "ok"}]
        return {
            "init_messages": [*said, {"role": "user", "content": "Go on"}],
            "metadata": {"answer": first},
        }

    assert validate({"f": written(tmp_path / "f.jsonl", chat("one"), chat("two"))}).problems == []


def test_many_problems_are_counted_and_the_first_kept(tmp_path: Path) -> None:
    report = validate({"f": written(tmp_path / "f.jsonl", *[task("same")] * 100)})
    assert report.counts["duplicate"] == 99
    assert len(found(report, "duplicate")) == 20


QUESTIONS = st.just("Keep to this: what is 3+4?") | st.sampled_from(
    [
        "Is it?",
        "is  IT?",
        "12 + 5 = 17",
        "The answer is 5. What?",
        "答案是 七",
        "Café?",
        " ",
        "",
        "Paris? paris",
        3,
        None,
        ["x"],
    ]
)
ANSWERS = st.sampled_from(
    [
        "5",
        "05",
        5,
        5.0,
        17,
        "17",
        "七",
        "paris",
        10**30,
        -0.0,
        1e22,
        True,
        False,
        None,
        "",
        [],
        [1],
        {},
        {"a": 1},
        "true",
    ]
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "main_query": QUESTIONS,
        "question": QUESTIONS,
        "metadata": (
            st.fixed_dictionaries(
                {}, optional={"answer": ANSWERS, "label": ANSWERS, "level": ANSWERS}
            )
            | ANSWERS
        ),
        "answer": ANSWERS,
        "task_id": st.sampled_from(["7", 7, "", None, True, 7.5, ["x"], 2**70]),
        "init_messages": st.sampled_from(
            [[], None, [{"role": "user", "content": "Hi"}], [{}], ["x"]]
        ),
        "env_type": st.sampled_from(["web", "", None, 3]),
        "JSON": st.sampled_from(["\ud800", "x"]),
    },
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(ROWS)
def test_a_row_is_a_task_where_a_run_would_take_it(values: dict[str, Any]) -> None:
    row = Row("f line 1", values)
    facts = facts_of(row, Reading(values))
    try:
        task = to_task(row, {})
        asks = bool(task.main_query.strip() or task.init_messages or task.env_type)
    except TaskError:
        asks = False
    assert facts.is_task is asks
    if facts.task_id is not None:
        assert facts.task_id == task.task_id


def test_an_id_that_the_content_gives_is_the_id_of_another_task(tmp_path: Path) -> None:
    made = Task(main_query="a", metadata={"answer": "1"}).task_id
    train = written(tmp_path / "train.jsonl", task("b"), task("a"), task("c", task_id="x"))
    val = written(tmp_path / "val.jsonl", task("d", task_id=made), {"task_id": "x", **task("c")})
    report = validate({"train": train, "val": val})
    assert found(report, "id") == [
        ("val.jsonl line 1", f"has the task_id '{made}' of another task, train.jsonl line 2")
    ]


def test_every_row_of_a_large_table_is_looked_at(tmp_path: Path) -> None:
    rows = 10_000
    path = tmp_path / "f.parquet"
    pl.DataFrame(
        {"main_query": [f"q {i}" for i in range(rows - 1)] + ["q 0"], "answer": ["x"] * rows}
    ).write_parquet(path)
    report = validate({"f": str(path)})
    assert report.rows == {"f": rows}
    assert found(report, "duplicate") == [
        ("f.parquet row 10000", "asks the same as f.parquet row 1")
    ]


@pytest.mark.parametrize("name", ["answer", "solution", "expected_output", "gold"])
def test_a_missing_answer_is_found_under_every_name(tmp_path: Path, name: str) -> None:
    rows = [{"main_query": f"q {i}", "metadata": {name: "1"}} for i in range(3)]
    path = written(tmp_path / "f.jsonl", *rows, {"main_query": "q 3", "metadata": {"level": 1}})
    [(where, message)] = found(validate({"f": path}), "answer")
    assert where == "f" and f"metadata.{name}" in message and "f.jsonl line 4" in message


def test_what_a_row_asks_and_answers_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Reading] = []
    begin = Reading.__init__

    def counted(self: Reading, values: dict[str, Any]) -> None:
        read.append(self)
        begin(self, values)

    monkeypatch.setattr(Reading, "__init__", counted)
    path = written(tmp_path / "f.jsonl", *(task(f"q {n}", str(n)) for n in range(50)))
    assert validate({"f": path}).rows == {"f": 50}
    assert len(read) == 50
