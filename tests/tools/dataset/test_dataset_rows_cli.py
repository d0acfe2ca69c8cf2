"""`ajet dataset filter export check` as a user calls them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ajet_tools.cli.app import app
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.files.writer import Writer
from tests.waiting import until


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    with Writer(path) as writer:
        for i in range(30):
            metadata = {"answer": str(i + 2), "level": i % 3}
            writer.write(
                {"main_query": f"What is {i} + 2?" + " Please?" * (i % 4), "metadata": metadata}
            )
    return path


def ajet(*arguments: object, code: int = 0, input: bytes | None = None) -> Result:
    result = CliRunner().invoke(
        app, ["dataset", *map(str, arguments)], input=input, env={"COLUMNS": "120"}
    )
    assert result.exit_code == code, result.output
    return result


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_filter_writes_what_fits_and_says_why_the_rest_does_not(
    tasks: Path, tmp_path: Path
) -> None:
    out, rejected = tmp_path / "kept.jsonl", tmp_path / "rejected.jsonl"
    said = ajet(
        "filter",
        tasks,
        "metadata.level>=1 and not has('29') and chars<=25",
        "--rejected",
        rejected,
        "-o",
        out,
    ).stderr
    kept = lines(out)
    assert kept == [
        row
        for row in lines(tasks)
        if row["metadata"]["level"] >= 1
        and "29" not in row["main_query"]
        and len(row["main_query"]) <= 25
    ]
    assert f"{len(kept)} rows of 30 kept, to {out}" in said
    others = lines(rejected)
    assert len(others) == 30 - len(kept)
    assert {row["left_out"] for row in others} == {"not matching the expression"}


def test_filter_pipes_and_its_summary_goes_to_stderr(tasks: Path) -> None:
    result = ajet("filter", "-", "metadata.level=0", "--json", input=tasks.read_bytes())
    assert len(result.stdout.splitlines()) == 10
    assert json.loads(result.stderr)["kept"] == 10


def test_filter_stops_at_a_bad_row_and_leaves_what_stood_there(tasks: Path, tmp_path: Path) -> None:
    bad, out = tmp_path / "bad.jsonl", tmp_path / "out.jsonl"
    bad.write_bytes(tasks.read_bytes() + b'{"main_query": "\xff"}\n')
    out.write_text("before")
    assert "bad.jsonl line 31 is not UTF-8" in ajet("filter", bad, "is", "-o", out, code=2).stderr
    assert out.read_text() == "before"
    said = ajet("filter", bad, "is", "--skip-bad-rows", "-o", out, "--json").stdout
    assert json.loads(said)["bad_rows"] == 1
    assert len(lines(out)) == 30


def test_filter_says_where_an_expression_is_wrong(tasks: Path) -> None:
    assert "cannot evaluate 'chars >'" in ajet("filter", tasks, "chars >", code=2).stderr
    assert "did you mean metadata.level?" in ajet("filter", tasks, "metadata.levl=1", code=2).stderr


def test_a_judge_that_raises_keeps_what_passed_and_the_exit_code_is_not_0(
    tasks: Path, tmp_path: Path
) -> None:
    judge = tmp_path / "judges.py"
    judge.write_text(
        "import ajet\n\n@ajet.judge\ndef small(output: str) -> float:\n    if output == '7':\n     "
        "   raise ValueError('seven')\n    return float(int(output) < 10)\n"
    )
    out = tmp_path / "out.jsonl"
    said = ajet("filter", tasks, "--judge", f"{judge}:small", "-o", out, code=1).stderr
    assert (
        "the judge failed on some rows, which were left out; the first failure: tasks.jsonl line 6:"
        " ValueError: seven" in said
    )
    assert [row["metadata"]["answer"] for row in lines(out)] == ["2", "3", "4", "5", "6", "8", "9"]


@pytest.mark.slow
def test_a_reader_of_stdout_may_leave(tasks: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.jsonl"
    big.write_text(tasks.read_text() * 2000)
    command = f"{sys.executable} -m ajet dataset filter {big} is | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert "Error" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("filter", "chars>60", "--rejected"),
        ("dedup", "--report"),
        ("dedup", "--against", "tests.jsonl", "--report"),
        ("dedup", "--against"),
    ],
)
def test_two_files_of_a_command_are_not_one(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tests.jsonl").write_bytes(tasks.read_bytes())
    (out := tmp_path / "out.jsonl").write_bytes(tasks.read_bytes())
    name, *more = arguments
    said = ajet(name, tasks, *more, "./out.jsonl", "-o", out, code=2).stderr
    assert "are the same file" in said and arguments[-1] in said and "--out" in said
    assert out.read_bytes() == tasks.read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ("dedup", "--keep", "max:metadata.levle", "-o"),
        ("split", "--stratify", "metadata.levle", "-o"),
    ],
)
def test_a_field_that_no_row_has_is_named_with_the_nearest(
    tasks: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    name, *more = arguments
    said = ajet(
        name, tasks, *more, *([tmp_path / "out"] if more[-1] == "-o" else []), code=2
    ).stderr
    assert "no row has a field 'metadata.levle'; did you mean metadata.level?" in said
    assert not list((tmp_path / "out").rglob("*.*"))


def test_the_current_directory_is_a_place_and_no_name_is_none(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    monkeypatch.chdir(tmp_path / "set")
    ajet("filter", tasks, "chars>0", "-o", ".")
    assert [
        str(path.relative_to(tmp_path / "set")) for path in (tmp_path / "set").rglob("*.*")
    ] == ["data/train-00000-of-00001.parquet"]
    assert "is empty" in ajet("filter", tasks, "chars>0", "-o", "", code=2).stderr


def test_export_of_a_directory_is_a_dataset_of_the_hub(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    source, out = tmp_path / "data", tmp_path / "hub"
    for name, rows in {
        "train": [{"main_query": f"q{i}", "metadata": {"answer": i}} for i in range(20)],
        "validation": [{"main_query": "v", "metadata": {"answer": "x", "unit": "kg"}}],
        "rejected": [{"reason": "wrong"}],
    }.items():
        with Writer(source / f"{name}.jsonl") as writer:
            for row in rows:
                writer.write(row)
    said = ajet("export", source, "-o", out).stderr
    assert "21 rows of tasks" in said and "validation: 1 row" in said
    assert sorted(p.name for p in (out / "data").iterdir()) == [
        "train-00000-of-00001.parquet",
        "validation-00000-of-00001.parquet",
    ]
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert {name: len(part) for name, part in loaded.items()} == {"train": 20, "validation": 1}
    assert loaded["train"].features == loaded["validation"].features, (
        "the splits have the same columns"
    )
    assert [row.values["metadata"] for row in read(f"{out}:validation")] == [
        {"answer": "x", "unit": "kg"}
    ]
    assert "# hub" in (out / "README.md").read_text()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_the_splits_of_configurations_are_exported_apart(tasks: Path, tmp_path: Path) -> None:
    for folder in ("main", "other"):
        for split in ("train", "test"):
            (tmp_path / "set" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "set" / folder / f"{split}.jsonl").write_bytes(tasks.read_bytes())
    ajet("export", tmp_path / "set", "-o", tmp_path / "hub")
    assert sorted(
        path.name.partition("-0")[0] for path in (tmp_path / "hub" / "data").iterdir()
    ) == [f"{folder}-{split}" for folder in ("main", "other") for split in ("test", "train")]


def test_export_counts_what_has_not_what_a_form_needs(tasks: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "more.jsonl", tmp_path / "sft.jsonl"
    path.write_text(tasks.read_text() + '{"main_query": "no answer"}\n')
    said = ajet("export", path, "--format", "messages", "-o", out).stderr
    assert "30 rows of messages" in said and "left out: 1 row without a reply or an answer" in said
    assert lines(out)[0]["messages"][1] == {"role": "assistant", "content": "2"}
    out.write_text("before")
    said = ajet("export", path, "--format", "trl-preference", "-o", out, code=2).stderr
    assert "no row of" in said and ": 31 rows without a chosen and a rejected reply" in said
    assert out.read_text() == "before"
    assert "'x'" in ajet("export", path, "--format", "x", code=2).stderr


@pytest.mark.slow
def test_stats_are_printed_and_json(tasks: Path) -> None:
    out = ajet("check", tasks).stdout
    assert "30 rows, 30 distinct, 0 duplicates, 4 forms, 30 with an answer" in out
    for title in ("lengths", "languages", "fields"):
        assert f"\n{title}\n" in out
    figures = json.loads(ajet("check", "-", "--json", input=tasks.read_bytes()).stdout)
    [stats] = figures["stats"].values()
    assert (stats["rows"], stats["languages"]) == (30, {"en": 30})


def test_stats_of_nothing_and_hostile_text(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "0 rows" in ajet("check", empty, code=1).stdout
    hostile = tmp_path / "hostile.jsonl"
    row = json.dumps({"main_query": "[bold]x[/] \x1b[31mred", "k\x1b]0;t\x07": "$\\frac"})
    hostile.write_text(f"{row}\n{row}\n")
    out = ajet("check", hostile).stdout
    assert "\x1b" not in out and "[bold]x[/]" in out


def test_validate_exits_with_1_where_there_is_an_error(tasks: Path, tmp_path: Path) -> None:
    assert "tasks.jsonl: 30 rows; 0 errors, 0 warnings" in ajet("check", tasks).stdout
    val = tmp_path / "val.jsonl"
    val.write_text(tasks.read_text().splitlines()[3] + "\n")
    out = ajet("check", tasks, val, code=1).stdout
    assert "error: a task is in two files (1)" in out
    assert "val.jsonl line 1: asks the same as tasks.jsonl line 4" in out
    told = json.loads(ajet("check", tasks, val, "--json", code=1).stdout)
    assert (told["errors"], told["problems"][0]["kind"]) == (1, "leakage")


def test_validate_takes_the_splits_of_a_directory_apart(tasks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text(tasks.read_text())
    (folder / "validation.jsonl").write_text('{"main_query": "v", "metadata": {"answer": 1}}\n' * 2)
    (folder / "rejected.jsonl").write_text(tasks.read_text())
    out = ajet("check", folder).stdout
    assert f"{folder}:train: 30 rows, {folder}:validation: 2 rows; 0 errors, 1 warning" in out


def test_columns_are_renamed(tmp_path: Path) -> None:
    path = tmp_path / "qa.csv"
    path.write_text("q,label\nWhat is it?,a\n")
    out = ajet("filter", path, "--map", "q=main_query", "--map", "label=metadata.answer").stdout
    assert json.loads(out) == {"main_query": "What is it?", "metadata": {"answer": "a"}}
    assert "write COLUMN=FIELD" in ajet("filter", path, "--map", "q", code=2).stderr


@pytest.mark.parametrize("command", ["filter", "export", "check"])
def test_help_has_examples(command: str) -> None:
    assert f"ajet dataset {command} " in ajet(command, "--help").stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_stood_there_and_no_draft(
    tasks: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "work").mkdir()
    out = tmp_path / "work" / "out.parquet"
    out.write_text("before")
    # without an expression, rows of stdin are written as they come
    command = [sys.executable, "-m", "ajet", "dataset", "filter", "-", "-o", str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdin and running.stderr
        running.stdin.write(tasks.read_bytes())
        running.stdin.flush()
        until(lambda: len(list(out.parent.iterdir())) > 1)
        running.send_signal(number)
        said = running.stderr.read()
    assert running.returncode == 128 + number, said
    assert said == b"Interrupted: files are written whole or not at all\n"
    assert out.read_text() == "before"
    assert list(out.parent.iterdir()) == [out]
