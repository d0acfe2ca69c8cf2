"""Listings of millions of episodes: sorted by any column, filtered, read page by page.

DuckDB reads and filters, Arrow sorts. Columns computed from other tables are read for a page only,
until a sort needs them for all episodes. Counting sampled tokens is slow, as DuckDB reads whole
lists for their lengths: `prepare` does so in a worker after the first page.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.base import USAGE_TOKENS, among, rows
from ajet_tools.trace.queries.episodes import ListedEpisode
from ajet_tools.trace.queries.filters import Filter
from ajet_tools.trace.queries.search import (
    IN_CALL,
    IN_EPISODE,
    call_parameters,
    call_spans,
    episode_parameters,
    of_span,
)

COLUMNS = tuple(ListedEpisode.__annotations__)
"""Sort columns."""

_COUNTED = ("reward", "calls", "turns", "agents", "tokens")
"""Columns computed from other tables."""
_MANY = 2000
"""With more uncounted episodes than this, the whole trace is counted again."""
_SPAN = 20_000
"""Calls searched by a query."""
_TOKEN_SPAN = 200_000
"""Calls whose tokens a query counts."""
_LATE = timedelta(minutes=10)
"""For new episodes, calls are searched from this long before the earliest start."""

Progress = Callable[[int, int], None]
Stop = Callable[[], bool]


class Cancelled(QueryError):
    """The caller cancelled the query."""


@dataclass
class _Counts:
    """Cache of the `_COUNTED` columns, shared by listings derived from one another."""

    table: pa.Table | None = None

    def of(self, reader: TraceReader, ids: pa.Array, cancelled: Stop | None = None) -> pa.Table:
        """Return a table that includes the rows of these episodes."""
        missing = ids if self.table is None else _without(ids, _array(self.table, "episode_id"))
        if self.table is None or len(missing) > _MANY:
            self.table = _count_all(reader, ids, cancelled)
        elif len(missing):
            self.table = pa.concat_tables(
                [self.table, _count_few(reader, missing)]
            ).combine_chunks()
        return self.table


@dataclass(frozen=True)
class _Matches:
    """A snapshot of the episodes of a run, and the matches of a filter."""

    run_id: str | None
    episodes: pa.Table
    counts: _Counts
    filter: Filter | None = None
    fitting: pa.Array | None = None
    """Ids of the matches; None: all."""
    by_part: dict[str | None, tuple[pa.Array, pa.Array]] = field(default_factory=dict)
    """Ids of the episodes checked and of the matches, for each text that the filter searches, and
    for the whole of it (None)."""

    @property
    def ids(self) -> pa.Array:
        return _array(self.episodes, "episode_id")


class Listing:
    """Episodes in one order. Immutable; methods that read the trace return a new listing."""

    def __init__(self, reader: TraceReader, matches: _Matches, sort: str, descending: bool) -> None:
        self.filter = matches.filter
        self.sort = sort
        self.descending = descending
        self._matches = matches
        chosen = matches.episodes
        if matches.fitting is not None:
            chosen = chosen.filter(pc.is_in(chosen["episode_id"], value_set=matches.fitting))
        ids = _array(chosen, "episode_id")
        if sort in _COUNTED:
            values = _aligned(ids, matches.counts.of(reader, matches.ids), sort)
        elif sort in chosen.column_names:
            values = chosen[sort]
        else:
            value = f"episode_id, {_VALUES.get(sort, sort)} AS value"
            values = _aligned(ids, _episodes(reader, matches.run_id, value), "value")
        table = pa.table(
            {"none": pc.is_null(values), "value": values, "ended_at": chosen["ended_at"]}
        )
        keys = [
            ("none", "ascending"),
            ("value", "descending" if descending else "ascending"),
            ("ended_at", "descending"),
        ]
        self._ids = ids.take(pc.sort_indices(table, keys))

    @property
    def count(self) -> int:
        """Number of matches."""
        return len(self._ids)

    @property
    def of(self) -> int:
        """Number of all episodes."""
        return len(self._matches.episodes)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """Return the ids of the episodes [start, stop)."""
        episode_ids: list[str] = self._ids[start:stop].to_pylist()
        return episode_ids

    def position(self, episode_id: str) -> int | None:
        """Return the position of an episode, or None."""
        at: int = pc.index(self._ids, episode_id).as_py()
        return None if at < 0 else at

    def page(self, reader: TraceReader, offset: int, limit: int) -> list[ListedEpisode]:
        """Read the rows [offset, offset + limit); long texts are truncated."""
        ids = self._ids[offset : offset + limit]
        if not len(ids):
            return []
        condition, named = among("episode_id", ids.to_pylist())
        by_id = {
            row["episode_id"]: row for row in rows(reader, f"{_PAGE} WHERE {condition}", *named)
        }
        known = self._matches.counts
        counts = _count_few(reader, ids) if known.table is None else known.of(reader, ids)
        counts = counts.filter(pc.is_in(counts["episode_id"], value_set=ids))
        counted = {row["episode_id"]: row for row in counts.to_pylist()}
        nothing = dict.fromkeys(COLUMNS)  # the order of columns
        return [nothing | by_id[id] | counted[id] for id in ids.to_pylist() if id in by_id]

    def sorted(self, reader: TraceReader, sort: str, descending: bool) -> Listing:
        """Return the same episodes in another order."""
        _check_column(sort)
        return Listing(reader, self._matches, sort, descending)

    def filtered(
        self,
        reader: TraceReader,
        filter: Filter | None,
        *,
        progress: Progress | None = None,
        cancelled: Stop | None = None,
    ) -> Listing:
        """Return the episodes of the run that match another filter, sorted alike. Raises
        Cancelled."""
        matches = replace(self._matches, filter=filter, by_part={})
        return Listing(
            reader, _fit(reader, matches, progress, cancelled), self.sort, self.descending
        )

    def refreshed(self, reader: TraceReader) -> Listing:
        """Add the episodes that have ended since; returns self if there are none. Cheap enough for
        polling.

        Later changes of an episode (feedback, age) need a new listing.
        """
        last = self._matches
        state = "count(*) AS n, count(*) FILTER (superseded) AS superseded, max(ended_at) AS last"
        there = _episodes(reader, last.run_id, state).to_pylist()[0]
        if tuple(there.values()) == (
            len(last.episodes),
            pc.sum(last.episodes["superseded"]).as_py() or 0,
            pc.max(last.episodes["ended_at"]).as_py(),
        ):
            return self
        episodes = _episodes(reader, last.run_id)
        if len(_without(last.ids, _array(episodes, "episode_id"))):  # the file was replaced
            return open_listing(reader, last.run_id, self.filter, self.sort, self.descending)
        matches = _fit(reader, replace(last, episodes=episodes, by_part=dict(last.by_part)))
        return Listing(reader, matches, self.sort, self.descending)

    def prepare(self, reader: TraceReader, cancelled: Stop | None = None) -> None:
        """Count all episodes ahead of a sort, in a worker. Raises Cancelled."""
        self._matches.counts.of(reader, self._matches.ids, cancelled)


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
    _check_column(sort)
    matches = _Matches(run_id, _episodes(reader, run_id), _Counts(), filter)
    return Listing(reader, _fit(reader, matches, progress, cancelled), sort, descending)


def _check_column(sort: str) -> None:
    if sort not in COLUMNS:
        near = difflib.get_close_matches(sort, COLUMNS, n=1, cutoff=0.5)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise QueryError(
            f"episodes have no column {sort!r} to sort by{meant}; columns: {', '.join(COLUMNS)}"
        )


_PAGE = """
    SELECT episode_id, run_id, task_id, left(task->>'$.main_query', 300) AS task, attempt, group_id, step, split,
      decoding, status, cause, left(error, 300) AS error, round(epoch(ended_at - started_at), 2) AS seconds,
      started_at, ended_at, superseded
    FROM episodes"""
_VALUES = {
    "seconds": "epoch(ended_at - started_at)",
    "task": "left(task->>'$.main_query', 64)",
    "error": "left(error, 64)",
}
"""SQL of sort keys that are not columns of `episodes`."""
_COLUMNS = "episode_id, started_at, ended_at, coalesce(superseded, false)::INTEGER AS superseded"


def _episodes(reader: TraceReader, run_id: str | None, select: str = _COLUMNS) -> pa.Table:
    """Select from the episodes of a run."""
    of_run, run = _of_run(run_id)
    return reader.query(f"SELECT {select} FROM episodes e WHERE {of_run}", run)


def _of_run(run_id: str | None) -> tuple[str, list[object]]:
    return ("true", []) if run_id is None else ("e.run_id = ?", [run_id])


# Filters


def _fit(
    reader: TraceReader,
    matches: _Matches,
    progress: Progress | None = None,
    cancelled: Stop | None = None,
) -> _Matches:
    """Apply the filter, to episodes that it has not seen before."""
    if matches.filter is None or matches.filter.is_empty:
        return replace(matches, fitting=None)
    return replace(matches, fitting=_Fitting(reader, matches, progress, cancelled).ids())


class _Fitting:
    """Evaluates a filter: full-text searches separately, in spans of calls, and the rest in one
    query."""

    def __init__(
        self,
        reader: TraceReader,
        matches: _Matches,
        progress: Progress | None,
        cancelled: Stop | None,
    ) -> None:
        assert matches.filter is not None
        self._reader, self._matches, self._filter = reader, matches, matches.filter
        self._progress, self._cancelled = progress, cancelled
        self._done = 0

    def ids(self) -> pa.Array:
        """Return the ids of the matches."""
        found: dict[str, list[str]] = {}
        for needle in self._filter.needles:
            found[needle] = self._extended(needle, partial(self._holding, needle)).to_pylist()

        def matching(among: str, values: Sequence[object], _: datetime | None) -> list[pa.Array]:
            sql, parameters = self._filter.query(among, found)
            return [_array(self._reader.query(sql, [*parameters, *values]), "episode_id")]

        return self._extended(None, matching)

    def _extended(self, part: str | None, find: _Find) -> pa.Array:
        """Return the matches of a part, a needle or the whole filter, for which only new episodes
        are read."""
        matches = self._matches
        checked, fitting = matches.by_part.get(part, (None, pa.array([], pa.string())))
        new = matches.episodes
        if checked is not None:
            new = new.filter(pc.invert(pc.is_in(new["episode_id"], value_set=checked)))
        if len(new):
            among, values = _of_run(matches.run_id)
            began: datetime | None = None
            if checked is not None:
                began = pc.min(new["started_at"]).as_py()
                among += " AND e.ended_at >= ?"
                values = [*values, pc.min(new["ended_at"]).as_py()]
            parts = [fitting, *find(among, values, began)]
            fitting = pa.concat_arrays([ids.cast(pa.string()) for ids in parts])
            matches.by_part[part] = matches.ids, fitting
        return fitting

    def _holding(
        self, needle: str, among: str, values: Sequence[object], began: datetime | None
    ) -> Iterable[pa.Array]:
        """Yield the episodes that contain a text, themselves or in a call."""
        sql = f"SELECT episode_id FROM episodes e WHERE {among} AND {IN_EPISODE}"
        parameters = [*values, *episode_parameters(needle)]
        yield _array(self._reader.query(sql, parameters), "episode_id")
        spans = [((began - _LATE, None), 0)] if began else call_spans(self._reader, _SPAN)
        total = len(self._filter.needles) * sum(size for _, size in spans)
        for span, size in spans:
            if self._cancelled and self._cancelled():
                raise Cancelled("the search was canceled")
            condition, edges = of_span(span)
            sql = f"SELECT DISTINCT c.episode_id FROM calls c WHERE {condition} AND {IN_CALL}"
            yield _array(self._reader.query(sql, [*edges, *call_parameters(needle)]), "episode_id")
            self._done += size
            if self._progress:
                self._progress(self._done, total)


_Find = Callable[[str, Sequence[object], "datetime | None"], Iterable[pa.Array]]
"""Finds matches among episodes: by a condition with its parameters, that began after a time."""


# Counts

_COUNTS = """
    SELECT * FROM (
      SELECT episode_id, count(*) AS calls, count(*) FILTER (phase = 'rollout') AS turns,
        count(DISTINCT agent) FILTER (phase = 'rollout') AS agents, min(started_at) AS first, max(started_at) AS last
      FROM calls WHERE {0} GROUP BY episode_id
    ) FULL JOIN (
      SELECT episode_id, sum(value * weight) AS reward FROM rewards WHERE {0} GROUP BY episode_id
    ) USING (episode_id)"""


def _count_few(reader: TraceReader, ids: pa.Array) -> pa.Table:
    """Read the `_COUNTED` columns of a few episodes; output ids are read only from the times of
    their calls."""
    condition, named = among("episode_id", ids.to_pylist())
    counts = reader.query(_COUNTS.format(condition), named)
    called = counts.select(["first", "last"]).drop_null()
    spans: list[datetime] = []
    for first, last in sorted(zip(*called.to_pydict().values(), strict=True)):
        if spans and first <= spans[-1]:
            spans[-1] = max(spans[-1], last)
        else:
            spans += [first, last]
    during = (
        " OR ".join(f"started_at BETWEEN ${i} AND ${i + 1}" for i in range(1, len(spans), 2))
        or "false"
    )
    condition, named = among("episode_id", ids.to_pylist(), 1 + len(spans))
    sql = (
        f"SELECT episode_id, sum(len(output_ids))::BIGINT AS tokens FROM calls WHERE ({during}) AND"
        f" {condition}"
    )
    return _join(reader, ids, counts, reader.query(f"{sql} GROUP BY episode_id", [*spans, *named]))


def _count_all(reader: TraceReader, ids: pa.Array, cancelled: Stop | None) -> pa.Table:
    """Read the `_COUNTED` columns of all episodes."""
    counts, parts = reader.query(_COUNTS.format("true")), []
    for span, _ in call_spans(reader, _TOKEN_SPAN):
        if cancelled and cancelled():
            raise Cancelled("counting tokens was canceled")
        condition, edges = of_span(span)
        sql = "SELECT c.episode_id, sum(len(c.output_ids))::BIGINT AS tokens FROM calls c"
        parts.append(
            reader.query(f"{sql} WHERE {condition} AND c.output_ids IS NOT NULL GROUP BY 1", edges)
        )
        reader.close()  # DuckDB caches the lists as long as the file is open
    tokens = pa.concat_tables(parts).group_by("episode_id").aggregate([("tokens", "sum")])
    return _join(reader, ids, counts, tokens.rename_columns({"tokens_sum": "tokens"}))


def _join(reader: TraceReader, ids: pa.Array, counts: pa.Table, tokens: pa.Table) -> pa.Table:
    """Join counts in the order of the ids. Replies are read for their usage only if no call of an
    episode has ids."""
    columns = {name: _aligned(ids, counts, name) for name in _COUNTED[:-1]}
    columns |= {name: pc.fill_null(columns[name], 0) for name in ("calls", "turns", "agents")}
    sampled = _aligned(ids, tokens, "tokens")
    missing: list[str] = ids.filter(
        pc.and_(pc.is_null(sampled), pc.greater(columns["calls"], 0))
    ).to_pylist()
    if missing:
        condition, named = among("episode_id", missing)
        sql = (
            f"SELECT episode_id, {USAGE_TOKENS}::BIGINT AS tokens FROM calls WHERE output_ids IS"
            f" NULL AND {condition}"
        )
        sampled = pc.coalesce(
            sampled, _aligned(ids, reader.query(f"{sql} GROUP BY episode_id", named), "tokens")
        )
    return pa.table({"episode_id": ids, **columns, "tokens": sampled})


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def _without(ids: pa.Array, others: pa.Array) -> pa.Array:
    return ids.filter(pc.invert(pc.is_in(ids, value_set=others)))


def _aligned(ids: pa.Array, table: pa.Table, name: str) -> pa.Array:
    """Return a column in the order of `ids`, null for missing episodes."""
    return _array(table, name).take(pc.index_in(ids, value_set=_array(table, "episode_id")))
