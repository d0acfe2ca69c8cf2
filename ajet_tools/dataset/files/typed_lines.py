"""Lines of JSON as a table, by their columns: the types are those that `arrays.find` finds from the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ajet_tools.dataset.files.arrays import ABSENT, DEEPEST, EXACT, MOST_FIELDS, NOWHERE, objects
from ajet_tools.dataset.files.lines import Path, Structure, kind_in
from ajet_tools.dataset.files.places import Place

__all__ = ["OnlyRows", "array_of", "as_json"]


class OnlyRows(Exception):
    """Columns do not tell the types: there are lists, numbers beside text, hundreds of fields."""


def array_of(groups: Sequence[tuple[Structure | None, Any]], texts: Mapping[Path, Any]) -> tuple[Any, Place]:
    """Lines as an Arrow array of structs, and its type. Raises OnlyRows.

    Args:
        groups: what `structures` says of the lines.
        texts: what stands at each path, as a polars series of text.
    """
    found, rows = [one for one, _ in groups], [indices for _, indices in groups]
    if any(one is None for one in found):
        raise OnlyRows
    return _found((), found, rows, texts)


def _found(path: Path, values: Sequence[Any], rows: Sequence[Any], texts: Mapping[Path, Any]) -> tuple[Any, Place]:
    """`values` has what each structure has at that path: a structure, a kind, ABSENT or NOWHERE."""
    import polars as pl
    import pyarrow as pa

    kinds = {kind_in(one) for one in values if one is not ABSENT and one is not NOWHERE} - {"null"}
    flags: dict[str, Any] = {"absent": ABSENT in values, "nulls": "null" in values}
    lacking = flags["absent"] and flags["nulls"]
    if not kinds and not lacking:
        return pa.nulls(sum(map(len, rows))), Place(**flags)
    if kinds == {"object"} and not lacking and len(path) < DEEPEST:
        return _found_objects(path, values, rows, texts, flags)
    if not kinds <= {"text", "integer", "bool"} and (lacking or not kinds <= {"integer", "number"}):
        raise OnlyRows
    column = texts[path]
    if kinds == {"text"} and not lacking:
        return column.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.string()), Place(pa.string(), **flags)
    if kinds == {"bool"} and not lacking:
        return (column == "true").to_arrow(), Place(pa.bool_(), **flags)
    if kinds <= {"integer", "number"} and kinds and not lacking:
        whole = pl.concat([column.gather(some) for one, some in zip(values, rows, strict=True) if one == "integer"] or
                          [column.clear()]).cast(pl.Int128)  # fmt: skip
        least, most = whole.min() or 0, whole.max() or 0
        large = bool(max(-least, most) > EXACT)
        if "number" not in kinds and least >= -(1 << 63) and most < 1 << 63:
            return column.cast(pl.Int64).to_arrow(), Place(pa.int64(), large=large, **flags)
        if "number" in kinds:
            if large or column.str.contains(r"^-?[0-9]{16,}$").any():  # also integers past 64 bits
                raise OnlyRows
            return column.cast(pl.Float64).to_arrow(), Place(pa.float64(), **flags)
    made = pl.repeat(None, len(column), dtype=pl.String, eager=True)
    for one, some in zip(values, rows, strict=True):
        if one is not ABSENT and one is not NOWHERE:
            made = made.scatter(some, as_json(column.gather(some), one, json.dumps))
    return made.to_arrow(compat_level=pl.CompatLevel.oldest()).cast(pa.string()), Place(json=True, **flags)


def _found_objects(
    path: Path, values: Sequence[Any], rows: Sequence[Any], texts: Mapping[Path, Any], flags: dict[str, Any]
) -> tuple[Any, Place]:
    names = dict.fromkeys(name for one in values if isinstance(one, dict) for name in one)
    if not names or len(names) > MOST_FIELDS:
        raise OnlyRows
    fields = {}
    for name in names:
        inner = [one.get(name, ABSENT) if isinstance(one, dict) else NOWHERE for one in values]
        fields[name] = _found((*path, name), inner, rows, texts)
    nulls = np.zeros(sum(map(len, rows)), bool)
    for one, some in zip(values, rows, strict=True):
        nulls[some] = not isinstance(one, dict)
    return objects(fields, nulls.tolist()), Place(fields={name: place for name, (_, place) in fields.items()}, **flags)


def as_json(column: Any, kind: str, encode: Callable[[str], str]) -> Any:
    """A column of text, integers, truth values or nulls as JSON; text with `encode` where a character needs it."""
    import polars as pl

    if kind == "null":
        return "null"
    if kind != "text":
        return column
    plain = r'["\\\x00-\x1f]' if encode("ä") == '"ä"' else r'["\\\x00-\x1f]|[^\x00-\x7f]'
    escaped = column.str.contains(plain).arg_true()
    if len(escaped):
        texts = [encode(text)[1:-1] for text in column.gather(escaped)]
        column = column.clone().scatter(escaped, pl.Series(texts, dtype=pl.String))
    return pl.select('"' + pl.lit(column) + '"').to_series()
