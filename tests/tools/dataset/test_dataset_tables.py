"""Reading and writing datasets: what is written comes back, and what is wrong is told with its
place."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.tasks.json_rows import BadRows
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.task_rows import decoder
from ajet_tools.dataset.files.frames import read as frame
from ajet_tools.dataset.files.rows import Rows, read
from ajet_tools.dataset.files.sources import splits_of
from ajet_tools.dataset.files.writer import Writer

MIXED: list[dict[str, Any]] = [
    {"main_query": "a", "metadata": {"answer": "3", "unit": None}},
    {"main_query": "b", "metadata": {"answer": 3}},
    {"main_query": "c", "metadata": {"tags": [1, "x", None, {"a": []}], "empty": {}}},
    {"main_query": "d", "metadata": {"big": 2**70, "n": 1}, "extra": None},
    {"main_query": "e", "metadata": {"big": 2, "n": 1.5}, "list": []},
    {
        "main_query": "f",
        "init_messages": [
            {"role": "user", "content": "x"},
            {"role": "tool", "content": [{"t": 1}]},
        ],
    },
    {"main_query": "g", "list": [{}, None], "nested": {"a": {"b": None}}},
    {"main_query": "h", "extra": 5, "nested": {"a": {}, "c": [[1], [2, 3]]}},
    {"main_query": "wide", "nested": {f"key {i}": i for i in range(300)}},
]


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    with Writer(path, **options) as writer:
        for row in rows:
            writer.write(row)
    return path


def values(path: str | Path, **options: Any) -> list[dict[str, Any]]:
    return [row.values for row in Rows(path, **options)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows"])
def test_rows_of_mixed_shapes_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, MIXED)
    assert values(path) == MIXED
    assert [p.name for p in tmp_path.iterdir()] == [name]


_text = st.text(st.characters())  # half surrogate pairs among them
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_infinity=False, allow_nan=False)
    | _text,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(st.dictionaries(st.sampled_from("abcd"), _json, min_size=1), max_size=5))
def test_parquet_loses_nothing_of_any_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert values(write(tmp_path / "rows.parquet", rows)) == rows


def test_columns_of_parquet_are_typed_nested_for_trainers_or_json(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "main_query": "q",
            "level": number,
            "score": 0.5,
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": [{"b": 1, "a": 1.0}, {"a": 72, "b": 72.0}],
            "metadata": {"n": 2**53 + 1, "x": score},
        }
        for number, score, call in (
            (1, 72, {"function": {"name": "f", "arguments": {"z": 1, "a": 1.0}}}),
            (2, 72.0, {"function": {"name": "g", "arguments": {"a": [1]}}}),
        )
    ]
    path = write(tmp_path / "rows.parquet", rows)
    schema = pq.read_schema(path)
    json_type = pa.json_(pa.string())
    function = pa.struct([("name", pa.string()), ("arguments", json_type)])
    message = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("tool_calls", pa.list_(pa.struct([("function", function)]))),
        ]
    )
    assert schema.field("main_query").type == pa.string()
    assert schema.field("level").type == pa.int64()
    assert schema.field("score").type == pa.float64()
    assert schema.field("messages").type.value_type == message
    assert schema.field("tools").type == schema.field("metadata").type == json_type
    assert repr(values(path)) == repr(rows)  # the order of keys, and integers beside floats


def test_a_run_reads_the_answers_of_mixed_parquet_as_they_were(tmp_path: Path) -> None:
    rows = [
        {"main_query": "a", "metadata": {"answer": "3"}},
        {"main_query": "b", "metadata": {"answer": 3, "x": 1}},
    ]
    write(tmp_path / "set", rows)
    overrides = [
        "ajet.task_reader.type=huggingface_dat_repo",
        f"ajet.task_reader.huggingface_dat_repo.dataset_path={tmp_path / 'set'}",
        "ajet.task_reader.huggingface_dat_repo.validation_split=null",
    ]
    tasks = load_tasks(load_config(None, overrides)).train
    assert [task.metadata for task in tasks] == [{"answer": "3"}, {"answer": 3, "x": 1}]


@pytest.mark.parametrize("name", ["out.parquet", "out.csv", "out"])
@pytest.mark.parametrize("other", ["0.5", "1", '"text"', "null", "[2]", "1e400"])
def test_a_number_that_no_float_holds_is_refused_where_it_would_change(
    tmp_path: Path, name: str, other: str
) -> None:
    path, out = tmp_path / "rows.jsonl", tmp_path / name
    path.write_text(
        '{"main_query": "a", "m": {"n": 1e400}}\n{"main_query": "b", "m": {"n":'
        f" {other}}}}}\n"
    )
    with Writer(lines := tmp_path / "out.jsonl") as writer:
        for block in Rows(path).blocks():
            writer.write_block(block)
    assert lines.read_bytes() == path.read_bytes()
    with (
        pytest.raises(TaskError, match=r"a number.* is larger than any float"),
        Writer(out) as writer,
    ):
        for block in Rows(path).blocks():
            writer.write_block(block)
    assert not out.exists()


def test_half_a_surrogate_pair_and_five_megabytes_come_back(tmp_path: Path) -> None:
    rows = [{"main_query": "x" * 5_000_000}, {"main_query": "half \ud83d"}]
    for name in ("rows.jsonl", "rows.parquet"):
        assert values(write(tmp_path / name, rows)) == rows
    assert values(write(tmp_path / "rows.csv", rows[:1])) == rows[:1]


def test_csv_holds_text_and_json(tmp_path: Path) -> None:
    rows = [
        {
            "main_query": 'say "a,\nb"',
            "metadata": {"answer": 3},
            "init_messages": [{"role": "user", "content": "ü"}],
        },
        {"main_query": "[1, 2] is a list", "metadata": None},
        {"main_query": '{"is": "text"}'},
    ]
    found = values(write(tmp_path / "rows.csv", rows))
    assert found[0] == rows[0]
    assert [row["main_query"] for row in found[1:]] == ["[1, 2] is a list", '{"is": "text"}']
    assert found[1]["metadata"] == ""


@pytest.mark.slow
def test_a_directory_is_in_the_layout_of_the_hub_and_is_replaced_shard_by_shard(
    tmp_path: Path,
) -> None:
    rows = [{"main_query": f"{i} " + "x" * 1000} for i in range(20_000)]
    folder = write(tmp_path / "set", rows, shard_bytes=8_000_000)
    names = sorted(p.name for p in (folder / "data").iterdir())
    assert names == [f"train-{i:05d}-of-00003.parquet" for i in range(3)]
    assert values(folder) == rows
    write(folder, rows[:10], split="test")
    write(folder, rows[:5])
    assert {name: len(files) for name, files in splits_of(folder).items()} == {
        "test": 1,
        "train": 1,
    }
    assert values(f"{folder}:test") == rows[:10]
    assert values(folder) == rows[:5]


def test_a_directory_without_a_train_split_asks_which(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"main_query": "a"}])
    assert values(tmp_path) == [{"main_query": "a"}]
    write(tmp_path / "b.csv", [{"main_query": "b"}])
    with pytest.raises(ConfigError, match=r"name one of: .*:a, .*:b"):
        list(read(tmp_path))
    assert values(f"{tmp_path}:b") == [{"main_query": "b"}]


@pytest.mark.parametrize("folder", ["main", "default", "data/main"])
def test_the_splits_of_a_configuration_stay_apart(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    for split in ("train", "test"):
        write(tmp_path / folder / f"{split}-00000-of-00001.parquet", [{"main_query": split}])
    assert values(tmp_path) == [{"main_query": "train"}]
    assert values(f"{tmp_path}:test") == [{"main_query": "test"}]
    (tmp_path / "socratic").mkdir()
    write(tmp_path / "socratic" / "train-00000-of-00001.parquet", [{"main_query": "why"}])
    with pytest.raises(
        ConfigError, match=rf":{Path(folder).name}/test, \S+/train, \S+:socratic/train$"
    ):
        list(read(tmp_path))
    assert values(f"{tmp_path}:socratic/train") == [{"main_query": "why"}]


PACKERS: dict[str, Any] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_packed_text_is_unpacked_also_of_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: str, kind: str
) -> None:
    rows: list[dict[str, Any]] = [{"q": "a", "b": "1"}, {"q": "c", "b": "2"}]
    content = PACKERS[packed](write(tmp_path / f"rows.{kind}", rows).read_bytes())
    (path := tmp_path / f"rows.{kind}{packed}").write_bytes(content)
    assert values(path) == rows
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert values("-") == rows
    assert frame(path).collect().to_dicts() == rows
    path.write_bytes(content[:-6])
    with pytest.raises(TaskError, match=f"cannot read .*rows.{kind}{packed}"):
        list(read(path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"a": 1}\n{"a": \n', "rows.jsonl line 2 is not JSON"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "rows.jsonl line 2 is not UTF-8"),
        (b'{"a": 1}\n3\n', "rows.jsonl line 2 must be an object with keys, not a whole number"),
        (b'{"a": 1}\n{"a": NaN}\n', "rows.jsonl line 2 is not JSON: NaN"),
    ],
)
def test_a_bad_row_is_told_by_file_and_line_or_left_out_and_counted(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content + b'{"a": 2}\n')
    with pytest.raises(TaskError, match=problem):
        list(read(path))
    bad = BadRows(skip=True)
    assert values(path, bad=bad) == [{"a": 1}, {"a": 2}]
    assert bad.count == 1
    assert problem in bad.first[0]


def test_bad_rows_of_csv_have_the_line_they_begin_in(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'a,b\n"two\nlines",1\nonly one\n\xff,1\nlast,2\n')
    bad = BadRows(skip=True)
    assert values(path, bad=bad) == [{"a": "two\nlines", "b": "1"}, {"a": "last", "b": "2"}]
    assert bad.first == [
        "rows.csv line 4 has 1 cell, but the header has 2",
        "rows.csv line 5 is not UTF-8",
    ]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl.gz"])
def test_a_file_that_is_not_what_its_name_says_is_one_message(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"neither\n")
    with pytest.raises(TaskError, match="cannot read"):
        list(read(tmp_path / name))


def test_tables_of_other_writers_have_values_as_json_has_them(tmp_path: Path) -> None:
    table = pa.table(
        {
            "q": ["a"],
            "bytes": [b"\x00"],
            "nan": [float("nan")],
            "at": pa.array([0], pa.timestamp("s")),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table)
    expected = {"q": "a", "bytes": "AA==", "nan": None, "at": "1970-01-01 00:00:00"}
    assert values(tmp_path / "rows.parquet") == [expected]
    assert values(tmp_path / "rows.arrow") == [expected]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_stdin_is_told_by_its_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = write(tmp_path / f"rows.{kind}", [{"q": "a", "b": "1"}, {"q": "c", "b": "2"}])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert values("-") == [{"q": "a", "b": "1"}, {"q": "c", "b": "2"}]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_the_delimiter_of_stdin_is_found(monkeypatch: pytest.MonkeyPatch, delimiter: str) -> None:
    content = delimiter.join("qb") + "\n" + delimiter.join("a1") + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert values("-") == [{"q": "a", "b": "1"}]


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_arrow_of_a_file_or_of_stdin_has_views_as_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: Any
) -> None:
    inner = pa.struct([("b", pa.binary_view()), ("t", pa.string_view())])
    rows = [
        {"q": "a", "m": [{"b": b"\x00", "t": "x"}]},
        {"q": None, "m": None},
        {"q": "c", "m": []},
    ]
    table = pa.Table.from_pylist(
        rows, pa.schema([("q", pa.string_view()), ("m", pa.list_(inner))], {"mine": "kept"})
    )
    with new(str(tmp_path / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    expected = [
        {"q": "a", "m": [{"b": "AA==", "t": "x"}]},
        {"q": None, "m": None},
        {"q": "c", "m": []},
    ]
    assert values(tmp_path / "rows.arrow") == expected
    rows = Rows(tmp_path / "rows.arrow")
    with Writer(tmp_path / "some.parquet", schema=rows.schema) as writer:
        for block in rows.blocks():
            writer.write_block(block.take([0, 2]))
    assert values(tmp_path / "some.parquet") == [expected[0], expected[2]]
    assert pq.read_schema(tmp_path / "some.parquet").metadata[b"mine"] == b"kept"
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "rows.arrow").read_bytes()))
    )
    assert values("-") == expected


def test_what_parquet_does_not_hold_is_one_message(tmp_path: Path) -> None:
    table = pa.table({"q": ["a"], "nothing": pa.array([{}], pa.struct([]))})
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    with (
        pytest.raises(TaskError, match="Parquet cannot store"),
        Writer(tmp_path / "rows.parquet", schema=Rows(tmp_path / "rows.arrow").schema) as writer,
    ):
        for block in Rows(tmp_path / "rows.arrow").blocks():
            writer.write_block(block)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.arrow"]


def test_a_broken_table_of_stdin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"PAR1 and no more")))
    with pytest.raises(TaskError, match=r"^cannot read stdin: Parquet"):
        list(read("-"))


def test_columns_are_renamed_and_a_row_without_one_is_bad(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl", [{"q": "a", "label": 1, "metadata": {"x": 2}}, {"q": "b"}]
    )
    mapping = {"q": "main_query", "label": "metadata.answer"}
    bad = BadRows(skip=True)
    assert values(path, mapping=mapping, bad=bad) == [
        {"main_query": "a", "metadata": {"x": 2, "answer": 1}}
    ]
    assert bad.first == ["rows.jsonl line 2 has no column 'label' for metadata.answer; it has q"]
    with pytest.raises(ConfigError, match="'q' is mapped to 'question'"):
        list(read(path, mapping={"q": "question"}))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv", "rows.jsonl.gz"])
def test_an_error_leaves_what_stood_there_and_no_draft(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"main_query": "before"}])
    before = path.read_bytes()
    with pytest.raises(RuntimeError), Writer(path) as writer:
        writer.write({"main_query": "after"})
        raise RuntimeError
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_a_disk_without_room_is_one_message_and_leaves_what_stood_there(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / name, [{"main_query": "before"}])
    before = path.read_bytes()
    program = (
        "import resource, signal, sys; from ajet_tools.dataset.files.writer import"
        " Writer\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        " resource.setrlimit(resource.RLIMIT_FSIZE, (50_000,) * 2)\nwith Writer(sys.argv[1]) as"
        " writer:\n    for i in range(100_000): writer.write({'main_query': f'{i} of many'})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True
    )
    assert f"ConfigError: cannot write {path}: File too large" in done.stderr
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.csv"):
        write(tmp_path / "one" / name, MIXED)
        write(tmp_path / "two" / name, MIXED)
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_what_json_has_not_and_what_has_no_format_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(TaskError, match=r"row 1 for .* cannot be written as JSON"),
        Writer(tmp_path / "a.jsonl") as w,
    ):
        w.write({"a": float("nan")})
    with pytest.raises(ConfigError, match=r"use \.jsonl"):
        Writer(tmp_path / "rows.txt")
    with pytest.raises(ConfigError, match="there is no"):
        list(read(tmp_path / "absent.jsonl"))


def test_no_rows_are_a_file_too(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.parquet", "rows.csv", "rows.jsonl.gz"):
        assert values(write(tmp_path / name, [])) == []


def test_a_gzip_of_json_lines_is_one(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl.gz", [{"a": "ü"}])
    assert json.loads(gzip.decompress(path.read_bytes())) == {"a": "ü"}
    assert list(
        csv.reader(write(tmp_path / "rows.csv", [{"a": "ü"}]).read_text("utf-8").splitlines())
    ) == [
        ["a"],
        ["ü"],
    ]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"main_query": "q", "messages": [{"role": "user", "content": "m"}]}, "q"),
        ({"question": "q"}, "q"),
        (
            {
                "messages": [
                    {"role": "user", "content": "first"},
                    {"role": "assistant", "content": "a"},
                ]
            },
            "first",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]}, "parts"),
        ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}, "h"),
        ({"title": "t", "body": {"x": ["y", 3]}, "task_id": "7"}, "t\ny"),
    ],
)
def test_the_text_of_a_row_is_what_it_asks(row: dict[str, Any], text: str) -> None:
    assert text_of(row) == text


@pytest.mark.slow
def test_lines_are_read_without_a_database_or_an_http_client() -> None:
    """They take longer to load than most datasets to read, and Parquet's reader loads with the
    first such file."""
    code = (
        "import sys, ajet_tools.dataset.files.rows, ajet_tools.dataset.curation.stats;"
        " print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert {"duckdb", "pyarrow.parquet", "httpx", "torch"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize(
    "wait",
    [
        "threading.Event().wait()",
        "sys.stdin.buffer.read()",
        "pair = socket.socketpair(); pair[0].recv(1)",
    ],
)
def test_ctrl_c_ends_a_wait(wait: str) -> None:
    """polars has what waits begin again: reads, locks, joins."""
    code = (
        f"import socket, sys, threading, ajet_tools.dataset.files.rows; print(flush=True); {wait}"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe
    ) as running:
        try:
            assert running.stdout and running.stdout.readline()
            running.send_signal(signal.SIGINT)
            assert running.wait(60) == -signal.SIGINT
        finally:
            running.kill()


@pytest.mark.parametrize("error", ["KeyboardInterrupt()", "OSError(28, 'No space left on device')"])
@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_a_file_that_cannot_be_begun_leaves_nothing_behind(
    tmp_path: Path, name: str, error: str
) -> None:
    code = f"""
import sys
from pathlib import Path
from ajet_tools.dataset.files.writer import Writer

def fail(event, arguments):
    if event == "open" and {str(tmp_path)!r} in str(arguments[0]) and "w" in str(arguments[1]):
        raise {error}

writer = Writer(Path({str(tmp_path)!r}) / {name!r})
sys.addaudithook(fail)
try:
    writer.__enter__()
except BaseException as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.startswith(("KeyboardInterrupt", "ConfigError cannot write")), done.stdout
    assert list(tmp_path.iterdir()) == []


def test_text_that_looks_like_json_is_text_after_csv(tmp_path: Path) -> None:
    texts = ["[1, 2]", '{"a": 1}', '"\\u005bx', '"quoted"', "[not json", "007", "half \ud83d", ""]
    rows = [{"main_query": "q", "answer": text} for text in texts]
    assert values(write(tmp_path / "rows.csv", rows)) == rows


def test_a_number_too_large_is_refused_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": {"n": 1}}\n\n{"a": {"n": 1e400}}\n')
    with (
        pytest.raises(TaskError, match=r"^rows.jsonl line 3: a "),
        Writer(tmp_path / "o.parquet") as w,
    ):
        for block in Rows(path).blocks():
            w.write_block(block)


def test_json_columns_of_other_writers_are_values(tmp_path: Path) -> None:
    texts = pa.array(['{"b": 1, "a": 1.0}', None])
    column = pa.ExtensionArray.from_storage(pa.json_(pa.string()), texts)
    pq.write_table(pa.table({"q": ["a", '"b"'], "x": column}), tmp_path / "rows.parquet")
    expected = [{"q": "a", "x": {"b": 1, "a": 1.0}}, {"q": '"b"', "x": None}]
    assert values(tmp_path / "rows.parquet") == expected
    decode = decoder(pq.read_schema(tmp_path / "rows.parquet"))
    assert [decode(row) for row in pq.read_table(tmp_path / "rows.parquet").to_pylist()] == expected
