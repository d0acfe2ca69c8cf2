"""A picture as lines of text: each character is two pixels, one above the other."""

from __future__ import annotations

from rich.color import Color
from rich.style import Style
from rich.text import Text

from ajet_sdk.errors import PictureError
from ajet_sdk.pictures import Picture

ROWS = 14
"""Largest height, in lines."""
_COLUMNS = 60
_HALF = "▀"


def size_of(picture: Picture, width: int) -> tuple[int, int]:
    """Columns and lines that a picture takes; a small one is not enlarged."""
    scale = min(
        1.0, min(width, _COLUMNS) / max(picture.width, 1), 2 * ROWS / max(picture.height, 1)
    )
    columns = max(1, round(picture.width * scale))
    lines = max(1, (round(picture.height * scale) + 1) // 2)
    return columns, lines


def half_blocks(picture: Picture, width: int) -> Text:
    """Draw a picture at most `width` columns wide; nothing if it was removed or cannot be read."""
    columns, lines = size_of(picture, width)
    text = Text(no_wrap=True, end="")
    if not picture.data:
        return text
    try:
        pixels = picture.image().resize((columns, 2 * lines)).load()
    except PictureError:
        return text
    assert pixels is not None
    for line in range(lines):
        if line:
            text.append("\n")
        for column in range(columns):
            upper = Color.from_rgb(*pixels[column, 2 * line])  # type: ignore[misc]
            lower = Color.from_rgb(*pixels[column, 2 * line + 1])  # type: ignore[misc]
            text.append(_HALF, Style(color=upper, bgcolor=lower))
    return text
