"""Text that can be read on its background, whatever style a theme, a table or a chart gives it."""

from __future__ import annotations

from functools import lru_cache

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter

LEAST = 4.5
"""Contrast of text (WCAG 2.2, 1.4.3)."""
_BLACK, _WHITE = Color(0, 0, 0), Color(255, 255, 255)
_DECORATION = dict.fromkeys(range(0x2500, 0x25A0))
"""Borders, rules, scroll bars, bars of a sparkline."""


class ReadableText(LineFilter):
    """Moves the colour of text towards black or white until it contrasts with its background by `LEAST`."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            Segment(text, _readable(style, background), control)
            if style is not None and text.translate(_DECORATION).strip()
            else Segment(text, style, control)
            for text, style, control in segments
        ]


def contrast(a: Color, b: Color) -> float:
    """From 1 to 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


@lru_cache(1024)
def _luminance(color: Color) -> float:
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color.normalized)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@lru_cache(1024)
def _readable(style: Style, background: Color) -> Style:
    if style.color is None or style.color.triplet is None:
        return style  # of the terminal's palette, which it knows alone
    if style.bgcolor is not None and style.bgcolor.triplet is None:
        return style
    front = Color.from_rich_color(style.color)
    ground = background if style.bgcolor is None else Color.from_rich_color(style.bgcolor)
    if style.reverse:
        return style + Style(bgcolor=readable(ground, front).rich_color)
    return style + Style(color=readable(front, ground).rich_color)


def readable(color: Color, background: Color) -> Color:
    """The nearest shade of a colour that contrasts with a background by `LEAST`."""
    goals = [_WHITE, _BLACK] if _luminance(color) > _luminance(background) else [_BLACK, _WHITE]
    goal = next(goal for goal in goals if contrast(goal, background) >= LEAST)
    shades = (color.blend(goal, tenths / 10) for tenths in range(11))
    return next(shade for shade in shades if contrast(shade, background) >= LEAST)
