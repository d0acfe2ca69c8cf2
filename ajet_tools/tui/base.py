"""Base of both viewers: keys, command palette, notifications, dialogs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.css.query import NoMatches
from textual.filter import LineFilter
from textual.screen import ModalScreen, Screen
from textual.widgets import HelpPanel, Input, Static

from ajet_sdk.reporting.output import visible
from ajet_tools.tui.contrast import ReadableText


class ViewerApp(App[None]):
    """Base class of both viewers."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "keys", "Keys", key_display="?"),
        Binding("q", "quit", "Quit", show=False),
    ]

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), ReadableText()]

    def show_error(self, error: Exception) -> None:
        """Show an error as a notification."""
        self.notify(visible(str(error)), severity="error", markup=False, timeout=8)

    def copy(self, text: str, what: str) -> None:
        """Copy a text to the clipboard (by OSC 52, which works over SSH), and notify."""
        self.copy_to_clipboard(text)
        self.notify(f"copied {what}", markup=False, timeout=2)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for active in screen.active_bindings.values():
            binding = active.binding
            is_own = active.node is screen and active.enabled
            # Textual's keys of every screen move the focus and copy a selection
            if is_own and not binding.action.startswith(("app.", "screen.")):
                yield SystemCommand(
                    binding.description,
                    f"key {self.get_key_display(binding)}",
                    partial(self.call_later, self.run_action, binding.action, screen),
                )

    def action_keys(self) -> None:
        """Show all keys of the focused widget and its screen, or hide them."""
        if self.screen.query(HelpPanel):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()

    def _handle_exception(self, error: Exception) -> None:
        """Ignore missing widgets in workers of closed screens."""
        cause = getattr(error, "error", None) or error
        screens = set(self.screen_stack) if self.is_running else set()
        workers = [worker for worker in self.workers if worker.error is cause]
        # a worker may go on for a moment after its screen has gone
        is_closed = any(screens.isdisjoint(worker.node.ancestors_with_self) for worker in workers)
        if not (isinstance(cause, NoMatches) and is_closed):
            super()._handle_exception(error)


Result = TypeVar("Result")


class Dialog(ModalScreen[Result]):
    """A modal box, `Vertical` or `VerticalScroll`, with an error line `#wrong` if it has inputs."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close")]
    DEFAULT_CSS = """
    Dialog {
        align: center middle;
        & > Vertical, & > VerticalScroll {
            width: 76; max-width: 96%; height: auto; padding: 0 1;
            border: round $accent; background: $surface;
        }
        & #wrong { height: auto; color: $text-error; display: none; }
        & #wrong.shown { display: block; }
    }
    """

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Without the contrast: the dialog itself draws the dimmed screen behind it."""
        filters = super().get_line_filters()
        return [line_filter for line_filter in filters if not isinstance(line_filter, ReadableText)]

    def show_wrong(self, wrong: str) -> None:
        """Show an error of the input; an empty text clears it."""
        line = self.query_one("#wrong", Static)
        line.set_class(bool(wrong), "shown")
        line.update(Content(visible(wrong)))
        if wrong:
            line.scroll_visible(animate=False)


class GoScreen(Dialog[str]):
    """Asks for an id or its beginning."""

    DEFAULT_CSS = """
    GoScreen > Vertical { width: 60; max-width: 95%; padding: 0; }
    """

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "go to"
            yield Input(placeholder="the beginning of a run's, an episode's or a call's id")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())
