"""Blocks of some thousand rows in their stored form: lines of JSON, or a record batch of a table.

Commands that select rows read columns of a block (polars) and pass its lines or Arrow rows on
unchanged. Row objects are built only for a model, a judge or a user's function.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.row_names import INNER, QUERY_COLUMNS, asking_pattern, is_asking
from ajet_sdk.tasks.task_rows import Row as TaskRow
from ajet_tools.dataset.files.arrays import change, convert, infer, with_statistics
from ajet_tools.dataset.files.lines import Path, Wanted, decode, read_columns, with_fields
from ajet_tools.dataset.files.places import Columns, Place, merged
from ajet_tools.dataset.files.values import objects_of

ROWS = 8192
QUERIES: Sequence[Path] = [(name,) for name in QUERY_COLUMNS]
"""The columns that `texts` reads."""
_UNCLEAR = r"^(?:[\[{]|-?[0-9][0-9.eE+-]*$|true$|false$)"
"""Matches text that may also be a list, an object, a number or a boolean."""
_ASKING = asking_pattern()
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_ESCAPING = json.JSONEncoder(allow_nan=False)


class Irregular(Exception):
    """The columns of a block can't represent its values; read its rows instead."""


@dataclass(frozen=True)
class Row(TaskRow):
    """A row of a dataset and its location, such as `seeds.jsonl line 7`."""

    values: dict[str, Any]
    stored: Stored | None = field(default=None, compare=False, repr=False)
    """The row in its table, from which `Writer.write` takes the types; None if it was read from
    text."""


@dataclass(frozen=True)
class Stored:
    """The location of a row in a table."""

    block: TableBlock
    index: int

    @property
    def columns(self) -> Columns:
        return self.block.table


@dataclass
class LineBlock:
    """Rows as lines of JSON objects."""

    name: str
    lines: pl.Series
    """Stripped lines."""
    numbers: Any
    """Line numbers in the file, from 1, as a numpy array; or a list with the location of each row
    as text."""
    known: dict[Wanted, Any] = field(default_factory=dict, repr=False)
    """Decoded values: columns of text by path, frames by type."""
    asked: list[Wanted] = field(default_factory=list, repr=False)
    """Paths and types requested from earlier blocks of this file; later blocks decode them while
    they are checked."""

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, index: int) -> str:
        number = self.numbers[index]
        return number if isinstance(number, str) else f"{self.name} line {number}"

    def rows(self, indices: Iterable[int] | None = None) -> Iterator[Row]:
        chosen = list(range(len(self)) if indices is None else map(int, indices))
        lines = self.lines if indices is None else self.lines.gather(chosen)
        for index, line in zip(chosen, lines.to_list(), strict=True):
            yield Row(self.where(index), json.loads(line))

    def columns(self, paths: Sequence[Path]) -> dict[Path, pl.Series]:
        """Returns the values at these paths as text. Raises Irregular."""
        if (missing := [path for path in paths if path not in self.known]) and not self.decode(
            missing
        ):
            raise Irregular
        return {path: self.known[path] for path in paths}

    def frame(self, dtype: pl.Struct) -> pl.DataFrame:
        """Returns the fields of a struct type as a frame. Raises Irregular if a value has a
        different type."""
        if dtype not in self.known and not self.decode([dtype]):
            raise Irregular
        return self.known[dtype]  # type: ignore[no-any-return]

    def decode(self, wanted: Sequence[Wanted]) -> bool:
        """Decodes paths and types into `known`; False if a line is invalid JSON or a value has a
        different type."""
        results = decode(self.lines, wanted)
        self.known |= results or {}
        self.asked += (
            [key for key in wanted if key not in self.asked] if results is not None else []
        )
        return results is not None

    def whole(self, dtype: pl.Struct) -> pl.DataFrame | None:
        """Returns a frame with the fields of that type, or None if polars can't decode the lines
        so.

        Later blocks decode the union of the fields requested so far.
        """
        before = next((key for key in self.asked if isinstance(key, pl.Struct)), None)
        wanted = dtype if before is None else with_fields(dtype, before)
        if wanted != before:
            self.asked[:] = [key for key in self.asked if key != before]
        return self.known[wanted] if wanted in self.known or self.decode([wanted]) else None

    @cached_property
    def texts(self) -> pl.Series:
        """The question of each row (`text_of`)."""
        return _texts(self)

    def with_columns(self, values: Mapping[str, object]) -> LineBlock:
        """Adds fields with a constant value, except where a row has them."""
        rows = ({**row.values, **values, **row.values} for row in self.rows())
        return _block_of(map(Row, map(self.where, range(len(self))), rows), self.name)

    def take(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> LineBlock:
        numbers = (
            self.numbers[indices]
            if isinstance(self.numbers, np.ndarray)
            else [self.numbers[i] for i in indices]
        )
        return LineBlock(self.name, self.lines.gather(np.asarray(indices)), numbers)


@dataclass
class TableBlock:
    """Rows in the columnar form of a table."""

    name: str
    table: Columns
    data: pa.RecordBatch
    first: int = 1
    """Number of its first row in the file, from 1."""
    known: dict[Path, pl.Series] = field(default_factory=dict, init=False, repr=False)
    """Columns of text requested so far, by path."""

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def where(self, index: int) -> str:
        return f"{self.name} row {self.first + index}"

    def rows(self, indices: Iterable[int] | None = None) -> Iterator[Row]:
        chosen = list(range(len(self)) if indices is None else map(int, indices))
        some = self if len(chosen) == len(self) else self.take(chosen)
        for index, values in zip(chosen, objects_of(some.data, self.table), strict=True):
            yield Row(self.where(index), values, Stored(self, index))

    def columns(self, paths: Sequence[Path]) -> dict[Path, pl.Series]:
        self.known |= {path: self._text(path) for path in paths if path not in self.known}
        return {path: self.known[path] for path in paths}

    def _text(self, path: Sequence[str]) -> pl.Series:
        """Returns a field as text: `[` for a list, an object or a type that JSON lacks."""
        at = self.data.schema.get_field_index(path[0])
        if at < 0:
            return pl.Series(dtype=pl.String).extend_constant(None, len(self))
        if self.table.fields[path[0]].notes:
            raise Irregular
        array, remaining = self.data.column(at), list(path[1:])
        while remaining and pa.types.is_struct(array.type):
            index = array.type.get_field_index(remaining[0])
            if index < 0:
                return pl.Series(dtype=pl.String).extend_constant(None, len(self))
            array = array.flatten()[index]
            remaining.pop(0)
        if remaining and not pa.types.is_null(array.type):
            raise Irregular
        types = pa.types
        if any(
            fits(array.type)
            for fits in (types.is_string, types.is_large_string, types.is_integer, types.is_null)
        ):
            return pl.Series(array).cast(pl.String)
        if types.is_boolean(array.type):
            return pl.Series(array).replace_strict(
                {True: "true", False: "false"}, return_dtype=pl.String
            )
        return pl.Series(
            ["[" if valid else None for valid in array.is_valid().to_pylist()], dtype=pl.String
        )

    def frame(self, dtype: pl.Struct) -> pl.DataFrame:
        """Returns the existing columns of a struct type as a frame. Raises Irregular if polars
        lacks a type."""
        names = [
            wanted_field.name
            for wanted_field in dtype.fields
            if wanted_field.name in self.table.fields
        ]
        data = self.data.select(names or self.data.schema.names[:1])
        if "decimal256" in str(data.schema):  # not supported by polars
            raise Irregular
        return pl.DataFrame(data)

    @cached_property
    def texts(self) -> pl.Series:
        return _texts(self)

    def take(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> TableBlock:
        return replace(self, data=self.data.take(pa.array(indices, pa.int64())))

    def changed(self, values: Sequence[Mapping[str, object]]) -> TableBlock:
        """Replaces the values of its rows; unchanged values keep their type. Raises Misfit."""
        data, table = change(self.data, self.table, objects_of(self.data, self.table), values)
        return replace(self, table=table, data=data)

    def with_columns(self, values: Mapping[str, object]) -> TableBlock:
        """Adds columns with a constant value, except those that exist."""
        places = self._places()
        for name, value in values.items():
            array = pa.repeat(pa.scalar(value), len(self))
            places.setdefault(
                name, (Place() if value is None else Place(array.type, table=self.name), array)
            )
        return self._with(places)

    def renamed(self, mapping: Mapping[str, str]) -> TableBlock:
        """Renames columns as `--map` says."""
        places = {
            name: arranged for name, arranged in self._places().items() if name not in mapping
        }
        for name, target in mapping.items():
            root, _, inner = target.partition(".")
            if root != "metadata":
                places[target] = self._places()[name]
                continue
            before = places.pop("metadata", None)
            if before is None or not before[0].is_json:
                places["metadata"] = _object(
                    {**(_fields(before) if before else {}), inner: self._places()[name]}
                )
        return self._with(places)

    def opened(self) -> TableBlock:
        """Adds the fields of `metadata` as columns."""
        places = self._places()
        return self._with(
            {**(_fields(places["metadata"]) if "metadata" in places else {}), **places}
        )

    def _places(self) -> dict[str, _Arranged]:
        return {
            name: (place, self.data.column(i))
            for i, (name, place) in enumerate(self.table.fields.items())
        }

    def _with(self, places: Mapping[str, _Arranged]) -> TableBlock:
        row = Place(
            fields={name: place for name, (place, _) in places.items()}, table=self.table.row.table
        )
        table = Columns(self.name, row, self.table.metadata)
        data = pa.RecordBatch.from_arrays(
            [array for _, array in places.values()], schema=table.schema
        )
        return replace(self, table=table, data=data)


Block = LineBlock | TableBlock
_Arranged = tuple[Place, pa.Array]


def _fields(arranged: _Arranged) -> dict[str, _Arranged]:
    place, array = arranged
    if place.fields is None or place.is_json:
        return {}
    return dict(
        zip(place.fields, zip(place.fields.values(), array.flatten(), strict=True), strict=True)
    )


def _object(fields: Mapping[str, _Arranged]) -> _Arranged:
    some = {name: replace(inner, nullable=True) for name, (inner, _) in fields.items()}
    place = Place(
        fields=some, table=next((inner.table for inner in some.values() if inner.table), None)
    )
    array = pa.StructArray.from_arrays(
        [array for _, array in fields.values()],
        fields=[inner.as_field(name) for name, inner in some.items()],
    )
    return place, array


def json_line(value: object) -> bytes:
    """Encodes a value as a line of JSON. Lone surrogates, which UTF-8 can't encode, are escaped."""
    try:
        return (_ENCODER.encode(value) + "\n").encode()
    except UnicodeEncodeError:
        return (_ESCAPING.encode(value) + "\n").encode()


def encodable(text: str) -> str:
    """Escapes lone surrogates, which polars can't store."""
    return text.encode("utf-8", "backslashreplace").decode()


def blocks_of(rows: Iterable[Row], name: str) -> Iterator[LineBlock]:
    """Groups rows into blocks of lines."""
    remaining = iter(rows)
    while some := list(islice(remaining, ROWS)):
        yield _block_of(some, name)


def _block_of(rows: Iterable[Row], name: str) -> LineBlock:
    pairs = [(json_line(row.values)[:-1].decode(), row.where) for row in rows]
    return LineBlock(
        name,
        pl.Series("line", [line for line, _ in pairs], pl.String),
        [where for _, where in pairs],
    )


def as_lines(block: Block) -> LineBlock:
    return block if isinstance(block, LineBlock) else _block_of(block.rows(), block.name)


def as_table(block: Block) -> TableBlock:
    """Converts lines to a table, with types that hold the values without loss."""
    if isinstance(block, TableBlock):
        return block
    data, columns = read_columns(block.name, block.lines, block.whole) or infer(
        block.name, json.loads(f"[{block.lines.str.join(',').item()}]")
    )
    return TableBlock(block.name, columns, data)


def join(blocks: Sequence[Block], *, lines: bool) -> Block:
    """Joins blocks into one; its rows lose their locations. Raises TaskError if the types can't be
    merged."""
    if lines:
        some = [as_lines(block) for block in blocks]
        return LineBlock("", pl.concat([block.lines for block in some]), [""] * sum(map(len, some)))
    tables = [as_table(block) for block in blocks]
    same = all(block.table is tables[0].table for block in tables)
    updated = [
        block.table if same else with_statistics(block.data, block.table) for block in tables
    ]
    to = merged(updated)
    data = [
        convert(block.data, columns, to) for block, columns in zip(tables, updated, strict=True)
    ]
    whole = pa.Table.from_batches(data, to.schema).unify_dictionaries().combine_chunks()
    return TableBlock(tables[0].name, to, (whole.to_batches() or data)[0])


def _texts(block: Block) -> pl.Series:
    """Returns the question of each row: from its only column, or from the row where several fields
    may ask."""
    try:
        columns = block.columns(QUERIES)
    except Irregular:
        return pl.Series(
            "text", [encodable(text_of(row.values)) for row in block.rows()], pl.String
        )
    filled = [series for series in columns.values() if series.null_count() < len(series)]
    texts = filled[0] if filled else columns[QUERIES[0]]
    several = _asked_by_several(block)
    if len(filled) > 1:
        texts = pl.select(pl.coalesce(filled)).to_series()
        number = pl.select(
            pl.sum_horizontal([series.is_not_null().cast(pl.Int8) for series in filled])
        ).to_series()
        several = several | (number > 1)
    unclear = texts.str.contains(rf"^\s*$|{_UNCLEAR}").fill_null(True)
    to_read = (unclear | several).arg_true()
    if not len(to_read):
        return texts
    return texts.clone().scatter(
        to_read, [encodable(text_of(row.values)) for row in block.rows(to_read)]
    )


def _asked_by_several(block: Block) -> pl.Series:
    """Marks the rows in which a field besides `QUERY_COLUMNS` may ask; in lines a text that looks
    like one may too."""
    if isinstance(block, LineBlock):
        return block.lines.str.contains(_ASKING)
    names = [name for name in block.data.schema.names if name not in QUERY_COLUMNS]
    for name in set(INNER).intersection(names):
        kind = block.data.schema.field(name).type
        names += (
            [kind.field(index).name for index in range(kind.num_fields)]
            if pa.types.is_struct(kind)
            else [name]
        )
    is_several = any(is_asking(name) for name in names)
    return pl.repeat(is_several, len(block), eager=True)
