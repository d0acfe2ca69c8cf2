"""A compact index of a run's episodes: their ids, and the values of each column that is sorted by, in memory.

100,000 episodes take 4 MB, and a column 1 to 4 MB. Rewards and numbers of calls are each one query over their table,
made when first needed. Sampled tokens are the exception: their number is the length of a list, and to know it DuckDB
reads the lists. They are counted in spans of time, so that the memory for them is bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.base import USAGE_TOKENS, among
from ajet_tools.trace.queries.fields import call_spans, of_span

Positions = npt.NDArray[np.int64]

_PLAIN: dict[str, str] = {
    **{
        name: name
        for name in (
            "run_id",
            "task_id",
            "group_id",
            "split",
            "decoding",
            "status",
            "cause",
            "attempt",
            "step",
            "started_at",
        )
    },
    "ended_at": "ended_at",
    "superseded": "superseded::INTEGER",
    "seconds": "epoch(ended_at - started_at)",
    "task": "left(task->>'$.main_query', 64)",
    "error": "left(error, 64)",
}
_ALWAYS = ("started_at", "ended_at", "superseded")
COUNTED = ("reward", "calls", "turns", "agents", "tokens")
"""Columns computed from other tables."""
_SPAN = 200_000
_MANY = 2000
_LATE = timedelta(minutes=10)
"""Episodes are written roughly in the order in which they end; a later one is still found, by a slower query."""


class Cancelled(QueryError):
    """The caller cancelled the query."""


class _Counts(TypedDict):
    n: int
    """Episodes."""
    s: int
    """Superseded."""
    last: datetime | None
    """When the last ended."""


class EpisodeIndex:
    """The episodes of a run (of all runs where None) in the order in which they were seen. It only grows."""

    def __init__(self, run_id: str | None) -> None:
        self.run_id = run_id
        self.ids: pa.Array = pa.array([], pa.string())
        self._columns: dict[str, pa.Array] = {}
        self._superseded = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def scope(self) -> tuple[str, list[str]]:
        """The condition that an episode `e` is of this run."""
        return ("true", []) if self.run_id is None else ("e.run_id = ?", [self.run_id])

    def load(self, reader: TraceReader) -> EpisodeIndex:
        """Read the ids. Returns self."""
        table = self._episodes(reader, "true", [])
        with self._lock:
            self._superseded = pc.sum(table["superseded"]).as_py() or 0
            self._append(table)
        return self

    def grow(self, reader: TraceReader) -> bool | None:
        """Add the episodes that ended since. Returns whether there are any; None if a new index must be loaded."""
        with self._lock:
            there, recent = self._since_last(reader)
            if there["s"] != self._superseded or there["n"] < len(self):
                return None
            if there["n"] == len(self):
                return False if there["last"] == self._last else None
            new = self._unknown(recent)
            if new is not None and len(self) + len(new) < there["n"] and self._last:  # some ended before the last
                new = self._unknown(self._episodes(reader, "e.ended_at >= ?", [self._last - _LATE], self._plain))
            if new is None or len(self) + len(new) < there["n"]:
                return None
            self._append(new, reader)
            return True

    def _since_last(self, reader: TraceReader) -> tuple[_Counts, pa.Table]:
        """How many episodes there are, how many of them superseded, when the last ended; and those since our last.

        In one question: a busy run answers each of them late.
        """
        of_run, run = self.scope
        condition, since = ("e.ended_at >= ?", [self._last]) if self._last else ("true", [])
        table = reader.query(
            f"""
            SELECT * FROM (
              SELECT count(*) AS n, count(*) FILTER (superseded) AS s, max(ended_at) AS last
              FROM episodes e WHERE {of_run}
            ) LEFT JOIN ({self._listed(condition, self._plain)}) ON true""",
            [*run, *run, *since],
        )
        there: _Counts = table.slice(0, 1).select(["n", "s", "last"]).to_pylist()[0]
        recent = table.drop_columns(["n", "s", "last"])
        return there, recent.filter(pc.is_valid(recent["episode_id"]))

    def _unknown(self, recent: pa.Table) -> pa.Table | None:
        """The episodes that are not in the index yet; None if none is: the file was replaced."""
        new = recent.filter(pc.invert(pc.is_in(recent["episode_id"], value_set=self.ids)))
        return None if len(self) and len(new) == len(recent) else new

    @property
    def _plain(self) -> list[str]:
        """Columns of the table that have been read beside those that always are."""
        return [name for name in self._columns if name in _PLAIN and name not in _ALWAYS]

    @property
    def _last(self) -> datetime | None:
        """When the last episode ended."""
        last: datetime | None = pc.max(self._columns["ended_at"]).as_py()
        return last

    def column(self, reader: TraceReader, name: str, cancelled: Callable[[], bool] | None = None) -> pa.Array:
        """The values of a column, in the order of `ids`. Others may ask for other columns meanwhile."""
        known = self._columns.get(name)
        if known is not None:
            return known
        ids = self.ids
        read = self._read(reader, name, ids, cancelled)
        with self._lock:
            late = self.ids.slice(len(ids))  # ended while it was read
            if len(late):
                began = self._columns["started_at"].slice(len(ids))
                more = self._ended_meanwhile(reader, late, pc.min(began).as_py(), set(read))
                read = {each: pa.concat_arrays([old, more[each].cast(old.type)]) for each, old in read.items()}
            self._columns |= {each: values for each, values in read.items() if each not in self._columns}
            return self._columns[name]

    def known(self, name: str) -> pa.Array | None:
        """The values of a column if they have been read."""
        return self.ids if name == "episode_id" else self._columns.get(name)

    def order(self, reader: TraceReader, name: str, descending: bool, chosen: Positions) -> Positions:
        """Some positions in the order of a column: of equals the newer first, and those without a value last."""
        values = (self.ids if name == "episode_id" else self.column(reader, name)).take(pa.array(chosen))
        ended = _keys(self._columns["ended_at"].take(pa.array(chosen)))
        keys = _keys(values)
        return chosen[np.lexsort((-ended, -keys if descending else keys))]

    def positions(self, ids: pa.Array) -> Positions:
        """Positions of episodes, without those that are not in the index."""
        indices = pc.index_in(ids, value_set=self.ids).drop_null()
        return np.asarray(indices.to_numpy(zero_copy_only=False), dtype=np.int64)

    def _episodes(
        self, reader: TraceReader, condition: str, parameters: Sequence[object], more: Sequence[str] = ()
    ) -> pa.Table:
        return reader.query(self._listed(condition, more), [*self.scope[1], *parameters])

    def _listed(self, condition: str, more: Sequence[str]) -> str:
        """The SELECT of the episodes that fit a condition."""
        columns = "".join(f", {_PLAIN[name]} AS {name}" for name in more)
        return f"""
            SELECT e.episode_id, e.started_at, e.ended_at, coalesce(e.superseded, false)::INTEGER AS superseded{columns}
            FROM episodes e WHERE {self.scope[0]} AND {condition}"""

    def _append(self, new: pa.Table, reader: TraceReader | None = None) -> None:
        """Add episodes; with `reader` the columns that are counted grow too, unless there are many to add."""
        ids = _whole(new["episode_id"]).cast(pa.string())
        added = {name: _whole(new[name]) for name in new.column_names if name != "episode_id"}
        if reader is None or len(ids) > _MANY:
            self._columns = {name: values for name, values in self._columns.items() if name in added}
        else:
            added |= self._counted(reader, ids, pc.min(new["started_at"]).as_py(), set(self._columns))
        for name, values in added.items():
            before = self._columns.get(name)
            self._columns[name] = values if before is None else pa.concat_arrays([before, values.cast(before.type)])
        self.ids = pa.concat_arrays([self.ids, ids])

    def _counted(
        self, reader: TraceReader, ids: pa.Array, first: datetime | None, names: set[str]
    ) -> dict[str, pa.Array]:
        """Those of some columns that are counted, of episodes that have just ended: the first began then."""
        wanted = [name for name in COUNTED if name in names]
        if not wanted:
            return {}
        table = counted(reader, ids.to_pylist(), wanted, since=first and first - _LATE)
        return {name: _aligned(ids, table, name) for name in wanted}

    def _ended_meanwhile(
        self, reader: TraceReader, ids: pa.Array, first: datetime | None, names: set[str]
    ) -> dict[str, pa.Array]:
        """Some columns of episodes that ended while those of the others were read."""
        plain = [name for name in names if name in _PLAIN]
        table = self._episodes(reader, "e.episode_id IN (SELECT unnest(?::VARCHAR[]))", [ids.to_pylist()], plain)
        return {name: _aligned(ids, table, name) for name in plain} | self._counted(reader, ids, first, names)

    def _read(
        self, reader: TraceReader, name: str, ids: pa.Array, cancelled: Callable[[], bool] | None
    ) -> dict[str, pa.Array]:
        """A column of these episodes, with those that come from the same query."""
        of_run, run = self.scope
        if name == "tokens":
            return {name: _tokens(reader, ids, cancelled)}
        if name == "reward":
            names = ["reward"]
            table = reader.query("SELECT episode_id, sum(value * weight) AS reward FROM rewards GROUP BY episode_id")
        elif name in COUNTED:
            names = ["calls", "turns", "agents"]
            table = reader.query(f"SELECT episode_id, {_COUNTS} FROM calls GROUP BY episode_id")
        else:
            names = [name]
            table = reader.query(f"SELECT episode_id, {_PLAIN[name]} AS {name} FROM episodes e WHERE {of_run}", run)
        columns = {each: _aligned(ids, table, each) for each in names}
        return {n: pc.fill_null(v, 0) if n in ("calls", "turns", "agents") else v for n, v in columns.items()}


def _tokens(reader: TraceReader, ids: pa.Array, cancelled: Callable[[], bool] | None) -> pa.Array:
    total, there = np.zeros(len(ids)), np.zeros(len(ids), dtype=bool)
    for span, _ in call_spans(reader, _SPAN):
        if cancelled and cancelled():
            raise Cancelled("counting tokens was cancelled")
        condition, edges = of_span(span)
        sql = "SELECT c.episode_id, sum(len(c.output_ids))::BIGINT AS tokens FROM calls c"
        table = reader.query(f"{sql} WHERE {condition} AND c.output_ids IS NOT NULL GROUP BY 1", edges)
        reader.close()  # what was read of the lists stays in memory as long as the file is open
        where = pc.index_in(_whole(table["episode_id"]), value_set=ids)
        known = pc.is_valid(where).to_numpy(zero_copy_only=False)
        at = where.drop_null().to_numpy(zero_copy_only=False).astype(np.int64)
        np.add.at(total, at, _whole(table["tokens"]).to_numpy(zero_copy_only=False)[known])
        there[at] = True
    tokens = _or_usage(reader, ids, pa.array(total.astype(np.int64), mask=~there))
    reader.close()
    return tokens


def _or_usage(reader: TraceReader, ids: pa.Array, tokens: pa.Array) -> pa.Array:
    """Tokens of episodes, by the usage of their calls where no call has ids; only then are replies read."""
    missing: list[str] = ids.filter(pc.is_null(tokens)).to_pylist()
    if not missing:
        return tokens
    condition, named = among("episode_id", missing)
    sql = f"SELECT episode_id, {USAGE_TOKENS}::BIGINT AS tokens FROM calls WHERE output_ids IS NULL AND {condition}"
    return pc.coalesce(tokens, _aligned(ids, reader.query(f"{sql} GROUP BY episode_id", named), "tokens"))


def counted(reader: TraceReader, ids: Sequence[str], names: Sequence[str], since: datetime | None = None) -> pa.Table:
    """The columns of COUNTED, of a few episodes, `tokens` only if named; `since`: none of their calls began before.

    Where that is not known, when the calls began is asked first: DuckDB then reads the lists of output ids of those
    times only.
    """
    wanted = pa.array(ids, pa.string())
    if "tokens" in names and since:
        tables = [_called(reader, ids, _TOKENS, since)]
    else:
        tables = [_called(reader, ids, ", min(started_at) AS first, max(started_at) AS last", since)]
        calls = tables[0].filter(pc.is_valid(tables[0]["first"]))
        if "tokens" in names and len(calls):
            tables.append(_tokens_of(reader, ids, calls))
    columns = {"episode_id": wanted, "reward": pa.nulls(len(wanted)), "tokens": pa.nulls(len(wanted))}
    for table in tables:
        columns |= {name: _aligned(wanted, table, name) for name in table.column_names if name != "episode_id"}
    for name in ("calls", "turns", "agents"):
        columns[name] = pc.fill_null(columns[name], 0)
    if "tokens" in names:
        columns["tokens"] = _or_usage(reader, wanted, columns["tokens"].cast(pa.int64()))
    return pa.table({name: columns[name] for name in ("episode_id", *COUNTED)})


_TOKENS = ", sum(len(output_ids))::BIGINT AS tokens"
_COUNTS = """count(*) AS calls, count(*) FILTER (phase = 'rollout') AS turns,
  count(DISTINCT agent) FILTER (phase = 'rollout') AS agents"""


def _called(reader: TraceReader, ids: Sequence[str], more: str, since: datetime | None) -> pa.Table:
    """The counted columns of the episodes."""
    late, values = (" AND started_at >= $1", [since]) if since else ("", [])
    condition, named = among("episode_id", ids, 1 + len(values))
    sql = f"""
        SELECT * FROM (
          SELECT episode_id, {_COUNTS}{more} FROM calls WHERE {condition}{late} GROUP BY episode_id
        ) FULL JOIN (
          SELECT episode_id, sum(value * weight) AS reward FROM rewards WHERE {condition} GROUP BY episode_id
        ) USING (episode_id)"""
    return reader.query(sql, [*values, *named])


def _tokens_of(reader: TraceReader, ids: Sequence[str], calls: pa.Table) -> pa.Table:
    during = _apart(zip(calls["first"].to_pylist(), calls["last"].to_pylist(), strict=True))
    condition, named = among("episode_id", ids, 1 + 2 * len(during))
    parts = (
        f"""SELECT episode_id, len(output_ids) AS n FROM calls
        WHERE {condition} AND started_at >= ${i} AND started_at <= ${i + 1}"""
        for i in range(1, 1 + 2 * len(during), 2)
    )
    sql = f"SELECT episode_id, sum(n)::BIGINT AS tokens FROM ({' UNION ALL '.join(parts)}) GROUP BY episode_id"
    return reader.query(sql, [*(edge for span in during for edge in span), *named])


_APART = 4
"""Spans of time that are read each by itself: each is a scan with a plan of its own."""


def _apart(spans: Iterable[tuple[datetime, datetime]]) -> list[tuple[datetime, datetime]]:
    """At most so many spans of time that hold all of these, with the largest gaps between them left out."""
    merged: list[tuple[datetime, datetime]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    gaps = sorted(range(1, len(merged)), key=lambda i: merged[i - 1][1] - merged[i][0])[: _APART - 1]
    cuts = [0, *sorted(gaps), len(merged)]
    return [(merged[a][0], merged[b - 1][1]) for a, b in pairwise(cuts) if a < b]


def _whole(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _aligned(ids: pa.Array, table: pa.Table, name: str) -> pa.Array:
    """A column of the table in the order of `ids`; null where the table has no such episode."""
    where = pc.index_in(ids, value_set=_whole(table["episode_id"]))
    return _whole(table[name]).take(where)


def _keys(values: pa.Array) -> npt.NDArray[np.float64]:
    """Numbers in the order of the values; NaN where there is none."""
    if pa.types.is_string(values.type):
        distinct = values.dictionary_encode()
        place = np.empty(len(distinct.dictionary) + 1)
        place[pc.array_sort_indices(distinct.dictionary).to_numpy()] = np.arange(len(distinct.dictionary))
        place[-1] = np.nan
        codes = pc.fill_null(distinct.indices, len(distinct.dictionary)).to_numpy(zero_copy_only=False)
        return np.asarray(place[codes])
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    return np.asarray(values.cast(pa.float64()).to_numpy(zero_copy_only=False))
