"""Pictures in datasets: counted, checked, and told apart by their pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from ajet_tools.cli.app import app
from ajet_tools.dataset.curation.validate import validate
from tests.drawings import drawn, file_of, part, png, text, url_of

LEFT = {"role": "assistant", "content": "left"}


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def asked(data: bytes, answer: str) -> dict[str, Any]:
    message = {"role": "user", "content": [text("Which way?"), part(data)]}
    return {"init_messages": [message], "answer": answer}


def test_pictures_are_counted_and_broken_ones_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    path = written(
        tmp_path / "tasks.jsonl",
        {"question": "one?", "answer": "1", "image": "a.png"},
        {"question": "two?", "answer": "2", "image": url_of(png(1))},
        {"question": "three?", "answer": "3", "images": [url_of(png(2)), url_of(png(3))]},
        {"question": "four?", "answer": "4", "image": "missing.png"},
        {"question": "five?", "answer": "5", "image": url_of(b"no picture")},
        {"question": "six?", "answer": "6", "image": "python:3.11"},
    )
    report = validate({"tasks": path})
    assert report.pictures == {"tasks": 4} and report.different_pictures == 3
    broken = [problem.where for problem in report.problems if problem.kind == "picture"]
    assert broken == ["tasks.jsonl line 4", "tasks.jsonl line 5"]


def test_the_same_question_about_another_picture_is_another(tmp_path: Path) -> None:
    image = drawn(1, 32, 32)
    same = [file_of(image), file_of(image, compress_level=0)]
    path = written(
        tmp_path / "tasks.jsonl",
        asked(same[0], "left"),
        asked(png(2), "right"),
        asked(same[1], "left"),
    )
    kinds = [(each.kind, each.where) for each in validate({"tasks": path}).problems]
    assert kinds == [("duplicate", "tasks.jsonl line 3")]


def test_copies_are_told_by_pixels(tmp_path: Path) -> None:
    image = drawn(1, 32, 32)
    files = [file_of(image), file_of(image, compress_level=0), png(2)]
    rows = [{"question": "Which way?", "answer": "left", "image": url_of(data)} for data in files]
    path = written(tmp_path / "tasks.jsonl", *rows)
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["dataset", "dedup", path, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert [json.loads(line)["image"] for line in out.read_text().splitlines()] == [
        url_of(files[0]),
        url_of(files[2]),
    ]


def test_columns_of_hugging_face_are_exported_as_data(tmp_path: Path) -> None:
    rows = [{"question": "Where?", "answer": "1", "image": {"bytes": png(1), "path": "a.png"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    report = validate({"tasks": str(tmp_path / "tasks.parquet")})
    assert report.pictures == {"tasks": 1}
    out = tmp_path / "out.jsonl"
    arguments = [
        "dataset",
        "filter",
        str(tmp_path / "tasks.parquet"),
        "chars > 0",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    [row] = map(json.loads, out.read_text().splitlines())
    assert row["image"] == url_of(png(1))


LONG = "Look at the floor plan and tell which door leads out of the building from the blue room."


def test_the_same_words_about_another_picture_are_no_near_copy(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": [text(LONG), part(png(seed))]}, LEFT]}
        for seed in range(3)
    ]
    path = written(tmp_path / "rows.jsonl", *rows)
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["dataset", "dedup", path, "--near", "0.8", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert len(out.read_text().splitlines()) == 3


def test_a_picture_in_a_column_of_any_name_makes_another_question(tmp_path: Path) -> None:
    rows = [{"question": LONG, "answer": str(n), "map": url_of(png(n))} for n in range(3)]
    path = written(tmp_path / "rows.jsonl", *rows)
    assert [each.kind for each in validate({"rows": path}).problems] == []
    out = tmp_path / "out.jsonl"
    result = CliRunner().invoke(app, ["dataset", "dedup", path, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert len(out.read_text().splitlines()) == 3


def test_only_rows_about_a_picture_of_the_evaluation_leak_its_question(tmp_path: Path) -> None:
    """Many rows ask the same about their pictures."""
    same = file_of(drawn(1), compress_level=0)
    quoting = {"role": "user", "content": [text(f"{LONG} Think first."), part(same)]}
    rows = [
        *({"question": LONG, "answer": "1", "image": url_of(png(n))} for n in range(2, 5)),
        {"question": LONG, "answer": "1"},
        {"messages": [{"role": "user", "content": [text(LONG), part(same)]}, LEFT]},
        {"messages": [quoting, LEFT]},
    ]
    train = written(tmp_path / "train.jsonl", *rows)
    val = written(
        tmp_path / "val.jsonl", {"question": LONG, "answer": "1", "image": url_of(png(1))}
    )
    out = tmp_path / "out.jsonl"
    arguments = ["dataset", "dedup", train, "--against", val, "--out", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows[:3]


def test_a_picture_in_two_files_is_named(tmp_path: Path) -> None:
    """By its pixels, whatever the files are called and whatever they ask."""
    (tmp_path / "a.png").write_bytes(png(1))
    train = written(
        tmp_path / "train.jsonl",
        {"question": "What is on the left?", "answer": "a", "image": "a.png"},
        {"question": "What is on top?", "answer": "c", "image": url_of(png(2))},
    )
    val = written(
        tmp_path / "val.jsonl",
        {"question": "What is on the right?", "answer": "b", "image": url_of(png(1))},
    )
    problems = validate({"train": train, "val": val}).problems
    assert [(each.kind, each.where) for each in problems] == [
        ("shared picture", "val.jsonl line 1")
    ]
    assert "train.jsonl line 1" in problems[0].message
