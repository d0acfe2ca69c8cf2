"""The reward of a query: 1 where it gives the rows of the reference query, in databases that the
agent never saw too.

Rows are compared as a multiset, and in order where the reference query is ordered; numbers to nine
digits, and never with texts. A query that fails, is none, gives too much or is no single SELECT
earns 0. A reference query that fails or says nothing is an error of the task, and no reward.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from pathlib import Path

from shop import databases
from sql_database import Database, QueryError, Row, opened

import ajet

_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"")
_INNER = re.compile(r"\([^()]*\)")
_FENCE = re.compile(r"\s*```(?:sql)?\s*\n(.*?)```\s*", re.DOTALL | re.IGNORECASE)


@ajet.judge
def right(output: str, answer: str, database: str = "") -> float:
    """`answer` is the reference query; `database` a file, by default the three of the shop."""
    query = query_of(output)
    for one in [opened(database)] if database else databases():
        expected = reference(one, answer)
        try:
            rows = one.query(query)
        except QueryError:
            return 0.0
        if not same(rows, expected, ordered=is_ordered(answer)):
            return 0.0
    return 1.0


def query_of(output: str) -> str:
    """The output without the fence around it. Whatever else stands there is no SQL."""
    fenced = _FENCE.fullmatch(output)
    return (fenced[1] if fenced else output).strip().rstrip(";")


@lru_cache(maxsize=4096)
def reference(database: Database, sql: str) -> list[Row]:
    """Raises ValueError where the reference query says nothing: an empty result is too easy to
    give."""
    try:
        rows = database.query(sql)
    except QueryError as error:
        raise ValueError(
            f"the reference query fails in {Path(database.path).name}: {error}"
        ) from error
    if all(value is None for row in rows for value in row):
        raise ValueError(f"the reference query gives nothing in {Path(database.path).name}: {sql}")
    return rows


def is_ordered(sql: str) -> bool:
    """It has an ORDER BY outside of parentheses."""
    plain = _QUOTED.sub("''", sql)
    while (inner := _INNER.sub("", plain)) != plain:
        plain = inner
    return re.search(r"\border\s+by\b", plain, re.IGNORECASE) is not None


def same(rows: list[Row], expected: list[Row], *, ordered: bool) -> bool:
    if [len(row) for row in rows] != [len(row) for row in expected]:
        return False
    pairs = (
        zip(rows, expected, strict=True)
        if ordered
        else zip(in_order(rows), in_order(expected), strict=True)
    )
    return all(equal(a, b) for row, other in pairs for a, b in zip(row, other, strict=True))


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: [_key(value) for value in row])


def _key(value: object) -> str:
    return f"{value:.6e}" if is_number(value) else json.dumps(value)


def equal(a: object, b: object) -> bool:
    if is_number(a) and is_number(b):
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    return type(a) is type(b) and a == b


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
