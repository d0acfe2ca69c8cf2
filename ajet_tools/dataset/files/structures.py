"""The structures of lines of JSON: which keys the objects have, in their order, and of which type each value is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import duckdb
import numpy as np

from ajet_sdk.types import QUERY_COLUMNS
from ajet_tools.dataset.files.values import kind_of

__all__ = ["Structure", "asking", "kind_at", "kind_in", "kinds_of", "structures"]

Structure = Mapping[str, Any]
"""Field -> DuckDB's name of its type (`VARCHAR`, `UBIGINT`, ...), a structure, or a list."""
_KINDS = {"VARCHAR": "text", "BOOLEAN": "bool", "NULL": "null", "UBIGINT": "integer", "BIGINT": "integer"}


def kind_in(type_: Any) -> str:
    """The kind of the values of a type in a structure, as `kind_of` names it; integers past 64 bits are `number`."""
    if isinstance(type_, dict | list):
        return "object" if isinstance(type_, dict) else "list"
    return _KINDS.get(type_, "number")


def kind_at(structure: Structure, path: Sequence[str]) -> str:
    """The kind of the values at a path; "null" where there is none."""
    found: Any = structure
    for step in path:
        found = found.get(step, "NULL") if isinstance(found, dict) else "NULL"
    return kind_in(found)


def asking(structure: Structure) -> str | None:
    """The column of the question."""
    return next((name for name in QUERY_COLUMNS if kind_at(structure, (name,)) == "text"), None)


def kinds_of(values: Mapping[str, Any], kind: Callable[[Any], str] = kind_of, before: str = "") -> dict[str, str]:
    """The kinds of the columns of a row, and of the fields within them, by path; whole numbers are numbers.

    With `kind_in` for `kind`, those of a structure.
    """
    found = {}
    for name, value in values.items():
        found[f"{before}{name}"] = kind(value).replace("integer", "number")
        if isinstance(value, dict) and not before:
            found |= kinds_of(value, kind, f"{name}.")
    return found


def structures(lines: Any) -> list[tuple[Structure | None, Any]]:
    """The structures of a polars series of lines, by their first line, each with the indices of its lines.

    None stands for lines of which the structure does not tell each type (an empty object, a key that comes twice), and
    for all of a series in which DuckDB cannot read one (half a surrogate pair).
    """
    import polars as pl

    table = lines.rename("line").to_frame().to_arrow()
    try:
        with _connection().cursor() as cursor:
            found = cursor.from_arrow(table).project("json_structure(line)").to_arrow_table().column(0)
    except duckdb.Error:
        return [(None, np.arange(len(lines)))]
    groups = pl.DataFrame({"structure": found}).with_row_index().group_by("structure", maintain_order=True).agg("index")
    return [
        (None if '"JSON"' in text else _parsed(text), indices.to_numpy())
        for text, indices in zip(groups["structure"], groups["index"], strict=True)
    ]


@cache
def _connection() -> Any:
    return duckdb.connect(config={"threads": 1})


@lru_cache(1000)
def _parsed(text: str) -> Any:
    return json.loads(text)
