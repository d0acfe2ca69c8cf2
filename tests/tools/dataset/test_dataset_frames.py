"""Datasets as polars frames, and SQL over them."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

import ajet
from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Run, Task
from ajet_tools.cli.app import app
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.files.writer import Writer
from tests.tools.dataset.typed import check_kept, write_typed

ROWS = [
    {
        "main_query": f"What is {i} + 2?",
        "metadata": {"answer": str(i + 2), "level": i % 3},
        "big": 2**60 + i,
    }
    for i in range(12)
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def command(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["dataset", *map(str, arguments)], env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result


def test_a_frame_has_the_rows_of_each_format(tasks: Path, tmp_path: Path) -> None:
    expected = ajet.dataset.read(tasks).collect()
    assert expected.to_dicts() == ROWS
    packed, document = tmp_path / "packed.jsonl.gz", tmp_path / "document.json"
    packed.write_bytes(gzip.compress(tasks.read_bytes()))
    document.write_text(json.dumps(ROWS, indent=1))
    expected.write_parquet(tmp_path / "t.parquet")
    expected.write_ipc(tmp_path / "t.arrow")
    expected.write_ipc_stream(tmp_path / "s.arrow")
    for name in ("packed.jsonl.gz", "document.json", "t.parquet", "t.arrow", "s.arrow"):
        assert ajet.dataset.read(tmp_path / name).collect().equals(expected), name
    assert ajet.dataset.read(str(tmp_path / "t*.parquet")).collect().equals(expected)
    assert isinstance(ajet.dataset.read(tmp_path / "t.parquet"), pl.LazyFrame)


def test_cells_of_csv_stay_text_and_its_delimiter_and_quotes_are_found(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_text("question;answer\n'a; b';007\nc;0\n")
    assert ajet.dataset.read(path).collect().to_dicts() == [
        {"question": "a; b", "answer": "007"},
        {"question": "c", "answer": "0"},
    ]
    assert [
        json.loads(line) for line in command("filter", path, "answer=0").stdout.splitlines()
    ] == [{"question": "c", "answer": "0"}]


def test_values_of_several_types_are_json_text_and_a_bad_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"a": 1, "b": {"x": 1}}\n{"a": "1", "b": [2]}\n')
    assert ajet.dataset.read(path).collect().to_dict(as_series=False) == {
        "a": ["1", '"1"'],
        "b": ['{"x":1}', "[2]"],
    }
    path.write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(TaskError, match=r"mixed.jsonl line 2 is not JSON"):
        ajet.dataset.read(path)
    with pytest.raises(ConfigError, match="there is no"):
        ajet.dataset.read(tmp_path / "nothing.jsonl")


def test_columns_are_in_the_order_of_the_rows(tmp_path: Path) -> None:
    path, names = tmp_path / "wide.jsonl", [f"c{i * 7 % 60}" for i in range(60)]
    row = {**dict.fromkeys(names, 1), "inner": [dict.fromkeys(names, "x")]}
    path.write_text(json.dumps({"z": 0, "c7": 1}) + "\n" + json.dumps(row) + "\n")
    frame = ajet.dataset.read(path)
    assert frame.collect_schema().names() == [
        "z",
        "c7",
        *(name for name in names if name != "c7"),
        "inner",
    ]
    assert list(frame.collect()["inner"][1][0]) == names
    assert json.loads(
        command("filter", path, "--sql", 'SELECT "inner" FROM rows LIMIT 1 OFFSET 1').stdout
    )
    assert list(
        json.loads(command("filter", path, "--sql", "SELECT * FROM rows").stdout.splitlines()[1])
    ) == list(frame.collect_schema())


def test_half_a_surrogate_pair_is_text_to_columns(tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_bytes(
        b'{"main_query": "half \\ud800 of it", "metadata": {"answer": "1"}}\n'
        b'{"main_query": "half \\ud801 of it", "metadata": {"answer": "1"}}\n'
    )
    assert ajet.dataset.read(path).collect()["main_query"].to_list() == [
        "half \\ud800 of it",
        "half \\ud801 of it",
    ]
    [stats] = json.loads(command("check", path, "--json", code=1).stdout)["stats"].values()
    assert stats["distinct"] == 2
    for arguments in (
        ["dedup", "--near", "1"],
        ["filter", "chars(main_query) > 3"],
        ["filter", "chars>3"],
    ):
        name, *more = arguments
        command(name, path, *more, "-o", tmp_path / "kept.jsonl")
        kept = (tmp_path / "kept.jsonl").read_bytes().splitlines()
        assert sorted(kept) == sorted(path.read_bytes().splitlines()), arguments
    command("split", path, "-o", tmp_path / "split")


@pytest.mark.parametrize(
    "name", ["broken.parquet", "broken.arrow", "twice.parquet", "twice.csv", "empty.csv"]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "twice.parquet":
        pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["q", "q"]), path)
    else:
        path.write_bytes({"twice": b"q,q\na,b\n", "broken": b"PAR1"}.get(path.stem, b""))
    if name == "empty.csv":
        assert ajet.dataset.read(path).collect().height == 0
        return
    with pytest.raises(TaskError, match=name):
        ajet.dataset.read(path)
    assert name in command("filter", path, "--sql", "SELECT * FROM rows", code=2).stderr


def test_a_frame_of_csv_has_the_rows_that_commands_have(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_text("q,a\none,\ntwo,2\n")
    assert ajet.dataset.read(path).collect().to_dicts() == [
        {"q": "one", "a": ""},
        {"q": "two", "a": "2"},
    ]
    path.write_text("q,a\none,\n\ntwo,2\n\n")
    assert ajet.dataset.read(path).collect().to_dicts() == [
        {"q": "one", "a": ""},
        {"q": "two", "a": "2"},
    ]
    path.write_text('q,a\n5" pipe,x\n"a"b,y\n')
    assert ajet.dataset.read(path).collect().to_dicts() == [
        {"q": '5" pipe', "a": "x"},
        {"q": "ab", "a": "y"},
    ]
    for line in ("short", "one,too,many", '"never closed,1'):
        path.write_text(f"q,a\none,\n{line}\ntwo,2\n")
        for query in ("SELECT * FROM rows", "SELECT count(*) AS n FROM rows"):
            assert "cells.csv line 3 has" in command("filter", path, "--sql", query, code=2).stderr
    path.write_bytes(b"q,a\none,\xff\n")
    assert (
        "cells.csv line 2 is not UTF-8"
        in command("filter", path, "--sql", "SELECT q FROM rows", code=2).stderr
    )


@pytest.mark.parametrize(
    ("where", "levels"),
    [
        ("metadata.level IN (1, 2) AND main_query LIKE '%1%'", [1, 1, 2]),
        ("chars(main_query) > 14 OR words(main_query) BETWEEN 90 AND 99", [1, 2]),
        (
            (
                "language(main_query) = 'en' AND metadata.level <> 0 AND big IS NOT NULL AND chars"
                " < 15"
            ),
            [1, 2, 1, 2, 1, 2],
        ),
        ("CAST(metadata.answer AS INT) + 1 = 3", [0]),
    ],
)
def test_a_where_of_sql_chooses_rows(
    where: str, levels: list[int], tasks: Path, tmp_path: Path
) -> None:
    kept = [json.loads(line) for line in command("filter", tasks, where).stdout.splitlines()]
    assert [row["metadata"]["level"] for row in kept] == levels and all(row in ROWS for row in kept)
    ajet.dataset.read(tasks).sink_parquet(tmp_path / "t.parquet")
    command("filter", tmp_path / "t.parquet", where, "-o", tmp_path / "kept.parquet")
    assert pl.read_parquet(tmp_path / "kept.parquet").to_dicts() == kept


def test_lines_pass_a_filter_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_bytes(
        b'{"a":1.50,"b":"\\u00e9","c":12345678901234567890123}\r\n\n  {"a": 2, "a": 3}\n{"a":"x"}'
    )
    command("filter", path, "a != 'x'", "-o", tmp_path / "kept.jsonl")
    assert (
        tmp_path / "kept.jsonl"
    ).read_bytes() == b'{"a":1.50,"b":"\\u00e9","c":12345678901234567890123}\n{"a": 2, "a": 3}\n'


def test_a_select_is_written_and_errors_name_the_nearest_column(
    tasks: Path, tmp_path: Path
) -> None:
    out = tmp_path / "levels.parquet"
    query = "SELECT metadata.level AS level, count(*) AS n FROM rows GROUP BY level ORDER BY level"
    assert "3 rows" in command("filter", tasks, "--sql", query, "-o", out).stderr
    assert pq.read_table(out).to_pylist() == [{"level": level, "n": 4} for level in range(3)]
    assert (
        "did you mean main_query?"
        in command("filter", tasks, "main_qery LIKE '%1%'", code=2).stderr
    )
    assert (
        "did you mean metadata.level?"
        in command("filter", tasks, "metadata.levl IN (1)", code=2).stderr
    )
    assert "is not a condition" in command("filter", tasks, "chars(main_query) + 1", code=2).stderr
    assert (
        "--sql is a complete SELECT" in command("filter", tasks, "x", "--sql", query, code=2).stderr
    )


def test_a_select_keeps_integers_of_any_size(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    path.write_text('{"n": 123456789012345678901234567890, "s": "0"}\n{"n": 0, "s": "00"}\n')
    found = command("filter", path, "--sql", "SELECT s, n FROM rows").stdout
    assert found == '{"s": "0", "n": 123456789012345678901234567890}\n{"s": "00", "n": 0}\n'
    command("filter", path, "--sql", "SELECT n FROM rows", "-o", tmp_path / "n.parquet")
    command("filter", tmp_path / "n.parquet", "", "-o", tmp_path / "n.jsonl")
    assert [json.loads(line)["n"] for line in (tmp_path / "n.jsonl").open()] == [
        123456789012345678901234567890,
        0,
    ]
    assert (
        "--sql takes a SELECT" in command("filter", path, "--sql", "DROP TABLE rows", code=2).stderr
    )


@pytest.mark.parametrize(
    ("query", "more"),
    [
        ("SELECT * FROM rows", ()),
        ("SELECT * FROM self ORDER BY small DESC LIMIT 0", ()),
        ("SELECT * EXCLUDE (image, blob) FROM rows WHERE label = 1", ()),
        (
            'SELECT question, answer, "image", label, seen, kind, tags, metadata, chars FROM rows',
            (),
        ),
        (
            (
                "SELECT DISTINCT answer, label, 1 + small AS small, 1 + label AS more FROM rows"
                " WHERE label = 1"
            ),
            ("more",),
        ),
    ],
)
def test_a_select_keeps_the_types_of_what_it_does_nothing_with(
    query: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    source, out = write_typed(tmp_path / "typed.parquet"), tmp_path / "out.parquet"
    if "chars" in query:
        assert (
            "no row has a field 'chars'" in command("filter", source, "--sql", query, code=2).stderr
        )
        query = query.replace(", chars", "")
    command("filter", source, "--sql", query, "-o", out)
    found, given = pq.read_schema(out), pq.read_schema(source)
    if not more:
        check_kept(source, out, less=tuple(set(given.names) - set(found.names)))
        return
    features = json.loads(found.metadata[b"huggingface"])["info"]["features"]
    assert features["label"]["names"] == ["easy", "hard"] and features["more"]["_type"] == "Value"
    assert found.field("answer").equals(given.field("answer"), check_metadata=True)


def test_text_of_a_dictionary_is_text_to_sql(tmp_path: Path) -> None:
    path = tmp_path / "kinds.parquet"
    kinds = pa.array(["sum", "product", "sum"]).dictionary_encode()
    exact = pa.array([1, 2, 3], pa.decimal256(50, 2))  # which polars does not have
    pq.write_table(pa.table({"main_query": kinds, "kind": kinds, "exact": exact}), path)
    for where in (
        "kind LIKE 's%'",
        "chars(main_query) = 3",
        "words(kind) = 1 AND main_query IN ('sum')",
    ):
        command("filter", path, where, "-o", tmp_path / "kept.parquet")
        assert pq.read_table(tmp_path / "kept.parquet")["kind"].to_pylist() == ["sum", "sum"], where


def test_decimals_of_more_than_38_digits_are_text_to_columns_and_keep_their_type(
    tmp_path: Path,
) -> None:
    digits = ["123456789012345678901234567890123456789012.25", "1.50"]
    table = pa.table(
        {"q": ["a", "b"], "exact": pa.array(map(Decimal, digits), pa.decimal256(50, 2))}
    )
    pq.write_table(table, tmp_path / "wide.parquet")
    with pa.ipc.new_file(str(tmp_path / "wide.arrow"), table.schema) as file:
        file.write_table(table)
    for name in ("wide.parquet", "wide.arrow"):
        path, out = tmp_path / name, tmp_path / "out.parquet"
        assert ajet.dataset.read(path).collect()["exact"].to_list() == digits
        command("filter", path, "CAST(exact AS DOUBLE) > 2 AND q IS NOT NULL", "-o", out)
        assert pq.read_table(out).equals(table.slice(0, 1))
        command("filter", path, "--sql", "SELECT * FROM rows ORDER BY q DESC", "-o", out)
        assert pq.read_table(out).equals(table.take([1, 0]))
    assert "--sql takes a SELECT" in command("filter", path, "--sql", "", code=2).stderr


@pytest.mark.parametrize(
    "function",
    ["chars(main_query)", "words(main_query)", "language(main_query)", "text(metadata.level)"],
)
def test_a_select_has_the_functions_of_a_where(function: str, tasks: Path) -> None:
    selected = command(
        "filter", tasks, "--sql", f"SELECT main_query FROM rows r WHERE {function} IS NOT NULL"
    ).stdout
    assert len(selected.splitlines()) == len(
        command("filter", tasks, f"{function} IS NOT NULL").stdout.splitlines()
    )
    value = json.loads(
        command("filter", tasks, "--sql", f"SELECT {function} AS v FROM rows LIMIT 1").stdout
    )["v"]
    assert value == {"c": 14, "w": 5, "l": "en", "t": "0"}[function[0]]


def test_what_a_select_computes_is_numbers_and_a_bad_value_is_an_error(
    tasks: Path, tmp_path: Path
) -> None:
    query = (
        "SELECT sum(big) AS wide, sum(metadata.level) AS total, max(big) - min(big) AS gap FROM"
        " rows"
    )
    found = json.loads(command("filter", tasks, "--sql", query).stdout)
    assert found == {"wide": sum(row["big"] for row in ROWS), "total": 12, "gap": 11}
    assert (
        command("filter", tasks, "--sql", "SELECT x FROM (SELECT 1 AS x) WHERE x > 1").stdout == ""
    )
    for arguments in (
        ["CAST(main_query AS INT) > 1"],
        ["--sql", "SELECT CAST(main_query AS INT) FROM rows"],
    ):
        assert "Could not convert" in command("filter", tasks, *arguments, code=2).stderr
    assert "aggregates" in command("filter", tasks, "count(*) > 1", code=2).stderr
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"q": "a", "Q": 1}\n')
    assert "--map" in command("filter", twice, "--sql", "SELECT * FROM rows", code=2).stderr


def test_a_trace_gives_tables(tmp_path: Path) -> None:
    run = Run(name="r", backbone="debug")
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(
            run, Episode(run_id=run.run_id, task=Task(main_query="q"), status="succeeded", step=3)
        )
    trace = ajet.open_trace(str(tmp_path))
    assert trace.episodes().pl()["step"].to_list() == [3]
    assert isinstance(trace.calls().arrow(), pa.Table) and trace.calls().pl().height == 0


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_select_of_whole_columns_changes_no_value(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [
        {"q": "half \ud800", "tools": [{"b": 1, "a": 72}], "metadata": {"n": 2**53 + 1, "x": 1}},
        {"q": "whole", "tools": [{"a": 72.0, "c": {}}], "metadata": {"x": 1.5}},
        {"q": "[1]", "tools": [], "metadata": {"y": None}},
    ]
    path, out = tmp_path / f"rows.{suffix}", tmp_path / "out.jsonl"
    with Writer(path) as writer:
        for row in rows:
            writer.write(row)
    command("filter", path, "--sql", "SELECT * FROM rows ORDER BY q = 'whole'", "-o", out)
    assert repr([row.values for row in read(out)]) == repr([rows[0], rows[2], rows[1]])
    command("filter", path, "metadata.x >= 1", "-o", out)
    assert repr([row.values for row in read(out)]) == repr(rows[:2])


def test_a_select_of_stdin_and_of_renamed_columns_has_its_columns_in_order(tmp_path: Path) -> None:
    pl.DataFrame({"a": [1, 2], "b": ["x", "y"]}).write_parquet(tmp_path / "rows.parquet")
    query = (
        "SELECT b, sum(a) AS total, a, DATE '2024-02-29' AS day FROM rows GROUP BY ALL ORDER BY b"
    )
    for out in ("out.jsonl", "out.csv", "out.parquet"):
        command("filter", tmp_path / "rows.parquet", "--sql", query, "-o", tmp_path / out)
        [first, _] = read(tmp_path / out)
        assert list(first.values) == ["b", "total", "a", "day"], out
    arguments = ["filter", "-", "--map", "q=main_query", "--sql", "SELECT n, main_query FROM rows"]
    result = CliRunner().invoke(app, ["dataset", *arguments], input='{"q": "a", "n": 1.50}\n')
    assert result.stdout == '{"n": 1.5, "main_query": "a"}\n', result.output
