"""What a query reads of the tables, by DuckDB's own plan: which columns, and of which episodes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from ajet_sdk.errors import QueryError
from ajet_sdk.trace.query import SETTINGS, only_statement
from ajet_sdk.trace.schema import COLUMNS, create_statements

__all__ = ["Planner", "Scan"]


@dataclass(frozen=True, slots=True)
class Scan:
    """What is read of one table."""

    columns: frozenset[str]
    ids: tuple[str, frozenset[str]] | None = None
    """A column and the values that its rows have, where the query reads no others; None: any row."""

    def __or__(self, other: Scan) -> Scan:
        """What two scans of a table read together."""
        one = self.ids is not None and other.ids is not None and self.ids[0] == other.ids[0]
        ids = (self.ids[0], self.ids[1] | other.ids[1]) if one and self.ids and other.ids else None
        return Scan(self.columns | other.columns, ids)


_EVERYTHING = {table: Scan(frozenset(columns)) for table, columns in COLUMNS.items()}
_VIRTUAL = frozenset({"rowid"})
_EXPLAIN = re.compile(r"\s*explain\b(\s+analyze\b)?(\s*\([^)]*\))?", re.I)
_ID = r"'[0-9A-Za-z_-]+'"
_ONLY = re.compile(rf"(?:optional: )?\((episode_id|call_id|run_id) (?:= ({_ID})|IN \(({_ID}(?:, {_ID})*)\))\)")
_PRUNING = "statistics_propagation,empty_result_pullup"
"""Optimizers that would leave out the scan of an empty table, which all of ours are here."""


class Planner:
    """Plans queries over empty tables of a trace's schema."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection = duckdb.connect(config=dict(SETTINGS))
        for statement in create_statements():
            self._connection.execute(statement)
        self._connection.execute(f"SET disabled_optimizers = '{_PRUNING}'")

    def scans(self, sql: str, parameters: Sequence[Any] = ()) -> dict[str, Scan]:
        """Table -> what one SELECT or EXPLAIN reads of it. Raises QueryError where it is not one, or wrong."""
        with self._lock:
            statement = only_statement(self._connection, sql)
            text = sql
            if statement.type == duckdb.StatementType.EXPLAIN:
                text = _EXPLAIN.sub("", sql, count=1)
            try:
                planned = self._connection.execute(f"EXPLAIN (FORMAT json) {text}", list(parameters) or None).fetchall()
            except duckdb.Error as error:
                if statement.type == duckdb.StatementType.EXPLAIN:
                    return _EVERYTHING
                raise QueryError(f"the query failed: {error}") from error
        found: dict[str, Scan] = {}
        for table, scan in _scans_in(json.loads(planned[0][1])):
            found[table] = found[table] | scan if table in found else scan
        return found


def _scans_in(plan: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Scan]]:
    for node in plan:
        about = node.get("extra_info") or {}
        table = str(about.get("Table", "")).rpartition(".")[2]
        if table in COLUMNS:
            yield table, _scan(table, about)
        yield from _scans_in(node.get("children") or ())


def _scan(table: str, about: Mapping[str, Any]) -> Scan:
    given = {name: [value] if isinstance(value, str) else value for name, value in about.items() if name != "Table"}
    listed = set(given.get("Projections") or ()) - _VIRTUAL
    if not listed <= COLUMNS[table].keys():
        return _EVERYTHING[table]
    # Columns that only filter are not among those projected. One named in a constant is read for nothing.
    words = set(re.findall(r"\w+", " ".join(str(part) for parts in given.values() for part in parts)))
    columns = frozenset(listed | (COLUMNS[table].keys() & words))
    for text in given.get("Filters") or ():
        if only := _ONLY.fullmatch(text):
            return Scan(columns, (only[1], frozenset(re.findall(_ID, only[2] or only[3]))))
    return Scan(columns)
