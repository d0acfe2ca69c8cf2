"""The list of episodes: those of a run that match a filter, in one order, read page by page.

One query gives the ids in their order, another the rows of a page. A text that the filter searches
for is looked up before, in spans of calls; what was found is kept while the run goes on, so that
only calls of new episodes are searched. Calls and tokens of an episode are counted once: for a page
in order of time those of its episodes, and for another order those of all.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.base import USAGE_TOKENS, among, rows
from ajet_tools.trace.queries.episodes import ListedEpisode
from ajet_tools.trace.queries.filters import COLUMNS as FILTER_COLUMNS
from ajet_tools.trace.queries.filters import Filter, parse
from ajet_tools.trace.queries.search import Span, call_spans, episodes_with, of_span

COLUMNS = tuple(ListedEpisode.__annotations__)
"""Sort columns."""
_SORT_KEYS = {
    **FILTER_COLUMNS,
    "task": "left(e.task->>'$.main_query', 64)",
    "error": "left(e.error, 64)",
}
"""SQL of sort keys over a row `e` of `episodes`."""
_COUNTED = ("calls", "turns", "agents", "tokens")
"""Columns of `_Counts`."""
_IN_TIME = ("started_at", "ended_at")
"""Orders in which the episodes of a page have their calls close together in the trace."""
_NOTHING = pa.schema([("episode_id", pa.string()), *((name, pa.int64()) for name in _COUNTED)])
_TOKEN_SPAN = 250_000
"""Calls whose tokens one query counts."""
_LATE = timedelta(minutes=10)
"""For new episodes, calls are searched from this long before the earliest start."""

Progress = Callable[[int, int], None]
Stop = Callable[[], bool]


@dataclass(frozen=True)
class _State:
    """The finished episodes of a run, counted."""

    count: int
    superseded: int
    last_end: datetime | None


class _Counts:
    """Calls, turns, agents and tokens of the ended episodes of a run.

    They don't change, so listings derived from one another share this cache. DuckDB reads all
    token ids of the calls that it counts, which takes most of the time of a page.
    """

    def __init__(self, run_id: str | None) -> None:
        self._run_id = run_id
        self._table = _NOTHING.empty_table()
        self._has_counted_all = False
        self._lock = threading.Lock()

    def read(self, reader: TraceReader, ids: pa.Array, *, nearby: bool) -> pa.Table:
        """Return the counts of these episodes, in any order.

        Args:
            nearby: their calls are close together in the trace, so that few others are read.
        """
        with self._lock:  # a screen reads several pages at once
            counted = self._among(ids)
            if len(counted) == len(ids):
                return counted
            if nearby or self._has_counted_all:
                missing = ids.filter(pc.invert(pc.is_in(ids, value_set=counted["episode_id"])))
                self._table = pa.concat_tables([self._table, _count_few(reader, missing)])
            else:
                self._table = _count_all(reader, self._run_id)
                self._has_counted_all = True
            return self._among(ids)

    def _among(self, ids: pa.Array) -> pa.Table:
        return self._table.filter(pc.is_in(self._table["episode_id"], value_set=ids))


@dataclass(frozen=True)
class Listing:
    """Episodes in one order. Immutable; methods that read the trace return a new listing."""

    run_id: str | None
    filter: Filter
    sort: str
    descending: bool
    state: _State
    found: Mapping[str, frozenset[str]]
    """Episodes that hold each text of the filter."""
    counts: _Counts
    episode_ids: pa.Array

    @property
    def count(self) -> int:
        """Number of matches."""
        return len(self.episode_ids)

    @property
    def of(self) -> int:
        """Number of all episodes."""
        return self.state.count

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Return the ids of the episodes [start, stop)."""
        ids: list[str] = self.episode_ids[start:stop].to_pylist()
        return ids

    def page(self, reader: TraceReader, offset: int, limit: int) -> list[ListedEpisode]:
        """Read the rows [offset, offset + limit); long texts are truncated."""
        ids = self.episode_ids[offset : offset + limit]
        if not len(ids):
            return []
        named, values = among("episode_id", ids.to_pylist())
        by_id = {row["episode_id"]: row for row in rows(reader, _PAGE.format(named), *values)}
        counts = self.counts.read(reader, ids, nearby=self.sort in _IN_TIME)
        counted_by_id = {row["episode_id"]: row for row in counts.to_pylist()}
        return [by_id[id] | counted_by_id[id] for id in ids.to_pylist() if id in by_id]

    def sorted(self, reader: TraceReader, sort: str, descending: bool) -> Listing:
        """Return the episodes in another order."""
        return _open(reader, self.run_id, self.filter, sort, descending, self.counts, before=self)

    def filtered(
        self,
        reader: TraceReader,
        filter: Filter,
        *,
        progress: Progress | None = None,
        cancelled: Stop | None = None,
    ) -> Listing:
        """Return the episodes of the run that match another filter, sorted alike. Raises
        Cancelled."""
        search = partial(episodes_with, reader, progress=progress, cancelled=cancelled)
        return _open(
            reader, self.run_id, filter, self.sort, self.descending, self.counts, search=search
        )

    def refreshed(self, reader: TraceReader) -> Listing:
        """Add the episodes that have ended since; returns self if there are none. Cheap enough for
        polling.

        Later changes of an episode (feedback, age) need a new listing.
        """
        state = _state(reader, self.run_id)
        if state == self.state:
            return self
        return _open(
            reader,
            self.run_id,
            self.filter,
            self.sort,
            self.descending,
            self.counts,
            before=self,
            state=state,
        )


def open_listing(
    reader: TraceReader,
    run_id: str | None,
    filter: Filter | None = None,
    sort: str = "ended_at",
    descending: bool = True,
    *,
    progress: Progress | None = None,
    cancelled: Stop | None = None,
) -> Listing:
    """List the episodes of a run, or of all runs, that match a filter.

    A full-text filter may take seconds: `progress(done, of)` is called, and `cancelled()` checked,
    between queries. Raises QueryError for an unknown column, and Cancelled.
    """
    search = partial(episodes_with, reader, progress=progress, cancelled=cancelled)
    counts = _Counts(run_id)
    return _open(reader, run_id, filter or parse(""), sort, descending, counts, search=search)


def _open(
    reader: TraceReader,
    run_id: str | None,
    filter: Filter,
    sort: str,
    descending: bool,
    counts: _Counts,
    *,
    before: Listing | None = None,
    state: _State | None = None,
    search: Callable[..., set[str]] | None = None,
) -> Listing:
    """`before` is a listing of the same filter, whose searches are continued."""
    if sort not in COLUMNS:
        near = difflib.get_close_matches(sort, COLUMNS, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise QueryError(
            f"episodes have no column {sort!r} to sort by{hint}; columns: {', '.join(COLUMNS)}"
        )
    state = state or _state(reader, run_id)
    search = search or partial(episodes_with, reader)
    found: Mapping[str, frozenset[str]] = {}
    if before is not None and state == before.state:
        found = before.found
    elif filter.needles:
        since = None
        if before is not None:
            since = _start_of_new(reader, before)
        for needle in filter.needles:
            ids = frozenset(search(needle, since))
            if since is not None and before is not None:
                ids |= before.found[needle]
            found = {**found, needle: ids}
    in_run, run = _of_run(run_id)
    matches, parameters = filter.query(in_run, {text: [*ids] for text, ids in found.items()})
    direction = "DESC" if descending else "ASC"
    if sort in _COUNTED:
        sort_key = "NULL"
    else:
        sort_key = _SORT_KEYS.get(sort, f"e.{sort}")
    sql = f"""
        SELECT episode_id FROM (
          SELECT e.episode_id, e.ended_at, {sort_key} AS sort_key
          FROM episodes e WHERE {f"e.episode_id IN ({matches})" if not filter.is_empty else in_run})
        ORDER BY sort_key {direction} NULLS LAST, ended_at DESC, episode_id"""
    values = run if filter.is_empty else [*parameters, *run]
    ids = _column(reader.query(sql, values), "episode_id")
    if sort in _COUNTED:
        counted = _aligned(ids, counts.read(reader, ids, nearby=False), sort)
        order = "descending" if descending else "ascending"
        # ties keep the order of the query, by time
        ids = ids.take(pc.array_sort_indices(counted, order=order))  # a stable sort
    return Listing(run_id, filter, sort, descending, state, found, counts, ids)


def _of_run(run_id: str | None) -> tuple[str, list[object]]:
    if run_id is None:
        return ("true", [])
    return ("e.run_id = ?", [run_id])


def _state(reader: TraceReader, run_id: str | None) -> _State:
    in_run, run = _of_run(run_id)
    sql = f"""
        SELECT count(*) AS count, count(*) FILTER (superseded) AS superseded,
          max(ended_at) AS last_end
        FROM episodes e WHERE {in_run}"""
    [counted] = rows(reader, sql, *run)
    return _State(**counted)


def _start_of_new(reader: TraceReader, before: Listing) -> datetime | None:
    """Return the time from which calls have to be searched again; None: all of them.

    All are searched if an episode came that had ended earlier, as from another worker's file, or if
    the file was replaced.
    """
    if before.state.last_end is None:
        return None
    in_run, run = _of_run(before.run_id)
    sql = f"""
        SELECT count(*) FILTER (ended_at <= $1) AS known,
          min(started_at) FILTER (ended_at > $1) AS since
        FROM episodes e WHERE {in_run.replace("?", "$2")}"""
    [row] = rows(reader, sql, before.state.last_end, *run)
    if row["known"] != before.state.count or row["since"] is None:
        return None
    since: datetime = row["since"] - _LATE
    return since


def _count_all(reader: TraceReader, run_id: str | None) -> pa.Table:
    in_run, run = _of_run(run_id)
    ids = reader.query(f"SELECT e.episode_id FROM episodes e WHERE {in_run}", run)
    named = f"c.episode_id IN (SELECT e.episode_id FROM episodes e WHERE {in_run})"
    calls = reader.query(_CALLS.format(named), run)
    spans = [span for span, _ in call_spans(reader, _TOKEN_SPAN)]
    return _with_tokens(reader, _column(ids, "episode_id"), calls, named, run, spans)


def _count_few(reader: TraceReader, ids: pa.Array) -> pa.Table:
    """Token ids are read only within the time of these calls."""
    named, values = among("c.episode_id", ids.to_pylist())
    calls = reader.query(_CALLS.format(named), values)
    since: datetime | None = pc.min(calls["first_call"]).as_py()
    until: datetime | None = pc.max(calls["last_call"]).as_py()
    if until is not None:
        until += timedelta(microseconds=1)  # a span ends before its end
    return _with_tokens(reader, ids, calls, named, values, [(since, until)])


def _with_tokens(
    reader: TraceReader,
    ids: pa.Array,
    calls: pa.Table,
    named: str,
    values: Sequence[object],
    spans: Sequence[Span],
) -> pa.Table:
    """Add the sampled tokens of episodes to the counts of their calls, by ids or else by usage.

    Replies are read for their usage only if an episode has no ids, as they are long.
    """
    sql = "SELECT c.episode_id, {}::BIGINT AS tokens FROM calls c WHERE {} GROUP BY c.episode_id"
    parts: list[pa.Table] = []
    for span in spans:
        in_span = f"{of_span(span)} AND {named}"
        parts.append(reader.query(sql.format("sum(len(c.output_ids))", in_span), values))
        reader.close()  # DuckDB keeps the ids that it has read until then
    by_ids = pa.concat_tables(parts).group_by("episode_id").aggregate([("tokens", "sum")])
    tokens = _aligned(ids, by_ids, "tokens_sum")
    numbers = {
        name: pc.fill_null(_aligned(ids, calls, name), 0) for name in ("calls", "turns", "agents")
    }
    without_ids = ids.filter(pc.and_(pc.is_null(tokens), pc.greater(numbers["calls"], 0)))
    if len(without_ids):
        named, values = among("c.episode_id", without_ids.to_pylist())
        by_usage = reader.query(sql.format(USAGE_TOKENS, named), values)
        tokens = pc.coalesce(tokens, _aligned(ids, by_usage, "tokens"))
    return pa.table({"episode_id": ids, **numbers, "tokens": tokens})


def _aligned(ids: pa.Array, table: pa.Table, name: str) -> pa.Array:
    """Return a column in the order of `ids`, null for missing episodes."""
    return _column(table, name).take(pc.index_in(ids, value_set=_column(table, "episode_id")))


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        return pa.concat_arrays(column.chunks)
    return column


_CALLS = """
    SELECT c.episode_id, count(*) AS calls, count(*) FILTER (c.phase = 'rollout') AS turns,
      count(DISTINCT c.agent) FILTER (c.phase = 'rollout') AS agents,
      min(c.started_at) AS first_call, max(c.started_at) AS last_call
    FROM calls c WHERE {} GROUP BY c.episode_id"""
_PAGE = """
    WITH earned AS (
      SELECT episode_id, sum(value * weight) AS reward FROM rewards WHERE {0} GROUP BY episode_id)
    SELECT episode_id, run_id, task_id, left(task->>'$.main_query', 300) AS task, attempt, group_id,
      step, split, decoding, status, cause, left(error, 300) AS error, reward, 0 AS calls,
      0 AS turns, 0 AS agents, NULL AS tokens, round(epoch(ended_at - started_at), 2) AS seconds,
      started_at, ended_at, coalesce(superseded, false) AS superseded
    FROM episodes LEFT JOIN earned USING (episode_id)
    WHERE {0}"""
