"""Rows of any shape as columns of one table, without loss: which kinds of value there are, and the type of each place.

A table's column has one type. So the shape of all rows is gathered first (`Shape.observe`, and `Shape.declare` for what
the tables say that rows were read from), then each place gets an Arrow type (`Place`): the declared one where there is
one, else one for its values. Two things Arrow has no word for are kept beside it, in the schema's metadata, where
`ajet_sdk.tasks.rows` finds them when the file is read:

- a place whose values have several types, or that Arrow cannot hold (an empty object, an integer past 64 bits, half a
  surrogate pair, an object of hundreds of keys), is JSON text;
- a key that some rows lack is null there, and taken out again on reading. Where other rows have it as a true null, the
  place is JSON text, in which `null` is not the same as nothing (of a declared type, it is null).

An integer among floats becomes the float of the same value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ajet_sdk.errors import TaskError
from ajet_tools.dataset.files.stored import Table, fields_of

__all__ = ["Declaration", "Place", "Shape", "encoded"]

_MOST_FIELDS = 256
_MOST_COLUMNS = 10_000
_DEEPEST = 16
_EXACT = 1 << 53
_LARGEST = 1 << 63


@dataclass(frozen=True)
class Declaration:
    """What a table says of a place."""

    table: str
    field: Any
    feature: Any = None
    """What Hugging Face's `datasets` notes of it."""
    firm: bool = True
    """Rows are of it; what is only a wish (the types of seeds) gives way to values that don't fit."""


class Shape:
    """Which kinds of value stand at a place, gathered over rows."""

    __slots__ = ("_depth", "copies", "declared", "dicts", "fields", "item", "kinds", "largest", "seen", "tables",
                 "wide")  # fmt: skip

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self.tables: list[Table] = []
        """Of the rows themselves: those that were declared."""
        self.copies: list[Callable[[], None]] | None = []
        """Ends the copying of each file that batches are copied to; None where none may be."""
        self.declared: list[Declaration] = []
        """What tables say of it, each type once."""
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

    def declare(self, table: Table, *, firm: bool = True) -> None:
        """The columns of a table are among those here, with its types."""
        if table in self.tables:
            return
        self.tables.append(table)
        features = table.features or {}
        self._declare_fields(table.name, table.schema, table.notes, features, firm)

    def _declare_fields(
        self, table: str, fields: Any, notes: Mapping[str, Any], features: Mapping[str, Any], firm: bool
    ) -> None:
        import pyarrow as pa

        for field in fields:
            note, feature = notes.get(field.name, {}), features.get(field.name)
            place = self.fields.setdefault(field.name, Shape(self._depth + 1))
            if "json" in note or "item" in note:  # ajet's own encoding of values without a type
                continue
            one = Declaration(table, field, feature, firm)
            if not any(one.field.type == other.field.type and feature == other.feature for other in place.declared):
                place.declared.append(one)
            if pa.types.is_struct(field.type):
                inner = [field.type.field(i) for i in range(field.type.num_fields)]
                place._declare_fields(table, inner, note.get("fields", {}), fields_of(feature), firm)

    def observe(self, value: Any) -> None:
        self.seen += 1
        kind = type(value)
        if kind is str:
            self.kinds.add("str" if _is_utf8(value) else "odd")
        elif kind is int:
            self.kinds.add("int")
            self.largest = max(self.largest, _LARGEST - 1 if value == -_LARGEST else abs(value))  # int64 holds both
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
                if not _is_utf8(name):
                    self.kinds.add("odd")
            shape.observe(inner)
        if self._depth and not self.declared and (len(self.fields) > _MOST_FIELDS or self._depth > _DEEPEST):
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


def _is_utf8(text: str) -> bool:
    """UTF-8 can hold it: there is no half of a surrogate pair in it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Place:
    """One place of the rows of a shape, the row itself to begin with, and the Arrow type that its values get."""

    def __init__(
        self,
        shape: Shape,
        parent: Shape | None = None,
        path: str = "",
        *,
        undeclared: Collection[str] = (),
    ) -> None:
        """`undeclared` are the paths at which values did not fit what tables declare.

        Raises TaskError where tables declare types of which none holds the values of all.
        """
        import pyarrow as pa

        self.path = path
        self.declared = shape.declared
        absent = parent is not None and shape.seen < parent.dicts
        self.children: dict[str, Place] | None = None
        self.tree: _Tree | None = None
        """How its values are encoded, where the type is found from them."""
        self.feature: Any = None
        self.notes: _Tree = {}
        self.nullable = True
        if parent is None or (path not in undeclared and _is_object(shape)):
            names = (name for name, inner in shape.fields.items() if inner.seen or not shape.dicts)
            self.children = {
                name: Place(shape.fields[name], shape, f"{path}.{name}" if path else name, undeclared=undeclared)
                for name in names
            }
            below = {name: one.notes for name, one in self.children.items() if one.notes}
            self.notes = {"fields": below} if below else {}
            self.type = self._struct()
            own = next((one.feature for one in self.declared if one.feature and not fields_of(one.feature)), None)
            unchanged = own is not None and any(one.field.type == self.type for one in self.declared)
            self.feature = own if unchanged else {name: one.feature for name, one in self.children.items()}
        elif (one := self._declared_type(shape, path not in undeclared)) is not None:
            self.type = one
            self.feature = next((each.feature for each in self.declared if each.field.type == one), None)
        else:
            self.tree = _tree(shape, parent)
            self.notes = _notes(self.tree)
            self.type = _arrow(shape, self.tree)
        if self.declared and self.tree is None:
            nulls = "null" in shape.kinds and not pa.types.is_floating(self.type)  # there it may be NaN
            self.nullable = absent or nulls or any(one.field.nullable for one in self.declared)
        if absent and self.tree is None and "null" not in shape.kinds:
            self.notes = {**self.notes, "absent": True}
        if self.feature is None:
            self.feature = _feature(self.type)

    def field(self, name: str) -> Any:
        import pyarrow as pa

        metadata = next((one.field.metadata for one in self.declared if one.field.type == self.type), None)
        return pa.field(name, self.type, self.nullable, metadata)

    def _struct(self) -> Any:
        import pyarrow as pa

        return pa.struct([one.field(name) for name, one in (self.children or {}).items()])

    def _declared_type(self, shape: Shape, fitting: bool) -> Any:
        """None where nothing is declared, or the values decide: all are as JSON has them, or not `fitting`."""
        if not self.declared:
            return None
        self._check_labels()
        given = [one.field.type for one in self.declared]
        natural = all(map(_is_natural, given))
        found = _one_type(given)
        if found is not None and fitting and (not natural or _fits(shape, found)):
            return found
        if natural or not any(one.firm for one in self.declared):
            return None
        told = ", ".join(f"{one.field.type} in {one.table}" for one in self.declared)
        raise TaskError(f"{self.path} is {told}, which do not fit one type; write .jsonl, or convert the values first")

    def _check_labels(self) -> None:
        """A class label is a number whose name stands in the schema: other names are other labels."""
        known = [one for one in self.declared if _labels(one.feature)]
        for one in known[1:]:
            if _labels(one.feature) != _labels(known[0].feature):
                raise TaskError(
                    f"{self.path} is a class label of {_labels(known[0].feature)} in {known[0].table} and of "
                    f"{_labels(one.feature)} in {one.table}: the same number means different labels. Make them "
                    "the same first"
                )


def _is_object(shape: Shape) -> bool:
    """Tables declare objects, and there are only such."""
    import pyarrow as pa

    given = [one.field.type for one in shape.declared if not pa.types.is_null(one.field.type)]
    return bool(given) and all(map(pa.types.is_struct, given)) and shape.kinds <= {"dict", "null"}


def _fits(shape: Shape, type_: Any) -> bool:
    """Whether a natural type holds all values that were seen."""
    import pyarrow as pa

    kinds = shape.kinds - {"null"}
    if pa.types.is_list(type_):
        return kinds <= {"list"} and (shape.item is None or _fits(shape.item, type_.value_type))
    if pa.types.is_struct(type_):
        known = {type_.field(i).name: type_.field(i).type for i in range(type_.num_fields)}
        fields = {name: one for name, one in shape.fields.items() if one.seen}
        return kinds <= {"dict"} and all(name in known and _fits(one, known[name]) for name, one in fields.items())
    if type_ == pa.float64():
        return kinds <= {"float", "int"} and shape.largest <= _EXACT
    if type_ == pa.int64():
        return kinds <= {"int"} and shape.largest < _LARGEST
    return kinds <= ({"str"} if type_ == pa.string() else {"bool"} if type_ == pa.bool_() else set())


def _one_type(given: list[Any]) -> Any:
    """The type that holds the values of all of them; None where there is none."""
    import pyarrow as pa

    types = [one for one in given if not pa.types.is_null(one)] or given
    if all(one == types[0] for one in types):
        return types[0]
    if len({_family(one) for one in types}) > 1:
        return None
    try:
        return pa.unify_schemas([pa.schema([("", one)]) for one in types], promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _family(type_: Any) -> str:
    """Types of one family differ in their width alone."""
    import pyarrow as pa

    kinds = {"int": pa.types.is_integer, "float": pa.types.is_floating, "decimal": pa.types.is_decimal,
             "text": lambda one: pa.types.is_string(one) or pa.types.is_large_string(one),
             "bytes": lambda one: pa.types.is_binary(one) or pa.types.is_large_binary(one)}  # fmt: skip
    return next((name for name, fits in kinds.items() if fits(type_)), str(type_))


def _is_natural(type_: Any) -> bool:
    """The type that values would get which came as JSON: nothing is lost where JSON stands between."""
    import pyarrow as pa

    if pa.types.is_list(type_):
        return _is_natural(type_.value_type)
    if pa.types.is_struct(type_):
        return all(_is_natural(type_.field(i).type) for i in range(type_.num_fields))
    return type_ in (pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.null())


def _labels(feature: Any) -> Any:
    """The names of the class labels in what `datasets` notes of a column."""
    if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
        return feature.get("names")
    if isinstance(feature, dict):
        return {name: found for name, inner in feature.items() if (found := _labels(inner))}
    return [found for inner in feature if (found := _labels(inner))] if isinstance(feature, list) else None


def _feature(type_: Any) -> Any:
    """What `datasets` notes of a column that ajet added."""
    import pyarrow as pa

    if pa.types.is_struct(type_):
        return {type_.field(i).name: _feature(type_.field(i).type) for i in range(type_.num_fields)}
    if pa.types.is_list(type_):
        return [_feature(type_.value_type)]
    name = str(type_)
    return {
        "dtype": {"double": "float64", "float": "float32", "halffloat": "float16"}.get(name, name),
        "_type": "Value",
    }


_Tree = dict[str, Any]
"""How values at a place are encoded, as in `ajet_sdk.tasks.rows`; of `fields` all are there."""


def _tree(shape: Shape, parent: Shape | None = None) -> _Tree:
    tree: _Tree = {}
    if parent is not None and shape.seen < parent.dicts:
        tree["absent"] = True
    if shape.is_mixed or ("absent" in tree and "null" in shape.kinds):
        tree["json"] = True
    elif shape.item is not None:
        tree["item"] = _tree(shape.item)
    elif shape.fields:
        fields = {name: inner for name, inner in shape.fields.items() if inner.seen}
        tree["fields"] = {name: _tree(inner, shape) for name, inner in fields.items()}
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
        return pa.struct([(name, _arrow(shape.fields[name], inner)) for name, inner in tree["fields"].items()])
    kinds = shape.kinds - {"null"}
    if kinds == {"int", "float"}:
        return pa.float64()
    types = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    return types[kinds.pop()] if kinds else pa.null()


def encoded(value: Any, tree: _Tree) -> Any:
    """A value as it stands in a column of that encoding."""
    if "json" in tree:
        return json.dumps(value)
    if value is None:
        return None
    if "item" in tree:
        return [encoded(item, tree["item"]) for item in value]
    if "fields" in tree:
        return {name: encoded(inner, tree["fields"][name]) for name, inner in value.items()}
    return value
