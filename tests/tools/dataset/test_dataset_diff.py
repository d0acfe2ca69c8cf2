"""What changed between two datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.curation.diff import diff
from ajet_tools.dataset.files.writer import Writer


def written(path: Path, *rows: dict[str, Any]) -> str:
    with Writer(path) as writer:
        for row in rows:
            writer.write(row)
    return str(path)


def task(query: str, answer: Any = "1", **more: Any) -> dict[str, Any]:
    return {"main_query": query, "metadata": {"answer": answer}, **more}


def test_order_and_format_are_no_difference(tmp_path: Path) -> None:
    rows = [task("a"), task("b"), task("b", 2), task("c", x=1)]
    before = written(tmp_path / "a.jsonl", *rows)
    found = diff(before, written(tmp_path / "b.parquet", *reversed(rows)))
    assert not found.any
    assert found.same == 4


def test_rows_are_matched_by_text_where_they_have_no_id(tmp_path: Path) -> None:
    before = written(tmp_path / "a.jsonl", task("a"), task("b", "2"), task("c"))
    found = diff(before, written(tmp_path / "b.jsonl", task("C"), task("b", 3, x=1), task("d")))
    assert [row.values["main_query"] for row in found.added] == ["d"]
    assert [row.values["main_query"] for row in found.removed] == ["a"]
    other, answered = found.changed
    assert (other.by, other.fields) == ("text", {"main_query": ("c", "C")})
    assert (answered.before, answered.after) == ("a.jsonl line 2", "b.jsonl line 2")
    assert answered.fields == {"metadata.answer": ("2", 3), "x": (None, 1)}
    assert (answered.added, answered.removed) == (("x",), ())


def test_rows_are_matched_by_id_before_text(tmp_path: Path) -> None:
    before = written(tmp_path / "a.jsonl", task("a", task_id="1"), task("b", task_id="2"))
    found = diff(before, written(tmp_path / "b.jsonl", task("b", task_id="1"), task("c", task_id="2")))
    assert [(one.by, one.fields) for one in found.changed] == [
        ("id", {"main_query": ("a", "b")}),
        ("id", {"main_query": ("b", "c")}),
    ]
    renamed = diff(before, written(tmp_path / "c.jsonl", task("a", task_id="1"), task("b", task_id="9")))
    assert [(one.by, one.fields) for one in renamed.changed] == [("text", {"task_id": ("2", "9")})]


def test_columns_may_be_left_out_and_rows_come_as_often_as_they_do(tmp_path: Path) -> None:
    before = written(tmp_path / "a.jsonl", task("a", provenance={"model": "x"}), task("b"), task("b"))
    after = written(tmp_path / "b.jsonl", task("a", provenance={"model": "y"}), task("b"))
    found = diff(before, after, ignore=("provenance",))
    assert (found.same, found.changed_count, found.removed_count) == (2, 0, 1)
    assert diff(before, after).changed_count == 1


def test_all_are_counted_and_some_are_kept(tmp_path: Path) -> None:
    before = written(tmp_path / "a.jsonl", *(task(f"a{i}") for i in range(50)), *(task(f"c{i}") for i in range(50)))
    after = written(tmp_path / "b.jsonl", *(task(f"b{i}") for i in range(50)), *(task(f"c{i}", 2) for i in range(50)))
    found = diff(before, after, limit=5)
    assert (found.added_count, found.removed_count, found.changed_count) == (50, 50, 50)
    assert len(found.added) == len(found.removed) == len(found.changed) == 5


def test_many_rows_of_one_text_are_compared_in_a_moment(tmp_path: Path) -> None:
    before = tmp_path / "a.jsonl"
    before.write_text((json.dumps(task("same")) + "\n") * 20_000)
    assert diff(str(before), str(before)).same == 20_000


def test_the_first_cannot_be_stdin() -> None:
    with pytest.raises(ConfigError, match="read twice"):
        diff("-", "b.jsonl")
