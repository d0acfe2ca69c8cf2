"""One text whole, of any size: a message, a call's JSON, a cell of a table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from textwrap import wrap
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content

from ajet_sdk.errors import QueryError
from ajet_tools.text.clean import one_line
from ajet_tools.trace.compare.changes import ID
from ajet_tools.trace.compare.explain import explain, lines_of
from ajet_tools.tui.base import Dialog
from ajet_tools.tui.trace.screen import TraceViewer
from ajet_tools.tui.widgets.long_text import FindInText, LongText
from ajet_tools.tui.widgets.prompt import Prompt

_FRAME = 6
"""Columns of a text screen beside its text: border, padding, scroll bar."""


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
            yield LongText()
            yield Prompt("find", back=LongText)

    @work
    async def on_mount(self) -> None:
        self.text = await asyncio.to_thread(self.load_text)
        shown = self.query_one(LongText)
        shown.show(self.text)
        self.call_after_refresh(self.show, shown)

    def show(self, text: LongText) -> None:
        """The text is on the screen."""

    def action_copy(self) -> None:
        self.app.copy(self.text, self.heading)


class ExplanationScreen(TextScreen):
    """What changed in a run; its episodes open from here."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close"),
        Binding("enter", "open", "Open the marked episode"),
        Binding("n", "next(1)", "Next episode"),
    ]

    def __init__(self, run_id: str) -> None:
        super().__init__(f"why: run {run_id[:12]}", self._explain)
        self.run_id = run_id
        self.episodes: list[str] = []

    def _explain(self) -> str:
        """The explanation, folded between words."""
        try:
            explanation = explain(self.app.reader, self.run_id, trace=self.app.path)
        except QueryError as error:
            return str(error)
        findings = (finding for change in explanation.changes for finding in change.findings)
        self.episodes = [id for finding in findings for id in finding.episodes]
        return "\n".join(
            "\n".join(wrap(line, text_width(self.app), subsequent_indent=" " * 8)) for line in lines_of(explanation)
        )

    def show(self, text: LongText) -> None:
        if self.episodes:
            self.query_one(Vertical).border_subtitle = "n next episode · enter opens it · y copies · escape closes"
            text.search(re.compile("|".join(rf"\b{re.escape(id[:ID])}\b" for id in dict.fromkeys(self.episodes))))

    def action_open(self) -> None:
        if prefix := self.query_one(LongText).current:
            self.app.open_episode(next((id for id in self.episodes if id.startswith(prefix)), prefix))

    def on_long_text_clicked(self) -> None:
        self.action_open()


def text_width(app: TraceViewer) -> int:
    """Columns of the text in a `TextScreen`."""
    return int(app.size.width * 0.94) - _FRAME
