"""Limits of a query count processor time, so that a busy machine stops none."""

from __future__ import annotations

import threading
import time

import duckdb
import pytest

from ajet_sdk.errors import QueryError
from ajet_sdk.trace.query import select


def test_a_query_that_waits_is_not_stopped_by_the_clock() -> None:
    def wait(value: int) -> int:
        threading.Event().wait(0.5)
        return value

    with duckdb.connect() as connection:
        connection.create_function("wait", wait, [duckdb.sqltypes.INTEGER], duckdb.sqltypes.INTEGER)
        assert select(connection, "SELECT wait(7) AS n", timeout=0.2).to_pylist() == [{"n": 7}]


def test_a_query_that_computes_is_stopped() -> None:
    began = time.process_time()
    with duckdb.connect(config={"threads": 1}) as connection, pytest.raises(QueryError):
        select(
            connection,
            "SELECT sum(a.range * b.range) FROM range(10000000) a, range(100000) b",
            timeout=0.3,
        )
    assert time.process_time() - began < 20
