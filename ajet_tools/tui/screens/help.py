"""The screens that help: every key of the screen behind, going to an id, and the word about a small terminal."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Label, Static

from ajet_tools.tui.frame import is_basic

__all__ = ["GoScreen", "HelpScreen", "TooSmallScreen"]

_OWN, _EVERYWHERE = "this screen", "everywhere"
Keys = list[tuple[str, list[tuple[str, str]]]]


class HelpScreen(ModalScreen[None]):
    """Every key that works on the screen behind, those of the focused part first."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        width: 72; max-width: 95%; height: auto; max-height: 90%;
        border: round $accent; background: $surface; padding: 0 1;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,f1,enter", "dismiss", "Close", show=False),
    ]

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self.keys = keys

    @classmethod
    def of(cls, screen: Screen[Any]) -> HelpScreen:
        """The help for a screen: what is bound there now."""
        groups: dict[str, dict[tuple[str, str], list[str]]] = {}
        for active in screen.active_bindings.values():
            binding = active.binding
            if binding.system or not binding.description:
                continue
            of = _EVERYWHERE if is_basic(binding) else _named(active.node)
            keys = groups.setdefault(of, {}).setdefault((binding.description, binding.action), [])
            shown = screen.app.get_key_display(binding)
            if shown not in keys:
                keys.append(shown)
        order = sorted(groups, key=lambda of: (of != _OWN, of != _EVERYWHERE))
        return cls([(of, [(" ".join(keys), what) for (what, _), keys in groups[of].items()]) for of in order])

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


def _named(node: Any) -> str:
    """The screen's own keys, the app's, or those of a part of the screen."""
    if isinstance(node, Screen):
        return _OWN
    name = "".join(f" {c.lower()}" if c.isupper() else c for c in type(node).__name__).strip()
    return _EVERYWHERE if name.endswith("app") else name


class GoScreen(ModalScreen[str]):
    """Asks for the beginning of an id."""

    DEFAULT_CSS = """
    GoScreen { align: center middle; }
    GoScreen > Vertical { width: 60; max-width: 95%; height: auto; border: round $accent; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss", "Close", show=False)]

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "go to"
            yield Input(placeholder="the beginning of a run's, an episode's or a call's id")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())


class TooSmallScreen(Screen[None]):
    """Stands before everything while the terminal is too small."""

    DEFAULT_CSS = "TooSmallScreen { align: center middle; } TooSmallScreen Label { width: 100%; text-align: center; }"

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.needed = (columns, rows)

    def compose(self) -> ComposeResult:
        columns, rows = self.needed
        yield Label(Content(f"needs {columns} × {rows} characters"))
        yield Label("", id="now")

    def on_resize(self) -> None:
        width, height = self.app.size
        self.query_one("#now", Label).update(Content(f"this is {width} × {height}"))
