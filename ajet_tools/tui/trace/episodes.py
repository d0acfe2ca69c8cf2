"""Screen with the list of episodes: sort, filter, search, select, open."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.actions import SkipAction
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message

from ajet_sdk.errors import AjetError
from ajet_tools.text.clean import one_line
from ajet_tools.trace.queries.episodes import ListedEpisode, unended_rows
from ajet_tools.trace.queries.experiments import names_of_runs
from ajet_tools.trace.queries.filters import Filter, FilterError, parse
from ajet_tools.trace.queries.listing import Listing, open_listing
from ajet_tools.trace.queries.search import Cancelled
from ajet_tools.tui.trace.episode_list import (
    CAUSE_COLUMN,
    EPISODE_COLUMNS,
    UnfinishedRows,
    run_column,
)
from ajet_tools.tui.trace.screen import MAX_COMPARED, TraceScreen
from ajet_tools.tui.widgets.lines import PartsLine, Prompt, remember
from ajet_tools.tui.widgets.listing import ListingTable
from ajet_tools.tui.widgets.listing_rows import Rows

_BY_TIME = "ended_at"
_FILTER_EXAMPLE = "reward < 0.5 and status = 'failed' and has('calc')"
_ASCENDING_FIRST = frozenset(("task", "attempt", "status", "cause"))
"""Columns sorted in ascending order first."""
_ORDERS = {(_BY_TIME, True): "newest first", (_BY_TIME, False): "oldest first"}
"""Orders without a column title to mark."""
_FAILURE_FIELDS = re.compile(r"\b(status|cause|error)\b")
"""A filter with one of these fields adds the column of causes."""


class EpisodesScreen(TraceScreen):
    """Lists the episodes of a run, or of all runs, that match a filter.

    Rows never move while being read: new episodes only appear at once at the top of a list sorted
    by time; otherwise the status line counts them.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Search or filter", key_display="/"),
        Binding("g", "group", "Group"),
        Binding("c", "compare", "Compare"),
        Binding("f", "feedback", "Feedback"),
        Binding("y", "copy", "Copy the id", show=False),
        Binding("full_stop", "newest", "Show new rows", show=False, key_display="."),
        Binding("escape", "leave", "Stop, unselect, or back", show=False),
    ]
    PALETTE: ClassVar[Sequence[tuple[str, str]]] = [
        *((f"Sort by {column.title}", f"sort('{column.name}')") for column in EPISODE_COLUMNS),
        ("Sort by time of end", f"sort('{_BY_TIME}')"),
        ("Reverse the order", "reverse"),
        ("Select all, or none", "select_all"),
    ]

    @dataclass
    class Progress(Message):
        """Progress of a full-text filter, in calls."""

        of_worker: threading.Event
        done: int
        of: int

    def __init__(self, run_id: str | None = None, filter_text: str = "") -> None:
        super().__init__()
        self.run_id = run_id
        self.filter_text = filter_text
        self.listing: Listing | None = None
        self.pending: Listing | None = None
        """A newer listing that is not shown yet."""
        self.filter: Filter | None = None
        self._run_names: dict[str, str] = {}
        """For a list of several runs."""
        self._stop = threading.Event()
        self._busy = ""
        self._hidden: tuple[Rows | None, frozenset[str], int] = (None, frozenset(), 0)
        """Cache: rows, selection, and the number of selected episodes that are not listed."""

    def compose_body(self) -> ComposeResult:
        yield ListingTable(EPISODE_COLUMNS, self._fetch_page)
        yield PartsLine()
        yield Prompt("filter", _FILTER_EXAMPLE, back=ListingTable, check=parse, id="filter")

    @property
    def table(self) -> ListingTable:
        return self.query_one(ListingTable)

    @property
    def prompt(self) -> Prompt:
        return self.query_one("#filter", Prompt)

    @property
    def latest(self) -> Listing | None:
        return self.pending or self.listing

    async def _fetch_page(
        self, rows: Listing | UnfinishedRows, offset: int, limit: int
    ) -> Sequence[ListedEpisode]:
        return await self.app.ask(rows.page, offset, limit)

    def on_mount(self) -> None:
        if self.run_id:
            self.title = "runs › … › episodes"
        else:
            self.title = "episodes of all runs"
        self.table.focus()
        self._start()

    def on_unmount(self) -> None:
        self._stop.set()

    @work(group="listing", exclusive=True)
    async def _start(self) -> None:
        self._update_status(busy="reading")
        try:
            names = await self.app.ask(names_of_runs)
            if self.run_id is None:
                self._run_names = names
            else:
                self.title = f"runs › {one_line(names.get(self.run_id) or 'run', 40)} › episodes"
            self._use_listing(await self._first_listing())
        finally:
            self._update_status(busy="")
        await self._show_unended()

    async def _first_listing(self) -> Listing:
        """Open the listing of the given filter; if it is invalid or stopped, list all episodes and
        open the prompt."""
        try:
            self.filter = parse(self.filter_text)
            progress, cancelled = self._cancellable()
            return await self.app.ask(
                open_listing, self.run_id, self.filter, progress=progress, cancelled=cancelled
            )
        except AjetError as error:
            if not self.filter_text:
                raise
            self.filter = parse("")
            self._ask_filter(self.filter_text, str(error))
            return await self.app.ask(open_listing, self.run_id, self.filter)

    # Rows and order

    def _use_listing(self, listing: Listing, *, top: bool = False) -> None:
        self.listing = listing
        self.pending = None
        why = self.filter is not None and _FAILURE_FIELDS.search(self.filter.text)
        # next to the status, as a narrow screen hides the last columns
        if why:
            columns = [*EPISODE_COLUMNS[:3], CAUSE_COLUMN, *EPISODE_COLUMNS[3:]]
        else:
            columns = [*EPISODE_COLUMNS]
        if len(self._run_names) > 1:
            columns.insert(1, run_column(self._run_names))
        self.table.show_columns(columns)
        self.table.show_sort(listing.sort, listing.descending)
        self.table.show(listing, top=top)
        self._update_status()

    async def _show_unended(self) -> None:
        """If no episode has ended, list the unfinished ones."""
        if (
            self.listing is not None
            and not self.listing.count
            and not (self.filter and self.filter.text)
        ):
            self.table.show(UnfinishedRows(await self.app.ask(unended_rows, self.run_id)))
            self._update_status()

    def _cancellable(self) -> tuple[Callable[[int, int], None], Callable[[], bool]]:
        """Return callbacks for progress and cancellation of a slow query, and stop the previous
        query."""
        self._stop.set()
        self._stop = stop = threading.Event()

        def progress(done: int, of: int) -> None:
            self.post_message(self.Progress(stop, done, of))

        return progress, stop.is_set

    def on_episodes_screen_progress(self, event: Progress) -> None:
        if event.of_worker is self._stop and self._busy:
            self._update_status(busy=f"read {event.done:,} of {event.of:,}, esc stops")

    @work(group="listing", exclusive=True)
    async def _sort(self, latest: Listing, sort: str, descending: bool) -> None:
        self._use_listing(await self.app.ask(latest.sorted, sort, descending))

    def action_sort(self, column: str) -> None:
        """Sort by a column; a second time reverses the order."""
        if (latest := self.latest) is not None:
            if latest.sort == column:
                descending = not latest.descending
            else:
                descending = column not in _ASCENDING_FIRST
            self._sort(latest, column, descending)

    def action_reverse(self) -> None:
        if (latest := self.latest) is not None:
            self._sort(latest, latest.sort, not latest.descending)

    def on_listing_table_sort_requested(self, event: ListingTable.SortRequested) -> None:
        self.action_sort(event.column)

    # The filter

    def action_filter(self) -> None:
        self._ask_filter(self.filter.text if self.filter else "")

    def _ask_filter(self, text: str, wrong: str = "") -> None:
        self.prompt.open(text, self.app.filters)
        self.prompt.show_error(wrong)

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        try:
            wanted = parse(event.text)
        except FilterError as error:
            self.prompt.show_error(str(error))
            return
        self._filter(wanted)

    @work(group="listing", exclusive=True)
    async def _filter(self, wanted: Filter) -> None:
        """Apply a filter; an error keeps the list."""
        if (latest := self.latest) is None:
            return
        progress, cancelled = self._cancellable()
        self._update_status(busy="filtering, esc stops" if wanted.needles else "filtering")
        try:
            listing = await self.app.ask(
                latest.filtered, wanted, progress=progress, cancelled=cancelled
            )
        except Cancelled:
            return
        except AjetError as error:
            if self.prompt.is_open:
                self.prompt.show_error(str(error))
            else:
                self.app.show_error(error)
            return
        finally:
            self._update_status(busy="")
        self.filter = wanted
        self.prompt.close()
        self._use_listing(listing)
        remember(self.app.filters, wanted.text)

    # New episodes

    async def read(self) -> None:
        if (latest := self.latest) is not None:
            listing = await self.app.ask(latest.refreshed)
            # a sort or filter may have come while the trace was read
            if listing is not latest and latest is self.latest:
                self._receive_listing(listing)
            await self._show_unended()

    def _receive_listing(self, listing: Listing) -> None:
        """Show a newer listing if no visible row moves; otherwise keep it for later."""
        by_time = listing.sort == _BY_TIME
        if self.listing is None or not self.listing.count or (by_time and not listing.descending):
            self._use_listing(listing)
        elif by_time and self.table.at_top:
            self._use_listing(listing, top=True)
        elif listing.count == self.listing.count:
            self._use_listing(listing)
        else:
            self.pending = listing
            self._update_status()

    def on_listing_table_at_top(self) -> None:
        if self.pending is not None and self.pending.sort == _BY_TIME:
            self._use_listing(self.pending, top=True)

    def action_newest(self) -> None:
        """Show new episodes; in a list sorted by time, go to them."""
        if self.pending is not None:
            self._use_listing(self.pending)
        if self.listing is not None and self.listing.sort == _BY_TIME:
            self.table.move_to_edge(end=not self.listing.descending)

    # Actions on episodes

    def on_listing_table_opened(self, event: ListingTable.Opened) -> None:
        """Open the episode, at the text that the filter searches for, if any."""
        needles = self.filter.needles if self.filter else ()
        self.app.open_episode(event.id, needle=needles[0] if needles else "")

    @property
    def selected_ids(self) -> list[str]:
        """Selected ids in the order of the list, then unlisted ones; without a selection, the row
        under the cursor."""
        positions = self.table.places
        selected = self.table.selected
        if not selected:
            if self.table.cursor_id:
                return [self.table.cursor_id]
            return []
        return [
            *sorted(selected & positions.keys(), key=positions.__getitem__),
            *sorted(selected - positions.keys()),
        ]

    def action_group(self) -> None:
        if (id := self.table.cursor_id) is not None:
            self.app.compare_group(id)

    def action_compare(self) -> None:
        chosen = self.selected_ids
        # one selected row and the cursor on another: those two are meant
        if len(chosen) == 1 and self.table.cursor_id not in (None, chosen[0]):
            chosen.append(str(self.table.cursor_id))
        if 2 <= len(chosen) <= MAX_COMPARED:
            self.app.open_compare(chosen)
        else:
            self.notify(
                f"select 2 to {MAX_COMPARED} episodes with space (now {len(self.table.selected):,})"
            )

    def action_select_all(self) -> None:
        self.table.select_all()

    def action_feedback(self) -> None:
        if (id := self.table.cursor_id) is not None:
            self.app.open_feedback(id)

    def action_copy(self) -> None:
        if chosen := self.selected_ids:
            self.app.copy(
                "\n".join(chosen), chosen[0] if len(chosen) == 1 else f"{len(chosen):,} ids"
            )

    def action_leave(self) -> None:
        """Stop the query, else clear the selection, else leave the screen."""
        if self.listing is None:
            raise SkipAction  # there is nothing to stop before the first listing
        if self._busy and not self._stop.is_set():
            self._stop.set()
        elif self.table.selected:
            self.table.select(())
        else:
            raise SkipAction

    # Status

    def on_listing_table_moved(self) -> None:
        self._update_status()

    def on_listing_table_failed(self, event: ListingTable.Failed) -> None:
        self.app.show_error(event.error)

    def _update_status(self, busy: str | None = None) -> None:
        self._busy = self._busy if busy is None else busy
        self.query_one(PartsLine).show(self._status_parts())

    def _status_parts(self) -> Iterator[Text]:
        """Yield the parts of the status line: position, new episodes, progress, selection, filter."""
        table = self.table
        rows = self.table.rows
        yield Text(self._place())
        if self.pending and self.listing and (new := self.pending.count - self.listing.count) > 0:
            yield Text(f"{new:,} new: . shows them", style="bold reverse")
        if self._busy:
            yield Text(one_line(self._busy), style="italic")
        if table.selected:
            if self._hidden[:2] != (rows, table.selected):
                self._hidden = (rows, table.selected, len(table.selected - table.places.keys()))
            hidden = ""
            if self._hidden[2]:
                hidden = f" ({self._hidden[2]:,} not in this list)"
            yield Text(f"{len(table.selected):,} selected{hidden}", style="bold")
        if self.filter and self.filter.text:
            yield Text(one_line(self.filter.text, 60), style="italic")

    def _place(self) -> str:
        rows = self.table.rows
        count = self.table.count
        if not count:
            if self.filter and self.filter.text:
                return "no episode fits"
            return "no episode yet"
        of = f"{count:,}"
        latest = self.listing
        order = ""
        if latest:
            order = _ORDERS.get((latest.sort, latest.descending), "")
        if isinstance(rows, UnfinishedRows):
            if rows.of_all > count:
                of = f"the newest {of} of {rows.of_all:,}"
            order = "that have not ended"
        return f"{self.table.cursor + 1:,} of {of} {order}".rstrip()
