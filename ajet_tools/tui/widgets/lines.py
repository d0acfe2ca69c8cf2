"""Lines of a screen: title, status, keys, and the input prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.message import Message
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Header, Input, Label, Static

from ajet_sdk.errors import AjetError
from ajet_sdk.reporting.output import visible

_LISTS = ("keys", "app.keys", "command_palette", "app.command_palette")


@dataclass(frozen=True, slots=True)
class _Key:
    key: str
    shown: str
    does: str
    enabled: bool

    @property
    def width(self) -> int:
        return cell_len(f" {self.shown} {self.does} ")


class KeyLine(Widget, can_focus=False):
    """A single widget for all keys; Textual's Footer creates a widget per key at each change of
    focus.

    Keys that do not fit are omitted. The keys of help and command palette, which list all keys, are
    on the right.
    """

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"key-line--key", "key-line--does"}
    DEFAULT_CSS = """
    KeyLine {
        dock: bottom; height: 1; color: $footer-foreground; background: $footer-background;
        & > .key-line--key { color: $footer-key-foreground; background: $footer-key-background; text-style: bold; }
        & > .key-line--does { color: $footer-description-foreground; background: $footer-description-background; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self._keys: tuple[_Key, ...] = ()
        self._lists: tuple[_Key, ...] = ()

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._update)
        self.call_next(self._update, self.screen)  # the first signal may have been missed

    def on_unmount(self) -> None:
        self.screen.bindings_updated_signal.unsubscribe(self)

    def _update(self, screen: Screen[object]) -> None:
        lost_focus = not self.app.app_focus and self._keys  # keys come back with the focus
        if screen is not self.screen or lost_focus:
            return
        by_action: dict[str, _Key] = {}
        for _, binding, enabled, _ in screen.active_bindings.values():
            if binding.show or binding.key == self.app.COMMAND_PALETTE_BINDING:
                key = _Key(
                    binding.key, self.app.get_key_display(binding), binding.description, enabled
                )
                by_action.setdefault(binding.action, key)
        lists = tuple(by_action.pop(action) for action in _LISTS if action in by_action)
        keys = tuple(by_action.values())
        if (keys, lists) != (self._keys, self._lists):
            self._keys, self._lists = keys, lists
            self.refresh()

    def _place_keys(self) -> list[tuple[int, _Key]]:
        """Return the visible keys with their positions."""
        right = max(0, self.size.width - sum(key.width for key in self._lists))
        placed, at = list[tuple[int, _Key]](), 0
        for key in self._keys:
            if at + key.width >= right:
                break
            placed.append((at, key))
            at += key.width
        for key in self._lists:
            placed.append((right, key))
            right += key.width
        return placed

    def render_line(self, y: int) -> Strip:
        bold, plain = (
            self.get_component_rich_style(f"key-line--{part}") for part in ("key", "does")
        )
        segments, at = list[Segment](), 0
        for start, key in self._place_keys():
            if start > at:
                segments.append(Segment("▕".rjust(start - at), self.rich_style))
            dim = Style(dim=not key.enabled)
            segments += [
                Segment(f" {key.shown} ", bold + dim),
                Segment(f"{key.does} ", plain + dim),
            ]
            at = start + key.width
        return Strip(segments).adjust_cell_length(self.size.width, self.rich_style)

    def on_click(self, event: events.Click) -> None:
        for start, key in self._place_keys():
            if start <= event.x < start + key.width:
                self.app.simulate_key(key.key) if key.enabled else self.app.bell()
                return


class PartsLine(Static):
    """A status line of parts, most important first, as a narrow screen cuts the last ones."""

    DEFAULT_CSS = "PartsLine { height: 1; padding: 0 1; background: $panel; color: $foreground; }"

    def __init__(self) -> None:
        super().__init__("", markup=False)

    def show(self, parts: Iterable[Text]) -> None:
        line = Text(" · ").join(parts)
        line.no_wrap, line.overflow = True, "ellipsis"
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
        """Show an error below the text; an empty one clears it."""
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
        """Clear the error as soon as the text is valid."""
        event.stop()
        if self._check is not None:
            with suppress(AjetError):
                self._check(event.value.strip())
                self.show_error("")
