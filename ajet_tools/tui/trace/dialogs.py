"""Dialogs of a whole text, of pictures, of the explanation of a run, and of feedback."""

from __future__ import annotations

import asyncio
import getpass
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from textwrap import wrap
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label, Static, TextArea

from ajet_sdk.errors import AjetError, PictureError, QueryError
from ajet_sdk.pictures import Picture
from ajet_sdk.reporting.output import visible
from ajet_sdk.trace.feedback import give
from ajet_sdk.types import Feedback
from ajet_tools.text.clean import one_line
from ajet_tools.trace.compare.changes import ID
from ajet_tools.trace.compare.explain import explain, lines_of
from ajet_tools.trace.episode.blocks import size_of
from ajet_tools.trace.queries.records import feedback_of
from ajet_tools.tui.base import Dialog
from ajet_tools.tui.trace.screen import TraceViewer
from ajet_tools.tui.widgets.lines import Prompt
from ajet_tools.tui.widgets.long_text import LongText
from ajet_tools.tui.widgets.pictures import ALONE, PictureWidget

_FRAME = 6
"""Columns of border, padding and scroll bar."""
UP = 1.0
DOWN = 0.0
"""Scores of thumbs, by which datasets can be filtered."""


class PictureScreen(Dialog[None]):
    """Shows pictures, each as large as the terminal is."""

    DEFAULT_CSS = """
    PictureScreen > VerticalScroll { width: 96%; max-width: 96%; height: 96%; padding: 0; }
    """

    def __init__(self, pictures: Sequence[Picture], kind: type[PictureWidget] = ALONE) -> None:
        super().__init__()
        self.pictures = pictures
        self.kind = kind

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_subtitle = "escape closes"
            for picture in self.pictures:
                yield Static(Content(picture.line))
                yield from self._drawn(picture)

    def _drawn(self, picture: Picture) -> ComposeResult:
        if not picture.data:
            return
        try:
            drawing = self.kind(picture.image())
        except PictureError as error:
            yield Static(Content(str(error)))
            return
        # beside the edges, the picture's line and the scroll bar
        room = self.app.size.width * 96 // 100 - 4, self.app.size.height * 96 // 100 - 3
        columns, lines = size_of(picture, max(1, room[0]), max(1, room[1]), enlarged=True)
        drawing.styles.width = columns
        drawing.styles.height = lines
        yield drawing


class TextScreen(Dialog[None]):
    """Shows a text of any size; `text` is called in a thread."""

    app: TraceViewer
    DEFAULT_CSS = """
    TextScreen > Vertical { width: 94%; max-width: 94%; height: 90%; }
    TextScreen LongText { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "find", "Search", key_display="/"),
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
            box.border_subtitle = "/ searches · y copies · escape closes"
            yield LongText()
            yield Prompt("search", back=LongText)

    @work
    async def on_mount(self) -> None:
        self.text = await asyncio.to_thread(self.load_text)
        shown = self.query_one(LongText)
        shown.show(self.text)
        self.call_after_refresh(self.show, shown)

    def show(self, text: LongText) -> None:
        """Called with the widget that shows the text."""

    def action_copy(self) -> None:
        self.app.copy(self.text, self.heading)

    def action_find(self) -> None:
        self.query_one(Prompt).open("")

    def action_next(self, by: int) -> None:
        self.query_one(LongText).go(by)

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        matched = self.query_one(LongText).search(event.text)
        if event.text and not matched:
            event.prompt.show_error("not in this text")
        else:
            event.prompt.close()


class ExplanationScreen(TextScreen):
    """Explains the changes in a run, and opens its example episodes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open the marked episode"),
    ]

    def __init__(self, run_id: str) -> None:
        super().__init__(f"why: run {run_id[:12]}", self._explain)
        self.run_id = run_id
        self.episodes: list[str] = []

    def _explain(self) -> str:
        try:
            explanation = explain(self.app.reader, self.run_id, trace=self.app.path)
        except QueryError as error:
            return str(error)
        self.episodes = []
        for change in explanation.changes:
            for finding in change.findings:
                self.episodes += finding.episodes
        return "\n".join(
            "\n".join(wrap(line, text_width(self.app), subsequent_indent=" " * 8))
            for line in lines_of(explanation)
        )

    def show(self, text: LongText) -> None:
        if self.episodes:
            self.query_one(
                Vertical
            ).border_subtitle = "n next episode · enter opens it · y copies · escape closes"
            text.search(
                re.compile(
                    "|".join(rf"\b{re.escape(id[:ID])}\b" for id in dict.fromkeys(self.episodes))
                )
            )

    def action_open(self) -> None:
        if prefix := self.query_one(LongText).current:
            self.app.open_episode(
                next((id for id in self.episodes if id.startswith(prefix)), prefix)
            )

    def on_long_text_clicked(self) -> None:
        self.action_open()


def text_width(app: TraceViewer) -> int:
    """Return the width of the text in a `TextScreen`."""
    return int(app.size.width * 0.94) - _FRAME


class FeedbackScreen(Dialog[None]):
    """Shows and adds feedback; ctrl+s saves, escape cancels."""

    app: TraceViewer
    DEFAULT_CSS = """
    FeedbackScreen {
        & > VerticalScroll { max-width: 100%; max-height: 100%; }
        & #given { height: auto; max-height: 8; }
        & Horizontal { height: auto; }
        & Button { min-width: 10; margin: 0 1 0 0; }
        & Button.chosen { background: $primary; color: $text; text-style: bold reverse; }
        & #score { width: 1fr; background: $boost; }
        & TextArea { height: 3; background: $boost; }
        & Label { color: $text-muted; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "keep", "Keep"),
        Binding("plus", "thumb(True)", "Thumb up", show=False),
        Binding("minus", "thumb(False)", "Thumb down", show=False),
    ]

    def __init__(self, episode_id: str, call_id: str | None = None) -> None:
        super().__init__()
        self.episode_id = episode_id
        self.call_id = call_id
        self._saving = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False) as box:
            if self.call_id:
                of = f"call {self.call_id[:12]}"
            else:
                of = f"episode {self.episode_id[:12]}"
            box.border_title = Content(f"feedback on {visible(of)}")
            box.border_subtitle = "ctrl+s keeps · esc leaves"
            with VerticalScroll(id="given", can_focus=False):
                yield Static("", markup=False)
            with Horizontal():
                yield Button("+ up", id="up", compact=True)
                yield Button("- down", id="down", compact=True)
                yield Label("score ")
                yield Input(placeholder="a number, as 0.5", id="score", compact=True)
            yield Label("comment")
            yield TextArea(id="comment", compact=True)
            yield Label("the answer as it should have been")
            yield TextArea(id="correction", compact=True)
            yield Static("", id="wrong", markup=False)

    def on_mount(self) -> None:
        self.query_one("#up", Button).focus()
        self._show_feedback()

    @work(group="given", exclusive=True)
    async def _show_feedback(self) -> None:
        rows = (await self.app.ask(feedback_of, self.episode_id, self.call_id))[::-1]
        self.query_one("#given Static", Static).update(render_feedback(rows))

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.action_thumb(event.button.id == "up")

    def action_thumb(self, up: bool) -> None:
        """Enter the score of a thumb, or clear it if it is entered already."""
        score, field = f"{UP if up else DOWN:g}", self.query_one("#score", Input)
        field.value = "" if field.value.strip() == score else score

    def on_input_changed(self, event: Input.Changed) -> None:
        value = event.value.strip()
        self.query_one("#up", Button).set_class(value == f"{UP:g}", "chosen")
        self.query_one("#down", Button).set_class(value == f"{DOWN:g}", "chosen")

    def on_input_submitted(self) -> None:
        self.action_keep()

    def action_keep(self) -> None:
        if self._saving:
            return
        text = self.query_one("#score", Input).value.strip()
        comment, correction = (
            self.query_one(f"#{id}", TextArea).text.strip() for id in ("comment", "correction")
        )
        try:
            score = float(text) if text else None
        except ValueError:
            score = math.nan
        if score is not None and not math.isfinite(score):
            self.show_wrong(
                f"the score {text!r} is not a number; enter one such as 0.5, or leave it empty"
            )
        elif score is None and not comment and not correction:
            self.show_wrong(
                "nothing to save: give a thumb, a score, a comment or a corrected answer"
            )
        else:
            author = ""
            with suppress(OSError, KeyError):  # a container may have no user name
                author = getpass.getuser()
            self._save(
                Feedback(
                    episode_id=self.episode_id,
                    call_id=self.call_id,
                    author=author,
                    score=score,
                    comment=comment or None,
                    correction=correction or None,
                )
            )

    @work(group="keep")
    async def _save(self, feedback: Feedback) -> None:
        """Save the feedback and close; a failure keeps the form open."""
        self._saving = True
        try:
            await asyncio.to_thread(give, self.app.path, feedback)
        except AjetError as error:
            self.show_wrong(str(error))
            return
        finally:
            self._saving = False
        self.notify(f"saved as {feedback.author or 'nobody'}", markup=False, timeout=3)
        self.dismiss()


def render_feedback(rows: Sequence[Feedback]) -> Text:
    """Format feedback: author, time, score, comment, correction."""
    shown = Text()
    for row in rows:
        head = [row.author or "nobody named", f"{row.at:%Y-%m-%d %H:%M}"]
        head += [f"score {row.score:g}"] if row.score is not None else []
        head += [f"on call {row.call_id[:12]}"] if row.call_id else []
        shown.append(one_line("  ".join(head)) + "\n", style="bold")
        for before, text in (("", row.comment), ("should be: ", row.correction)):
            if text:
                shown.append(f"  {before}{one_line(text, 400)}\n")
    if rows:
        return shown
    return Text("no feedback yet", style="dim")
