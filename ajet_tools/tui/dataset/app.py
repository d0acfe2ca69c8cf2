"""The application of `ajet dataset view`, and its table of rows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import ClassVar, get_args

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ajet_sdk.errors import AjetError
from ajet_tools.dataset.curation.filter import Filter, parse
from ajet_tools.dataset.review.journal import Mark
from ajet_tools.dataset.review.review import Only, Review
from ajet_tools.dataset.review.save import Plan
from ajet_tools.text.clean import one_line
from ajet_tools.text.grammar import FilterError
from ajet_tools.tui.base import ViewerApp
from ajet_tools.tui.dataset.edit import EditScreen
from ajet_tools.tui.dataset.row import RowPane, RowScreen
from ajet_tools.tui.dataset.save import SaveScreen
from ajet_tools.tui.dataset.table import ReviewStatus, RowsTable, SearchHits, ShownRows
from ajet_tools.tui.widgets.lines import KeyLine, Prompt, TitleLine, remember
from ajet_tools.tui.widgets.listing import ListingTable

_GROW_SECONDS = 0.2
"""Seconds between two updates while rows are being read."""
_ONLY: tuple[Only, ...] = get_args(Only)


class RowsScreen(Screen[None]):
    """Lists the rows of a dataset, with details of the row under the cursor."""

    app: DatasetApp

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "mark('rejected')", "Reject"),
        Binding("u,ctrl+z", "undo", "Undo"),
        Binding("e", "edit(False)", "Edit"),
        Binding("E", "edit(True)", "Edit as JSON", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("ctrl+f", "find", "Search"),
        Binding("n", "hit(1)", "Next match", show=False),
        Binding("N", "hit(-1)", "Previous match", show=False),
        Binding("t", "only", "Undecided, accepted, rejected, edited, or all", show=False),
        Binding("p", "pane", "Show or hide the row's details", show=False),
        Binding("y", "copy", "Copy the row as JSON", show=False),
        Binding("ctrl+s", "save", "Save"),
        Binding("escape", "back", "Stop, unselect, or show all", show=False),
        Binding("q", "leave", "Quit", show=False),
    ]

    def __init__(self, review: Review, filter_text: str = "") -> None:
        super().__init__()
        self.review = review
        self.first_filter = filter_text
        self.filter = parse("")
        self.only: Only = "all"
        self.hits: SearchHits | None = None
        self._history: dict[str, list[str]] = {"filter": [], "find": []}
        self._stop, self._cancel_load = threading.Event(), threading.Event()
        self._busy = ""
        self._leave_pressed = False

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield RowsTable(self.review)
        yield ReviewStatus(self.review)
        yield RowPane(self.review)
        yield Prompt(
            "filter",
            'metadata.level>=3 text~"train" chars<500',
            back=RowsTable,
            check=parse,
            id="filter",
        )
        yield Prompt("search", "a text anywhere in a row", back=RowsTable, id="find")
        yield KeyLine()

    @property
    def table(self) -> RowsTable:
        return self.query_one(RowsTable)

    def on_mount(self) -> None:
        self.table.focus()
        self._load()
        self._growing = self.set_interval(_GROW_SECONDS, self._grow)

    def on_unmount(self) -> None:
        self._stop.set()
        self._cancel_load.set()

    # Loading

    @work(group="load")
    async def _load(self) -> None:
        try:
            await asyncio.to_thread(self.review.load, self._cancel_load.is_set)
        except AjetError as error:
            self.app.fail(error)
            return
        if self._cancel_load.is_set():
            return
        self._growing.stop()
        self._grow()
        self._report_restored()
        if self.review.sampled is not None:
            self.table.show(self._shown())
            undecided = (
                at
                for at, number in enumerate(self.review.sampled)
                if self.review.mark_of(number) is None
            )
            self.table.go_to(next(undecided, 0))
        if self.first_filter:
            self._filter(self.first_filter)

    def _grow(self) -> None:
        """Show the rows read so far."""
        count = len(self.review.spool)
        if count and not self.table.columns:
            self.table.choose_columns()
        if not self._narrowed and self.review.sample_size is None and count != self.table.count:
            self.table.show(ShownRows(range(count)))
        self._show_marks()

    def on_resize(self) -> None:
        if self.table.rows is not None:
            self.table.choose_columns()
            self.table.show(self.table.rows)

    def _report_restored(self) -> None:
        review = self.review
        if review.restored:
            self.notify(f"restored {review.restored:,} earlier decisions", markup=False, timeout=5)
        if review.lost:
            self.notify(
                f"{review.lost:,} earlier decisions are about rows that no longer exist",
                severity="warning",
                timeout=8,
            )
        if review.bad.count:
            self.notify(
                f"{review.bad.count:,} invalid rows are skipped", severity="warning", timeout=8
            )

    # Filter and search

    @property
    def _narrowed(self) -> bool:
        return bool(self.filter.text) or self.only != "all"

    def action_filter(self) -> None:
        self._open_prompt("filter", self.filter.text)

    def action_find(self) -> None:
        self._open_prompt("find", self.hits.needle if self.hits is not None else "")

    def _open_prompt(self, what: str, text: str) -> None:
        self.query_one(f"#{what}", Prompt).open(text, self._history[what])

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        remember(self._history[event.prompt.id or ""], event.text)
        if event.prompt.id == "filter":
            self._filter(event.text)
        else:
            self._find(event.text)

    def _filter(self, text: str) -> None:
        try:
            wanted = parse(text)
        except FilterError as error:
            self._show_filter_error(text, error)
        else:
            self._narrow(wanted, self.only)

    def _show_filter_error(self, text: str, error: AjetError) -> None:
        prompt = self.query_one("#filter", Prompt)
        if not prompt.is_open:
            self._open_prompt("filter", text)
        prompt.show_error(str(error))

    @work(group="rows", exclusive=True)
    async def _narrow(self, wanted: Filter, only: Only) -> None:
        """Show the matching rows; an error keeps the list."""
        try:
            matches = await self._scan("filtering", self.review.fitting, wanted, only)
        except AjetError as error:
            self._show_filter_error(wanted.text, error)
            return
        if matches is None:
            return
        self.filter, self.only = wanted, only
        self.query_one("#filter", Prompt).close()
        self.table.show(self._shown(matches if self._narrowed else None))
        self._update_status()

    def _shown(self, matches: list[int] | None = None) -> ShownRows:
        """Return the matching rows or all; of a sample, only its rows, in sampled order."""
        if self.review.sampled is None:
            return ShownRows(range(len(self.review.spool)) if matches is None else matches)
        fitting = None if matches is None else set(matches)
        return ShownRows(
            [number for number in self.review.sampled if fitting is None or number in fitting],
            rising=False,
        )

    @work(group="rows", exclusive=True)
    async def _find(self, needle: str) -> None:
        """Mark the rows that contain a text, and go to the next one."""
        self.query_one("#find", Prompt).close()
        matches = await self._scan("searching", self.review.holding, needle) if needle else None
        self.hits = SearchHits(needle, matches) if matches is not None else None
        self._show_marks()
        if self.hits is not None:
            self._go_to_hit(self.hits, 0)

    async def _scan(
        self, verb: str, scan: Callable[..., list[int] | None], *arguments: object
    ) -> list[int] | None:
        """Return the row numbers of a scan; None if it was stopped by escape or another scan."""
        self._stop.set()
        self._stop = stop = threading.Event()

        self._busy = f"{verb}, esc stops"
        self._update_status()
        try:
            return await asyncio.to_thread(scan, *arguments, stop=stop)
        finally:
            self._busy = ""
            self._update_status()

    def action_only(self) -> None:
        """Show only the next of: all, undecided, accepted, rejected, edited."""
        self._narrow(self.filter, _ONLY[(_ONLY.index(self.only) + 1) % len(_ONLY)])

    def action_hit(self, by: int) -> None:
        if self.hits is None:
            self.notify("no search yet; ctrl+f searches", timeout=2)
        else:
            self._go_to_hit(self.hits, by)

    def _go_to_hit(self, hits: SearchHits, by: int) -> None:
        at = (
            hits.step(self.table.rows, self.table.cursor, by)
            if self.table.rows is not None
            else None
        )
        if at is None:
            self.notify(f"no row contains {one_line(hits.needle, 40)!r}", markup=False, timeout=3)
        else:
            self.table.go_to(at)

    def action_back(self) -> None:
        """Stop the scan, else clear the selection, the hits or the filter."""
        if self._busy:
            self._stop.set()
        elif self.table.selected:
            self.table.select(())
        elif self.hits is not None:
            self.hits = None
            self._show_marks()
        elif self._narrowed:
            self._narrow(parse(""), "all")

    # Decisions

    def action_mark(self, mark: Mark) -> None:
        """Accept or reject, and go to the next row."""
        if not (chosen := self.table.numbers):
            return
        self.review.mark(chosen, mark)
        many = bool(self.table.selected)
        self.table.select(())
        if not many and self.review.mark_of(chosen[0]) is not None:
            self.table.action_move(1)
        self._update_decisions()

    def action_undo(self) -> None:
        back = self.review.undo()
        if not back:
            self.notify("nothing to undo", timeout=2)
            return
        if (
            at := (
                self.table.rows.position(str(min(back))) if self.table.rows is not None else None
            )
        ) is not None:
            self.table.go_to(at)
        self.update_rows()

    def update_rows(self) -> None:
        """Show changed rows."""
        if self.table.rows is not None:
            self.table.show(self.table.rows)
        self._update_decisions()

    def _update_decisions(self) -> None:
        if self.review.unkept is not None and not self.review.told_unkept:
            self.review.told_unkept = True
            self.app.show_error(self.review.unkept)
        self._show_marks()
        self.query_one(RowPane).show(self.table.number)

    def action_edit(self, as_json: bool) -> None:
        if (number := self.table.number) is not None:
            edit = EditScreen(self.review, number, as_json)
            self.app.push_screen(edit, lambda changed: self.update_rows() if changed else None)

    def on_listing_table_opened(self, event: ListingTable.Opened) -> None:
        self.app.push_screen(RowScreen(self.table))

    def action_copy(self) -> None:
        if (number := self.table.number) is not None:
            self.app.copy(self.review.line(number), f"row {number + 1:,}")

    def action_pane(self) -> None:
        pane = self.query_one(RowPane)
        pane.display = not pane.display

    # Saving and leaving

    def action_save(self) -> None:
        self.app.push_screen(SaveScreen(self.review), self._finish_save)

    def _finish_save(self, saved: Plan | None) -> None:
        if saved is None:
            return
        names = " and ".join(str(file) for file in saved.files)
        self.notify(f"saved {saved.rows:,} rows: {names}", markup=False, timeout=6)
        self.app.parting = f"saved {saved.rows:,} rows: {names}"
        if saved.in_place:
            self.app.reopen()
        else:
            self._update_status()

    def action_leave(self) -> None:
        """Leave. Decisions are in the journal; if that failed, losing them takes a second key
        press."""
        review = self.review
        if review.unsaved and not review.is_kept and not self._leave_pressed:
            self._leave_pressed = True
            self.notify(
                "your decisions are not saved: ctrl+s saves them, q again discards them",
                severity="warning",
            )
            return
        if review.unsaved and review.is_kept:
            self.app.parting = (
                f"your decisions are kept in {review.journal.path}; nothing is saved yet"
            )
        self.app.exit()

    # Status

    def on_listing_table_moved(self) -> None:
        self.query_one(RowPane).show(self.table.number)
        self._update_status()

    def on_listing_table_failed(self, event: ListingTable.Failed) -> None:
        self.app.show_error(event.error)

    def _show_marks(self) -> None:
        self.table.show_marks(self.hits)
        self._update_status()

    def _update_status(self) -> None:
        status = self.query_one(ReviewStatus)
        status.update_status(self.table, self._busy, self.filter.text, self.only, self.hits)


class DatasetApp(ViewerApp):
    """The dataset viewer, with an optional filter."""

    TITLE = "ajet dataset"

    def __init__(self, review: Review, filter_text: str = "") -> None:
        super().__init__()
        self.review = review
        self.first_filter = filter_text
        self.sub_title = one_line(review.source)
        self.failure: AjetError | None = None
        """Error that ended the app, reported by the command."""
        self.parting = ""
        """Printed to the terminal at the end."""

    def on_mount(self) -> None:
        self.push_screen(RowsScreen(self.review, self.first_filter))

    def fail(self, error: AjetError) -> None:
        self.failure = error
        self.exit(return_code=1)

    def reopen(self) -> None:
        """Read the dataset again after it was written."""
        before = self.review
        self.review = Review(
            before.source,
            mapping=before.mapping,
            skip_bad=before.bad.skip,
            sample=before.sample_size,
            seed=before.seed,
        )
        self.switch_screen(RowsScreen(self.review))
        before.close()

    async def action_quit(self) -> None:
        """Leave like the key q of the table, which asks for unsaved decisions."""
        while not isinstance(self.screen, RowsScreen) and len(self.screen_stack) > 1:
            self.pop_screen()
        if isinstance(self.screen, RowsScreen):
            self.screen.action_leave()
