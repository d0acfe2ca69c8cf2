"""A user's SQL is exactly one SELECT or EXPLAIN and can touch nothing, on a file and live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace import query
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Metric


@pytest.fixture(scope="module", params=["live", "at rest"])
def trace(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TraceReader]:
    path = tmp_path_factory.mktemp("trace") / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(
            *(Metric(run_id="r", step=i, name="train/reward", value=i / 2) for i in range(3))
        )
        writer.flush()
        if request.param == "live":
            yield writer
            return
    with open_trace(path) as reader:
        yield reader


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT step FROM metrics ORDER BY step",
        "FROM metrics SELECT step ORDER BY step",
        "WITH m AS (SELECT * FROM metrics) SELECT step FROM m ORDER BY step -- so",
        "/* first */ SELECT step FROM metrics ORDER BY step;",
    ],
)
def test_a_select_is_answered(trace: TraceReader, sql: str) -> None:
    assert trace.query(sql).column("step").to_pylist() == [0, 1, 2]


def test_parameters_and_explain(trace: TraceReader) -> None:
    assert trace.query("SELECT count(*) AS n FROM metrics WHERE step >= ?", [1]).to_pylist() == [
        {"n": 2}
    ]
    assert (
        trace.query("SELECT step FROM metrics WHERE step = $1 OR step = $1 + 1", [1]).num_rows == 2
    )
    assert "explain_value" in trace.query("EXPLAIN SELECT * FROM metrics").column_names
    assert trace.query("EXPLAIN ANALYZE SELECT * FROM metrics").num_rows == 1


@pytest.mark.parametrize(
    ("sql", "word"),
    [
        ("", "exactly one"),
        ("SELECT 1; SELECT 2", "SELECT, SELECT"),
        ("SELECT 1; DELETE FROM metrics", "DELETE"),
        ("DELETE FROM metrics", "DELETE"),
        ("INSERT INTO metrics VALUES (1)", "INSERT"),
        ("UPDATE metrics SET value = 0", "UPDATE"),
        ("DROP TABLE metrics", "DROP"),
        ("CREATE TABLE t (a INTEGER)", "CREATE"),
        ("ATTACH 'x.duckdb'", "ATTACH"),
        ("COPY metrics TO 'x.csv'", "COPY"),
        ("EXPORT DATABASE 'x'", "EXPORT"),
        ("INSTALL httpfs", "LOAD"),
        ("SET memory_limit = '1TB'", "SET"),
        ("PRAGMA enable_profiling", "exactly one"),
        ("CALL force_checkpoint()", "exactly one"),
        ("COMMIT", "TRANSACTION"),
        ("SELEC 1", "parsed"),
        ("EXPLAIN ANALYZE DELETE FROM metrics", "read-only|base table"),
        ("SELECT * FROM read_csv('/etc/passwd')", "disabled"),
        ("SELECT * FROM '/etc/passwd'", "failed"),
        ("SELECT * FROM read_text('/etc/hostname')", "disabled"),
        ("SELECT * FROM glob('/*')", "disabled"),
        ("SELECT * FROM query('DROP TABLE metrics')", "not available"),
        ("SELECT * FROM arrow_scan(1, 2, 3)", "not available"),
        ("FROM query /* a /* comment */ hides */ ('SELECT 1')", "query.. is not available"),
        ('FROM main."CHECKPOINT" -- nothing\n ()', "checkpoint.. is not available"),
        ("FROM json_execute_serialized_sql(json_serialize_sql('SELECT 1'))", "not available"),
        ("FROM enable_logging(storage_path = '/tmp/log')", "not available"),
        ("FROM enable_profiling(save_location = '/tmp/profile.json')", "not available"),
        ("SELECT nothing FROM metrics", "nothing"),
    ],
)
def test_anything_else_is_a_query_error(trace: TraceReader, sql: str, word: str) -> None:
    with pytest.raises(QueryError, match=word):
        trace.query(sql)
    assert trace.query("SELECT count(*) AS n FROM metrics").to_pylist() == [{"n": 3}]


def test_a_text_is_no_call(trace: TraceReader) -> None:
    sql = (
        "SELECT 'query(1)' AS query, count(*) FILTER (name LIKE '%arrow_scan(%') AS \"é\" /* query("
        " */ FROM metrics"
    )
    assert trace.query(sql).to_pylist() == [{"query": "query(1)", "é": 0}]


def test_a_variable_of_this_process_cannot_be_read(trace: TraceReader) -> None:
    secrets = trace.query("SELECT 'hidden' AS word")
    assert secrets.num_rows == 1
    with pytest.raises(QueryError, match="secrets"):
        trace.query("SELECT * FROM secrets")


def test_a_long_query_is_interrupted(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        endless = (
            "SELECT count(*) FROM range(10000000000) a, range(1000000) b WHERE a.range % 7 ="
            " b.range % 11"
        )
        with pytest.raises(QueryError, match=r"stopped after 0\.5 s"):
            query.select(writer._root, endless, timeout=0.5)  # type: ignore[arg-type]
        assert writer.query("SELECT 1 AS one").num_rows == 1


def test_a_huge_result_is_refused_rather_than_held(trace: TraceReader) -> None:
    with pytest.raises(QueryError, match=r"larger than|stopped after|memory"):
        trace.query("SELECT range AS a, repeat('x', 1000) AS b FROM range(100000000)")
