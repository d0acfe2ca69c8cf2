"""What the views of traces and of datasets share: keys, themes, the palette, words at the edge, the least size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ajet_tools.trace.text import visible

__all__ = ["DARK", "LIGHT", "Frame", "is_basic"]

DARK, LIGHT = "textual-dark", "textual-light"


class Frame(App[None]):
    """An application whose screens need so many columns and rows."""

    LEAST_SIZE: ClassVar[tuple[int, int]]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "keys", "Keys", key_display="?"),
        Binding("f1", "keys", "Keys", show=False, priority=True),
        Binding("f2", "change_shade", "Light or dark", show=False, priority=True),
    ]

    def told(self, error: Exception) -> None:
        """What could not be done, as a word at the screen's edge; the screen stays as it is."""
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
        yield SystemCommand("Quit", "Leave the view", self._acting("quit", self))
        for active in screen.active_bindings.values():
            binding = active.binding
            own = binding.show or active.node is screen
            if active.enabled and own and binding.description and active.node is not self and not is_basic(binding):
                action = self._acting(binding.action, active.node)
                yield SystemCommand(binding.description, f"key {self.get_key_display(binding)}", action)

    def _acting(self, action: str, node: Any) -> Callable[[], None]:
        def act() -> None:
            self.call_later(self.run_action, action, node)

        return act

    def action_keys(self) -> None:
        from ajet_tools.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen.of(self.screen))

    def action_change_shade(self) -> None:
        self.theme = DARK if self.current_theme.dark is False else LIGHT

    def on_resize(self, event: events.Resize) -> None:
        """A terminal that is too small says what it needs, until it is large enough."""
        from ajet_tools.tui.screens.help import TooSmallScreen

        fits = event.size.width >= self.LEAST_SIZE[0] and event.size.height >= self.LEAST_SIZE[1]
        shown = isinstance(self.screen, TooSmallScreen)
        if shown and fits:
            self.pop_screen()
        elif not shown and not fits:
            self.push_screen(TooSmallScreen(*self.LEAST_SIZE))


def is_basic(binding: Binding) -> bool:
    """Whether a key is Textual's own on every screen: to go on, to copy what the mouse has selected."""
    return binding.action.startswith(("app.focus", "screen.copy_text"))
