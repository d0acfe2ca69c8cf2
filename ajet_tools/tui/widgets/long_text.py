"""A scrollable text of any size, and base classes of widgets that render only their visible
lines."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

from rich.cells import cell_len, get_character_cell_size, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ajet_sdk.reporting.output import visible
from ajet_tools.text.clean import drop_zero_width


class LineView(ScrollView):
    """A scroll view of lines that computes its style once per frame; Textual would do so for every
    line."""

    ground = Style.null()
    """Background style while rendering."""

    def scroll_to(self, x: float | None = None, y: float | None = None, **options: Any) -> None:
        """Scroll without animation, as contents may move meanwhile."""
        super().scroll_to(x, y, **{**options, "animate": False, "force": True})

    def render_lines(self, crop: Region) -> list[Strip]:
        self.ground = self.rich_style
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        strip = self.line(y + self.scroll_offset.y) or Strip.blank(0)
        return strip.apply_style(self.ground).crop_extend(0, self.size.width, self.ground)

    def line(self, line: int) -> Strip | None:
        """Return the content of a line; None after the last one."""
        raise NotImplementedError


class CursorView(LineView):
    """Lines with a cursor, which Textual's keys of a scrolling widget move."""

    def move_by_lines(self, lines: int) -> None:
        raise NotImplementedError

    def move_by_pages(self, pages: int) -> None:
        raise NotImplementedError

    def move_to_edge(self, *, end: bool) -> None:
        """Move to the beginning or the end of everything."""
        raise NotImplementedError

    def action_scroll_up(self) -> None:
        self.move_by_lines(-1)

    def action_scroll_down(self) -> None:
        self.move_by_lines(1)

    def action_page_up(self) -> None:
        self.move_by_pages(-1)

    def action_page_down(self) -> None:
        self.move_by_pages(1)

    def action_scroll_home(self) -> None:
        self.move_to_edge(end=False)

    def action_scroll_end(self) -> None:
        self.move_to_edge(end=True)


class RowView(CursorView):
    """Rows of a line each, below a fixed header."""

    @property
    def page_rows(self) -> int:
        """Number of rows that fit below the header."""
        return max(1, self.scrollable_content_region.height - 1)

    def reveal(self, row: int) -> None:
        """Scroll as little as necessary to make a row visible."""
        first = self.scroll_offset.y
        if not first <= row < first + self.page_rows:
            self.scroll_to(y=row if row < first else row - self.page_rows + 1)


class LongText(LineView, can_focus=True):
    """A text whose long lines are wrapped at the width of the window, which may hold wide
    characters."""

    DEFAULT_CSS = """
    LongText { overflow-x: hidden; overflow-y: scroll; }
    LongText > .long-text--found { background: $warning; color: $background; text-style: bold; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {"long-text--found"}

    class Clicked(Message):
        """`current` was clicked."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.show(text)

    def show(self, text: str) -> None:
        """Show another text from its beginning."""
        self.text = drop_zero_width(visible(text)).expandtabs(4)
        self._lines = self.text.split("\n")
        self._starts: list[Sequence[int]] = [range(1)] * len(self._lines)
        """Per line, the columns where its rows start."""
        self._firsts: list[int] = [0]
        self._needle: re.Pattern[str] | None = None
        self._found: list[tuple[int, int]] = []
        """Line and column of each match."""
        self._at = -1
        if self.is_mounted:
            self.scroll_to(y=0)
            self._wrap()

    def on_resize(self) -> None:
        self._wrap()

    def _wrap(self) -> None:
        # the line at the top stays there, while its rows change
        line = self._row(self.scroll_offset.y)[0]
        cells = max(4, self.scrollable_content_region.width)
        self._starts = [_row_starts(text, cells) for text in self._lines]
        self._firsts = [0, *accumulate(map(len, self._starts))]
        self.virtual_size = Size(self.size.width, self._firsts[-1])
        self.scroll_to(y=self._firsts[line])
        self.refresh()

    def _row(self, row: int) -> tuple[int, int]:
        """Return the line of a row, and the number of the row in it."""
        line = max(0, min(bisect_right(self._firsts, row) - 1, len(self._lines) - 1))
        return line, row - self._firsts[line]

    def search(self, needle: str | re.Pattern[str]) -> int:
        """Find a text (ignoring case) or pattern, go to the next match, and return the number of
        matches."""
        if isinstance(needle, str):
            if needle:
                self._needle = re.compile(re.escape(needle), re.IGNORECASE)
            else:
                self._needle = None
        else:
            self._needle = needle
        self._found = []
        if self._needle:
            for number, line in enumerate(self._lines):
                self._found += [(number, match.start()) for match in self._needle.finditer(line)]
        here = self._row(self.scroll_offset.y)[0]
        self._at = next((n for n, (line, _) in enumerate(self._found) if line >= here), 0) - 1
        self.go(1)
        return len(self._found)

    def go(self, by: int) -> None:
        """Go to the next match, or the previous one."""
        if self._found:
            self._at = (self._at + by) % len(self._found)
            line, column = self._found[self._at]
            row = (
                self._firsts[min(line, len(self._firsts) - 1)]
                + bisect_right(self._starts[line], column)
                - 1
            )
            if not self.scroll_offset.y <= row < self.scroll_offset.y + self.size.height:
                self.scroll_to(y=max(0, row - self.size.height // 3))
        self.refresh()

    @property
    def current(self) -> str:
        """Text of the current match, or an empty text."""
        if self._found:
            return self._match(*self._found[self._at])
        return ""

    def _match(self, line: int, column: int) -> str:
        match = None
        if self._needle:
            match = self._needle.match(self._lines[line], column)
        return match[0] if match else ""

    def on_click(self, event: Click) -> None:
        """Make a clicked match the current one."""
        line, part = self._row(event.y + self.scroll_offset.y)
        start = self._starts[line][part]
        column = start + _characters(self._lines[line][start:], event.x - self.gutter.left)
        for at, (number, start) in enumerate(self._found):
            if number == line and start <= column < start + len(self._match(number, start)):
                self._at = at
                self.refresh()
                self.post_message(self.Clicked())

    def line(self, line: int) -> Strip | None:
        """Render a row, with highlighted matches."""
        if line >= self._firsts[-1]:
            return None
        number, part = self._row(line)
        starts = self._starts[number]
        text = self._lines[number]
        segments = list[Segment]()
        at = start = starts[part]
        end = starts[part + 1] if part + 1 < len(starts) else len(text)
        # a match may begin in the row before or end in the next one
        match_style = self.get_component_rich_style("long-text--found")
        reach = 0
        if self._needle is not None:
            reach = len(self._needle.pattern)
        for match in (
            self._needle.finditer(text, max(0, start - reach), end + reach) if self._needle else ()
        ):
            first = max(at, match.start())
            last = min(end, match.end())
            if first < last:
                here = self._found and (number, match.start()) == self._found[self._at]
                if here:
                    style = match_style + Style(reverse=True)
                else:
                    style = match_style
                segments += [
                    Segment(text[at:first], Style.null()),
                    Segment(text[first:last], style),
                ]
                at = last
        segments.append(Segment(text[at:end], Style.null()))
        return Strip(segments, cell_len(text[start:end]))


def _row_starts(text: str, width: int) -> Sequence[int]:
    """Return the columns where the rows of a line start, with at most `width` cells each."""
    if text.isascii() or all(map(_is_narrow, {*text})):
        return range(0, max(1, len(text)), width)
    starts = [0]
    cells = 0
    for column, character in enumerate(text):
        size = get_character_cell_size(character)
        if cells + size > width:
            starts.append(column)
            cells = 0
        cells += size
    return starts


def _is_narrow(character: str) -> bool:
    return get_character_cell_size(character) == 1


def _characters(text: str, cells: int) -> int:
    """Return the number of characters that end within the first cells of a text."""
    for column, character in enumerate(text):
        cells -= get_character_cell_size(character)
        if cells < 0:
            return column
    return len(text)


def fit_text(text: str, width: int, *, right: bool = False) -> str:
    """Fit a text into one line of exactly `width` cells, with an ellipsis or padding."""
    plain = visible(drop_zero_width(" ".join(text[: 4 * width + 16].split())))
    length = cell_len(plain)
    if length > width:
        if width:
            return set_cell_size(set_cell_size(plain, max(0, width - 1)).rstrip() + "…", width)
        return ""
    padding = " " * (width - length)
    return padding + plain if right else plain + padding
