"""Fields of lines of JSON as columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from typing import Any

import polars as pl

Path = tuple[str, ...]
"""Of a field, such as `("metadata", "level")`."""
HALF_PAIR = re.compile(r"\\u[dD][89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w)\\u[dD][c-fC-F]")
"""The escape of half a surrogate pair, or what looks so."""


def decode(lines: Any, wanted: Sequence[Any]) -> dict[Any, Any] | None:
    """The fields at paths as columns of text, and frames of struct types; None where polars cannot read lines so."""
    escaped = lines.filter(lines.str.contains(r"\\u[dD][89a-fA-F]"))
    if any(map(HALF_PAIR.search, escaped)):  # polars has a NUL there
        return None
    known: dict[Any, Any] = {}
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


def _together(wanted: Sequence[Any]) -> list[tuple[Any, list[Path]]]:
    """Types to read lines with, and the paths that each is for; a field and one within it are read apart."""
    groups: list[list[Path]] = []
    for path in (item for item in wanted if isinstance(item, tuple)):
        for group in groups:
            if not any(all(a == b for a, b in zip(path, known_path, strict=False)) for known_path in group):
                group.append(path)
                break
        else:
            groups.append([path])
    frames: list[tuple[Any, list[Path]]] = [(item, []) for item in wanted if not isinstance(item, tuple)]
    return [*frames, *((_type_of(group), group) for group in groups)] or [(_type_of([]), [])]


def _type_of(paths: Sequence[Path]) -> Any:
    """The type of objects that have text at these paths."""
    inner: dict[str, list[Path]] = {}
    for path in paths:
        inner.setdefault(path[0], []).append(path[1:])
    fields = {name: _type_of(below) if all(below) else pl.String for name, below in inner.items()}
    return pl.Struct(fields or {"task_id": pl.String})
