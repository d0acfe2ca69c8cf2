"""The title of a screen, in its first line."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.widgets import Header

__all__ = ["TitleLine"]


class TitleLine(Header):
    """Textual's header, which would look for its parts, and end the viewer, where a title changes as it goes."""

    def __init__(self) -> None:
        super().__init__(icon=" ")

    def watch(self, obj: DOMNode, attribute_name: str, callback: Any, init: bool = True) -> None:
        async def unless_gone() -> None:
            with suppress(NoMatches):
                await callback()

        super().watch(obj, attribute_name, unless_gone, init)
