"""A line at the screen's foot that asks for a text: with a history, and room for what is wrong with the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Label, Static

from ajet_sdk.errors import AjetError
from ajet_sdk.reporting.output import visible


def remember(history: list[str], text: str) -> None:
    """Put a text at the end of what was asked before, once."""
    history[:] = [*(entry for entry in history if entry != text), *([text] if text else [])]


class Prompt(Vertical):
    """Hidden until it is opened. Up and down go through what was asked before; escape closes it."""

    DEFAULT_CSS = """
    Prompt {
        height: auto; display: none;
        & Horizontal { height: 1; }
        & Label { width: auto; padding: 0 1; text-style: bold; }
        & Input { width: 1fr; height: 1; border: none; padding: 0; background: $boost; }
        & Input:focus { border: none; }
        & #wrong { height: auto; max-height: 3; padding: 0 1; color: $text-error; display: none; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "history(-1)", "Previous query", show=False),
        Binding("down", "history(1)", "Next query", show=False),
        Binding("escape", "close", "Close", show=False),
    ]

    @dataclass
    class Submitted(Message):
        """The text was entered; `prompt` stays open until it is closed."""

        prompt: Prompt
        text: str

    def __init__(
        self,
        label: str,
        placeholder: str = "",
        *,
        back: type[Widget],
        check: Callable[[str], object] | None = None,
        id: str | None = None,
    ) -> None:
        """`back` gets the focus when the prompt is closed. `check` raises AjetError while the text is wrong."""
        super().__init__(id=id)
        self._back = back
        self._check = check
        self._label = label
        self._placeholder = placeholder
        self._history: Sequence[str] = ()
        self._at = 0

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Label(self._label, markup=False)
            yield Input(placeholder=self._placeholder, select_on_focus=False)
        yield Static("", id="wrong", markup=False)

    @property
    def is_open(self) -> bool:
        return bool(self.display)

    def open(self, text: str, history: Sequence[str] = ()) -> None:
        self._history, self._at = tuple(history), len(history)
        self.show_error("")
        self.display = True
        field = self.query_one(Input)
        field.value = text
        field.cursor_position = len(text)
        field.focus()

    def close(self) -> None:
        if self.display:
            self.display = False
            self.screen.query_one(self._back).focus()

    def show_error(self, error: str) -> None:
        """What is wrong with the text, under it; nothing where the text is empty."""
        line = self.query_one("#wrong", Static)
        line.display = bool(error)
        line.update(Content(visible(error)))

    def action_history(self, by: int) -> None:
        self._at = max(0, min(self._at + by, len(self._history)))
        field = self.query_one(Input)
        field.value = self._history[self._at] if self._at < len(self._history) else ""
        field.cursor_position = len(field.value)

    def action_close(self) -> None:
        self.close()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Submitted(self, event.value.strip()))

    def on_input_changed(self, event: Input.Changed) -> None:
        """What is wrong is taken back as soon as it is mended."""
        event.stop()
        if self._check is not None:
            with suppress(AjetError):
                self._check(event.value.strip())
                self.show_error("")
