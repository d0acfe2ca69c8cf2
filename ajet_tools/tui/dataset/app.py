"""`ajet dataset view`: the application around the table of rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ajet_sdk.errors import AjetError
from ajet_tools.dataset.review import Review
from ajet_tools.trace.text import one_line, visible

__all__ = ["LEAST_SIZE", "DatasetApp"]

LEAST_SIZE = (60, 16)
"""Columns and rows below which the screens do not fit."""
_DARK, _LIGHT = "textual-dark", "textual-light"


class DatasetApp(App[None]):
    """The view of one dataset. `failure` is why it ended by itself, where it did."""

    TITLE = "ajet dataset"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "keys", "Keys", key_display="?"),
        Binding("f1", "keys", "Keys", show=False, priority=True),
        Binding("f2", "change_shade", "Light or dark", show=False, priority=True),
    ]

    def __init__(self, review: Review, filter_text: str = "") -> None:
        super().__init__()
        self.review = review
        self.first_filter = filter_text
        self.sub_title = one_line(review.source)
        self.failure: AjetError | None = None
        self.parting = ""
        """What is to be said on the terminal after the view."""

    def on_mount(self) -> None:
        from ajet_tools.tui.dataset.rows import RowsScreen

        self.push_screen(RowsScreen(self.review, self.first_filter))

    def reopen(self) -> None:
        """Read the dataset anew: it was written."""
        from ajet_tools.tui.dataset.rows import RowsScreen

        before = self.review
        self.review = Review(before.source, mapping=before.mapping, skip_bad=before.bad.skip)
        self.switch_screen(RowsScreen(self.review, ""))
        before.close()

    def fail(self, error: AjetError) -> None:
        """End, and leave what is wrong to the command to say."""
        self.failure = error
        self.exit(return_code=1)

    def told(self, error: AjetError) -> None:
        """What could not be done, as a word at the screen's edge."""
        self.notify(visible(str(error)), severity="error", markup=False, timeout=8)

    def copy(self, text: str, what: str) -> None:
        """Put a text on the clipboard (OSC 52, which reaches through SSH) and say what it is."""
        self.copy_to_clipboard(text)
        self.notify(f"copied {what}", markup=False, timeout=2)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield SystemCommand("Keys", "Every key of this screen", self.action_keys)
        yield SystemCommand("Light or dark", "Change between the light and the dark theme", self.action_change_shade)
        yield SystemCommand("Theme", "Choose among all themes", self.action_change_theme)
        yield SystemCommand("Save a picture", "This screen as an SVG file", self.deliver_screenshot)

    def action_keys(self) -> None:
        from ajet_tools.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen.of(self.screen))

    def action_change_shade(self) -> None:
        self.theme = _DARK if self.current_theme.dark is False else _LIGHT

    async def action_quit(self) -> None:
        """Ctrl-Q leaves by the same way as q: by the table, which asks where something was decided."""
        from ajet_tools.tui.dataset.rows import RowsScreen

        while not isinstance(self.screen, RowsScreen) and len(self.screen_stack) > 1:
            self.pop_screen()
        if isinstance(self.screen, RowsScreen):
            self.screen.action_leave()

    def on_resize(self, event: events.Resize) -> None:
        """A terminal that is too small says what it needs, until it is large enough."""
        from ajet_tools.tui.screens.help import TooSmallScreen

        fits = event.size.width >= LEAST_SIZE[0] and event.size.height >= LEAST_SIZE[1]
        shown = isinstance(self.screen, TooSmallScreen)
        if shown and fits:
            self.pop_screen()
        elif not shown and not fits:
            self.push_screen(TooSmallScreen(*LEAST_SIZE))
