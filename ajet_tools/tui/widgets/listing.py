"""A virtual table that fetches, measures and draws only visible rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.cache import LRUCache
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from ajet_sdk.errors import AjetError
from ajet_tools.tui.widgets.listing_rows import PAGE, PAGES, Column, Rows, find_column, fit_widths
from ajet_tools.tui.widgets.long_text import RowView

_GUTTER = 3
"""Cells for cursor, selection and a space."""


class ListingTable(RowView, can_focus=True):
    """A virtual table over `Rows`, with a cursor and a selection that follow their ids.

    `fetch(rows, offset, limit)` reads a page in a worker, first for the visible rows and then
    around them. Missing rows are drawn as dots.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        f"listing--{part}"
        for part in ("header", "cursor", "blurred", "selected", "good", "bad", "warn", "faint")
    }
    DEFAULT_CSS = """
    ListingTable {
        height: 1fr;
        background: $surface;
        overflow-y: scroll;
        scrollbar-size-vertical: 1;
        & > .listing--header { text-style: bold; background: $panel; color: $foreground; }
        & > .listing--cursor { background: $primary; color: $text; text-style: bold; }
        & > .listing--blurred { background: $primary-muted; color: $text; }
        & > .listing--selected { background: $secondary-muted; }
        & > .listing--good { color: $text-success; }
        & > .listing--bad { color: $text-error; }
        & > .listing--warn { color: $text-warning; }
        & > .listing--faint { color: $text-muted; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "choose", "Select"),
        Binding("enter", "open", "Open"),
    ]

    @dataclass
    class Opened(Message):
        """A row was opened, by enter or a double click."""

        id: str

    @dataclass
    class Moved(Message):
        """The cursor or the selection changed."""

        cursor: str | None

    class AtTop(Message):
        """The view was scrolled back to the first row."""

    @dataclass
    class SortRequested(Message):
        """The title of a column was clicked."""

        column: str

    @dataclass
    class Failed(Message):
        """A page could not be read; its rows stay dots until the cursor moves."""

        error: AjetError

    def __init__(
        self,
        columns: Sequence[Column[Any]],
        fetch: Callable[[Any, int, int], Awaitable[Sequence[Mapping[str, object]]]],
        *,
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self.columns = tuple(columns)
        self.fetch = fetch
        self.rows: Rows | None = None
        self.cursor = 0
        self.selected: frozenset[str] = frozenset()
        self.sorted_by: tuple[str, bool] = ("", False)
        self._pages: LRUCache[int, Sequence[Mapping[str, object]]] = LRUCache(PAGES)
        self._strips: LRUCache[tuple[object, ...], Strip] = LRUCache(1024)
        self._styles: dict[str, Style] = {}
        self._widths = tuple(column.width for column in self.columns)
        self._height = 0
        self._places: Mapping[str, int] | None = None
        self._fetching = self._failed = False

    # For screens

    @property
    def count(self) -> int:
        return self.rows.count if self.rows else 0

    @property
    def cursor_id(self) -> str | None:
        """Id of the row under the cursor."""
        return self.id_at(self.cursor)

    def id_at(self, index: int) -> str | None:
        """Return the id of a row."""
        if self.rows is None or not 0 <= index < self.rows.count:
            return None
        return self.rows.ids(index, index + 1)[0]

    @property
    def places(self) -> Mapping[str, int]:
        """Position of every row by id; built once per `Rows`."""
        if self._places is None:
            if self.rows is not None:
                self._places = {id: at for at, id in enumerate(self.rows.ids())}
            else:
                self._places = {}
        return self._places

    @property
    def at_top(self) -> bool:
        return self.scroll_offset.y == 0

    def row(self, index: int) -> Mapping[str, object] | None:
        """Return a row, if its page is loaded."""
        page = self._pages.get(index // PAGE)
        if page and index % PAGE < len(page):
            return page[index % PAGE]
        return None

    def show(self, rows: Rows, *, top: bool = False) -> None:
        """Show other rows, keeping the cursor on its row and that row at its line of the screen.

        With `top`, the view stays at the top, and so does a cursor on the first row; elsewhere the
        cursor follows its row, and the view follows before it leaves the screen. If its row is
        gone, the cursor keeps its position.
        """
        cursor = self.cursor_id
        first = self.scroll_offset.y
        visible = first <= self.cursor < first + self.page_rows
        anchor = self.cursor if visible else first
        anchor_id = cursor if visible else self.id_at(first)
        self.rows = rows
        self._places = None
        # the rows of a page may be others now
        self._pages.clear()
        self._failed = False
        follows = top and not self.cursor
        if follows:
            self.cursor = 0
        else:
            self.cursor = max(0, min(self._place(cursor, self.cursor), rows.count - 1))
        self._measure()
        down = 0
        if visible:
            down = max(0, self.cursor - self.page_rows + 1)
        self.scroll_to(y=down if top else first + self._place(anchor_id, anchor) - anchor)
        self.redraw()
        self.post_message(self.Moved(self.cursor_id))

    def _place(self, id: str | None, otherwise: int) -> int:
        if id is None:
            return otherwise
        return self.places.get(id, otherwise)

    def go_to(self, index: int) -> None:
        """Move the cursor to a row, and make it visible."""
        self.cursor = max(0, min(index, self.count - 1))
        self._failed = False
        self.reveal(self.cursor)
        self.refresh()
        self.post_message(self.Moved(self.cursor_id))

    def select(self, ids: Iterable[str]) -> None:
        """Select exactly these rows."""
        self.selected = frozenset(ids)
        self.refresh()
        self.post_message(self.Moved(self.cursor_id))

    def show_columns(self, columns: Sequence[Column[Any]]) -> None:
        """Show other columns of the same rows."""
        if tuple(columns) != self.columns:
            self.columns = tuple(columns)
            self._measure()
            self.redraw()

    def show_sort(self, column: str, descending: bool) -> None:
        """Show the sort column."""
        self.sorted_by = (column, descending)
        self.redraw()

    # Keys and mouse

    def move_by_lines(self, lines: int) -> None:
        self.go_to(self.cursor + lines)

    def move_by_pages(self, pages: int) -> None:
        self.move_by_lines(pages * max(1, self.page_rows - 1))

    def move_to_edge(self, *, end: bool) -> None:
        self.go_to(self.count - 1 if end else 0)

    def action_scroll_left(self) -> None:
        # a cell at a time would take dozens of keys
        self.scroll_to(x=self.scroll_offset.x - 8)

    def action_scroll_right(self) -> None:
        self.scroll_to(x=self.scroll_offset.x + 8)

    def action_choose(self) -> None:
        if (id := self.cursor_id) is not None:
            self.select(self.selected ^ {id})

    def select_all(self) -> None:
        """Select all rows, or none if they are selected."""
        if self.rows is not None and self.count:
            all_ids = frozenset(self.places)
            self.select(frozenset() if all_ids <= self.selected else self.selected | all_ids)

    def action_open(self) -> None:
        if (id := self.cursor_id) is not None:
            self.post_message(self.Opened(id))

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if at is None:
            return
        if at.y == 0:
            if (
                column := find_column(
                    self.columns, self._widths, at.x - _GUTTER, self.scroll_offset.x
                )
            ) is not None:
                self.post_message(self.SortRequested(column))
            return
        index = self.scroll_offset.y + at.y - 1
        if index >= self.count:
            return
        self.go_to(index)
        if event.ctrl or at.x < _GUTTER:
            self.action_choose()
        # a click moves the cursor alone, so that looking around opens nothing
        elif event.chain == 2:
            self.action_open()

    # Layout

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if round(old_value) and not round(new_value):
            self.post_message(self.AtTop())

    def on_resize(self, event: events.Resize) -> None:
        """Keep a visible cursor visible."""
        before = max(1, self._height - 1)
        first = self.scroll_offset.y
        seen = first <= self.cursor < first + before
        self._height = self.scrollable_content_region.height
        self._measure()
        if seen:
            self.reveal(self.cursor)
        self.redraw()

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles.clear()
        self._strips.clear()

    def _measure(self) -> None:
        self._widths = fit_widths(self.columns, self.scrollable_content_region.width - _GUTTER)
        self.virtual_size = Size(
            _GUTTER + sum(self._widths) + len(self._widths) - 1, self.count + 1
        )

    def redraw(self) -> None:
        """Draw the rows again, as after a change of what their cells show."""
        self._strips.clear()
        self.refresh()

    # Drawing

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        left = self.scroll_offset.x
        if y == 0:
            whole = self._header()
            style = self._style("header")
        else:
            index = self.scroll_offset.y + y - 1
            if index >= self.count:
                return Strip.blank(width, self._style())
            whole, style = self._line(index)
        gutter = whole.crop(0, _GUTTER)
        cells = whole.crop(_GUTTER + left, left + width)
        return Strip.join([gutter, cells]).adjust_cell_length(width, style)

    def _header(self) -> Strip:
        style = self._style("header")
        parts = [Segment(" " * _GUTTER, style)]
        for column, width in zip(self.columns, self._widths, strict=True):
            parts.append(Segment(column.heading(width, *self.sorted_by), style))
        return Strip(parts)

    def _style(self, part: str = "") -> Style:
        """Return the style of a part of the table, cached per theme."""
        if part not in self._styles:
            if part:
                upon = self.get_component_rich_style(f"listing--{part}", partial=True)
            else:
                upon = Style.null()
            self._styles[part] = self.rich_style + upon
        return self._styles[part]

    def _line(self, index: int) -> tuple[Strip, Style]:
        """Render a row with all columns; also returns its background."""
        id = self.id_at(index)
        row = self.row(index)
        if row is None:
            self._request_rows()
        style = self._style("selected" if id in self.selected else "")
        if index == self.cursor:
            style = self._style("cursor" if self.has_focus else "blurred")
        # a strip is drawn again once its page has come
        key = (index, row is None, style, id in self.selected)
        strip = self._strips.get(key)
        if strip is None:
            cursor = "▸" if index == self.cursor else " "
            selected = "●" if id in self.selected else " "
            segments = [Segment(f"{cursor}{selected} ", style)]
            for column, width in zip(self.columns, self._widths, strict=True):
                for text, tone in column.cell(row, width):
                    segments.append(Segment(text, self._apply_tone(style, tone, index)))
            strip = self._strips[key] = Strip(segments)
        return strip, style

    def _apply_tone(self, style: Style, tone: str, index: int) -> Style:
        """Add the colour of a tone, except under the cursor, where it may be unreadable."""
        if not tone or index == self.cursor:
            return style
        return style + Style(color=self._style(tone).color)

    # Pages

    def _request_rows(self) -> None:
        if not self._fetching and not self._failed and self.is_running:
            self._fetching = True
            self.run_worker(self._fetch_visible(), group="pages", exit_on_error=True)

    async def _fetch_visible(self) -> None:
        """Fetch the visible pages, which may change meanwhile, then the pages around them."""
        try:
            while (page := self._next_page()) is not None:
                rows = self.rows
                page_rows = await self.fetch(rows, page * PAGE, PAGE)
                # a sort or a filter came while the page was read
                if rows is self.rows:
                    self._pages[page] = page_rows
                    self.refresh()
        except AjetError as error:
            self._failed = True
            self.post_message(self.Failed(error))
        finally:
            self._fetching = False

    def _next_page(self) -> int | None:
        """Return the next page to fetch, visible ones first; None if all are loaded."""
        first = self.scroll_offset.y
        last = min(self.count, first + self.page_rows) - 1
        if first <= last:
            shown = range(first // PAGE, last // PAGE + 1)
        else:
            shown = range(0)
        around = []
        if shown:
            around = [
                page for page in (shown[-1] + 1, shown[0] - 1) if 0 <= page * PAGE < self.count
            ]
        return next((page for page in (*shown, *around) if page not in self._pages), None)
