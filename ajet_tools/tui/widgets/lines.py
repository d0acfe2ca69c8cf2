"""Lines of a screen: title, status, and the input prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Header, Input, Label, Static

from ajet_sdk.errors import AjetError
from ajet_sdk.reporting.output import visible


class PartsLine(Static):
    """A status line of parts, most important first, as a narrow screen cuts the last ones."""

    DEFAULT_CSS = "PartsLine { height: 1; padding: 0 1; background: $panel; color: $foreground; }"

    def __init__(self) -> None:
        super().__init__("", markup=False)

    def show(self, parts: Iterable[Text]) -> None:
        line = Text(" · ").join(parts)
        line.no_wrap = True
        line.overflow = "ellipsis"
        self.update(line)


class TitleLine(Header):
    """Textual's header, except that a change of title while it is being removed does not crash the
    app."""

    def __init__(self) -> None:
        super().__init__(icon=" ")

    def watch(self, obj: DOMNode, attribute_name: str, callback: Any, init: bool = True) -> None:
        async def unless_gone() -> None:
            with suppress(NoMatches):
                await callback()

        super().watch(obj, attribute_name, unless_gone, init)


def remember(history: list[str], text: str) -> None:
    """Move a text to the end of a history."""
    history[:] = [*(entry for entry in history if entry != text), *([text] if text else [])]


class Prompt(Vertical):
    """An input line that is hidden until opened, with a history (up and down) and an error line."""

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
        """A text was entered; `prompt` stays open until it is closed."""

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
        """Create a prompt. `back` gets the focus after closing. `check` raises AjetError for an
        invalid text."""
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
        self._history = tuple(history)
        self._at = len(history)
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
        """Show an error below the text; an empty one clears it."""
        line = self.query_one("#wrong", Static)
        line.display = bool(error)
        line.update(Content(visible(error)))

    def action_history(self, by: int) -> None:
        self._at = max(0, min(self._at + by, len(self._history)))
        field = self.query_one(Input)
        if self._at < len(self._history):
            field.value = self._history[self._at]
        else:
            field.value = ""
        field.cursor_position = len(field.value)

    def action_close(self) -> None:
        self.close()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Submitted(self, event.value.strip()))

    def on_input_changed(self, event: Input.Changed) -> None:
        """Clear the error as soon as the text is valid."""
        event.stop()
        if self._check is not None:
            with suppress(AjetError):
                self._check(event.value.strip())
                self.show_error("")
