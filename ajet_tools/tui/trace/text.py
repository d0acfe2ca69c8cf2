"""One text whole, of any size: a message, a call's JSON, a cell of a table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content

from ajet_tools.text.clean import one_line
from ajet_tools.tui.base import Dialog
from ajet_tools.tui.trace.screen import TraceViewer
from ajet_tools.tui.widgets.long_text import FindInText, LongText
from ajet_tools.tui.widgets.prompt import Prompt


class TextScreen(FindInText, Dialog[None]):
    """A text that its place had no room for. `text` is called in a thread, for it may take long to make."""

    app: TraceViewer
    DEFAULT_CSS = """
    TextScreen > Vertical { width: 94%; max-width: 94%; height: 90%; }
    TextScreen LongText { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Close"),
        Binding("slash", "find", "Find", key_display="/"),
        Binding("n", "next(1)", "Next", show=False),
        Binding("N", "next(-1)", "Previous", show=False),
        Binding("y", "copy", "Copy"),
    ]

    def __init__(self, name: str, text: Callable[[], str]) -> None:
        super().__init__()
        self.heading = one_line(name, 60)
        self.load_text = text
        self.text = ""

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = Content(self.heading)
            box.border_subtitle = "/ finds · y copies · escape closes"
            yield Prompt("find", back=LongText)

    @work
    async def on_mount(self) -> None:
        self.text = await asyncio.to_thread(self.load_text)
        shown = LongText(self.text)
        await self.query_one(Vertical).mount(shown, before=0)
        shown.focus()

    def action_copy(self) -> None:
        self.app.copy(self.text, self.heading)
