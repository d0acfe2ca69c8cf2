"""A row has a longest length: no reader takes more memory for a file than its rows may have."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import ajet_sdk.tasks.json_rows as json_rows
from ajet_sdk.errors import TaskError
from ajet_sdk.tasks import jsonl
from ajet_tools.cli.app import app
from ajet_tools.dataset.files import delimited, rows
from ajet_tools.dataset.files.rows import Rows, read

LONGEST = 1 << 20
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}
SHORT, LONG = b'{"question": "short"}\n', b'{"question": "' + b"x" * (3 * LONGEST) + b'"}\n'


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "LONGEST", LONGEST)
    monkeypatch.setattr(delimited, "LONGEST", LONGEST)
    monkeypatch.setattr(rows, "LONGEST", LONGEST)


@pytest.mark.slow
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", LONG, 1),
        ("a.jsonl", SHORT * 70_000 + LONG + SHORT, 70_001),
        ("a.jsonl", SHORT + LONG.strip(), 2),
        ("a.json", b"[" + LONG.strip() + b"]", 1),
        ("a.csv", b"question\nshort\n" + b"x" * (3 * LONGEST), 3),
        ("a.csv", b"question,answer\n" + b"x," * LONGEST + b"\n", 2),
    ],
)
def test_a_line_that_is_too_long_is_named(
    tmp_path: Path, packed: str, name: str, content: bytes, line: int
) -> None:
    file = tmp_path / f"{name}{packed}"
    file.write_bytes(PACKED[packed](content))
    with pytest.raises(TaskError, match=rf"{name}{packed} line {line} is longer than 1 MiB"):
        list(read(file))


@pytest.mark.parametrize("packed", PACKED)
def test_such_a_line_is_skipped_as_any_bad_row_is(tmp_path: Path, packed: str) -> None:
    file, out = tmp_path / f"a.jsonl{packed}", tmp_path / "kept.jsonl"
    file.write_bytes(
        PACKED[packed](SHORT + LONG + SHORT + b"{nothing\n" + LONG + SHORT + LONG.strip())
    )
    for source in (str(file), "-"):
        options = [
            "dataset",
            "filter",
            source,
            "chars>0",
            "-o",
            str(out),
            "--skip-bad-rows",
            "--json",
        ]
        done = CliRunner().invoke(app, options, input=file.read_bytes())
        assert done.exit_code == 0, done.output
        assert out.read_bytes() == SHORT * 3
        assert json.loads(done.stdout)["bad_rows"] == 4
    bad = json_rows.BadRows(skip=True)
    list(Rows(file, bad=bad))
    assert [one.partition(" line ")[2] for one in bad.first] == [
        "2 is longer than 1 MiB", "4 is not JSON: Expecting property name enclosed in double quotes at column 2",
        "5 is longer than 1 MiB", "7 is longer than 1 MiB",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_cell_of_a_table_has_the_limit(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a{suffix}"
    table = pa.table(
        {
            "question": ["short"] * 5,
            "more": [{"text": "x" * (3 * LONGEST if n == 2 else 1)} for n in range(5)],
        }
    )
    if suffix == ".parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(TaskError, match=rf"a{suffix} row 3 has more than 1 MiB in column more"):
        list(read(file))
    bad = json_rows.BadRows(skip=True)
    assert [row.where.partition(" row ")[2] for row in Rows(file, bad=bad)] == ["1", "2", "4", "5"]
    assert bad.count == 1


def test_lines_that_are_long_and_not_too_long_are_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    row = b'{"question": "' + b"x" * (LONGEST - 50) + b'"}\n'
    file.write_bytes(gzip.compress(row * 5 + SHORT))
    assert [len(found.values["question"]) for found in read(file)] == [LONGEST - 50] * 5 + [5]


def test_a_cell_over_many_lines_has_the_limit_too(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b'question,answer\na,b\n"' + b"x\n" * LONGEST + b'",b\n')
    with pytest.raises(TaskError, match="line 3 is not CSV: field larger than field limit"):
        list(read(file))


def test_tasks_of_a_job_and_imported_traces_have_it(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"messages": [{"role": "user", "content": "hi"}]}\n' + LONG)
    with pytest.raises(TaskError, match="line 2 is longer than 1 MiB"):
        list(jsonl.json_rows(file))
    for source in (str(file), "-"):
        out = str(tmp_path / "t.duckdb")
        done = CliRunner().invoke(
            app,
            ["trace", "import", source, "--from", "openai", "--out", out],
            input=file.read_bytes(),
        )
        assert done.exit_code == 2 and "line 2 is longer than 1 MiB" in done.stderr, done.output


def test_a_stream_on_stdin_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BufferedReader(io.BytesIO(gzip.compress(SHORT + LONG)))  # type: ignore[arg-type]

    monkeypatch.setattr("sys.stdin", Stdin())
    with pytest.raises(TaskError, match="stdin line 2 is longer than 1 MiB"):
        list(read("-"))
