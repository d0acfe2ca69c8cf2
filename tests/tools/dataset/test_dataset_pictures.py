"""Pictures in datasets: counted, checked, and told apart by their pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ajet_sdk import pictures
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


def with_file(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["dataset", *arguments])


FILE_FORMS: dict[str, Any] = {
    "column": lambda name: {"question": LONG, "answer": "1", "image": name},
    "list": lambda name: {"question": LONG, "answer": "1", "images": [name]},
    "list as text": lambda name: {"question": LONG, "answer": "1", "images": json.dumps([name])},
    "path": lambda name: {"question": LONG, "answer": "1", "image_path": name},
    "struct": lambda name: {"question": LONG, "answer": "1", "image": {"bytes": None, "path": name}},
    "metadata": lambda name: {"main_query": LONG, "metadata": {"image": name, "answer": "1"}},
    "part": lambda name: {"init_messages": [{"role": "user", "content": [text(LONG), part(name)]}], "answer": "1"},
    "part of type image": lambda name: {
        "init_messages": [
            {"role": "user", "content": [text(LONG), {"type": "image", "path": name}]}
        ],
        "answer": "1",
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FILE_FORMS)
def test_files_with_the_same_pixels_are_one_picture(tmp_path: Path, form: str) -> None:
    image = drawn(1, 32, 32)
    with_file(tmp_path / "a.png", file_of(image))
    with_file(tmp_path / "b.png", file_of(image, compress_level=0))
    with_file(tmp_path / "c.png", png(2))
    rows = [FILE_FORMS[form](name) for name in ("a.png", "b.png", "c.png")]
    path = written(tmp_path / "tasks.jsonl", *rows)
    kinds = [(each.kind, each.where) for each in validate({"tasks": path}).problems]
    assert kinds == [("duplicate", "tasks.jsonl line 2")]
    out = tmp_path / "out.jsonl"
    result = run("dedup", path, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert [json.loads(line) for line in out.read_text().splitlines()] == [rows[0], rows[2]]


def test_files_of_one_name_in_two_directories_are_different(tmp_path: Path) -> None:
    row = {"question": LONG, "answer": "1", "image": "a.png"}
    with_file(tmp_path / "train" / "a.png", png(1))
    train = written(tmp_path / "train" / "rows.jsonl", row)
    paths = []
    for name, seed in (("other", 2), ("same", 1)):
        with_file(tmp_path / name / "a.png", png(seed))
        paths.append(written(tmp_path / name / "rows.jsonl", row))
    for path, rest in zip(paths, ([row], []), strict=True):
        out = tmp_path / "out.jsonl"
        result = run("dedup", train, "--against", path, "--out", str(out))
        assert result.exit_code == 0, result.output
        assert [json.loads(line) for line in out.read_text().splitlines()] == rest
    kinds = {each.kind for each in validate({"train": train, "other": paths[0]}).problems}
    assert kinds == set()
    kinds = {each.kind for each in validate({"train": train, "same": paths[1]}).problems}
    assert kinds == {"leakage", "shared picture"}


def test_rows_about_one_picture_are_on_one_side_of_a_split(tmp_path: Path) -> None:
    names = []
    for seed in range(12):
        for copy, level in (("a", 6), ("b", 0)):
            name = f"figures/{seed}{copy}.png"
            with_file(tmp_path / name, file_of(drawn(seed), compress_level=level))
            names.append(name)
    rows = [{"question": LONG, "answer": "1", "image": name} for name in names]
    path = written(tmp_path / "tasks.jsonl", *rows)
    result = run("split", path, "--out", str(tmp_path / "out"), "--fractions", "0.4")
    assert result.exit_code == 0, result.output
    sides = {}
    for file in (tmp_path / "out").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            sides[json.loads(line)["image"]] = file.stem
    assert len(sides) == 24 and len(set(sides.values())) == 2
    for seed in range(12):
        assert sides[f"figures/{seed}a.png"] == sides[f"figures/{seed}b.png"]


@pytest.mark.parametrize("command", ["dedup", "split", "against"])
def test_a_row_whose_file_cannot_be_read_is_a_bad_one(tmp_path: Path, command: str) -> None:
    with_file(tmp_path / "a.png", png(1))
    with_file(tmp_path / "broken.png", b"no picture")
    names = ["a.png", "broken.png", "missing.png"]
    rows = [{"question": LONG, "answer": "1", "image": name} for name in names]
    path = written(tmp_path / "tasks.jsonl", *rows)
    other = written(tmp_path / "other.jsonl", {"question": "Another one?", "answer": "2"})
    out = tmp_path / "out.jsonl"
    arguments = {
        "dedup": ["dedup", path, "--out", str(out)],
        "split": ["split", path, "--out", str(tmp_path / "out"), "--fractions", "0.5"],
        "against": ["dedup", other, "--against", path, "--out", str(out)],
    }[command]
    result = run(*arguments)
    assert result.exit_code == 2
    assert "tasks.jsonl line 2" in result.output and "broken.png" in result.output
    kept = str(tmp_path / "kept.jsonl")
    assert run("filter", path, "--skip-bad-rows", "--out", kept).exit_code == 0
    result = run(*(kept if argument == path else argument for argument in arguments))
    assert result.exit_code == 0, result.output


def test_each_file_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_file(tmp_path / "a.png", png(77))
    rows = [{"question": f"{LONG} {n}?", "answer": "1", "image": "a.png"} for n in range(20)]
    path = written(tmp_path / "tasks.jsonl", *rows)
    decoded: list[bytes] = []
    monkeypatch.setattr(pictures, "picture_of", counting(pictures.picture_of, decoded))
    result = run("dedup", path, "--out", str(tmp_path / "out.jsonl"))
    assert result.exit_code == 0, result.output
    assert decoded == [png(77)]
    with_file(tmp_path / "a.png", png(78, 16, 16))
    result = run("dedup", path, "--out", str(tmp_path / "out.jsonl"))
    assert decoded == [png(77), png(78, 16, 16)]


def counting(decode: Any, decoded: list[bytes]) -> Any:
    def counted(data: bytes) -> Any:
        decoded.append(data)
        return decode(data)

    return counted


def test_names_of_files_are_written_as_they_were(tmp_path: Path) -> None:
    with_file(tmp_path / "a.png", png(1))
    rows = [{"question": LONG, "answer": "1", "images": ["a.png"], "n": 1}]
    path = written(tmp_path / "tasks.jsonl", *rows)
    for out in (tmp_path / "out.jsonl", tmp_path / "out.parquet"):
        result = run("dedup", path, "--out", str(out))
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out.jsonl").read_text()) == rows[0]
    kinds = validate({"tasks": str(tmp_path / "out.parquet")})
    assert kinds.pictures == {"tasks": 1} and kinds.errors == 0


@pytest.mark.parametrize("form", FILE_FORMS)
def test_files_are_counted_and_broken_ones_named(tmp_path: Path, form: str) -> None:
    with_file(tmp_path / "a.png", png(1))
    with_file(tmp_path / "b.png", b"no picture")
    rows = [FILE_FORMS[form](name) for name in ("a.png", "b.png")]
    report = validate({"tasks": written(tmp_path / "tasks.jsonl", *rows)})
    assert report.pictures == {"tasks": 1} and report.different_pictures == 1
    broken = [each.where for each in report.problems if each.kind == "picture"]
    assert broken == ["tasks.jsonl line 2"]
