"""SQL over the rows of a dataset (polars): a WHERE that chooses rows, or any SELECT.

What the filter language derives of a row is there as columns (`text`, `chars`, `words`, `language`) and as functions
of a column: `chars(main_query) < 500`, `language(metadata.answer) = 'en'`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import polars as pl
import pyarrow as pa

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.files.blocks import Block, Irregular, TableBlock
from ajet_tools.dataset.files.frames import column, read
from ajet_tools.dataset.files.places import Columns, merged
from ajet_tools.dataset.files.tables import files_of, tables_of
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.rows.language import language_of

__all__ = ["Where", "is_sql", "select"]

_ROWS = 8192
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"")
_SIGNS = re.compile(
    r"\b(?:i?like|rlike|between)\s|\bin\s*\(|\bis\s+(?:not\s+)?null\b|\bcase\s+when\b|<>|\|\||\w\(|\s[+*/%-]\s", re.I
)
_DERIVED = ("text", "chars", "words", "language")
_CALL = re.compile(rf"\b({'|'.join(_DERIVED)})\s*\(", re.I)
_LIST = re.compile(r"\s*select\s+(?:distinct\s+)?(.+?)\s+from\s+(?:rows|self)\b", re.I | re.S)
_ALL = re.compile(r"\*(?:$|\s+exclude\b)", re.I)
_NESTS = re.compile(r"\b(?:join|union|except|intersect)\b|\(\s*select\b", re.I)


def is_sql(text: str) -> bool:
    """An expression that the filter language has no words for: LIKE, IN (...), IS NULL, BETWEEN, a function, a sum."""
    return bool(_SIGNS.search(_QUOTED.sub("''", text)))


class Where:
    """A condition in SQL over the columns of a dataset."""

    def __init__(self, text: str, path: str) -> None:
        """`path` says which columns there are. Raises ConfigError where the condition cannot be worked out."""
        self.text = text
        self._schema = read(path).collect_schema()
        self._wanted = _named(pl.Struct(self._schema), text.casefold()) or pl.Struct({"task_id": pl.String})
        self._mask(pl.Schema({one.name: one.dtype for one in self._wanted.fields}).to_frame(eager=True), None)

    def mask(self, block: Block) -> Any:
        """Which rows of a block fit, as a polars series."""
        try:
            frame = block.frame(self._wanted)
        except Irregular:  # values of several types
            rows = [row.values for row in block.rows()]
            columns = [
                (column(one.name, [values.get(one.name) for values in rows]), one) for one in self._wanted.fields
            ]
            frame = pl.DataFrame([values.cast(one.dtype, strict=False) for values, one in columns])
        return self._mask(frame, block)

    def _mask(self, frame: pl.DataFrame, block: Block | None) -> Any:
        frame = frame.cast({pl.selectors.by_dtype(pl.Categorical, pl.Enum): pl.String})
        known = {name.casefold() for name in frame.columns}
        with _explain_sql(self.text, self._schema, *_DERIVED):
            if "text" not in known and re.search(rf"\b({'|'.join(_DERIVED)})\b", self.text, re.I):
                texts = pl.Series([], dtype=pl.String) if block is None else block.texts
                frame = frame.with_columns(text=texts)
            condition, made = _with_functions(self.text, frame)
            found = frame.with_columns(made).select(fits=pl.sql_expr(condition).fill_null(False)).to_series()
            if found.dtype != pl.Boolean:
                raise ConfigError(f"{self.text!r} is not a condition: its result is {found.dtype}, not true or false")
            return found


def _named(dtype: Any, text: str) -> Any:
    """The struct type with the fields that a text names; None where it names none."""
    fields = {one.name: one.dtype for one in dtype.fields if one.name.casefold() in text}
    inner = {name: _named(one, text) or one if isinstance(one, pl.Struct) else one for name, one in fields.items()}
    return pl.Struct(inner) if inner else None


def _functions() -> dict[str, Callable[[pl.Expr], pl.Expr]]:
    def languages(some: pl.Series) -> pl.Series:
        return pl.Series([None if one is None else language_of(one) for one in some], dtype=pl.String)

    return {
        "text": lambda one: one.cast(pl.String),
        "chars": lambda one: one.str.len_chars(),
        "words": lambda one: one.str.count_matches(r"\S+"),
        "language": lambda one: one.map_batches(languages, return_dtype=pl.String),
    }


def _with_functions(text: str, frame: pl.DataFrame) -> tuple[str, list[pl.Expr]]:
    """The condition with a column in place of each of our functions, and those columns."""
    made: list[pl.Expr] = []
    functions = _functions()
    blank = _QUOTED.sub(lambda found: "x" * len(found[0]), text)
    while found := _CALL.search(blank):
        depth, end = 1, found.end()
        while depth and end < len(blank):
            depth += {"(": 1, ")": -1}.get(blank[end], 0)
            end += 1
        name = f"ajet_{len(made)}"
        derived = functions[found[1].lower()](pl.sql_expr(text[found.end() : end - 1] or "text"))
        made.append(derived.alias(name))
        text, blank = (one[: found.start()] + name + one[end:] for one in (text, blank))
    for name in ("chars", "words", "language"):
        if name not in frame.columns and "text" in frame.columns and re.search(rf"\b{name}\b", blank, re.I):
            made.append(functions[name](pl.col("text")).alias(name))
    return text, made


class _explain_sql:
    """An error of polars as a ConfigError that names the nearest column."""

    def __init__(self, text: str, schema: Any, *more: str) -> None:
        """`more` are columns that are not in the file."""
        self._text, self._names = text, list(dict.fromkeys([*_paths(schema), *more]))

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, pl.exceptions.PolarsError):
            return
        said = str(error).partition("\n")[0]
        missing = re.search(r'unable to find column "([^"]+)"|^([\w.]+)$', said)
        if missing is None:
            raise ConfigError(f"cannot evaluate {self._text!r}: {said}") from error
        names, name = self._names, missing[1] or missing[2]
        near = difflib.get_close_matches(name, [*names, *(one.rpartition(".")[2] for one in names)], n=1)
        hint = f"did you mean {near[0]}? There are" if near else "there are"
        raise ConfigError(f"there is no column {name!r}; {hint} {', '.join(names[:40])}") from error


def _paths(schema: Any, before: str = "") -> Iterator[str]:
    for name, dtype in dict(schema).items():
        yield before + name
        if isinstance(dtype, pl.Struct):
            yield from _paths(dtype.to_schema(), f"{before}{name}.")


def select(query: str, path: str, out: str) -> int:
    """Write what a SELECT gives over the rows of a file, which it calls `rows` or `self`, and return how many rows.

    Columns that it gives as they are keep their type, and what the file says of them. Raises ConfigError.
    """
    frame = read(path)
    schema = frame.collect_schema()
    if re.match(r"[\s(]*(?:select|with)\b", query, re.I) is None:
        raise ConfigError(f"--sql takes a SELECT over `rows` (got {query!r})")
    frame = frame.cast({pl.selectors.by_dtype(pl.Categorical, pl.Enum): pl.String})
    with _explain_sql(query, schema):
        found = pl.SQLContext({"rows": frame, "self": frame}).execute(query)
        given = found.collect_schema()
        exact = "Int128" not in str(given)  # Arrow has no such type
        columns = _columns(query, path, _as_arrow(given.to_frame(eager=True)).schema) if exact else None
        with Writer(out, tables=[columns] if columns is not None else []) as writer:

            def write(part: pl.DataFrame) -> None:
                if columns is None:
                    for values in part.iter_rows(named=True):
                        writer.write(values)
                    return
                for batch in _as_arrow(part).to_batches():
                    arrays = [array.cast(one.type) for array, one in zip(batch, columns.schema, strict=True)]
                    data = type(batch).from_arrays(arrays, schema=columns.schema)
                    writer.write_block(TableBlock(path, columns, data))

            found.sink_batches(write, chunk_size=_ROWS, maintain_order=True, engine="streaming")
    return writer.rows


def _as_arrow(frame: pl.DataFrame) -> Any:
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest()).combine_chunks()


def _columns(query: str, path: str, given: Any) -> Columns:
    """The columns of a result: those that a table has and the SELECT gives as they are, as the table has them."""
    columns, tables = Columns.of(path, given), tables_of(path)
    if not tables or len(tables) < len(files_of(path)):
        return columns
    source, fields = merged(tables), dict(columns.fields)
    for name in _unchanged(query, source.fields) & fields.keys():
        try:
            pa.array([], fields[name].type).cast(source.fields[name].type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
        fields[name] = source.fields[name]
    kept = any(one is source.fields.get(name) for name, one in fields.items())
    return Columns(path, replace(columns.row, fields=fields), source.metadata if kept else {})


def _unchanged(query: str, names: Iterable[str]) -> set[str]:
    """Columns that a plain SELECT gives by `*`, or names in its list and does nothing with."""
    blank = _QUOTED.sub(lambda found: "x" * len(found[0]), query)
    listed = _LIST.match(blank)
    if listed is None or _NESTS.search(blank):
        return set()
    start, end = listed.span(1)
    cuts = [start, *(start + found.start() for found in re.finditer(",", listed[1])), end]
    plain = {query[one:other].strip(", \n\t").strip('"`') for one, other in pairwise(cuts)}
    everything = any(_ALL.match(item) for item in plain) and not re.search(r"\b(?:replace|rename)\b", blank, re.I)
    return set(names) if everything else plain & set(names)
