"""Values of queries: numbers are numbers everywhere, and none that DuckDB has ends a command."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ajet_sdk.reporting.output import json_line
from ajet_sdk.trace.query import rows_of
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_tools.cli.app import app
from ajet_tools.trace.queries.base import rows


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("values") / "t.duckdb"
    with TraceWriter(path):
        pass
    return path


def table(sql: str) -> pa.Table:
    with duckdb.connect() as connection:
        reader = connection.sql(sql).to_arrow_reader(2048)
        return pa.Table.from_batches(list(reader), reader.schema)


VALUES = [
    ("sum(x)", 3),
    ("sum(x)::HUGEINT * 100000000000000000000", 300_000_000_000_000_000_000),
    ("[sum(x)]", [3]),
    ("{'a': [sum(x)], 'b': {'c': sum(x)}}", {"a": [3], "b": {"c": 3}}),
    ("MAP {'k': sum(x)}", {"k": 3}),
    ("MAP {1: sum(x)}", [[1, 3]]),
    ("union_value(a := sum(x))", 3),
    ("1.5::DECIMAL(4, 2)", 1.5),
    ("avg(x)", 1.0),
    ("'a'::ENUM('a', 'b')", "a"),
    ("'12345678-1234-1234-1234-123456789012'::UUID", "12345678-1234-1234-1234-123456789012"),
    ("DATE '2024-02-29'", "2024-02-29"),
    ("TIMESTAMPTZ '2024-02-29 01:02:03+00'", "2024-02-29T01:02:03+00:00"),
    ("TIMESTAMP_NS '2024-02-29 01:02:03.000000001'", "2024-02-29 01:02:03.000000001"),
    ("TIME '01:02:03'", "01:02:03"),
    ("INTERVAL '14 months 3 days 04:05:06.5'", "1 year 2 months 3 days 04:05:06.5"),
    ("[INTERVAL 1 DAY]", ["1 day"]),
    ("DATE 'infinity'", "infinity"),
    ("[TIMESTAMP '-infinity', NULL]", ["-infinity", None]),
    ("DATE '0044-03-15 (BC)'", "0044-03-15 (BC)"),
    ("TIMESTAMP '290000-01-01 12:00:00.5'", "290000-01-01 12:00:00.5"),
    ("'a'::BLOB", "a"),
    ("'\\xFF'::BLOB", "/w=="),
    ("'NaN'::DOUBLE", None),
]


@pytest.mark.slow
def test_a_value_is_the_same_in_a_query_and_on_the_command_line(trace: Path) -> None:
    expected = {f"v{number}": value for number, (_, value) in enumerate(VALUES)}
    columns = ", ".join(f"{sql} AS v{number}" for number, (sql, _) in enumerate(VALUES))
    query = f"SELECT {columns} FROM range(3) t(x)"
    done = CliRunner().invoke(app, ["trace", "sql", query, str(trace), "--json"])
    assert json.loads(done.stdout) == [expected], done.stderr
    with open_trace(trace) as reader:
        [row] = rows(reader, query)
    for name, value in expected.items():
        assert value is None or json.loads(json_line({name: row[name]})) == {name: value}
        assert isinstance(row[name], type(value)) or not isinstance(value, int | list | dict), name


HOW = (["--json"], ["--csv"], [], ["-o", "x.jsonl"], ["-o", "x.csv"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "how"),
    [
        *(("FROM test_all_types()", how) for how in HOW),
        (f"SELECT {'[' * 70}1{']' * 70}", ["--json"]),
        (f"SELECT {'(' * 9000}", ["-o", "x.csv"]),
    ],
)
def test_no_value_or_query_ends_in_a_bug(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str, how: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["trace", "sql", query, str(trace), *how])
    assert "bug in ajet" not in done.output
    assert done.exit_code == (0 if "test_all" in query else 2), done.output


@pytest.mark.slow
@given(days=st.integers(-2_147_483_646, 2_147_483_646), months=st.integers(-1_200_000, 1_200_000))
def test_dates_and_intervals_of_any_size_read_as_duckdb_writes_them(days: int, months: int) -> None:
    shown = (
        f"epoch_ms(0)::DATE + {days}" if abs(days) < 2_000_000 else f"DATE '1970-01-01' + {days}"
    )
    sql = (
        f"SELECT d, d::VARCHAR AS dt, i, i::VARCHAR AS it FROM (SELECT {shown} AS d,"
        f" to_months({months}) AS i)"
    )
    try:
        found = table(sql)
    except duckdb.Error:  # beyond the dates that DuckDB has
        return
    [row] = rows_of(found)
    assert str(row["d"]) == row["dt"] and row["i"] == row["it"]
