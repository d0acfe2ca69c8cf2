"""What widgets share that make their lines themselves."""

from __future__ import annotations

from rich.style import Style
from textual.geometry import Region
from textual.scroll_view import ScrollView
from textual.strip import Strip

__all__ = ["LineView"]


class LineView(ScrollView):
    """Finds out its style once a frame and not once a line: to know it, Textual asks every widget above."""

    ground = Style.null()
    """What is behind the lines, while they are made."""

    def render_lines(self, crop: Region) -> list[Strip]:
        self.ground = self.rich_style
        return super().render_lines(crop)
