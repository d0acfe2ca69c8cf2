"""Rows of any shape as columns of one table, without loss.

A table's column has one type. So the shape of all rows is gathered first (`Shape.observe`), then each place gets an
Arrow type (`Columns`). Two things Arrow has no word for are kept beside it, in the schema's metadata, where
`ajet_sdk.tasks.encoded` finds them when the file is read:

- a place whose values have several types, or that Arrow cannot hold (an empty object, an integer past 64 bits, half a
  surrogate pair, an object of hundreds of keys), is JSON text;
- a key that some rows lack is null there, and taken out again on reading. Where other rows have it as a true null, the
  place is JSON text, in which `null` is not the same as nothing.

An integer among floats becomes the float of the same value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.encoded import KEY

__all__ = ["Columns", "Shape"]

_MOST_FIELDS = 256
_MOST_COLUMNS = 10_000
_DEEPEST = 16
_EXACT = 1 << 53
_LARGEST = 1 << 63


class Shape:
    """Which kinds of value stand at a place, gathered over rows."""

    __slots__ = ("_depth", "dicts", "fields", "item", "kinds", "largest", "seen", "wide")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self.kinds: set[str] = set()
        self.seen = 0
        """Times that something stood here, null included."""
        self.dicts = 0
        """Times that it was an object."""
        self.largest = 0
        """The largest integer, by size."""
        self.fields: dict[str, Shape] = {}
        self.item: Shape | None = None
        self.wide = False
        """An object of more keys than columns are made for; its fields are no longer gathered."""

    def observe(self, value: Any) -> None:
        self.seen += 1
        kind = type(value)
        if kind is str:
            self.kinds.add("str" if _sound(value) else "odd")
        elif kind is int:
            self.kinds.add("int")
            self.largest = max(self.largest, abs(value))
        elif kind is dict:
            self.kinds.add("dict")
            self.dicts += 1
            if not self.wide:
                self._observe_fields(value)
        elif kind is list:
            self.kinds.add("list")
            if self.item is None:
                self.item = Shape(self._depth + 1)
            if self._depth <= _DEEPEST:
                for item in value:
                    self.item.observe(item)
        else:
            self.kinds.add({type(None): "null", bool: "bool", float: "float"}.get(kind, "odd"))

    def _observe_fields(self, value: Mapping[str, Any]) -> None:
        for name, inner in value.items():
            shape = self.fields.get(name)
            if shape is None:
                shape = self.fields[name] = Shape(self._depth + 1)
                if not _sound(name):
                    self.kinds.add("odd")
            shape.observe(inner)
        if self._depth and (len(self.fields) > _MOST_FIELDS or self._depth > _DEEPEST):
            self.wide = True
            self.fields = {}
        elif len(self.fields) > _MOST_COLUMNS:
            raise TaskError(
                f"these rows have more than {_MOST_COLUMNS:,} different columns, too many for Parquet; write .jsonl"
            )

    @property
    def is_mixed(self) -> bool:
        """No one Arrow type holds what stands here."""
        kinds = self.kinds - {"null"}
        if kinds == {"int", "float"}:
            return self.largest > _EXACT
        if kinds == {"int"}:
            return self.largest >= _LARGEST
        if kinds == {"dict"}:
            return self.wide or not self.fields
        return len(kinds) > 1 or "odd" in kinds or (kinds == {"list"} and self._depth > _DEEPEST)


def _sound(text: str) -> bool:
    """UTF-8 can hold it: there is no half of a surrogate pair in it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Columns:
    """The Arrow schema for rows of a shape, and rows as tables of it."""

    def __init__(self, shape: Shape) -> None:
        import pyarrow as pa

        if "odd" in shape.kinds:
            raise TaskError("the name of a column is not text that UTF-8 can hold; write .jsonl")
        self._tree = {"fields": {name: _tree(inner, shape) for name, inner in shape.fields.items()}}
        fields = [pa.field(name, _arrow(inner, self._tree["fields"][name])) for name, inner in shape.fields.items()]
        notes = _notes(self._tree)
        self.schema = pa.schema(fields, metadata={KEY: json.dumps(notes).encode()} if notes else None)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """A `pyarrow.Table` of the rows, which must be among those that the shape was gathered of."""
        import pyarrow as pa

        return pa.Table.from_pylist([_encoded(row, self._tree) for row in rows], schema=self.schema)


_Tree = dict[str, Any]
"""How values at a place are encoded, as in `ajet_sdk.tasks.encoded`; of `fields` all are there."""


def _tree(shape: Shape, parent: Shape | None = None) -> _Tree:
    tree: _Tree = {}
    if parent is not None and shape.seen < parent.dicts:
        tree["absent"] = True
    if shape.is_mixed or ("absent" in tree and "null" in shape.kinds):
        tree["json"] = True
    elif shape.item is not None:
        tree["item"] = _tree(shape.item)
    elif shape.fields:
        tree["fields"] = {name: _tree(inner, shape) for name, inner in shape.fields.items()}
    return tree


def _notes(tree: _Tree) -> _Tree:
    """What has to be undone on reading; empty where nothing has."""
    notes: _Tree = {name: True for name in ("absent", "json") if name in tree}
    if below := {name: kept for name, inner in tree.get("fields", {}).items() if (kept := _notes(inner))}:
        notes["fields"] = below
    if "item" in tree and (kept := _notes(tree["item"])):
        notes["item"] = kept
    return notes


def _arrow(shape: Shape, tree: _Tree) -> Any:
    import pyarrow as pa

    if "json" in tree:
        return pa.string()
    if "item" in tree:
        return pa.list_(_arrow(shape.item, tree["item"]) if shape.item else pa.null())
    if "fields" in tree:
        return pa.struct([(name, _arrow(inner, tree["fields"][name])) for name, inner in shape.fields.items()])
    kinds = shape.kinds - {"null"}
    if kinds == {"int", "float"}:
        return pa.float64()
    types = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    return types[kinds.pop()] if kinds else pa.null()


def _encoded(value: Any, tree: _Tree) -> Any:
    if "json" in tree:
        return json.dumps(value)
    if value is None:
        return None
    if "item" in tree:
        return [_encoded(item, tree["item"]) for item in value]
    if "fields" in tree:
        return {name: _encoded(inner, tree["fields"][name]) for name, inner in value.items()}
    return value
