"""Digests of rows as written, to detect later edits of a file.

A digest has 64 bits: 8 of its table and 16 of the row's ids, which tell a row that was changed from
one that was added beside another that was deleted, and 40 of its content. Files of before have 64
bits of the content.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import duckdb
import numpy as np
import pyarrow as pa

_ROWS = 10_000
_NULL = {pa.int32(): np.iinfo(np.int32).min, pa.float32(): float(np.finfo(np.float32).min)}
"""Substitutes for NULL in a list."""


_KEYS = frozenset(
    ("feedback_id", "call_id", "episode_id", "run_id", "outcome", "name", "step", "digest")
)
"""Columns that identify a row, of those that a table has."""
_CONTENT_BITS = 40
_ID_BITS = 16


def keyed_digests(table: str, rows: pa.Table | pa.RecordBatch) -> list[int]:
    """The digest of each row: of its ids and of its content."""
    ids = digests_of(table, rows.select([name for name in rows.schema.names if name in _KEYS]))
    whole = digests_of(table, rows)
    tag = tag_of(table) << (_ID_BITS + _CONTENT_BITS)
    keys = ((key & ((1 << _ID_BITS) - 1)) << _CONTENT_BITS for key in ids)
    contents = (content & ((1 << _CONTENT_BITS) - 1) for content in whole)
    return [tag | key | content for key, content in zip(keys, contents, strict=True)]


def key_of(digest: int) -> int:
    """The part of a digest that two versions of a row share: table and ids."""
    return digest >> _CONTENT_BITS


def tag_of(table: str) -> int:
    """The part of a digest that tells the table."""
    return blake2b(table.encode(), digest_size=1).digest()[0]


def table_of(digest: int) -> int:
    """The `tag_of` the table of a row."""
    return digest >> (_CONTENT_BITS + _ID_BITS)


def digests_of(table: str, rows: pa.Table | pa.RecordBatch) -> list[int]:
    """The 64-bit BLAKE2b digest of each row's non-NULL values with the names of their columns."""
    names = sorted(rows.schema.names)
    prefixes = [f"\x1e{name}=".encode() for name in names]
    digests = []
    for values in zip(*(_as_bytes(rows.column(name)) for name in names), strict=True):
        digest = blake2b(table.encode(), digest_size=8)
        digest.update(
            b"".join([p + v for p, v in zip(prefixes, values, strict=True) if v is not None])
        )
        digests.append(int.from_bytes(digest.digest(), "little"))
    return digests


def _as_bytes(column: pa.Array | pa.ChunkedArray) -> list[bytes | None]:
    if isinstance(column, pa.ChunkedArray):
        array = column.combine_chunks()
    else:
        array = column
    if array.null_count == len(array):
        return [None] * len(array)
    if pa.types.is_list(array.type):
        flat = array.values.fill_null(_NULL[array.type.value_type]).to_numpy()
        ends = array.offsets.to_numpy().tolist()
        there = array.is_valid().to_pylist()
        return [
            flat[ends[i] : ends[i + 1]].tobytes() if known else None
            for i, known in enumerate(there)
        ]
    if pa.types.is_binary(array.type):
        files: list[bytes | None] = array.to_pylist()
        return files
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.int64())
    return [None if value is None else str(value).encode() for value in array.to_pylist()]


def digested(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    where: str = "true",
    values: object = None,
    *,
    schema: str = "",
) -> Iterator[tuple[pa.RecordBatch, list[int]]]:
    """Yields batches of a table's rows with the digests of their content."""
    rows = connection.sql(
        f"SELECT * FROM {schema}{table} WHERE {where}", params=values
    ).to_arrow_reader(_ROWS)
    for batch in rows:
        yield batch, digests_of(table, batch)


def every_digest(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    where: str,
    values: object = None,
    *,
    schema: str = "",
) -> list[int]:
    """Returns the digests that these rows may have: those of today, and of a file of before."""
    every: list[int] = []
    for batch, digests in digested(connection, table, where, values, schema=schema):
        every += digests
        every += keyed_digests(table, batch)
    return every


def seal(connection: duckdb.DuckDBPyConnection, digests: Sequence[int]) -> None:
    """Store digests of rows written in the same transaction."""
    if digests:
        connection.execute("INSERT INTO digests SELECT unnest(?::UBIGINT[])", [digests])


@contextlib.contextmanager
def amending(
    connection: duckdb.DuckDBPyConnection, table: str, where: str, values: object = None
) -> Iterator[None]:
    """Updates the digests of rows `where` that the block changes or deletes, so that
    `ajet trace check` accepts it."""
    before = every_digest(connection, table, where, values)
    if before:
        connection.execute(
            "DELETE FROM digests WHERE digest IN (SELECT unnest(?::UBIGINT[]))", [before]
        )
    yield
    after: list[int] = []
    for batch, _ in digested(connection, table, where, values):
        after += keyed_digests(table, batch)
    seal(connection, after)
