"""Feedback on an episode or a call: thumbs, a score, a comment, a corrected answer."""

from __future__ import annotations

import asyncio
import getpass
import math
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widgets import Button, Input, Label, Static, TextArea

from ajet_sdk.errors import AjetError
from ajet_sdk.reporting.output import visible
from ajet_sdk.trace.feedback import give
from ajet_sdk.types import Feedback
from ajet_tools.text.clean import one_line
from ajet_tools.trace.queries.records import feedback_of
from ajet_tools.tui.base import Dialog
from ajet_tools.tui.trace.screen import TraceViewer

UP, DOWN = 1.0, 0.0
"""Thumbs are stored as scores, by which datasets are filtered."""


class FeedbackScreen(Dialog[None]):
    """Shows feedback and adds more; ctrl+s saves, escape cancels."""

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
        Binding("escape", "dismiss", "Leave", show=False),
        Binding("plus,u", "thumb(True)", "Thumb up", show=False),
        Binding("minus,d", "thumb(False)", "Thumb down", show=False),
    ]

    def __init__(self, episode_id: str, call_id: str | None = None) -> None:
        super().__init__()
        self.episode_id = episode_id
        self.call_id = call_id
        self._saving = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False) as box:
            of = f"call {self.call_id[:12]}" if self.call_id else f"episode {self.episode_id[:12]}"
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
        """A thumb is written as its score; pressed twice it is taken back."""
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
        comment, correction = (self.query_one(f"#{id}", TextArea).text.strip() for id in ("comment", "correction"))
        try:
            score = float(text) if text else None
        except ValueError:
            score = math.nan
        if score is not None and not math.isfinite(score):
            self.show_wrong(f"the score {text!r} is not a number; enter one such as 0.5, or leave it empty")
        elif score is None and not comment and not correction:
            self.show_wrong("nothing to save: give a thumb, a score, a comment or a corrected answer")
        else:
            self._save(
                Feedback(
                    episode_id=self.episode_id,
                    call_id=self.call_id,
                    author=_author(),
                    score=score,
                    comment=comment or None,
                    correction=correction or None,
                )
            )

    @work(group="keep")
    async def _save(self, feedback: Feedback) -> None:
        """Shows a failure and keeps the typed text."""
        self._saving = True
        try:
            await asyncio.to_thread(give, self.app.path, feedback)
        except AjetError as error:
            self.show_wrong(str(error))
            return
        finally:
            self._saving = False
        self.notify(f"kept, as {feedback.author or 'nobody'}'s", markup=False, timeout=3)
        self.dismiss()


def _author() -> str:
    """The login name; nobody where a container has none."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def render_feedback(rows: Sequence[Feedback]) -> Text:
    """Feedback as text: author, time, comment."""
    shown = Text()
    for row in rows:
        head = [row.author or "nobody named", f"{row.at:%Y-%m-%d %H:%M}"]
        head += [f"score {row.score:g}"] if row.score is not None else []
        head += [f"on call {row.call_id[:12]}"] if row.call_id else []
        shown.append(one_line("  ".join(head)) + "\n", style="bold")
        for before, text in (("", row.comment), ("should be: ", row.correction)):
            if text:
                shown.append(f"  {before}{one_line(text, 400)}\n")
    return shown if rows else Text("no feedback yet", style="dim")
