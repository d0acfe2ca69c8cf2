"""Tables whose rows are read when a query scans them: of live files from their owners, of many
files at rest in parts.

DuckDB tells such a table the columns and the filter of a scan, so that only these are read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ajet_sdk.trace.at_rest import RunsOrError, Stamp, read_in_place, read_parts
from ajet_sdk.trace.conditions import columns_in, ids_in
from ajet_sdk.trace.rows import RowsOf, schemas
from ajet_sdk.trace.schema import COLUMNS

_SMALL_KINDS = frozenset({"VARCHAR", "INTEGER", "DOUBLE", "BOOLEAN", "TIMESTAMPTZ"})
_KEPT = {
    table: [name for name, kind in columns.items() if kind in _SMALL_KINDS]
    for table, columns in COLUMNS.items()
} | {
    "calls": [
        "call_id", "episode_id", "agent", "phase", "trainable", "policy_version", "started_at",
    ],
    "runs": list(COLUMNS["runs"]),  # a row or two a file, whose config every list of runs reads
}  # fmt: skip


class ScannedTable:
    """A table for one query, whose rows are read when DuckDB scans it, and once if it is scanned
    again with the same columns and filter."""

    def __init__(self, table: str, read: Callable[[RowsOf], Iterator[pa.Table]]) -> None:
        self.name = table
        self._read = read
        self._before: dict[RowsOf, pa.Table] = {}
        self.failure: Exception | None = None
        """Why rows could not be read; DuckDB raises another error then."""

    def dataset(self) -> Any:
        """The table as an Arrow dataset; DuckDB calls `scanner` of no other classes."""
        import pyarrow.dataset as ds  # 50 ms, which files at rest do not need

        class Scanned(ds.Dataset):  # type: ignore[misc]  # pyarrow has no types
            schema = schemas()[self.name]

            def __init__(self, scan: Callable[[Sequence[str] | None, Any], pa.Table]) -> None:
                self._scan = scan

            def scanner(
                self, columns: Sequence[str] | None = None, filter: Any = None, **_: object
            ) -> ds.Scanner:
                """Called by DuckDB, which leaves the filter to it."""
                return ds.dataset(self._scan(columns, filter)).scanner(
                    columns=columns, filter=filter
                )

        return Scanned(self.scan)

    def scan(self, columns: Sequence[str] | None, condition: Any) -> pa.Table:
        """The columns of a scan, and those of its filter, in rows with the ids that it names."""
        wanted = _request(self.name, columns, condition)
        if wanted not in self._before:
            fields = schemas()[self.name]
            schema = pa.schema([fields.field(name) for name in wanted.columns])
            try:
                self._before[wanted] = _on_disk(self._read(wanted), schema)
            except Exception as error:
                self.failure = error
                raise
        return self._before[wanted]


def _on_disk(tables: Iterator[pa.Table], schema: pa.Schema) -> pa.Table:
    """Rows in a file that is mapped to memory and deleted with it: they may be more than fit."""
    with tempfile.NamedTemporaryFile(prefix="ajet-trace-") as file:
        with pa.ipc.new_stream(file, schema) as stream:
            for rows in tables:
                stream.write_table(rows.select(schema.names).cast(schema))
        file.flush()
        return pa.ipc.open_stream(pa.memory_map(file.name)).read_all()


def _request(table: str, columns: Sequence[str] | None, condition: Any) -> RowsOf:
    """What to read for a scan: its columns, those of its filter, and the ids that it names."""
    named: set[str] = set()
    by: str | None = None
    among: tuple[str, ...] = ()
    if condition is not None:
        named = columns_in(condition)
        by, among = ids_in(condition)
    read = [name for name in COLUMNS[table] if columns is None or name in columns or name in named]
    return RowsOf(table=table, columns=tuple(read), by=by, among=among)


class ManyFiles:
    """Many files at rest: a query over a thousand attached files would take a second to plan.

    Their small columns, which lists of runs and episodes read, are kept in memory until a file
    changes. The others are read by each query, in the files that have its rows.
    """

    def __init__(self) -> None:
        self.stamps: Mapping[Path, Stamp] = {}
        """Of the readable files, as they were read."""
        self._numbers: dict[Path, int] = {}
        self._kept: dict[str, pa.Table] = {}
        """Rows by table, with the number of their file."""
        self._large: dict[str, set[int]] = {table: set() for table in _KEPT}
        """Files with a table that is too large to keep."""

    def follow(self, stamps: Mapping[Path, Stamp]) -> dict[Path, RunsOrError]:
        """Read the files that have changed; returns the runs of each file, or its error."""
        changed = [file for file, stamp in stamps.items() if self.stamps.get(file) != stamp]
        gone = [
            self._numbers.pop(file)
            for file in list(self._numbers)
            if file not in stamps or file in changed
        ]
        if not changed and not gone:
            return self._runs()
        import pyarrow.compute as pc

        first = max(self._numbers.values(), default=-1) + 1
        fresh = {first + i: file for i, file in enumerate(changed)}
        large: dict[str, set[int]] = {table: set() for table in _KEPT}
        rows, failed = read_parts(fresh, _KEPT, large)
        is_gone = pa.array(gone, pa.int32())
        for table, new in rows.items():
            before = self._kept.get(table, new.slice(0, 0))
            left = before.filter(pc.invert(pc.is_in(before["file"], is_gone)))
            self._kept[table] = pa.concat_tables([left, new])
            self._large[table] = self._large[table].difference(gone) | large[table]
        self._numbers |= {file: i for i, file in fresh.items() if file not in failed}
        self.stamps = {file: stamp for file, stamp in stamps.items() if file not in failed}
        return {**self._runs(), **failed}

    def _runs(self) -> dict[Path, RunsOrError]:
        files = {i: file for file, i in self._numbers.items()}
        runs: dict[Path, list[str]] = {file: [] for file in self._numbers}
        for row in self._kept["runs"].select(["file", "run_id"]).to_pylist():
            runs[files[row["file"]]].append(row["run_id"])
        return dict(runs)

    def files_of(self, run_id: str) -> list[Path]:
        """The files with a run, or with episodes of it."""
        import pyarrow.compute as pc

        numbers: set[int] = set()
        for table in ("runs", "episodes"):
            if table in self._kept:
                rows = self._kept[table]
                of_run = rows.filter(pc.equal(rows["run_id"], run_id))
                numbers.update(of_run["file"].to_pylist())
                numbers |= self._large[table]
        return [file for file, number in self._numbers.items() if number in numbers]

    def read(self, files: Sequence[Path], wanted: RowsOf) -> Iterator[pa.Table]:
        """Yields rows of some of the files. Raises TraceError for an unreadable one."""
        import pyarrow.compute as pc

        numbers = {self._numbers[file]: file for file in files if file in self._numbers}
        in_place = numbers
        where = ""
        if wanted.table in _KEPT:
            kept = self._kept[wanted.table]
            kept = kept.filter(pc.is_in(kept["file"], pa.array(list(numbers), pa.int32())))
            with_rows = self._large[wanted.table]
            is_kept = set(wanted.columns) <= set(_KEPT[wanted.table])
            if is_kept:
                yield kept
            elif wanted.by is not None:
                has_id = pc.is_in(kept[wanted.by], pa.array(wanted.among, pa.string()))
                with_rows = with_rows.union(kept.filter(has_id)["file"].to_pylist())
            if is_kept or wanted.by is not None:
                in_place = {i: file for i, file in numbers.items() if i in with_rows}
        if wanted.by is not None:
            where = f"""WHERE "{wanted.by}" IN ({", ".join(f"'{i}'" for i in wanted.among)})"""
        yield from read_in_place(list(in_place.values()), wanted.table, wanted.columns, where)
