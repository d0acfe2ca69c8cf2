"""Lines of JSON: fields as columns, structures, and from these the types and a record batch.

A structure gives the keys of an object, in order, and the kind of each value. `arrays.infer` infers
the same types from Python values; here Python parses no row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from ajet_sdk.tasks.row_names import INNER, asks_by_one
from ajet_tools.dataset.files.arrays import EXACT, batch_of, objects
from ajet_tools.dataset.files.places import DEEPEST, MOST_FIELDS, Columns, Place
from ajet_tools.dataset.files.values import kind_of

Structure = Mapping[str, Any]
"""Field -> kind of its value (`kind_of`; `number` beyond 64 bits), or the structure of an
object."""
Path = tuple[str, ...]
"""The path of a field, such as `("metadata", "level")`."""
Wanted = Path | pl.Struct
"""A field to decode as text, or a type to decode as a frame."""
HALF_PAIR = re.compile(
    r"\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w)\\u[dD][c-fC-F]"
)
"""Matches escapes of lone surrogates, and text that looks like one."""
_MOST_PATHS, _MOST_STRUCTURES, _MOST_TRIES = 256, 1024, 32
_paths: dict[str, bool] = {}
"""JSON pointers to the fields seen so far, and whether one was an object. If the next lines have no
other fields, one query determines their structures.
"""


def kind_in(structure: object) -> str:
    """Returns the kind of a value in a structure."""
    return "object" if isinstance(structure, dict) else str(structure)


def kind_at(structure: Structure, path: Sequence[str]) -> str:
    """Returns the kind of the values at a path, or "null"."""
    node: Any = structure
    for step in path:
        node = node.get(step, "null") if isinstance(node, dict) else "null"
    return kind_in(node)


def asking(structure: Structure) -> str | None:
    """Returns the column of the question, if it is text and no other field asks."""
    filled = [name for name, inner in structure.items() if inner != "null"]
    inner_names: list[str] = []
    for name in INNER:
        inner = structure.get(name)
        inner_names += (
            [key for key, kind in inner.items() if kind != "null"]
            if isinstance(inner, dict)
            else []
        )
    column = asks_by_one(filled, inner_names)
    return column if column is not None and kind_at(structure, (column,)) == "text" else None


def kinds_of(
    values: Mapping[str, object], kind: Callable[[object], str] = kind_of, before: str = ""
) -> dict[str, str]:
    """Returns the kinds of a row's columns and of the fields within them, by path; integers count
    as numbers.

    Pass `kind_in` as `kind` for a structure.
    """
    kinds = {}
    for name, value in values.items():
        kinds[f"{before}{name}"] = kind(value).replace("integer", "number")
        if isinstance(value, dict) and not before:
            kinds |= kinds_of(value, kind, f"{name}.")
    return kinds


def leaves(structure: Structure, before: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yields the path and kind of each value that is not an object."""
    for name, inner in structure.items():
        if isinstance(inner, dict):
            yield from leaves(inner, (*before, name))
        else:
            yield (*before, name), inner


def structures(lines: pl.Series) -> list[tuple[Structure | None, npt.NDArray[np.integer[Any]]]]:
    """Groups lines by structure, in order of the first line; returns each structure with the
    indices of its lines.

    The structure is None for lines with a duplicate key, and for the whole series if it has
    hundreds of different keys or structures, or if DuckDB can't parse a line (lone surrogates).
    """
    known = dict(_paths)
    for _ in range(_MOST_TRIES if len(lines) else 0):
        groups = _grouped(lines, known)
        if not 0 < len(groups) <= _MOST_STRUCTURES:
            break
        first_structures = [
            _structure_of(line) for line in lines.gather([indices[0] for indices in groups])
        ]
        paths: dict[str, bool] = {}
        for path, is_object in (
            pointer
            for structure in first_structures
            if structure is not None
            for pointer in _pointers(structure)
        ):
            paths[path] = is_object or paths.get(path, False)
        if all(known.get(path) in (is_object, True) for path, is_object in paths.items()):
            return list(zip(first_structures, groups, strict=True))
        if len(paths) > _MOST_PATHS:
            break
        known = known if len(known | paths) <= _MOST_PATHS else {}
        known |= {path: paths[path] or known.get(path, False) for path in sorted(paths)}
        _paths.clear()
        _paths.update(known)
    return [(None, np.arange(len(lines)))] if len(lines) else []


def _grouped(lines: pl.Series, paths: Mapping[str, bool]) -> list[npt.NDArray[np.integer[Any]]]:
    """Groups line indices by keys and by kinds at the known paths; empty if a line is invalid
    JSON."""
    import duckdb

    quoted = {path: "'" + path.replace("'", "''") + "'" for path in paths}
    objects = ", ".join(["'$'", *(quoted[path] for path, is_object in paths.items() if is_object)])
    keys = (  # the hash of nested lists ignores their order
        f"hash(flatten(json_keys(line, [{objects}]))) AS keys"
    )
    kinds = f"hash(json_type(line, [{', '.join(quoted.values())}]::VARCHAR[])) AS kinds"
    try:
        with _connection().cursor() as cursor:
            table = cursor.from_arrow(lines.rename("line").to_frame().to_arrow())
            hashes = pl.DataFrame(table.project(f"{keys}, {kinds}").to_arrow_table())
    except duckdb.Error:
        return []
    groups = hashes.with_row_index().group_by("keys", "kinds", maintain_order=True).agg("index")
    return [indices.to_numpy() for indices in groups["index"]]


def json_at(lines: pl.Series, path: Path) -> pl.Series | None:
    """Returns the JSON of each line at a path (null if absent), or None if DuckDB can't parse a
    line."""
    import duckdb

    pointer = "".join(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in path).replace(
        "'", "''"
    )
    try:
        with _connection().cursor() as cursor:
            table = cursor.from_arrow(lines.rename("line").to_frame().to_arrow())
            values = table.project(
                f"json_extract(line, '{pointer}')::VARCHAR AS value"
            ).to_arrow_table()
            return pl.DataFrame(values)["value"]
    except duckdb.Error:
        return None


@cache
def _connection() -> Any:
    import duckdb

    return duckdb.connect(config={"threads": 1})


def _structure_of(line: str) -> Structure | None:
    try:
        return {
            name: _kind(value)
            for name, value in json.loads(line, object_pairs_hook=_object).items()
        }
    except (_Twice, RecursionError):
        return None


class _Twice(Exception):
    """A duplicate key."""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs) or any("\0" in name for name in fields):
        raise _Twice
    return fields


def _kind(value: object) -> Structure | str:
    if isinstance(value, dict):
        return {name: _kind(inner) for name, inner in value.items()}
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        return "number"
    return kind_of(value)


def _pointers(structure: Structure, before: str = "") -> Iterator[tuple[str, bool]]:
    for name, inner in structure.items():
        path = f"{before}/{name.replace('~', '~0').replace('/', '~1')}"
        yield path, isinstance(inner, dict)
        if isinstance(inner, dict):
            yield from _pointers(inner, path)


def decode(lines: pl.Series, wanted: Sequence[Wanted]) -> dict[Wanted, Any] | None:
    """Decodes paths as columns of text, and types as frames; None if polars can't decode the lines
    so."""
    escaped = lines.filter(lines.str.contains(r"\\u[dD][89a-fA-F]"))
    if any(map(HALF_PAIR.search, escaped)):  # polars would decode it as NUL
        return None
    known: dict[Wanted, object] = {}
    for dtype, paths in _together(wanted):
        try:
            decoded = lines.str.json_decode(dtype)
        except pl.exceptions.PolarsError:
            return None
        if decoded.null_count():
            return None
        for path in paths:
            known[path] = reduce(
                lambda column, step: column.struct.unnest().get_column(step), path, decoded
            )
        if not paths:
            known[dtype] = decoded.struct.unnest()
    return known


def _together(wanted: Sequence[Wanted]) -> list[tuple[pl.Struct, list[Path]]]:
    """Groups paths into types to decode at once; a field and a field within it need different
    types."""
    groups: list[list[Path]] = []
    for path in (item for item in wanted if isinstance(item, tuple)):
        for group in groups:
            if not any(
                all(a == b for a, b in zip(path, known_path, strict=False)) for known_path in group
            ):
                group.append(path)
                break
        else:
            groups.append([path])
    frames: list[tuple[pl.Struct, list[Path]]] = [
        (item, []) for item in wanted if not isinstance(item, tuple)
    ]
    return [*frames, *((_type_of(group), group) for group in groups)] or [(_type_of([]), [])]


def _type_of(paths: Sequence[Path]) -> pl.Struct:
    inner: dict[str, list[Path]] = {}
    for path in paths:
        inner.setdefault(path[0], []).append(path[1:])
    fields = {name: _type_of(below) if all(below) else pl.String for name, below in inner.items()}
    return pl.Struct(fields or {"task_id": pl.String})


def as_json(column: pl.Series, kind: str, encode: Callable[[str], str]) -> pl.Series | str:
    """Encodes a column of text, integers, booleans or nulls as JSON; `encode` is applied to text
    that needs escapes."""
    if kind == "null":
        return "null"
    if kind != "text":
        return column
    plain = r'["\\\x00-\x1f]' if encode("ä") == '"ä"' else r'["\\\x00-\x1f]|[^\x00-\x7e]'
    escaped = column.str.contains(plain).arg_true()
    if len(escaped):
        texts = [encode(text)[1:-1] for text in column.gather(escaped)]
        column = column.clone().scatter(escaped, pl.Series(texts, dtype=pl.String))
    return pl.select('"' + pl.lit(column) + '"').to_series()


_LEAVES = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64(), "bool": pa.bool_()}
_DTYPES = {
    pa.string(): pl.String(),
    pa.int64(): pl.Int64(),
    pa.float64(): pl.Float64(),
    pa.bool_(): pl.Boolean(),
}
_encode = json.JSONEncoder().encode
_Group = tuple[Structure | str, np.ndarray]
"""A structure or kind, and the indices of the lines that have it."""


class _Unclear(Exception):
    """The types can't be inferred without parsing the rows."""


def read_columns(
    name: str, lines: pl.Series, decode: Callable[[pl.Struct], pl.DataFrame | None]
) -> tuple[pa.RecordBatch, Columns] | None:
    """Converts lines to a record batch, with types that hold their values without loss.

    `decode` decodes them as a frame with the fields of a type, or returns None.
    Returns None if the rows have to be parsed: lists, a duplicate key, integers beyond 64 bits or
    (among floats) beyond 2^53, numbers or objects mixed with values of another kind.
    """
    groups = [
        (structure, indices) for structure, indices in structures(lines) if structure is not None
    ]
    if sum(len(indices) for _, indices in groups) < len(lines):
        return None
    try:
        row = _place(groups, len(lines))
        frame = decode(_dtype(row))
        if frame is None:
            return None
        array, row = _array_of(frame, row, groups)
    except (_Unclear, pl.exceptions.PolarsError):
        return None
    columns = Columns(name, row)
    return batch_of(array, columns, len(lines)), columns


def _place(
    groups: Sequence[_Group],
    count: int,
    depth: int = DEEPEST + 1,
    *,
    absent: bool = False,
    nulls: bool = False,
) -> Place:
    """Returns the place of `count` objects with these structures. Raises _Unclear."""
    names = dict.fromkeys(
        name for structure, _ in groups if isinstance(structure, dict) for name in structure
    )
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
            leaf = (
                None
                if is_json or not kinds
                else _LEAVES["number" if len(kinds) > 1 else kinds.pop()]
            )
            fields[name] = Place(leaf, json=is_json, absent=lacking, nulls=null)
    return Place(fields=fields, absent=absent, nulls=nulls)


def _objects(groups: Sequence[_Group]) -> list[_Group]:
    return [group for group in groups if isinstance(group[0], dict)]


def _below(groups: Sequence[_Group], name: str) -> list[_Group]:
    return [
        (structure[name], rows)
        for structure, rows in groups
        if isinstance(structure, dict) and name in structure
    ]


def _dtype(place: Place) -> pl.Struct:
    return pl.Struct({
        name: _dtype(inner) if inner.fields is not None else _DTYPES.get(inner.leaf, pl.String())
        for name, inner in (place.fields or {}).items()
    })  # fmt: skip


def with_fields(dtype: pl.Struct, more: pl.Struct) -> pl.Struct:
    """Merges the fields of two types."""
    fields = more.to_schema()
    for name, inner in dtype.to_schema().items():
        known = fields.get(name)
        if isinstance(inner, pl.Struct) and isinstance(known, pl.Struct):
            inner = with_fields(inner, known)
        fields[name] = inner
    return pl.Struct(fields)


def _array_of(
    frame: pl.DataFrame, place: Place, groups: Sequence[_Group]
) -> tuple[pa.StructArray, Place]:
    """Converts the columns of a frame to an array of objects. Raises _Unclear."""
    fields = {}
    for name, inner in (place.fields or {}).items():
        below, column = _below(groups, name), frame.get_column(name)
        if inner.fields is not None:
            fields[name] = _array_of(column.struct.unnest(), inner, _objects(below))
        elif inner.is_empty:
            fields[name] = pa.nulls(len(frame)), inner
        else:
            fields[name] = _leaf(column, inner, below)
    nulls = np.ones(len(frame), bool)
    for _, rows in groups:
        nulls[rows] = False
    return objects(fields, nulls.tolist()), replace(
        place, fields={name: inner for name, (_, inner) in fields.items()}
    )


def _leaf(column: pl.Series, place: Place, groups: Sequence[_Group]) -> tuple[pa.Array, Place]:
    """Returns values of one type, or each as JSON text. Raises _Unclear if the nulls of polars are
    at other lines."""
    if len(column) - column.null_count() != sum(
        len(rows) for kind, rows in groups if kind != "null"
    ):
        raise _Unclear
    if place.json:
        for kind in {kind for kind, _ in groups}:
            rows = np.concatenate([rows for known, rows in groups if known == kind])
            values = column.gather(rows)
            cells = as_json(
                values.cast(pl.Int64) if kind == "integer" else values, str(kind), _encode
            )
            column = column.scatter(
                rows, cells if isinstance(cells, str) else cells.cast(pl.String)
            )
    elif (
        place.leaf in (pa.int64(), pa.float64())
        and not column.drop_nulls().is_between(-EXACT, EXACT).all()
    ):
        if place.leaf == pa.float64():
            raise _Unclear
        place = replace(place, large=True)
    return column.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(place.type), place
