"""A conversation of any length that renders only visible blocks, and keeps its position while it
grows.

Heights of blocks are estimated until they are near the window. As blocks above the window may turn
out to be higher or lower, the position is kept as block and line, from which the scroll offset
follows.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip

from ajet_sdk.pictures import Picture
from ajet_tools.text.markdown import MARKDOWN_THEME
from ajet_tools.trace.episode.blocks import Block
from ajet_tools.tui.widgets.long_text import LineView
from ajet_tools.tui.widgets.pictures import Drawing, drawing_of

_GUTTER = 2
_CACHED_BLOCKS = 400
"""Number of blocks with cached layout."""


@dataclass(frozen=True)
class _Layout:
    """The lines of a block, and the drawings in them, which the terminal has until they are
    removed."""

    strips: list[Strip]
    drawings: list[Drawing]

    def remove(self) -> None:
        for drawing in self.drawings:
            drawing.cleanup()


class Messages(LineView, can_focus=True):
    """A column of blocks with a selected one."""

    DEFAULT_CSS = """
    Messages { overflow-x: hidden; overflow-y: scroll; }
    Messages > .messages--chosen { color: $accent; text-style: bold; }
    Messages > .messages--found { background: $warning; color: $background; text-style: bold; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {"messages--chosen", "messages--found"}

    @dataclass
    class Moved(Message):
        """The selection moved to another block."""

        block: Block

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.blocks: Sequence[Block] = ()
        self.cursor = 0
        self.markdown = True
        self._unfolded: set[str] = set()
        self._all_unfolded = False
        self._needle: re.Pattern[str] | None = None
        self._heights: list[int] = []
        self._exact: set[int] = set()
        self._starts: list[int] = [0]
        self._laid_out: OrderedDict[tuple[str, int, bool, bool, int], _Layout] = OrderedDict()
        self._scrolling = False
        self.new = 0
        """Number of unread blocks at the end."""

    @property
    def chosen(self) -> Block | None:
        """Selected block."""
        if self.cursor < len(self.blocks):
            return self.blocks[self.cursor]
        return None

    def show(self, blocks: Sequence[Block], *, stay: bool = True, grown: bool = False) -> None:
        """Show other blocks; with `stay`, keep position and selection if their blocks still exist.

        `grown`: the same conversation has new blocks. The view follows if the last block is
        selected; otherwise new blocks are counted.
        """
        top, offset = self._position()
        index = {block.key: n for n, block in enumerate(blocks)}
        top_key = None
        if stay and top < len(self.blocks):
            top_key = self.blocks[top].key
        chosen = self.chosen.key if stay and self.chosen else None
        added = 0
        if grown:
            added = len(index.keys() - {block.key for block in self.blocks})
        follows = added and self.cursor == len(self.blocks) - 1
        self.new = self.new + added if grown and not follows else 0
        self.blocks = blocks
        self.cursor = index.get(chosen, 0) if chosen else 0
        self._estimate_heights()
        if follows:
            self.action_scroll_end()
        else:
            self._go(index.get(top_key, 0) if top_key else 0, offset if top_key in index else 0)

    def choose(self, block: int, *, top: bool = False, notify: bool = True) -> None:
        """Select a block and make it visible, with `top` at the upper edge."""
        if not self.blocks:
            return
        self.cursor = max(0, min(block, len(self.blocks) - 1))
        # an estimate above would move the block when it is corrected
        for n in range(max(0, self.cursor - 1), self.cursor + 1):
            self._measure(n)
        start = self._starts[self.cursor]
        end = self._starts[self.cursor + 1]
        above = self.scroll_offset.y
        below = self.scroll_offset.y + self._page
        if top or start < above or end > below:
            self._go(self.cursor, 0)
        self.refresh()
        if notify:
            self._post_moved()

    def choose_key(self, key: str) -> bool:
        """Select the block with a key; returns whether there is one."""
        index = next((n for n, block in enumerate(self.blocks) if block.key == key), None)
        if index is not None:
            self.choose(index, top=True)
        return index is not None

    def highlight(self, needle: str) -> None:
        """Highlight all matches of a text, ignoring case; an empty text clears them."""
        if needle:
            self._needle = re.compile(re.escape(needle), re.IGNORECASE)
        else:
            self._needle = None
        self.refresh()

    def fold(self, *, everything: bool = False, unfold: bool | None = None) -> None:
        """Fold or unfold the reasoning of the selected block, or of all blocks."""
        block = self.chosen
        if everything:
            self._all_unfolded = not self._all_unfolded
            self._unfolded.clear()
        elif block is not None and block.has_reasoning:
            open_now = block.key in self._unfolded
            if unfold is None or unfold != open_now:
                self._unfolded ^= {block.key}
        self._redo_layout()

    def show_markdown(self, markdown: bool) -> None:
        """Render Markdown, or show its source."""
        self.markdown = markdown
        self._redo_layout()

    def _redo_layout(self) -> None:
        """Estimate all heights again, keeping the position."""
        top, offset = self._position()
        self._estimate_heights()
        self._go(top, offset)

    # Heights and positions

    @property
    def _page(self) -> int:
        return max(1, self.scrollable_content_region.height)

    @property
    def _width(self) -> int:
        return max(8, self.scrollable_content_region.width - _GUTTER - 1)

    def _estimate_heights(self) -> None:
        width = self._width
        self._exact.clear()
        self._heights = [block.estimate_height(width) for block in self.blocks]
        self._sum_heights()

    def _sum_heights(self) -> None:
        self._starts = [0, *accumulate(self._heights)]

    def _measure(self, n: int) -> None:
        """Compute the exact height of a block."""
        if n not in self._exact:
            self._exact.add(n)
            height = len(self._strips(n))
            if height != self._heights[n]:
                self._heights[n] = height
                self._sum_heights()

    def _measure_lines(self, n: int, step: int, lines: int) -> None:
        """Measure blocks from `n`, downwards or upwards, until they fill a number of lines."""
        while 0 <= n < len(self.blocks) and lines > 0:
            self._measure(n)
            lines -= self._heights[n]
            n += step

    def _position(self) -> tuple[int, int]:
        """Return block and line at the upper edge."""
        return self._at(self.scroll_offset.y)

    def _at(self, line: int) -> tuple[int, int]:
        n = max(0, min(bisect_right(self._starts, line) - 1, len(self.blocks) - 1))
        return n, line - self._starts[n]

    def _go(self, block: int, offset: int) -> None:
        """Scroll a line of a block to the upper edge, after measuring the blocks around the
        window."""
        if not self.blocks or self.size.width == 0:
            self.virtual_size = Size(self.size.width, 0)
            self.refresh()
            return
        self._measure(block)
        offset = max(0, min(offset, self._heights[block] - 1))
        self._measure_lines(block, 1, 2 * self._page + offset)
        self._measure_lines(block - 1, -1, self._page)
        self._scrolling = True
        try:
            self.virtual_size = Size(self.size.width, self._starts[-1])
            self.scroll_to(y=self._starts[block] + offset)
        finally:
            self._scrolling = False
        self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if not self._scrolling and self.blocks and round(old_value) != round(new_value):
            self._go(*self._position())
            self._choose_visible()

    def _choose_visible(self) -> None:
        """If the selected block has left the window, select the first one that begins there."""
        above = self.scroll_offset.y
        below = self.scroll_offset.y + self._page
        if self._starts[self.cursor] < below and self._starts[self.cursor + 1] - 1 > above:
            return
        n, offset = self._position()
        if offset and n + 1 < len(self.blocks) and self._starts[n + 1] < below:
            n += 1
        self.cursor = n
        self._post_moved()

    def on_resize(self, event: events.Resize) -> None:
        self._redo_layout()

    def action_scroll_home(self) -> None:
        self.choose(0, top=True)

    def action_scroll_end(self) -> None:
        """Go to the end, with the last line at the lower edge."""
        # the last page has to be exact, else the end is not at the lower edge
        self._measure_lines(len(self.blocks) - 1, -1, self._page)
        self._go(*self._at(max(0, self._starts[-1] - self._page)))
        self.cursor = max(0, len(self.blocks) - 1)
        if self.blocks:
            self._post_moved()

    def on_click(self, event: events.Click) -> None:
        line = event.y + self.scroll_offset.y
        if self.blocks and line < self._starts[-1]:
            self.cursor = self._at(line)[0]
            self.refresh()
            self._post_moved()

    def _post_moved(self) -> None:
        if self.cursor == len(self.blocks) - 1:
            self.new = 0
        self.post_message(self.Moved(self.blocks[self.cursor]))

    # Drawing

    def _strips(self, n: int) -> list[Strip]:
        """Render a block to lines, with a cache."""
        block = self.blocks[n]
        unfolded = self._all_unfolded != (block.key in self._unfolded)
        key = (
            block.key,
            self._width,
            self.markdown,
            unfolded,
            hash((block.title, block.facts, block.parts)),
        )
        layout = self._laid_out.get(key)
        if layout is None:
            drawings: list[Drawing] = []

            def draw(picture: Picture, width: int) -> Drawing | None:
                drawing = drawing_of(picture, width)
                if drawing is not None:
                    drawings.append(drawing)
                return drawing

            console = self.app.console
            with console.use_theme(MARKDOWN_THEME):
                options = console.options.update(
                    width=self._width, height=None, highlight=False, markup=False
                )
                content = block.render(markdown=self.markdown, unfolded=unfolded, draw=draw)
                strips = [Strip(line) for line in console.render_lines(content, options, pad=False)]
            layout = self._laid_out[key] = _Layout(strips, drawings)
            # the terminal keeps a drawing until it is told to remove it
            if len(self._laid_out) > _CACHED_BLOCKS:
                _, oldest = self._laid_out.popitem(last=False)
                oldest.remove()
        else:
            self._laid_out.move_to_end(key)
        return layout.strips

    def on_unmount(self) -> None:
        for layout in self._laid_out.values():
            layout.remove()

    def line(self, line: int) -> Strip | None:
        if not self.blocks or line >= self._starts[-1]:
            return None
        n, offset = self._at(line)
        strips = self._strips(n)
        strip = strips[offset] if offset < len(strips) else Strip.blank(0)
        if self._needle:
            strip = self._highlight_matches(strip, self._needle)
        gutter = Strip.blank(_GUTTER)
        # the last line of a block is blank
        if n == self.cursor and offset + 1 < len(strips):
            gutter = Strip(
                [Segment("▌ ", self.get_component_rich_style("messages--chosen"))], _GUTTER
            )
        return Strip.join([gutter, strip])

    def _highlight_matches(self, strip: Strip, needle: re.Pattern[str]) -> Strip:
        """Highlight the matches in a line."""
        text = strip.text
        cuts: list[int] = []
        for match in needle.finditer(text):
            cuts += [cell_len(text[: match.start()]), cell_len(text[: match.end()])]
        if not cuts:
            return strip
        style = self.get_component_rich_style("messages--found")
        parts = list(strip.divide([*cuts, strip.cell_length]))
        for n in range(1, len(parts), 2):
            parts[n] = Strip(
                [
                    Segment(segment.text, (segment.style or Style.null()) + style)
                    for segment in parts[n]
                ]
            )
        return Strip.join(parts)
