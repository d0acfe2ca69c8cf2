"""The keys of a screen, in its last line.

One line of parts: what a reader has to know of a list.

The title of a screen, in its first line.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Header, Static

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
    """One widget for all keys: Textual's Footer makes one of each, at each change of focus, and styles them all.

    Keys that there is no room for are left out; those that list them all, the help's and the command palette's, stand
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
        self.call_next(self._update, self.screen)  # the signal may have been sent before

    def on_unmount(self) -> None:
        self.screen.bindings_updated_signal.unsubscribe(self)

    def _update(self, screen: Screen[object]) -> None:
        left = not self.app.app_focus and self._keys  # without a focus there are fewer keys than will be again
        if screen is not self.screen or left:
            return
        by_action: dict[str, _Key] = {}
        for _, binding, enabled, _ in screen.active_bindings.values():
            if binding.show or binding.key == self.app.COMMAND_PALETTE_BINDING:
                key = _Key(binding.key, self.app.get_key_display(binding), binding.description, enabled)
                by_action.setdefault(binding.action, key)
        lists = tuple(by_action.pop(action) for action in _LISTS if action in by_action)
        keys = tuple(by_action.values())
        if (keys, lists) != (self._keys, self._lists):
            self._keys, self._lists = keys, lists
            self.refresh()

    def _place_keys(self) -> list[tuple[int, _Key]]:
        """The keys that are shown, and where each begins."""
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
        bold, plain = (self.get_component_rich_style(f"key-line--{part}") for part in ("key", "does"))
        segments, at = list[Segment](), 0
        for start, key in self._place_keys():
            if start > at:
                segments.append(Segment("▕".rjust(start - at), self.rich_style))
            dim = Style(dim=not key.enabled)
            segments += [Segment(f" {key.shown} ", bold + dim), Segment(f"{key.does} ", plain + dim)]
            at = start + key.width
        return Strip(segments).adjust_cell_length(self.size.width, self.rich_style)

    def on_click(self, event: events.Click) -> None:
        for start, key in self._place_keys():
            if start <= event.x < start + key.width:
                self.app.simulate_key(key.key) if key.enabled else self.app.bell()
                return


class PartsLine(Static):
    """Parts in the order in which they matter: a narrow screen cuts the last ones."""

    DEFAULT_CSS = "PartsLine { height: 1; padding: 0 1; background: $panel; color: $foreground; }"

    def __init__(self) -> None:
        super().__init__("", markup=False)

    def show(self, parts: Iterable[Text]) -> None:
        line = Text(" · ").join(parts)
        line.no_wrap, line.overflow = True, "ellipsis"
        self.update(line)


class TitleLine(Header):
    """Textual's header, which would look for its parts, and end the viewer, where a title changes as it goes."""

    def __init__(self) -> None:
        super().__init__(icon=" ")

    def watch(self, obj: DOMNode, attribute_name: str, callback: Any, init: bool = True) -> None:
        async def unless_gone() -> None:
            with suppress(NoMatches):
                await callback()

        super().watch(obj, attribute_name, unless_gone, init)
