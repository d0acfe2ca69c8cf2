"""SQL over the rows of a dataset (DuckDB): a WHERE condition, or any SELECT.

What is derived from a text is a function: `chars(main_query) < 500`,
`language(metadata.answer) = 'en'`. In a WHERE, what is derived from the row's question is a column
too (`text`, `chars`, `words`, `language`), and `has('text')` searches it; a text without any
operator is searched for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.row_names import is_asking
from ajet_sdk.trace.scratch import spill_directory
from ajet_tools.dataset.curation.descent import marker
from ajet_tools.dataset.curation.fields import unknown_field
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.files.blocks import Block, encodable
from ajet_tools.dataset.files.columns import LINE, LINES, lost_in_text
from ajet_tools.dataset.files.json_columns import MARK, identifier, one_chunk
from ajet_tools.dataset.files.query_tables import RAW, QueryTables
from ajet_tools.dataset.files.rows import Rows
from ajet_tools.dataset.files.writer import Writer, writes_table
from ajet_tools.text.conditions import condition, literal

_ROWS = 8192
_DERIVED = ("text", "chars", "words", "language")
_MACROS = {
    "text": "CAST(x AS VARCHAR)",
    "chars": "length(x)",
    "words": r"len(regexp_extract_all(x, '\S+'))",
}
_NUMBER = "number_of_ajet"
_AS_TEXT = ("INTERVAL", "BIT", "BIGNUM")
"""Types of DuckDB that Arrow lacks."""
_WIDE = ("HUGEINT", "UHUGEINT", "DECIMAL(38,0)")
_SCALARS = ("VARCHAR", "BOOLEAN", "BIGINT", "INTEGER", "UBIGINT")
_PRINTED = ("DATE", "TIME", "DECIMAL")
_COUNT = re.compile(r"\bcount\s*\(\s*\*\s*\)", re.I)
_MISSING = re.compile(
    r'Referenced (?:column|table) "([^"]+)" not found|Could not find key "([^"]+)" in struct'
)


def _connect(path: Path | None = None) -> Any:
    """Opens a database with our functions, in memory or in a file."""
    import duckdb

    def languages(texts: pa.Array) -> pa.Array:
        found = [None if text is None else language_of(text) for text in texts.to_pylist()]
        return pa.array(found, pa.string())

    settings = {"threads": 1, "memory_limit": "1GB", "temp_directory": str(spill_directory())}
    connection = duckdb.connect(str(path or ":memory:"), config=settings)
    for name, meaning in _MACROS.items():
        connection.execute(f"CREATE MACRO {name}(x) AS {meaning}")
    connection.create_function("language", languages, ["VARCHAR"], "VARCHAR", type="arrow")
    return connection


def _has(needle: str) -> str:
    return f"contains(lower(text), lower({literal(needle)}))"


class Where:
    """A SQL condition on the columns of a dataset."""

    def __init__(self, text: str, rows: Rows) -> None:
        """Reads the rows, for the types of their columns. Raises ConfigError for an invalid
        condition."""
        self.text = text
        self._tables = QueryTables(rows, text.casefold())
        self._names = {name.casefold() for name in self._tables.names}
        self._sql = condition(text, {"has": _has}, self._names | {*_DERIVED})
        self._asks_text = re.search(rf"\b(?:{'|'.join(_DERIVED)})\b", self._sql, re.I) is not None
        self._connection = _connect()
        with self._explain():
            [kind] = self._relation(rows.empty()).project(self._sql).types
        if str(kind) not in ("BOOLEAN", '"NULL"'):
            raise ConfigError(
                f"{text!r} is not a condition: its result is {kind}, not true or false"
            )

    def matching(self, block: Block) -> list[int]:
        """Returns the indices of the matching rows of a block."""
        with self._explain():
            found = self._relation(block).filter(self._sql).project(_NUMBER).order(_NUMBER)
            return found.to_arrow_table().column(0).to_pylist()  # type: ignore[no-any-return]

    def _relation(self, block: Block) -> Any:
        """Returns the columns, what is derived from the question, and row numbers."""
        more = {_NUMBER: pa.array(np.arange(len(block)))}
        derived = []
        if self._asks_text and "text" not in self._names:
            more["text"] = pa.array(map(encodable, block.texts), pa.string())
            for name in _DERIVED[1:]:
                if name not in self._names:
                    derived.append(f"{name}(text) AS {name}")
        relation = self._tables.relation(self._connection, block, **more)
        return relation.project(", ".join(["*", *derived]))

    def _explain(self) -> AbstractContextManager[None]:
        return _explain(self.text, lambda: [*self._tables.paths(), *_DERIVED])


@contextmanager
def _explain(text: str, names: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Converts errors of DuckDB and Arrow to a ConfigError that names the nearest column."""
    import duckdb

    try:
        yield
    except (duckdb.Error, pa.ArrowException) as error:
        message = str(error).partition("\n")[0]
        if missing := _MISSING.search(message):
            raise unknown_field(missing[1] or missing[2], names()) from error
        raise ConfigError(
            f"cannot evaluate {text!r}: {message.partition(': ')[2] or message}"
        ) from error


def select(query: str, rows: Rows, out: str) -> int:
    """Writes the result of a SELECT over the rows, the table `rows` or `self`, and returns the
    number of its rows.

    A column with the name and the type of one of the file keeps its declaration. Raises
    ConfigError.
    """
    if re.match(r"[\s(]*(?:select|with)\b", query, re.I) is None:
        raise ConfigError(f"--sql takes a SELECT over `rows` (got {query!r})")
    is_all = "*" in _COUNT.sub("", query)
    tables = QueryTables(rows, None if is_all else query.casefold(), raw=True)
    with (
        _explain(query, tables.paths),
        TemporaryDirectory() as folder,
        _connect(Path(folder, "rows.duckdb")) as database,
    ):
        for number, block in enumerate(tables.blocks()):
            relation = tables.relation(database, block)
            if number:
                relation.insert_into("rows")
            else:
                relation.create("rows")
        database.execute("CREATE VIEW self AS FROM rows")
        database.execute(f"CREATE TABLE result AS {query.rstrip().rstrip(';')}")
        result = _Result(database, tables, rows, is_text=not writes_table(out))
        # a count or a mean asks nothing, and has no lineage
        has_questions = any(map(is_asking, result.names))
        mark = marker(rows.path, out if has_questions else rows.path)
        schema = mark(result.empty()).data.schema
        with Writer(out, schema=schema, order=result.names) as writer:
            for block in result.blocks():
                writer.write_block(mark(block))
    return writer.rows


class _Result:
    """The result of a SELECT: columns of a table, and JSON."""

    def __init__(self, database: Any, tables: QueryTables, rows: Rows, *, is_text: bool) -> None:
        """With `is_text`, all computed columns are JSON that can be."""
        self._path = rows.path
        self._metadata = rows.schema.metadata
        self._declared: dict[str, pa.Field] = {}
        """Columns that are as the file declares them."""
        self._result = database.table("result")
        self.names: list[str] = self._result.columns
        source = database.table("rows")
        types = dict(zip(source.columns, map(str, source.types), strict=True))
        declared = {column.name: column for column in tables.declared}
        if is_text:  # the others are the same in JSON
            lost = lost_in_text(pa.schema(tables.declared))
            declared = {name: column for name, column in declared.items() if name in lost}
        columns = []
        members = []
        for name, kind in zip(self.names, map(str, self._result.types), strict=True):
            column = identifier(name)
            is_declared = name in declared and types[name] == kind
            text = self._json(column, kind, is_text=is_text and not is_declared)
            if text is not None:
                key = literal(f"{json.dumps(name)}: ")
                members.append(f"{key} || coalesce(CAST({text} AS VARCHAR), 'null')")
            elif kind in _AS_TEXT:
                columns.append(f"CAST({column} AS VARCHAR) AS {column}")
            else:
                columns.append(column)
                if is_declared:
                    self._declared[name] = declared[name]
        if members:
            line = f"'{{' || concat_ws(', ', {', '.join(members)}) || '}}'"
            columns.append(f"{line} AS {identifier(LINE)}")
        self._relation = self._result.project(", ".join(columns))

    def _json(self, column: str, kind: str, *, is_text: bool) -> str | None:
        """Returns the JSON of a column: of mixed values, of objects with their JSON, of integers of
        any size, of text with half a surrogate pair; None if it is no JSON."""
        raw = identifier(RAW)
        if kind == "JSON":
            return column
        if kind in _WIDE:
            return f"CAST({column} AS VARCHAR)"
        if raw in kind and kind.endswith("[]"):
            items = f"list_transform({column}, lambda x: x.{raw})"
            return f"'[' || array_to_string({items}, ', ') || ']'"
        if raw in kind:
            return f"{column}.{raw}"
        if kind == "DOUBLE" and is_text:
            return f"CASE WHEN isfinite({column}) THEN to_json({column}) END"
        if is_text and kind in _SCALARS:
            return f"to_json({column})"
        if is_text and kind.startswith(_PRINTED):
            return f"to_json(CAST({column} AS VARCHAR))"
        if kind == "VARCHAR":
            marked = self._result.filter(f"contains({column}, '{MARK}')")
            if marked.limit(1).fetchall():
                return f"to_json({column})"
        return None

    def empty(self) -> Block:
        return self._block(self._relation.limit(0).to_arrow_table())

    def blocks(self) -> Iterator[Block]:
        for batch in self._relation.to_arrow_reader(_ROWS):
            yield self._block(pa.Table.from_batches([batch]))

    def _block(self, table: pa.Table) -> Block:
        arrays = []
        fields = []
        for column, values in zip(table.schema, table.columns, strict=True):
            array = one_chunk(values)
            field = self._declared.get(column.name, column)
            if column.name == LINE:
                array = pc.replace_substring(array, MARK, "\\u")
                field = LINES.field(LINE)
            arrays.append(array.cast(field.type))
            fields.append(field)
        schema = pa.schema(fields, self._metadata if self._declared else None)
        data = pa.RecordBatch.from_arrays(arrays, schema=schema)
        return Block(self._path, data, range(1, len(data) + 1), "row")
