"""Episodes sorted by any column, filtered, page by page, however many there are.

DuckDB reads and filters, Arrow sorts. What is counted in other tables is read for all episodes at once where a sort
needs it, and until then for those of a page. Sampled tokens are the lengths of lists, which DuckDB reads to know them:
call `prepare` in a worker after the first page, and no sort has to wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.base import USAGE_TOKENS, among, rows
from ajet_tools.trace.queries.episodes import ListedEpisode
from ajet_tools.trace.queries.fields import (
    IN_CALL,
    IN_EPISODE,
    SQL,
    call_parameters,
    call_spans,
    episode_parameters,
    of_span,
)
from ajet_tools.trace.queries.filters import Condition, Filter, Node, conditions, sql_of

COLUMNS = tuple(ListedEpisode.__annotations__)
"""Episodes can be sorted by each of these."""

_COUNTED = ("reward", "calls", "turns", "agents", "tokens")
"""Columns computed from other tables."""
_MANY = 2000
"""Uncounted episodes from which on those of the whole trace are counted anew."""
_SPAN = 20_000
"""Calls whose texts one query searches."""
_TOKEN_SPAN = 200_000
"""Calls whose tokens one query counts."""
_LATE = timedelta(minutes=10)
"""Episodes are written roughly in the order in which they end, their calls within this time."""

Progress = Callable[[int, int], None]
Stop = Callable[[], bool]


class Cancelled(QueryError):
    """The caller cancelled the query."""


@dataclass
class _Counts:
    """`_COUNTED` of the episodes that have been counted; listings that are made from one another share it."""

    table: pa.Table | None = None

    def of(self, reader: TraceReader, ids: pa.Array, cancelled: Stop | None = None) -> pa.Table:
        """Those of these episodes, among others."""
        table = self.table
        missing = ids
        if table is not None:
            missing = _without(ids, _array(table.filter(pc.is_in(table["episode_id"], value_set=ids)), "episode_id"))
        if table is None or len(missing) > _MANY:
            table = _count_all(reader, ids, cancelled)
        elif len(missing):
            table = pa.concat_tables([table, _count_few(reader, missing)]).combine_chunks()
        self.table = table
        return table


@dataclass(frozen=True)
class _Matches:
    """The episodes of a run at one time, and those of them that fit a filter."""

    run_id: str | None
    episodes: pa.Table
    counts: _Counts
    filter: Filter | None = None
    fitting: pa.Array | None = None
    """None: all."""
    by_part: dict[SQL, tuple[pa.Array, pa.Array]] = field(default_factory=dict)
    """Part of the filter -> the episodes that were looked at, and those that fit."""

    @property
    def ids(self) -> pa.Array:
        return _array(self.episodes, "episode_id")


class Listing:
    """Episodes in one order. It does not change; the methods that ask the trace give another one."""

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
        table = pa.table({"none": pc.is_null(values), "value": values, "ended_at": chosen["ended_at"]})
        keys = [
            ("none", "ascending"),
            ("value", "descending" if descending else "ascending"),
            ("ended_at", "descending"),
        ]
        self._ids = ids.take(pc.sort_indices(table, keys))

    @property
    def count(self) -> int:
        """Number of episodes that match the filter."""
        return len(self._ids)

    @property
    def of(self) -> int:
        """Number of all episodes."""
        return len(self._matches.episodes)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """The ids of the episodes [start, stop) in this order."""
        episode_ids: list[str] = self._ids[start:stop].to_pylist()
        return episode_ids

    def position(self, episode_id: str) -> int | None:
        """Position of an episode; None if it is not in the listing."""
        at: int = pc.index(self._ids, episode_id).as_py()
        return None if at < 0 else at

    def page(self, reader: TraceReader, offset: int, limit: int) -> list[ListedEpisode]:
        """The rows [offset, offset + limit); long texts are cut."""
        ids = self._ids[offset : offset + limit]
        if not len(ids):
            return []
        condition, named = among("episode_id", ids.to_pylist())
        by_id = {row["episode_id"]: row for row in rows(reader, f"{_PAGE} WHERE {condition}", *named)}
        known = self._matches.counts
        counts = _count_few(reader, ids) if known.table is None else known.of(reader, ids)
        counts = counts.filter(pc.is_in(counts["episode_id"], value_set=ids))
        counted = {row["episode_id"]: row for row in counts.to_pylist()}
        nothing = dict.fromkeys(COLUMNS)  # the order of columns
        return [nothing | by_id[id] | counted[id] for id in ids.to_pylist() if id in by_id]

    def sorted(self, reader: TraceReader, sort: str, descending: bool) -> Listing:
        """The same episodes in another order."""
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
        """The run's episodes that fit another filter, in the same order of columns. Raises Cancelled."""
        matches = replace(self._matches, filter=filter, by_part={})
        return Listing(reader, _fit(reader, matches, progress, cancelled), self.sort, self.descending)

    def refreshed(self, reader: TraceReader) -> Listing:
        """A listing with the episodes that ended since; self if none did. Cheap enough to call every second.

        Changes after an episode's end (feedback, age) are not read again: open a new listing.
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
        if len(_without(last.ids, _array(episodes, "episode_id"))):  # another file has taken the place of this one
            return open_listing(reader, last.run_id, self.filter, self.sort, self.descending)
        matches = _fit(reader, replace(last, episodes=episodes, by_part=dict(last.by_part)))
        return Listing(reader, matches, self.sort, self.descending)

    def prepare(self, reader: TraceReader, cancelled: Stop | None = None) -> None:
        """Count ahead, in a worker, so that sorts and pages don't wait. Raises Cancelled."""
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
    """The episodes of a run (of all where None) that fit a filter, in one order.

    `progress(done, of)` and `cancelled()` serve a filter that reads texts, which may take seconds.
    Raises QueryError where there is no such column, Cancelled where it was.
    """
    _check_column(sort)
    matches = _Matches(run_id, _episodes(reader, run_id), _Counts(), filter)
    return Listing(reader, _fit(reader, matches, progress, cancelled), sort, descending)


def _check_column(sort: str) -> None:
    if sort not in COLUMNS:
        raise QueryError(f"episodes have no column {sort!r} to sort by; columns: {', '.join(COLUMNS)}")


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
"""What is sorted by, where that is no column of the table."""
_TIMES = ("started_at", "ended_at")
_COLUMNS = "episode_id, started_at, ended_at, coalesce(superseded, false)::INTEGER AS superseded"


def _episodes(reader: TraceReader, run_id: str | None, select: str = _COLUMNS) -> pa.Table:
    """A SELECT from the episodes of a run."""
    of_run, run = _of_run(run_id)
    return reader.query(f"SELECT {select} FROM episodes e WHERE {of_run}", run)


def _of_run(run_id: str | None) -> tuple[str, list[str]]:
    return ("true", []) if run_id is None else ("e.run_id = ?", [run_id])


# Filters


def _fit(
    reader: TraceReader, matches: _Matches, progress: Progress | None = None, cancelled: Stop | None = None
) -> _Matches:
    """Those that fit the filter. Of each part of it, only episodes are looked at that were not before."""
    if matches.filter is None or matches.filter.node == Condition("true", ()):
        return replace(matches, fitting=None)
    return replace(matches, fitting=_Fitting(reader, matches, progress, cancelled).ids(matches.filter.node))


class _Fitting:
    """Answers a filter part by part: what reads messages in spans of calls, the rest in one query."""

    def __init__(
        self, reader: TraceReader, matches: _Matches, progress: Progress | None, cancelled: Stop | None
    ) -> None:
        self._reader, self._matches = reader, matches
        self._progress, self._cancelled = progress, cancelled
        assert matches.filter is not None
        self._needles = sum(part.needle is not None for part in conditions(matches.filter.node))
        self._done = 0

    def ids(self, node: Node) -> pa.Array:
        """The episodes that fit."""
        needles = [part.needle for part in conditions(node) if part.needle is not None]
        if isinstance(node, Condition) or not needles:
            return self._part(sql_of(node), needles[0] if needles else None)
        parts = [self.ids(part) for part in node.parts]
        if node.word == "not":
            return _without(self._matches.ids, parts[0])
        if node.word == "or":
            return pa.concat_arrays(parts)
        fitting = parts[0]
        for part in parts[1:]:
            fitting = fitting.filter(pc.is_in(fitting, value_set=part))
        return fitting

    def _part(self, sql: SQL, needle: str | None) -> pa.Array:
        matches = self._matches
        looked, fitting = matches.by_part.get(sql, (None, pa.array([], pa.string())))
        new = matches.episodes
        if looked is not None:
            new = new.filter(pc.invert(pc.is_in(new["episode_id"], value_set=looked)))
        if len(new):
            began, ended = (None, None) if looked is None else (pc.min(new[at]).as_py() for at in _TIMES)
            condition, values = sql if needle is None else (IN_EPISODE, episode_parameters(needle))
            late, since = ("e.ended_at >= ?", [ended]) if ended else ("true", [])
            of_run, run = _of_run(matches.run_id)
            text = f"SELECT episode_id FROM episodes e WHERE {of_run} AND {late} AND ({condition})"
            parts = [fitting, _array(self._reader.query(text, [*run, *since, *values]), "episode_id")]
            if needle is not None:
                parts += self._containing(needle, began)
            fitting = pa.concat_arrays([part.cast(pa.string()) for part in parts])
            matches.by_part[sql] = matches.ids, fitting
        return fitting

    def _containing(self, needle: str, since: datetime | None) -> Iterable[pa.Array]:
        """The episodes with a call that contains a text."""
        spans = [((since - _LATE, None), 0)] if since else call_spans(self._reader, _SPAN)
        of = self._needles * sum(size for _, size in spans)
        for span, size in spans:
            if self._cancelled and self._cancelled():
                raise Cancelled("the search was canceled")
            condition, edges = of_span(span)
            sql = f"SELECT DISTINCT c.episode_id FROM calls c WHERE {condition} AND {IN_CALL}"
            yield _array(self._reader.query(sql, [*edges, *call_parameters(needle)]), "episode_id")
            self._done += size
            if self._progress:
                self._progress(self._done, of)


# What is counted

_COUNTS = """
    SELECT * FROM (
      SELECT episode_id, count(*) AS calls, count(*) FILTER (phase = 'rollout') AS turns,
        count(DISTINCT agent) FILTER (phase = 'rollout') AS agents, min(started_at) AS first, max(started_at) AS last
      FROM calls WHERE {0} GROUP BY episode_id
    ) FULL JOIN (
      SELECT episode_id, sum(value * weight) AS reward FROM rewards WHERE {0} GROUP BY episode_id
    ) USING (episode_id)"""


def _count_few(reader: TraceReader, ids: pa.Array) -> pa.Table:
    """The columns of `_COUNTED`. Of the lists of output ids only those are read that are of these episodes' times."""
    condition, named = among("episode_id", ids.to_pylist())
    counts = reader.query(_COUNTS.format(condition), named)
    called = counts.select(["first", "last"]).drop_null()
    spans: list[datetime] = []
    for first, last in sorted(zip(*called.to_pydict().values(), strict=True)):
        if spans and first <= spans[-1]:
            spans[-1] = max(spans[-1], last)
        else:
            spans += [first, last]
    during = " OR ".join(f"started_at BETWEEN ${i} AND ${i + 1}" for i in range(1, len(spans), 2)) or "false"
    condition, named = among("episode_id", ids.to_pylist(), 1 + len(spans))
    sql = f"SELECT episode_id, sum(len(output_ids))::BIGINT AS tokens FROM calls WHERE ({during}) AND {condition}"
    return _join(reader, ids, counts, reader.query(f"{sql} GROUP BY episode_id", [*spans, *named]))


def _count_all(reader: TraceReader, ids: pa.Array, cancelled: Stop | None) -> pa.Table:
    """The same, read for all episodes of the trace."""
    counts, parts = reader.query(_COUNTS.format("true")), []
    for span, _ in call_spans(reader, _TOKEN_SPAN):
        if cancelled and cancelled():
            raise Cancelled("counting tokens was canceled")
        condition, edges = of_span(span)
        sql = "SELECT c.episode_id, sum(len(c.output_ids))::BIGINT AS tokens FROM calls c"
        parts.append(reader.query(f"{sql} WHERE {condition} AND c.output_ids IS NOT NULL GROUP BY 1", edges))
        reader.close()  # what was read of the lists stays in memory as long as the file is open
    tokens = pa.concat_tables(parts).group_by("episode_id").aggregate([("tokens", "sum")])
    return _join(reader, ids, counts, tokens.rename_columns({"tokens_sum": "tokens"}))


def _join(reader: TraceReader, ids: pa.Array, counts: pa.Table, tokens: pa.Table) -> pa.Table:
    """In the order of the ids; tokens by the usage of their calls where no call has ids: only then are replies read."""
    columns = {name: _aligned(ids, counts, name) for name in _COUNTED[:-1]}
    columns |= {name: pc.fill_null(columns[name], 0) for name in ("calls", "turns", "agents")}
    sampled = _aligned(ids, tokens, "tokens")
    missing: list[str] = ids.filter(pc.and_(pc.is_null(sampled), pc.greater(columns["calls"], 0))).to_pylist()
    if missing:
        condition, named = among("episode_id", missing)
        sql = f"SELECT episode_id, {USAGE_TOKENS}::BIGINT AS tokens FROM calls WHERE output_ids IS NULL AND {condition}"
        sampled = pc.coalesce(sampled, _aligned(ids, reader.query(f"{sql} GROUP BY episode_id", named), "tokens"))
    return pa.table({"episode_id": ids, **columns, "tokens": sampled})


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def _without(ids: pa.Array, others: pa.Array) -> pa.Array:
    return ids.filter(pc.invert(pc.is_in(ids, value_set=others)))


def _aligned(ids: pa.Array, table: pa.Table, name: str) -> pa.Array:
    """A column of the table in the order of `ids`; null where the table has no such episode."""
    return _array(table, name).take(pc.index_in(ids, value_set=_array(table, "episode_id")))
