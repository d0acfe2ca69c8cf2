"""A table of any size: only the rows on the screen are turned into text."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import ClassVar

import pyarrow as pa
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from ajet_sdk.trace.values import value_of
from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import number
from ajet_tools.tui.widgets.long_text import RowView, fit_text

_WIDEST = 48
_MEASURED = 100
"""Rows of each end that say how wide a column is."""


class ArrowTable(RowView, can_focus=True):
    """The rows of an Arrow table under a header that stays, with a cursor on one cell."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "arrow-table--header",
        "arrow-table--cursor",
        "arrow-table--row",
        "arrow-table--other-row",
        "arrow-table--cursor-row",
    }
    DEFAULT_CSS = """
    ArrowTable {
        & .arrow-table--header { background: $panel; color: $foreground; text-style: bold; }
        & .arrow-table--row { background: $surface; color: $foreground; }
        & .arrow-table--other-row { background: $surface-lighten-1; color: $foreground; }
        & .arrow-table--cursor-row { background: $block-hover-background; color: $foreground; }
        & .arrow-table--cursor {
            background: $block-cursor-blurred-background; color: $foreground; text-style: underline;
        }
        &:focus .arrow-table--cursor {
            background: $block-cursor-background; color: $block-cursor-foreground; text-style: bold;
        }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1, 0)", "Up", show=False),
        Binding("down", "move(1, 0)", "Down", show=False),
        Binding("left", "move(0, -1)", "Left", show=False),
        Binding("right", "move(0, 1)", "Right", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "edge(-1)", "First row", show=False),
        Binding("end,G", "edge(1)", "Last row", show=False),
        Binding("enter", "select", "Show or open", show=False),
    ]

    @dataclass
    class Selected(Message):
        """Enter or a second click on a cell."""

        table: ArrowTable
        column: str
        value: object

        @property
        def control(self) -> ArrowTable:
            return self.table

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.table: pa.Table = pa.table({})
        self.cursor = (0, 0)
        """Row and column."""
        self._widths: list[int] = []
        self._right: list[bool] = []
        self._texts = lru_cache(maxsize=512)(self._format_row)

    def show(self, table: pa.Table) -> None:
        """Another table, from its first row."""
        self.table = table
        self.cursor = (0, 0)
        self._texts.cache_clear()
        self._right = [_is_number(field.type) for field in table.schema]
        count = len(table)
        measured = {*range(min(_MEASURED, count)), *range(max(0, count - _MEASURED), count)}
        sample = [self._texts(row) for row in measured]
        names = [one_line(name, _WIDEST) for name in table.column_names]
        self._widths = [
            min(_WIDEST, max(len(name), *(len(texts[i]) for texts in sample), 1)) if sample else max(len(name), 1)
            for i, name in enumerate(names)
        ]
        self.virtual_size = Size(sum(self._widths) + 2 * len(self._widths), len(table) + 1)
        self.scroll_to(0, 0)
        self.refresh()

    @property
    def value(self) -> object:
        """What stands under the cursor; None where there is no row."""
        row, column = self.cursor
        return value_of(self.table[column][row]) if len(self.table) and self.table.num_columns else None

    def _format_row(self, row: int) -> list[str]:
        return [_format_value(value_of(column[row])) for column in self.table.columns]

    def render_line(self, y: int) -> Strip:
        width, scrolled = self.size.width, self.scroll_offset
        if not self._widths:
            return Strip.blank(width, self.ground)
        if y == 0:
            return self._header().crop_extend(scrolled.x, scrolled.x + width, self._style("header"))
        row = scrolled.y + y - 1
        if row >= len(self.table):
            return Strip.blank(width, self.ground)
        style = self._style("cursor-row" if row == self.cursor[0] else "other-row" if row % 2 else "row")
        under = self._style("cursor")
        cells = [
            Segment(
                f" {fit_text(text, self._widths[i], right=self._right[i])} ",
                under if (row, i) == self.cursor else style,
            )
            for i, text in enumerate(self._texts(row))
        ]
        return Strip(cells).crop_extend(scrolled.x, scrolled.x + width, style)

    def _header(self) -> Strip:
        style = self._style("header")
        return Strip(
            [
                Segment(f" {fit_text(name, self._widths[i], right=self._right[i])} ", style)
                for i, name in enumerate(self.table.column_names)
            ]
        )

    def _style(self, part: str) -> Style:
        return self.get_component_rich_style(f"arrow-table--{part}")

    def _move_to(self, row: int, column: int) -> None:
        """The cursor to a cell, and the cell into view."""
        if not len(self.table):
            return
        self.cursor = (
            min(max(0, row), len(self.table) - 1),
            min(max(0, column), self.table.num_columns - 1),
        )
        row, column = self.cursor
        start = sum(self._widths[:column]) + 2 * column
        end, x = start + self._widths[column] + 2, self.scroll_offset.x
        if start < x:
            self.scroll_to(x=start)
        elif end > x + self.size.width:
            self.scroll_to(x=max(0, min(start, end - self.size.width)))
        self.reveal(row)
        self.refresh()

    def action_move(self, rows: int, columns: int) -> None:
        self._move_to(self.cursor[0] + rows, self.cursor[1] + columns)

    def action_page(self, way: int) -> None:
        self._move_to(self.cursor[0] + way * max(1, self.page_rows - 1), self.cursor[1])

    def action_edge(self, way: int) -> None:
        self._move_to(0 if way < 0 else len(self.table) - 1, self.cursor[1])

    def action_select(self) -> None:
        if len(self.table):
            self.post_message(self.Selected(self, self.table.column_names[self.cursor[1]], self.value))

    def on_click(self, event: events.Click) -> None:
        if event.y == 0 or not self._widths:
            return
        x, column = event.x + self.scroll_offset.x, 0
        while column < len(self._widths) - 1 and x >= self._widths[column] + 2:
            x -= self._widths[column] + 2
            column += 1
        place = (self.scroll_offset.y + event.y - 1, column)
        if place == self.cursor:
            self.action_select()
        else:
            self._move_to(*place)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _format_value(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | str):
        return one_line(value, _WIDEST + 1) if isinstance(value, str) else str(value).lower()
    if isinstance(value, Decimal):
        return number(int(value)) if value == value.to_integral_value() else str(value)
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list):
        head = value if len(value) <= _WIDEST else value[:_WIDEST]
        return one_line(head, _WIDEST + 1)
    return one_line(value if isinstance(value, dict) else str(value), _WIDEST + 1)
