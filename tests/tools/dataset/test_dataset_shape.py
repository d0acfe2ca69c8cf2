"""The shape of seeds, and what does not keep to it."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_sdk.errors import TaskError
from ajet_tools.dataset.curation.schema import Misfit, RowShape
from ajet_tools.dataset.files.blocks import Row


def shape_of(*values: dict[str, Any], **options: Any) -> RowShape:
    return RowShape.infer(
        [Row(f"seeds.jsonl line {i}", one) for i, one in enumerate(values, 1)], **options
    )


def task(query: str, **metadata: Any) -> dict[str, Any]:
    return {"main_query": query, "metadata": metadata}


SUMS = shape_of(
    task("1 + 1?", answer="2", level="easy", topic="sums"),
    task("20 + 22?", answer="42", level="hard", topic="sums", hint="carry"),
    task("2 + 3?", answer="5", level="easy", topic="sums"),
    task("38 + 38?", answer="76", level="hard", topic="sums"),
)


def refused(shape: RowShape, values: Any) -> str:
    with pytest.raises(Misfit) as raised:
        shape.fit(values)
    return str(raised.value)


def test_a_row_of_the_shape_is_taken_with_the_constants_put_in() -> None:
    fitted = SUMS.fit(task("3 + 4?", answer="7", level="easy"))
    assert fitted == task("3 + 4?", answer="7", level="easy", topic="sums")
    assert (
        SUMS.fit(task("3 + 4?", answer="7", level="easy", hint="easy one"))["metadata"]["hint"]
        == "easy one"
    )


def test_constants_and_ids_are_not_shown_to_the_model() -> None:
    seed = {
        **task("1 + 1?", answer="2", level="easy", topic="sums"),
        "task_id": "t",
        "provenance": {"source": "x"},
    }
    assert SUMS.example(seed) == task("1 + 1?", answer="2", level="easy")
    assert SUMS.describe() == [
        "main_query: text",
        "metadata.answer: a number, written as text",
        'metadata.level: one of "easy", "hard"',
        "metadata.hint: text; may be left out",
    ]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("hello", "a row is text, not an object"),
        ({"main_query": "1 + 2?"}, "metadata is missing"),
        (task("1 + 2?", level="easy"), "metadata.answer is missing"),
        (task("1 + 2?", answer="three", level="easy"), "not a number, as in the seeds"),
        (task("1 + 2?", answer=["3"], level="easy"), "metadata.answer is a list, not text"),
        (task("1 + 2?", answer="3", level="medium"), "in the seeds only 'easy', 'hard'"),
        (
            task("1 + 2?", answer="3", level="easy", why="so"),
            "metadata.why is no field of the seeds",
        ),
        (task("  ", answer="3", level="easy"), "main_query is empty"),
        (task(None, answer="3", level="easy"), "main_query is null"),
        (task("x" * 5_000_000, answer="3", level="easy"), "5,000,000 characters long"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_the_reason(row: Any, why: str) -> None:
    assert why in refused(SUMS, row)


def test_a_number_for_text_and_text_for_a_number_are_converted_where_nothing_is_lost() -> None:
    assert SUMS.fit(task("3 + 4?", answer=7, level="easy"))["metadata"]["answer"] == "7"
    whole = shape_of(task("a", answer=1), task("b", answer=2))
    assert whole.fit(task("c", answer="1,234"))["metadata"]["answer"] == 1234
    assert whole.fit(task("c", answer=3.0))["metadata"]["answer"] == 3
    assert "a number, not a whole number" in refused(whole, task("c", answer=3.5))
    mixed = shape_of(task("a", answer=1), task("b", answer=2.5))
    assert mixed.fit(task("c", answer=7))["metadata"]["answer"] == 7
    assert "true or false" in refused(mixed, task("c", answer=True))


def test_lists_and_objects_inside_keep_their_shape_too() -> None:
    shape = shape_of(
        task("a", answer="x", tests=[{"call": "f(1)", "gives": 1}]),
        task("b", answer="y", tests=[{"call": "f(2)", "gives": 4}, {"call": "f(3)", "gives": 9}]),
    )
    row = task("c", answer="z", tests=[{"call": "g()", "gives": 0}])
    assert shape.fit(row) == row
    assert "metadata.tests[].gives is missing" in refused(
        shape, task("c", answer="z", tests=[{"call": "g()"}])
    )


def test_a_language_field_is_asked_for_where_languages_are() -> None:
    rows = (task("a", answer="x", language="en"), task("b", answer="y", language="en"))
    assert shape_of(*rows).fit(task("c", answer="z"))["metadata"]["language"] == "en"
    asked = shape_of(*rows, free_language=True)
    assert asked.fit(task("c", answer="z", language="de"))["metadata"]["language"] == "de"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            task("b", answer=["2"]),
            "metadata.answer is text in seeds.jsonl line 1 and a list in seeds.jsonl line 2",
        ),
        (task("b", answer=2), "metadata.answer is text in seeds.jsonl line 1 and a whole number"),
        (
            {"question": "b", "metadata": {"answer": "2"}},
            "in 'main_query' in seeds.jsonl line 1 and in 'question'",
        ),
        (
            task("b", target="2"),
            "metadata has answer in seeds.jsonl line 1 and target in seeds.jsonl line 2",
        ),
        (
            {"main_query": "b", "metadata": "2"},
            "metadata is an object in seeds.jsonl line 1 and text",
        ),
    ],
)
def test_seeds_of_different_shapes_are_told_with_both_places(
    other: dict[str, Any], message: str
) -> None:
    with pytest.raises(TaskError, match="different shapes") as raised:
        shape_of(task("a", answer="1"), other)
    assert message in str(raised.value)
