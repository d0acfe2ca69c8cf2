"""Lines of JSON: their fields as columns, and their structures.

A structure says which keys the objects have, in their order, and of which kind each value is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from ajet_sdk.tasks.task_rows import QUERY_COLUMNS
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
    """The value of each line at a path, as JSON in a polars series of text: null where there is none.

    None where DuckDB cannot read a line (half a surrogate pair).
    """
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
