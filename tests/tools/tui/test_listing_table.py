"""The virtualised table: what is fetched, what is drawn, and what the cursor and the selection
do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from rich.cells import cell_len
from textual.app import App, ComposeResult

from ajet_sdk.errors import QueryError
from ajet_tools.tui.widgets.listing import ListingTable
from ajet_tools.tui.widgets.listing_rows import Column
from ajet_tools.tui.widgets.long_text import fit_text

pytestmark = pytest.mark.anyio


class Numbers:
    """Rows of numbers; it remembers which were asked for."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.count = len(self.numbers)
        self.asked: list[int] = []

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        return [f"id{n}" for n in self.numbers[start:stop]]


class Table(App[None]):
    """One table of numbers; `gate` holds fetches back, `broken` fails them."""

    COLUMNS = (
        Column("number", "number", 8, lambda row: str(row["number"]), right=True),
        Column("text", "text", 12, lambda row: row["text"], most=60),
        Column("last", "last", 40, lambda row: f"<{row['number']}>"),
    )

    def __init__(self, rows: Numbers, text: str = "text") -> None:
        super().__init__()
        self.rows, self.text = rows, text
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = False
        self.opened: list[str] = []
        self.sorts: list[str] = []
        self.failures: list[str] = []

    async def fetch(self, rows: Numbers, offset: int, limit: int) -> list[dict[str, Any]]:
        await self.gate.wait()
        if self.broken:
            raise QueryError("the disk is gone")
        found = range(offset, min(offset + limit, rows.count))
        rows.asked += found
        return [{"number": rows.numbers[i], "text": self.text} for i in found]

    def compose(self) -> ComposeResult:
        yield ListingTable(self.COLUMNS, self.fetch)

    def on_mount(self) -> None:
        self.table.focus()
        self.table.show(self.rows)

    @property
    def table(self) -> ListingTable:
        return self.query_one(ListingTable)

    def on_listing_table_opened(self, event: ListingTable.Opened) -> None:
        self.opened.append(event.id)

    def on_listing_table_sort_requested(self, event: ListingTable.SortRequested) -> None:
        self.sorts.append(event.column)

    def on_listing_table_failed(self, event: ListingTable.Failed) -> None:
        self.failures.append(str(event.error))

    def lines(self) -> list[str]:
        return [
            self.table.render_line(y).text
            for y in range(self.table.scrollable_content_region.height)
        ]


@pytest.mark.slow
async def test_100_000_rows_are_scrolled_and_only_those_on_screen_fetched() -> None:
    rows = Numbers(range(100_000))
    app = Table(rows)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert app.lines()[0].split() == ["number", "text", "last"]
        assert "0" in app.lines()[1] and "<22>" in app.lines()[23]
        await pilot.press("end")
        await pilot.pause()
        assert app.table.cursor == 99_999 and "<99999>" in app.lines()[23]
        await pilot.press(*["pageup"] * 20)
        for fraction in (0.25, 0.5, 0.75):
            app.table.scroll_to(y=fraction * app.table.max_scroll_y, animate=False)
            await pilot.pause()
            assert f"<{app.table.scroll_offset.y}>" in app.lines()[1]
        assert len(rows.asked) < 2_500 and len(set(rows.asked)) == len(rows.asked)
        await pilot.press("home")
        await pilot.pause()
        assert app.table.at_top and "<0>" in app.lines()[1]


async def test_rows_that_are_not_there_yet_are_dots_and_keys_go_on() -> None:
    app = Table(Numbers(range(1_000)))
    app.gate.clear()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "···" in app.lines()[1] and "<0>" not in app.lines()[1]
        await pilot.press("end")
        assert app.table.cursor == 999
        app.gate.set()
        await pilot.pause()
        assert "<999>" in app.lines()[23] and "···" not in "".join(app.lines())


async def test_a_page_that_cannot_be_read_is_told_once_and_tried_again_when_the_reader_moves() -> (
    None
):
    app = Table(Numbers(range(1_000)))
    app.broken = True
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.pause()
        assert app.failures == ["the disk is gone"] and "···" in app.lines()[1]
        app.broken = False
        await pilot.press("down")
        await pilot.pause()
        assert "<1>" in app.lines()[2]


async def test_cursor_selection_and_opening_by_key() -> None:
    app = Table(Numbers(range(100)))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("down", "down", "up", "enter")
        assert app.opened == ["id1"]
        assert app.lines()[2].startswith("▸"), "the cursor is seen without colour"
        await pilot.press("space")
        assert app.table.selected == {"id1"} and app.lines()[2].startswith("▸●")
        await pilot.press("down", "space", "down", "space")
        assert app.table.selected == {"id1", "id2", "id3"}
        await pilot.press("space")
        assert app.table.selected == {"id1", "id2"}, "space takes a row out again"
        app.table.select_all()
        assert len(app.table.selected) == 100
        app.table.select_all()
        assert not app.table.selected
        await pilot.press("pagedown")
        assert app.table.cursor == 25


async def test_mouse_moves_selects_sorts_and_opens() -> None:
    app = Table(Numbers(range(100)))
    async with app.run_test(size=(80, 24)) as pilot:
        table = app.table
        await pilot.click(ListingTable, offset=(20, 5))
        assert table.cursor == 4
        await pilot.click(ListingTable, offset=(1, 2))
        assert "id1" in table.selected
        await pilot.click(ListingTable, offset=(20, 3), control=True)
        assert "id2" in table.selected
        await pilot.click(ListingTable, offset=(20, 6), times=2)
        assert app.opened == ["id5"]
        await pilot.click(ListingTable, offset=(6, 0))
        await pilot.click(ListingTable, offset=(15, 0))
        assert app.sorts == ["number", "text"]


async def test_other_rows_leave_the_cursor_on_its_row_and_on_its_line() -> None:
    app = Table(Numbers(range(100, 200)))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(*["down"] * 30, "space", *["up"] * 5)
        table = app.table
        line = table.cursor - table.scroll_offset.y
        table.show(Numbers(range(90, 200)))
        await pilot.pause()
        assert table.cursor_id == "id125" and table.cursor - table.scroll_offset.y == line
        assert table.selected == {"id130"}
        table.show(Numbers(range(1)))
        await pilot.pause()
        assert table.cursor_id == "id0"
        table.show(Numbers([]))
        table.select_all()
        await pilot.press("down", "space", "enter", "end", "pageup")
        assert table.cursor_id is None and table.selected == {"id130"}


async def test_columns_without_room_are_reached_sideways_and_the_cursor_stays() -> None:
    app = Table(Numbers(range(100)))
    async with app.run_test(size=(27, 10)) as pilot:
        await pilot.pause()
        assert "<1>" not in app.lines()[2] and all(
            cell_len(line) == 26 for line in app.lines()[:-1]
        )
        await pilot.press("right", "right")
        await pilot.pause()
        assert "<1>" in app.lines()[2] and app.lines()[1].startswith("▸")
        await pilot.press(*["left"] * 9)
        assert app.table.scroll_offset.x == 0


HOSTILE = (
    "[red]x[/] \x1b[31m\x1b]0;t\x07\u202e字字字👨‍👩‍👧❤️e\u0301\u200b\r\n\ttab" + "z" * 1_000_000
)


@pytest.mark.parametrize("text", [HOSTILE, "字" * 100, "👨‍👩‍👧" * 50, "\u0301" * 100, "", "\x00"])
async def test_no_text_is_wider_than_its_cells(text: str) -> None:
    app = Table(Numbers(range(3)), text)
    async with app.run_test(size=(79, 10)) as pilot:
        await pilot.pause()
        lines = app.lines()
        assert all(cell_len(line) == 78 for line in lines) and "<0>" in lines[1]
        assert not any(c in "".join(lines) for c in "\x1b\x07\u202e\r\n\u200d\ufe0f")


@pytest.mark.parametrize("width", range(9))
@pytest.mark.parametrize("text", ["字字字字字", "a字b字c", "abc", "👨‍👩‍👧👨‍👩‍👧", "\x1b[31m"])
def test_fitted_is_exactly_as_wide_as_asked(text: str, width: int) -> None:
    for right in (False, True):
        assert cell_len(fit_text(text, width, right=right)) == width
