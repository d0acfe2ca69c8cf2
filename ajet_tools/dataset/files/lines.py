"""Lines of JSON: their fields as columns, their structures, and by these the types and the lines as a record batch.

A structure says which keys the objects have, in their order, and of which kind each value is. `arrays.find` gives the
same types from rows of Python's values; here no row is parsed by Python.
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

from ajet_sdk.tasks.task_rows import QUERY_COLUMNS
from ajet_tools.dataset.files.arrays import EXACT, batch_of, objects
from ajet_tools.dataset.files.places import DEEPEST, MOST_FIELDS, Columns, Place
from ajet_tools.dataset.files.values import kind_of

Structure = Mapping[str, Any]
"""Field -> the kind of its value, as `kind_of` names it, or the structure of an object; integers past 64 bits are
`number`."""
Path = tuple[str, ...]
"""Of a field, such as `("metadata", "level")`."""
Wanted = Path | pl.Struct
"""What lines are read for: a field as text, or all fields of a type as a frame."""
HALF_PAIR = re.compile(r"\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w)\\u[dD][c-fC-F]")
"""The escape of half a surrogate pair, or what looks so."""
_MOST_PATHS, _MOST_STRUCTURES, _MOST_TRIES = 256, 1024, 32
_paths: dict[str, bool] = {}
"""JSON pointers to the fields that lines had so far, and whether one was an object. Where the next lines have no other,
one query tells their structures."""


def kind_in(structure: object) -> str:
    """The kind of a value in a structure."""
    return "object" if isinstance(structure, dict) else str(structure)


def kind_at(structure: Structure, path: Sequence[str]) -> str:
    """The kind of the values at a path; "null" where there is none."""
    node: Any = structure
    for step in path:
        node = node.get(step, "null") if isinstance(node, dict) else "null"
    return kind_in(node)


def asking(structure: Structure) -> str | None:
    """The column of the question."""
    return next((name for name in QUERY_COLUMNS if kind_at(structure, (name,)) == "text"), None)


def kinds_of(values: Mapping[str, object], kind: Callable[[object], str] = kind_of, before: str = "") -> dict[str, str]:
    """The kinds of the columns of a row, and of the fields within them, by path; whole numbers are numbers.

    With `kind_in` for `kind`, those of a structure.
    """
    kinds = {}
    for name, value in values.items():
        kinds[f"{before}{name}"] = kind(value).replace("integer", "number")
        if isinstance(value, dict) and not before:
            kinds |= kinds_of(value, kind, f"{name}.")
    return kinds


def leaves(structure: Structure, before: Path = ()) -> Iterator[tuple[Path, str]]:
    """The paths of what is no object, with its kind."""
    for name, inner in structure.items():
        if isinstance(inner, dict):
            yield from leaves(inner, (*before, name))
        else:
            yield (*before, name), inner


def structures(lines: pl.Series) -> list[tuple[Structure | None, npt.NDArray[np.integer[Any]]]]:
    """The structures of a polars series of lines, by their first line, each with the indices of its lines.

    None stands for lines of which the structure is not told (a key that comes twice), and for all of a series that has
    hundreds of different keys or structures, or in which DuckDB cannot read a line (half a surrogate pair).
    """
    known = dict(_paths)
    for _ in range(_MOST_TRIES if len(lines) else 0):
        groups = _grouped(lines, known)
        if not 0 < len(groups) <= _MOST_STRUCTURES:
            break
        first_structures = [_structure_of(line) for line in lines.gather([indices[0] for indices in groups])]
        paths: dict[str, bool] = {}
        for path, is_object in (
            pointer for structure in first_structures if structure is not None for pointer in _pointers(structure)
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
    """Indices of lines with the same keys, and kinds of values at the known paths; none where a line is no JSON."""
    import duckdb

    quoted = {path: "'" + path.replace("'", "''") + "'" for path in paths}
    objects = ", ".join(["'$'", *(quoted[path] for path, is_object in paths.items() if is_object)])
    keys = f"hash(flatten(json_keys(line, [{objects}]))) AS keys"  # a hash of lists in lists forgets their order
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
    """The JSON of each line at a path, null where there is none; None where DuckDB cannot read a line."""
    import duckdb

    pointer = "".join(f"/{name.replace('~', '~0').replace('/', '~1')}" for name in path).replace("'", "''")
    try:
        with _connection().cursor() as cursor:
            table = cursor.from_arrow(lines.rename("line").to_frame().to_arrow())
            values = table.project(f"json_extract(line, '{pointer}')::VARCHAR AS value").to_arrow_table()
            return pl.DataFrame(values)["value"]
    except duckdb.Error:
        return None


@cache
def _connection() -> Any:
    import duckdb

    return duckdb.connect(config={"threads": 1})


def _structure_of(line: str) -> Structure | None:
    try:
        return {name: _kind(value) for name, value in json.loads(line, object_pairs_hook=_object).items()}
    except (_Twice, RecursionError):
        return None


class _Twice(Exception):
    """A key comes twice."""


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
    """The fields at paths as columns of text, and frames of struct types; None where polars cannot read lines so."""
    escaped = lines.filter(lines.str.contains(r"\\u[dD][89a-fA-F]"))
    if any(map(HALF_PAIR.search, escaped)):  # polars has a NUL there
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
            known[path] = reduce(lambda column, step: column.struct.unnest().get_column(step), path, decoded)
        if not paths:
            known[dtype] = decoded.struct.unnest()
    return known


def _together(wanted: Sequence[Wanted]) -> list[tuple[pl.Struct, list[Path]]]:
    """Types to read lines with, and the paths that each is for; a field and one within it are read apart."""
    groups: list[list[Path]] = []
    for path in (item for item in wanted if isinstance(item, tuple)):
        for group in groups:
            if not any(all(a == b for a, b in zip(path, known_path, strict=False)) for known_path in group):
                group.append(path)
                break
        else:
            groups.append([path])
    frames: list[tuple[pl.Struct, list[Path]]] = [(item, []) for item in wanted if not isinstance(item, tuple)]
    return [*frames, *((_type_of(group), group) for group in groups)] or [(_type_of([]), [])]


def _type_of(paths: Sequence[Path]) -> pl.Struct:
    """The type of objects that have text at these paths."""
    inner: dict[str, list[Path]] = {}
    for path in paths:
        inner.setdefault(path[0], []).append(path[1:])
    fields = {name: _type_of(below) if all(below) else pl.String for name, below in inner.items()}
    return pl.Struct(fields or {"task_id": pl.String})


def as_json(column: pl.Series, kind: str, encode: Callable[[str], str]) -> pl.Series | str:
    """A column of text, integers, truth values or nulls as JSON; text with `encode` where a character needs it."""
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
        array, row = _array_of(frame, row, groups)
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


def _array_of(frame: pl.DataFrame, place: Place, groups: Sequence[_Group]) -> tuple[pa.StructArray, Place]:
    """Columns of a frame as an array of objects. Raises _Unclear."""
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
