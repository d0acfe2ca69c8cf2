"""The list of episodes: those of a run that match a filter, in one order, read page by page.

One query gives the ids in their order, another the rows of a page. A text that the filter searches
for is looked up before, in spans of calls; what was found is kept while the run goes on, so that
only calls of new episodes are searched.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.base import USAGE_TOKENS, among, rows
from ajet_tools.trace.queries.episodes import ListedEpisode
from ajet_tools.trace.queries.filters import COLUMNS as FILTER_COLUMNS
from ajet_tools.trace.queries.filters import Filter, parse
from ajet_tools.trace.queries.search import episodes_with

COLUMNS = tuple(ListedEpisode.__annotations__)
"""Sort columns."""
_SORT_KEYS = {
    **FILTER_COLUMNS,
    "task": "left(e.task->>'$.main_query', 64)",
    "error": "left(e.error, 64)",
    "agents": """(SELECT count(DISTINCT c.agent) FROM calls c
        WHERE c.episode_id = e.episode_id AND c.phase = 'rollout')""",
}
"""SQL of sort keys over a row `e` of `episodes`."""
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
    episode_ids: Sequence[str]

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
        return list(self.episode_ids[start:stop])

    def page(self, reader: TraceReader, offset: int, limit: int) -> list[ListedEpisode]:
        """Read the rows [offset, offset + limit); long texts are truncated."""
        ids = self.ids(offset, offset + limit)
        if not ids:
            return []
        named, values = among("episode_id", ids)
        by_id = {row["episode_id"]: row for row in rows(reader, _PAGE.format(named), *values)}
        tokens = _sampled_tokens(reader, [row for row in by_id.values() if row["calls"]])
        for row in by_id.values():
            del row["first_call"], row["last_call"]
            row["tokens"] = tokens.get(row["episode_id"])
        return [by_id[id] for id in ids if id in by_id]

    def sorted(self, reader: TraceReader, sort: str, descending: bool) -> Listing:
        """Return the episodes in another order."""
        return _open(reader, self.run_id, self.filter, sort, descending, self)

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
        return _open(reader, self.run_id, filter, self.sort, self.descending, search=search)

    def refreshed(self, reader: TraceReader) -> Listing:
        """Add the episodes that have ended since; returns self if there are none. Cheap enough for
        polling.

        Later changes of an episode (feedback, age) need a new listing.
        """
        state = _state(reader, self.run_id)
        if state == self.state:
            return self
        return _open(reader, self.run_id, self.filter, self.sort, self.descending, self, state)


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
    return _open(reader, run_id, filter or parse(""), sort, descending, search=search)


def _open(
    reader: TraceReader,
    run_id: str | None,
    filter: Filter,
    sort: str,
    descending: bool,
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
        since = None if before is None else _start_of_new(reader, before)
        for needle in filter.needles:
            ids = frozenset(search(needle, since))
            if since is not None and before is not None:
                ids |= before.found[needle]
            found = {**found, needle: ids}
    in_run, run = _of_run(run_id)
    matches, parameters = filter.query(in_run, {text: [*ids] for text, ids in found.items()})
    direction = "DESC" if descending else "ASC"
    sql = f"""
        SELECT episode_id FROM (
          SELECT e.episode_id, e.ended_at, {_SORT_KEYS.get(sort, f"e.{sort}")} AS sort_key
          FROM episodes e WHERE {f"e.episode_id IN ({matches})" if not filter.is_empty else in_run})
        ORDER BY sort_key {direction} NULLS LAST, ended_at DESC, episode_id"""
    values = run if filter.is_empty else [*parameters, *run]
    ids = reader.query(sql, values)["episode_id"].to_pylist()
    return Listing(run_id, filter, sort, descending, state, found, ids)


def _of_run(run_id: str | None) -> tuple[str, list[object]]:
    return ("true", []) if run_id is None else ("e.run_id = ?", [run_id])


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


def _sampled_tokens(
    reader: TraceReader, page_rows: Sequence[Mapping[str, Any]]
) -> dict[str, int | None]:
    """Count the sampled tokens of episodes, by ids or else by usage.

    Ids are read only within the time of the page's calls, which is short in the order of time.
    Replies are read for their usage only if an episode has no ids, as they are long.
    """
    if not page_rows:
        return {}
    sql = "SELECT episode_id, {}::BIGINT AS tokens FROM calls WHERE {} GROUP BY episode_id"
    named, values = among("episode_id", [row["episode_id"] for row in page_rows])
    since = min(row["first_call"] for row in page_rows)
    until = max(row["last_call"] for row in page_rows)
    during = f"started_at BETWEEN ${len(values) + 1} AND ${len(values) + 2} AND {named}"
    by_ids = rows(reader, sql.format("sum(len(output_ids))", during), *values, since, until)
    tokens = {row["episode_id"]: row["tokens"] for row in by_ids}
    without_ids = [episode_id for episode_id, count in tokens.items() if count is None]
    if without_ids:
        named, values = among("episode_id", without_ids)
        by_usage = rows(reader, sql.format(USAGE_TOKENS, named), *values)
        tokens |= {row["episode_id"]: row["tokens"] for row in by_usage}
    return tokens


_PAGE = """
    WITH called AS (
      SELECT episode_id, count(*) AS calls, count(*) FILTER (phase = 'rollout') AS turns,
        count(DISTINCT agent) FILTER (phase = 'rollout') AS agents,
        min(started_at) AS first_call, max(started_at) AS last_call
      FROM calls WHERE {0} GROUP BY episode_id),
    earned AS (
      SELECT episode_id, sum(value * weight) AS reward FROM rewards WHERE {0} GROUP BY episode_id)
    SELECT episode_id, run_id, task_id, left(task->>'$.main_query', 300) AS task, attempt, group_id,
      step, split, decoding, status, cause, left(error, 300) AS error, reward,
      coalesce(calls, 0) AS calls, coalesce(turns, 0) AS turns, coalesce(agents, 0) AS agents,
      NULL AS tokens, round(epoch(ended_at - started_at), 2) AS seconds, started_at, ended_at,
      coalesce(superseded, false) AS superseded, first_call, last_call
    FROM episodes LEFT JOIN called USING (episode_id) LEFT JOIN earned USING (episode_id)
    WHERE {0}"""
