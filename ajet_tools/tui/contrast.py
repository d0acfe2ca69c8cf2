"""A minimum contrast of text, which not every theme of Textual has."""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

LEAST = 4.5
"""Minimum contrast of text (WCAG 2.2, 1.4.3)."""
_BLACK = Color(0, 0, 0)
_WHITE = Color(255, 255, 255)
_DECORATION = dict.fromkeys(range(0x2500, 0x25A0))
"""Borders, rules, scroll bars, sparklines."""


class ReadableText(LineFilter):
    """Shifts text colours towards black or white until their contrast is `LEAST`."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        readable_segments = []
        for text, style, control in segments:
            if style is not None and text.translate(_DECORATION).strip():
                style = _readable(style, background)
            readable_segments.append(Segment(text, style, control))
        return readable_segments


def contrast(a: Color, b: Color) -> float:
    """Return the contrast ratio, from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@lru_cache(1024)
def _luminance(color: Color) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color.normalized]
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@lru_cache(1024)
def _readable(style: Style, background: Color) -> Style:
    if style.color is None or style.color.triplet is None:
        return style  # a palette colour, known only to the terminal
    if style.bgcolor is not None and style.bgcolor.triplet is None:
        return style
    front = Color.from_rich_color(style.color)
    if style.bgcolor is None:
        ground = background
    else:
        ground = Color.from_rich_color(style.bgcolor)
    if style.reverse:
        return style + Style(bgcolor=readable(ground, front).rich_color)
    return style + Style(color=readable(front, ground).rich_color)


def readable(color: Color, background: Color) -> Color:
    """Return the nearest shade of a colour with a contrast of `LEAST`."""
    goal = _BLACK
    other = _WHITE
    if _luminance(color) > _luminance(background):
        goal = _WHITE
        other = _BLACK
    if contrast(goal, background) < LEAST:
        goal = other
    shade = color
    for tenths in range(11):
        shade = color.blend(goal, tenths / 10)
        if contrast(shade, background) >= LEAST:
            break
    return shade
