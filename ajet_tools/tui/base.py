"""Base of both viewers: keys, themes, command palette, notifications, dialogs, and a minimum
contrast of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar, TypeVar

from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.css.query import NoMatches
from textual.filter import LineFilter
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Static

from ajet_sdk.reporting.output import visible

DARK, LIGHT = "textual-dark", "textual-light"


class ViewerApp(App[None]):
    """Base class of both viewers."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "keys", "Keys", key_display="?"),
        Binding("q", "quit", "Quit", show=False),
    ]

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), _READABLE]

    def show_error(self, error: Exception) -> None:
        """Show an error as a notification."""
        self.notify(visible(str(error)), severity="error", markup=False, timeout=8)

    def copy(self, text: str, what: str) -> None:
        """Copy a text to the clipboard (by OSC 52, which works over SSH), and notify."""
        self.copy_to_clipboard(text)
        self.notify(f"copied {what}", markup=False, timeout=2)

    def palette_commands(self) -> Iterable[SystemCommand]:
        """Yield the commands of the palette on every screen."""
        yield SystemCommand("Keys", "Every key of this screen", self.action_keys)
        yield SystemCommand(
            "Light or dark", "Change between the light and the dark theme", self.action_toggle_dark
        )
        yield SystemCommand("Theme", "Choose among all themes", self.action_change_theme)
        yield SystemCommand("Save a picture", "This screen as an SVG file", self.deliver_screenshot)
        yield SystemCommand(
            "Quit", "Leave the view", partial(self.call_later, self.run_action, "quit", self)
        )

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        palette_commands = list(self.palette_commands())
        yield from palette_commands
        keys: dict[tuple[str, str], tuple[object, list[str]]] = {}
        for active in screen.active_bindings.values():
            binding, shown = active.binding, self.get_key_display(active.binding)
            listed = binding.show or active.node is screen
            if (
                active.enabled
                and listed
                and binding.description
                and active.node is not self
                and not is_basic(binding)
            ):
                _, of = keys.setdefault((binding.description, binding.action), (active.node, []))
                if shown not in of:
                    of.append(shown)
        known = {command.title for command in palette_commands}
        for (does, action), (node, of) in keys.items():
            if does not in known:
                act = partial(self.call_later, self.run_action, action, node)
                yield SystemCommand(does, f"key {' '.join(of)}", act)

    def action_keys(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.screen))

    def action_toggle_dark(self) -> None:
        self.theme = DARK if self.current_theme.dark is False else LIGHT

    def _handle_exception(self, error: Exception) -> None:
        """Ignore missing widgets in workers of closed screens."""
        cause = getattr(error, "error", None) or error
        screens = set(self.screen_stack) if self.is_running else set()
        workers = [worker for worker in self.workers if worker.error is cause]
        is_closed = any(screens.isdisjoint(worker.node.ancestors_with_self) for worker in workers)
        if not (isinstance(cause, NoMatches) and is_closed):
            super()._handle_exception(error)


def is_basic(binding: Binding) -> bool:
    """Whether a binding is Textual's default on every screen: moving the focus, copying selected
    text."""
    return binding.action.startswith(("app.focus", "screen.copy_text"))


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
        """Disable the contrast filter: the dialog itself draws the dimmed screen behind it."""
        return [
            line_filter
            for line_filter in super().get_line_filters()
            if line_filter is not _READABLE
        ]

    def show_wrong(self, wrong: str) -> None:
        """Show an error of the input; an empty text clears it."""
        line = self.query_one("#wrong", Static)
        line.set_class(bool(wrong), "shown")
        line.update(Content(visible(wrong)))
        if wrong:
            line.scroll_visible(animate=False)


_OWN, _EVERYWHERE = "this screen", "everywhere"


class HelpScreen(Dialog[None]):
    """Lists all active keys of the screen behind it."""

    DEFAULT_CSS = """
    HelpScreen > VerticalScroll { width: 72; max-width: 95%; max-height: 90%; }
    """

    def __init__(self, screen: Screen[Any]) -> None:
        super().__init__()
        groups: dict[str, dict[tuple[str, str], list[str]]] = {}
        for active in screen.active_bindings.values():
            binding = active.binding
            if binding.system or not binding.description:
                continue
            of = type(active.node).__name__
            of = "".join(f" {c.lower()}" if c.isupper() else c for c in of).strip()
            if is_basic(binding) or (of.endswith("app") and not isinstance(active.node, Screen)):
                of = _EVERYWHERE
            elif isinstance(active.node, Screen):
                of = _OWN
            keys = groups.setdefault(of, {}).setdefault((binding.description, binding.action), [])
            shown = screen.app.get_key_display(binding)
            if shown not in keys:
                keys.append(shown)
        order = sorted(groups, key=lambda of: (of != _OWN, of != _EVERYWHERE))
        self.keys = [
            (of, [(" ".join(keys), what) for (what, _), keys in groups[of].items()]) for of in order
        ]

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "keys"
            box.border_subtitle = "escape closes"
            table = Table.grid(padding=(0, 2))
            table.add_column(style="bold", no_wrap=True)
            table.add_column()
            for name, keys in self.keys:
                table.add_row(Text(name, style="italic"), Text(""))
                for key, what in keys:
                    table.add_row(Text(key), Text(what))
            yield Static(table)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


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


LEAST = 4.5
"""Minimum contrast of text (WCAG 2.2, 1.4.3)."""
_BLACK, _WHITE = Color(0, 0, 0), Color(255, 255, 255)
_DECORATION = dict.fromkeys(range(0x2500, 0x25A0))
"""Borders, rules, scroll bars, sparklines."""


class ReadableText(LineFilter):
    """Shifts text colours towards black or white until their contrast is `LEAST`."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            (
                Segment(text, _readable(style, background), control)
                if style is not None and text.translate(_DECORATION).strip()
                else Segment(text, style, control)
            )
            for text, style, control in segments
        ]


def contrast(a: Color, b: Color) -> float:
    """Return the contrast ratio, from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@lru_cache(1024)
def _luminance(color: Color) -> float:
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color.normalized
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@lru_cache(1024)
def _readable(style: Style, background: Color) -> Style:
    if style.color is None or style.color.triplet is None:
        return style  # a palette colour, known only to the terminal
    if style.bgcolor is not None and style.bgcolor.triplet is None:
        return style
    front = Color.from_rich_color(style.color)
    ground = background if style.bgcolor is None else Color.from_rich_color(style.bgcolor)
    if style.reverse:
        return style + Style(bgcolor=readable(ground, front).rich_color)
    return style + Style(color=readable(front, ground).rich_color)


def readable(color: Color, background: Color) -> Color:
    """Return the nearest shade of a colour with a contrast of `LEAST`."""
    goals = [_WHITE, _BLACK] if _luminance(color) > _luminance(background) else [_BLACK, _WHITE]
    goal = next(goal for goal in goals if contrast(goal, background) >= LEAST)
    shades = (color.blend(goal, tenths / 10) for tenths in range(11))
    return next(shade for shade in shades if contrast(shade, background) >= LEAST)


_READABLE = ReadableText()
