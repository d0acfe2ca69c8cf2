"""The types of JSON lines from their structures, and the lines as a record batch of these types.

`arrays.find` gives the same columns from rows of Python's values; here no row is parsed by Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import polars as pl
import pyarrow as pa

from ajet_tools.dataset.files.arrays import EXACT, batch_of, objects
from ajet_tools.dataset.files.lines import Structure, as_json, kind_in, structures
from ajet_tools.dataset.files.places import DEEPEST, MOST_FIELDS, Columns, Place

_LEAVES = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64(), "bool": pa.bool_()}
_DTYPES = {pa.string(): pl.String(), pa.int64(): pl.Int64(), pa.float64(): pl.Float64(), pa.bool_(): pl.Boolean()}
_encode = json.JSONEncoder().encode
_Group = tuple[Structure | str, np.ndarray]
"""A structure of what stands at a place, or its kind, and the indices of the lines that have it there."""


class _Unclear(Exception):
    """Only the rows tell the types."""


def read_columns(
    name: str, lines: pl.Series, decode: Callable[[pl.Struct], pl.DataFrame | None]
) -> tuple[pa.RecordBatch, Columns] | None:
    """Lines as a record batch, with the types that hold their values without loss.

    `decode` reads them as a frame with the fields of a type, None where it cannot.
    None where the rows have to be parsed: lists, a key that comes twice, integers past 64 bits or among floats past
    2^53, numbers or objects among values of another kind.
    """
    groups = [(structure, indices) for structure, indices in structures(lines) if structure is not None]
    if sum(len(indices) for _, indices in groups) < len(lines):
        return None
    try:
        row = _place(groups, len(lines))
        frame = decode(_dtype(row))
        if frame is None:
            return None
        array, row = _object(frame, row, groups)
    except (_Unclear, pl.exceptions.PolarsError):
        return None
    columns = Columns(name, row)
    return batch_of(array, columns, len(lines)), columns


def _place(
    groups: Sequence[_Group], count: int, depth: int = DEEPEST + 1, *, absent: bool = False, nulls: bool = False
) -> Place:
    """The place of objects of these structures, `count` in all. Raises _Unclear."""
    names = dict.fromkeys(name for structure, _ in groups if isinstance(structure, dict) for name in structure)
    if not names or not depth or len(names) > MOST_FIELDS:
        raise _Unclear
    fields = {}
    for name in names:
        below = _below(groups, name)
        kinds = {kind_in(structure) for structure, _ in below}
        lacking, null = sum(len(rows) for _, rows in below) < count, "null" in kinds
        kinds.discard("null")
        is_json = (lacking and null) or (len(kinds) > 1 and kinds != {"integer", "number"})
        if "list" in kinds or (is_json and kinds & {"number", "object"}):
            raise _Unclear
        if kinds == {"object"}:
            inner = _objects(below)
            size = sum(len(rows) for _, rows in inner)
            fields[name] = _place(inner, size, depth - 1, absent=lacking, nulls=null)
        else:
            leaf = None if is_json or not kinds else _LEAVES["number" if len(kinds) > 1 else kinds.pop()]
            fields[name] = Place(leaf, json=is_json, absent=lacking, nulls=null)
    return Place(fields=fields, absent=absent, nulls=nulls)


def _objects(groups: Sequence[_Group]) -> list[_Group]:
    return [group for group in groups if isinstance(group[0], dict)]


def _below(groups: Sequence[_Group], name: str) -> list[_Group]:
    return [(structure[name], rows) for structure, rows in groups if isinstance(structure, dict) and name in structure]


def _dtype(place: Place) -> pl.Struct:
    """What polars reads objects of a place as."""
    return pl.Struct({
        name: _dtype(inner) if inner.fields is not None else _DTYPES.get(inner.leaf, pl.String())
        for name, inner in (place.fields or {}).items()
    })  # fmt: skip


def with_fields(dtype: pl.Struct, more: pl.Struct) -> pl.Struct:
    """A type with the fields of another, too."""
    fields = more.to_schema()
    for name, inner in dtype.to_schema().items():
        known = fields.get(name)
        if isinstance(inner, pl.Struct) and isinstance(known, pl.Struct):
            inner = with_fields(inner, known)
        fields[name] = inner
    return pl.Struct(fields)


def _object(frame: pl.DataFrame, place: Place, groups: Sequence[_Group]) -> tuple[pa.StructArray, Place]:
    """Columns of a frame as an array of objects. Raises _Unclear."""
    fields = {}
    for name, inner in (place.fields or {}).items():
        below, column = _below(groups, name), frame.get_column(name)
        if inner.fields is not None:
            fields[name] = _object(column.struct.unnest(), inner, _objects(below))
        elif inner.is_empty:
            fields[name] = pa.nulls(len(frame)), inner
        else:
            fields[name] = _leaf(column, inner, below)
    nulls = np.ones(len(frame), bool)
    for _, rows in groups:
        nulls[rows] = False
    return objects(fields, nulls.tolist()), replace(place, fields={name: inner for name, (_, inner) in fields.items()})


def _leaf(column: pl.Series, place: Place, groups: Sequence[_Group]) -> tuple[pa.Array, Place]:
    """Values of one type, or each as JSON text. Raises _Unclear where polars reads nulls at other lines."""
    if len(column) - column.null_count() != sum(len(rows) for kind, rows in groups if kind != "null"):
        raise _Unclear
    if place.json:
        for kind in {kind for kind, _ in groups}:
            rows = np.concatenate([rows for known, rows in groups if known == kind])
            values = column.gather(rows)
            cells = as_json(values.cast(pl.Int64) if kind == "integer" else values, str(kind), _encode)
            column = column.scatter(rows, cells if isinstance(cells, str) else cells.cast(pl.String))
    elif place.leaf in (pa.int64(), pa.float64()) and not column.drop_nulls().is_between(-EXACT, EXACT).all():
        if place.leaf == pa.float64():
            raise _Unclear
        place = replace(place, large=True)
    return column.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(place.type), place
