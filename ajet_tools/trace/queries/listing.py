"""Episodes sorted by any column, filtered, page by page, however many there are.

A listing stands on a compact index of the run (`queries.index`), which the listings made from one another share. The
first page waits for ids and times only. A sort by another column reads that column once; call `prepare` in a worker
after the first page, and no sort has to wait: the one that would, by tokens, reads every list of output ids.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.base import among, rows
from ajet_tools.trace.queries.episodes import ListedEpisode
from ajet_tools.trace.queries.fields import (
    IN_CALL,
    IN_EPISODE,
    call_parameters,
    call_spans,
    episode_parameters,
    of_span,
)
from ajet_tools.trace.queries.filters import Condition, Filter, Node, conditions, sql_of
from ajet_tools.trace.queries.index import COUNTED, EpisodeIndex, counted
from ajet_tools.trace.queries.index import Cancelled as Cancelled

COLUMNS = tuple(ListedEpisode.__annotations__)
"""Episodes can be sorted by each of these."""

_SPAN = 20_000
_LATE = timedelta(minutes=10)
Mask = npt.NDArray[np.bool_]
Progress = Callable[[int, int], None]
Stop = Callable[[], bool]


class Listing:
    """Episodes in one order. It does not change; the methods that ask the trace give another one."""

    def __init__(
        self, index: EpisodeIndex, mask: Mask, filter: Filter | None, sort: str, descending: bool, reader: TraceReader
    ) -> None:
        self.filter = filter
        self.sort = sort
        self.descending = descending
        self._index = index
        self._mask = mask
        self._order = index.order(reader, sort, descending, np.flatnonzero(mask))

    @property
    def count(self) -> int:
        """Number of episodes that match the filter."""
        return len(self._order)

    @property
    def of(self) -> int:
        """Number of all episodes."""
        return len(self._mask)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        """The ids of the episodes [start, stop) in this order."""
        episode_ids: list[str] = self._index.ids.take(pa.array(self._order[start:stop])).to_pylist()
        return episode_ids

    def position(self, episode_id: str) -> int | None:
        """Position of an episode; None if it is not in the listing."""
        at = pc.index(self._index.ids, episode_id).as_py()
        matches = np.flatnonzero(self._order == at)
        return int(matches[0]) if len(matches) else None

    def page(self, reader: TraceReader, offset: int, limit: int) -> list[ListedEpisode]:
        """The rows [offset, offset + limit); long texts are cut."""
        at = self._order[offset : offset + limit]
        ids: list[str] = self._index.ids.take(pa.array(at)).to_pylist()
        if not ids:
            return []
        condition, named = among("episode_id", ids)
        nothing = dict.fromkeys(COLUMNS)  # the order of columns; `COUNTED` follow below
        by_id = {row["episode_id"]: nothing | row for row in rows(reader, f"{_PAGE} WHERE {condition}", *named)}
        unread = [name for name in COUNTED if self._index.known(name) is None]
        if unread:
            for row in counted(reader, ids, unread).to_pylist():
                if row["episode_id"] in by_id:
                    by_id[row["episode_id"]] |= row
        for name in COUNTED:
            values = self._index.known(name)
            if values is not None:
                for id, value in zip(ids, values.take(pa.array(at)).to_pylist(), strict=True):
                    if id in by_id:
                        by_id[id][name] = value
        return [by_id[id] for id in ids if id in by_id]

    def sorted(self, reader: TraceReader, sort: str, descending: bool) -> Listing:
        """The same episodes in another order. Columns already read are reused."""
        _known(sort)
        return Listing(self._index, self._mask, self.filter, sort, descending, reader)

    def filtered(
        self,
        reader: TraceReader,
        filter: Filter | None,
        *,
        progress: Progress | None = None,
        cancelled: Stop | None = None,
    ) -> Listing:
        """The run's episodes that fit another filter, in the same order of columns. Raises Cancelled."""
        mask = _mask(reader, self._index, filter, 0, progress, cancelled)
        return Listing(self._index, mask, filter, self.sort, self.descending, reader)

    def refreshed(self, reader: TraceReader) -> Listing:
        """A listing with the episodes that ended since; self if none did. Cheap enough to call every second.

        Changes after an episode's end (feedback, age) are not read again: open a new listing.
        """
        grown = self._index.grow(reader)
        if grown is None:
            return open_listing(reader, self._index.run_id, self.filter, self.sort, self.descending)
        if len(self._index) == self.of:
            return self
        new = _mask(reader, self._index, self.filter, self.of, None, None)
        mask = np.concatenate([self._mask, new])
        return Listing(self._index, mask, self.filter, self.sort, self.descending, reader)

    def prepare(self, reader: TraceReader, cancelled: Stop | None = None) -> None:
        """Read the slow columns ahead, in a worker, so that sorts and pages don't wait. Raises Cancelled."""
        for name in ("reward", "calls", "task", "tokens"):
            reader.close()  # what DuckDB keeps of a file goes with it, and there is much to read
            self._index.column(reader, name, cancelled)


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
    _known(sort)
    index = EpisodeIndex(run_id).load(reader)
    mask = _mask(reader, index, filter, 0, progress, cancelled)
    return Listing(index, mask, filter, sort, descending, reader)


def _known(sort: str) -> None:
    if sort not in COLUMNS:
        raise QueryError(f"episodes have no column {sort!r} to sort by; columns: {', '.join(COLUMNS)}")


_PAGE = """
    SELECT episode_id, run_id, task_id, left(task->>'$.main_query', 300) AS task, attempt, group_id, step, split,
      decoding,      status, cause, left(error, 300) AS error, round(epoch(ended_at - started_at), 2) AS seconds,
      started_at, ended_at, superseded
    FROM episodes"""


def _mask(
    reader: TraceReader,
    index: EpisodeIndex,
    filter: Filter | None,
    start: int,
    progress: Progress | None,
    cancelled: Stop | None,
) -> Mask:
    """Which episodes from the position `start` on fit a filter."""
    if filter is None or filter.node == Condition("true", ()):
        return np.ones(len(index) - start, dtype=bool)
    return _Fitting(reader, index, start, filter.node, progress, cancelled).mask(filter.node)[start:]


class _Fitting:
    """Answers a filter for an index: what reads messages in spans of calls, the rest in one query."""

    def __init__(
        self,
        reader: TraceReader,
        index: EpisodeIndex,
        start: int,
        node: Node,
        progress: Progress | None,
        cancelled: Stop | None,
    ) -> None:
        self._reader, self._index = reader, index
        self._progress, self._cancelled = progress, cancelled
        self._since: tuple[datetime, datetime] | None = None
        if start:
            began, ended = (pc.min(_from(index, name, start)).as_py() for name in ("started_at", "ended_at"))
            self._since = (began, ended) if began and ended else None
        self._needles = sum(condition.needle is not None for condition in conditions(node))
        self._done = 0

    def mask(self, node: Node) -> Mask:
        """Which episodes match; valid for those from `start` on."""
        if isinstance(node, Condition) and node.needle is not None:
            return self._contains(node.needle)
        if isinstance(node, Condition) or not any(c.needle is not None for c in conditions(node)):
            return self._plain(*sql_of(node))
        parts = [self.mask(part) for part in node.parts]
        if node.word == "not":
            return ~parts[0]
        join = np.logical_and if node.word == "and" else np.logical_or
        return np.asarray(join.reduce(parts))

    def _plain(self, sql: str, parameters: tuple[object, ...]) -> Mask:
        of_run, run = self._index.scope
        late, since = ("e.ended_at >= ?", [self._since[1]]) if self._since else ("true", [])
        sql = f"SELECT e.episode_id FROM episodes e WHERE {of_run} AND {late} AND ({sql})"
        mask = np.zeros(len(self._index), dtype=bool)
        self._mark(mask, sql, [*run, *since, *parameters])
        return mask

    def _contains(self, needle: str) -> Mask:
        mask = self._plain(IN_EPISODE, tuple(episode_parameters(needle)))
        spans = [((self._since[0] - _LATE, None), 0)] if self._since else call_spans(self._reader, _SPAN)
        of = self._needles * sum(size for _, size in spans)
        for span, size in spans:
            if self._cancelled and self._cancelled():
                raise Cancelled("the search was canceled")
            condition, edges = of_span(span)
            sql = f"SELECT DISTINCT c.episode_id FROM calls c WHERE {condition} AND {IN_CALL}"
            self._mark(mask, sql, [*edges, *call_parameters(needle)])
            self._done += size
            if self._progress:
                self._progress(self._done, of)
        return mask

    def _mark(self, mask: Mask, sql: str, parameters: list[object]) -> None:
        ids = self._reader.query(sql, parameters)["episode_id"].combine_chunks()
        mask[self._index.positions(ids)] = True


def _from(index: EpisodeIndex, name: str, start: int) -> pa.Array:
    values = index.known(name)
    assert values is not None, "times are read with the ids"
    return values.slice(start)
