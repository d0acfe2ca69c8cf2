"""Requests to a live run for rows of its trace, without SQL, so that their time and memory are bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ajet_sdk.trace.query import RESULT_BYTES
from ajet_sdk.trace.schema import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa


MOST = 20_000
"""Maximum rows in a response."""
_BYTES = 64 << 20
"""Maximum bytes of a response with several rows."""
_COLUMNS = {**COLUMNS, "meta": {"schema_version": "INTEGER"}}
_MARKS = {
    "runs": "coalesce(sum(hash(run_id, status, config, error, ended_at)::HUGEINT) % 1000000007, 0)",
    "episodes": "count(*) FILTER (superseded)",
    "ledger": "count(*) FILTER (outcome = 'superseded')",
}
"""SQL that differs once rows have changed; in `metrics` and `trained` they are deleted and renumbered."""


class RowsOf(BaseModel):
    """A request for columns of a table's rows after a given one, in order, with their numbers as `_row`.

    Without columns the answer is one row with the number of rows `n`, and a `mark` that differs once rows have changed.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    table: str
    columns: tuple[str, ...] = ()
    after: Annotated[int, Field(ge=-1, lt=1 << 63)] = -1
    most: Annotated[int, Field(ge=1, le=MOST)] = MOST
    by: str | None = None
    """A column to filter by: only rows whose value is in `among`."""
    among: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _known(self) -> RowsOf:
        """Check names against the schema, since they go into SQL."""
        known = _COLUMNS.get(self.table)
        if known is None:
            raise ValueError(f"there is no table {self.table!r}; tables: {', '.join(_COLUMNS)}")
        for name in (*self.columns, *([] if self.by is None else [self.by])):
            if name not in known:
                raise ValueError(f"{self.table} has no column {name!r}; columns: {', '.join(known)}")
        return self

    def read(self, query: Callable[..., pa.Table]) -> pa.Table:
        """Reads the rows by a writer's `query`. Raises QueryError for several rows above 64 MiB: request fewer."""
        if not self.columns:
            return query(f"SELECT count(*) AS n, {_MARKS.get(self.table, '0')}::BIGINT AS mark FROM {self.table}")
        listed = ", ".join(f'"{name}"' for name in dict.fromkeys(self.columns))
        named: list[object] = list(self.among)
        only = "" if self.by is None else f' AND "{self.by}" IN ({", ".join("?" * len(named)) or "NULL"})'
        sql = f"SELECT {listed}, rowid AS _row FROM {self.table} WHERE rowid > ?{only} LIMIT {self.most}"
        values = [self.after, *(named if self.by is not None else [])]
        return query(sql, values, most_bytes=_BYTES if self.most > 1 else RESULT_BYTES)


VERSION = RowsOf(table="meta", columns=("schema_version",))
