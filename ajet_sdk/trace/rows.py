"""Requests for rows of a table of a live file, which its owner answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, ClassVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ajet_sdk.errors import QueryError
from ajet_sdk.trace.query import RESULT_BYTES
from ajet_sdk.trace.schema import COLUMNS, empty
from ajet_sdk.trace.scratch import open_scratch

ROWS_AT_ONCE = 20_000
"""Maximum rows in an answer."""
_BYTES_AT_ONCE = 64 << 20
"""Maximum bytes of an answer with several rows: an owner has them in memory."""


class RowsOf(BaseModel):
    """A request for columns of a table's rows after a given one, in order, with their numbers as
    `_row`."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    table: str
    columns: Annotated[tuple[str, ...], Field(min_length=1)]
    after: Annotated[int, Field(ge=-1, lt=1 << 63)] = -1
    most: Annotated[int, Field(ge=1, le=ROWS_AT_ONCE)] = ROWS_AT_ONCE
    by: str | None = None
    """A column to filter by: only rows whose value is in `among`."""
    among: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_names(self) -> RowsOf:
        """Check names against the schema, since they go into SQL."""
        columns = COLUMNS.get(self.table)
        if columns is None:
            raise ValueError(f"there is no table {self.table!r}; tables: {', '.join(COLUMNS)}")
        for name in (*self.columns, self.by):
            if name is not None and name not in columns:
                raise ValueError(
                    f"{self.table} has no column {name!r}; columns: {', '.join(columns)}"
                )
        return self

    def read(self, query: Callable[..., pa.Table]) -> pa.Table:
        """Read the rows by a writer's `query`. Raises QueryError for several rows above 64 MiB:
        request fewer."""
        listed = ", ".join(f'"{name}"' for name in dict.fromkeys(self.columns))
        sql = f"SELECT {listed}, rowid AS _row FROM {self.table} WHERE rowid > ?"
        values: list[object] = [self.after]
        if self.by is not None:
            sql += f' AND "{self.by}" IN (SELECT unnest(?::VARCHAR[]))'
            values.append(list(self.among))
        most_bytes = _BYTES_AT_ONCE if self.most > 1 else RESULT_BYTES
        return query(f"{sql} LIMIT {self.most}", values, most_bytes=most_bytes)


Ask = Callable[[RowsOf], pa.Table]
"""Requests rows of a live file."""


def all_rows(wanted: RowsOf, ask: Ask) -> Iterator[pa.Table]:
    """Yields all rows of a request, fewer at once if an answer would be too large."""
    while True:
        try:
            rows = ask(wanted)
        except QueryError:
            if wanted.most == 1:
                raise
            wanted = wanted.model_copy(update={"most": max(1, wanted.most // 8)})
            continue
        yield rows.drop_columns("_row")
        if len(rows) < wanted.most:
            return
        wanted = wanted.model_copy(update={"after": rows["_row"][-1].as_py()})


@cache
def schemas() -> Mapping[str, pa.Schema]:
    """The Arrow schemas of the tables' rows."""
    with open_scratch() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return {table: connection.sql(empty(table)).to_arrow_table().schema for table in COLUMNS}
