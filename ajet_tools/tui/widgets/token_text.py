"""A timeline as wrapped text, with tokens coloured by a value, and a cursor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.cache import LRUCache
from textual.events import Click
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip

from ajet_tools.trace.tokens.colors import ColorScale, shade
from ajet_tools.trace.tokens.layout import FORK, Layout, labels, lay_out
from ajet_tools.trace.tokens.view import TokenView
from ajet_tools.tui.widgets.long_text import CursorView

_TONES: Mapping[str, tuple[str, str, str]] = {
    "prompt": ("", "", ""),
    "unknown": ("on #3a3a3a", "on #dddddd", "italic"),
    "trained": ("on #14532d", "on #b7e4c3", "underline"),
    "held": ("on #1e3a5f", "on #bcd7f5", "bold"),
    "left": ("on #6b2a2a", "on #f6c1bd", "strike"),
    "context": ("on #3f3a16", "on #efe6ac", "italic"),
    "low2": ("on #8b1e1e", "on #f08a82", "reverse"),
    "low1": ("on #55261f", "on #f8d0cb", "strike"),
    "mid": ("on #3a3a3a", "on #dddddd", ""),
    "high1": ("on #1d4427", "on #cdeed4", "underline"),
    "high2": ("on #137333", "on #7fd393", "bold underline"),
    "scale0": ("on #262c33", "on #e6ebf0", ""),
    "scale1": ("on #2b4a2f", "on #d3edc9", "underline"),
    "scale2": ("on #5a5316", "on #f3e69a", "bold"),
    "scale3": ("on #7a4310", "on #f6c58a", "bold underline"),
    "scale4": ("on #92201f", "on #f19a94", "reverse"),
}
"""Styles of each tone on dark, on light, and without colour."""
_CURSOR = "bold black on #ffd75f"
_CURSOR_PLAIN = "bold reverse underline"
_MATCH = "black on #87d7ff"
_GUTTER = 7


def tone_styles(dark: bool, colour: bool) -> dict[str, Style]:
    """Return the style of each tone; prompts are dim, to differ from trained text."""
    column = (0 if dark else 1) if colour else 2
    styles = {name: Style.parse(f"{tone[column]} not dim") for name, tone in _TONES.items()}
    return styles | {"prompt": Style.parse("dim")}


class TokenText(CursorView, can_focus=True):
    """Tokens of a timeline."""

    DEFAULT_CSS = """
    TokenText { height: 1fr; background: $background; color: $foreground; overflow-x: hidden; overflow-y: scroll; }
    """

    @dataclass
    class Moved(Message):
        """The cursor moved to another token."""

        token: int

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.view: TokenView | None = None
        self.shade: ColorScale | None = None
        self.cursor = 0
        self.shading = "mask"
        self._labels: list[str] = []
        self.layout_shown: Layout | None = None
        """Current lines; None before the first timeline."""
        self._forks: frozenset[int] = frozenset()
        self._matches: frozenset[int] = frozenset()
        self._strips: LRUCache[int, Strip] = LRUCache(512)
        self._tones: dict[str, Style] = {}
        self._goal: int | None = None

    def show(self, view: TokenView, cursor: int = 0) -> None:
        """Show a timeline, with the cursor on a token."""
        self.view = view
        self._labels = labels(view)
        self._forks = frozenset(fork.at for fork in view.forks)
        self._matches = frozenset()
        self._lay_out()
        self.shade_by(self.shading)
        self.move(cursor)

    def update_view(self, view: TokenView) -> None:
        """Update the current timeline, keeping cursor and scroll position."""
        if self.view is None or len(view) != len(self.view):
            seen = self.scroll_offset.y
            self.show(view, min(self.cursor, len(view) - 1))
            self.scroll_to(y=seen)
            return
        self.view = view
        self.shade_by(self.shading)

    def shade_by(self, name: str) -> None:
        """Colour the tokens by another value."""
        self.shading = name
        if self.view is not None:
            self.shade = shade(self.view, name)
        self._repaint()

    def mark(self, tokens: frozenset[int]) -> None:
        """Show tokens as matches of a search."""
        self._matches = tokens
        self._repaint()

    def move(self, token: int) -> None:
        """Move the cursor to a token (-1: the last one), and make it visible."""
        if self.view is None or self.layout_shown is None or not len(self.view):
            return
        self._strips.clear()
        size = len(self.view)
        self.cursor = size - 1 if token < 0 or token >= size else token
        self._goal = None
        self._show_cursor()
        self.refresh()
        self.post_message(self.Moved(self.cursor))

    def _show_cursor(self) -> None:
        """Make the line of the cursor visible."""
        if self.layout_shown is not None and self.view is not None and len(self.view):
            line = int(self.layout_shown.line_of[self._holder])
            self.scroll_to_region(Region(0, line, 1, 1), animate=False, force=True)

    @property
    def _holder(self) -> int:
        """Token with the character that the token under the cursor continues, or that token."""
        assert self.view is not None
        if self.view.spelled:
            return self.view.spelled.holder(self.cursor)
        return self.cursor

    def _lay_out(self) -> None:
        width = self.scrollable_content_region.width - _GUTTER
        if self.view is None or width < 1:
            return
        self.layout_shown = lay_out(self._labels, width, self._forks)
        self.virtual_size = Size(width + _GUTTER, len(self.layout_shown.lines))
        self._repaint()

    def _repaint(self) -> None:
        app = self.app
        self._tones = tone_styles(app.current_theme.dark, not app.no_color)
        self._strips.clear()
        self.refresh()

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _: self._repaint())

    def on_resize(self) -> None:
        width = self.scrollable_content_region.width - _GUTTER
        if self.layout_shown is None or self.layout_shown.width != width:
            self._lay_out()
        self._show_cursor()

    def on_click(self, event: Click) -> None:
        if self.layout_shown is None:
            return
        line = event.y + self.scroll_offset.y
        if 0 <= line < len(self.layout_shown.lines):
            self.move(self.layout_shown.token_at(line, max(0, event.x - _GUTTER)))

    def action_scroll_left(self) -> None:
        self._move_by_tokens(-1)

    def action_scroll_right(self) -> None:
        self._move_by_tokens(1)

    def _move_by_tokens(self, tokens: int) -> None:
        if self.view is not None:
            self.move(max(0, min(len(self.view) - 1, self.cursor + tokens)))

    def move_by_lines(self, lines: int) -> None:
        if self.layout_shown is None:
            return
        holder = self._holder
        if self._goal is None:
            goal = self.layout_shown.cell_of(holder)
        else:
            goal = self._goal
        line = int(self.layout_shown.line_of[holder]) + lines
        if 0 <= line < len(self.layout_shown.lines):
            token = self.layout_shown.token_at(line, goal)
            # without this the cursor would stay in the token
            if token == holder:  # a token of several lines
                token = max(0, min(len(self._labels) - 1, token + lines))
            self.move(token)
            self._goal = goal

    def move_by_pages(self, pages: int) -> None:
        if self.layout_shown is None:
            return
        if self._goal is None:
            goal = self.layout_shown.cell_of(self._holder)
        else:
            goal = self._goal
        page = max(1, self.scrollable_content_region.height - 1)
        line = int(self.layout_shown.line_of[self._holder]) + pages * page
        self.move(
            self.layout_shown.token_at(max(0, min(len(self.layout_shown.lines) - 1, line)), goal)
        )
        self._goal = goal

    def move_to_edge(self, *, end: bool) -> None:
        self.move(-1 if end else 0)

    def line(self, line: int) -> Strip | None:
        if self.layout_shown is None or self.view is None or line >= len(self.layout_shown.lines):
            return None
        strip = self._strips.get(line)
        if strip is None:
            strip = self._strips[line] = self._line(line)
        return strip

    def _line(self, line: int) -> Strip:
        assert self.layout_shown is not None and self.view is not None and self.shade is not None
        pieces = self.layout_shown.lines[line]
        levels = self.shade.levels
        codes = self.shade.of
        holder = self._holder
        segments = [self._gutter(line, any(token == holder for token, _, _ in pieces))]
        run: list[str] = []
        run_style = Style.null()
        plain_cursor = self.app.no_color
        for token, text, _ in pieces:
            if token == holder:
                style = Style.parse(_CURSOR_PLAIN if plain_cursor else _CURSOR)
            elif token in self._matches:
                style = Style.parse("bold reverse" if plain_cursor else _MATCH)
            else:
                style = self._tones[levels[codes[token]].tone]
            # one segment for neighbours of one style: thousands of tokens are drawn
            if style is not run_style and run:
                segments.append(Segment("".join(run), run_style))
                run = []
            run_style = style
            if token in self._forks and text.startswith(FORK):
                segments += [
                    Segment("".join(run), run_style),
                    Segment(FORK, Style(bold=True, color="magenta")),
                ]
                run = []
                text = text[1:]
            run.append(text)
        segments.append(Segment("".join(run), run_style))
        return Strip([segment for segment in segments if segment.text])

    def _gutter(self, line: int, here: bool) -> Segment:
        """Render the position of the first token that begins in a line."""
        assert self.layout_shown is not None
        first = self.layout_shown.firsts[line]
        pieces = self.layout_shown.lines[line]
        begins = bool(pieces) and pieces[-1][0] >= first
        label = f"{first}" if begins else ""
        return Segment(
            f"{label:>{_GUTTER - 1}}{'▸' if here else ' '}", Style(dim=not here, bold=here)
        )
