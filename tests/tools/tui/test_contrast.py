"""Text of every screen contrasts with its background, in both themes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.color import Color
from textual.pilot import Pilot

from ajet_tools.tui.contrast import LEAST, contrast, readable
from tests.waiting import settled

_COLORS = st.builds(Color, *[st.integers(0, 255)] * 3)


@given(_COLORS, _COLORS)
def test_any_colour_becomes_readable_and_one_that_is_stays(color: Color, background: Color) -> None:
    shade = readable(color, background)
    assert contrast(shade, background) >= LEAST
    assert shade == color or contrast(color, background) < LEAST


def test_contrast_is_that_of_wcag() -> None:
    assert contrast(Color(0, 0, 0), Color(255, 255, 255)) == pytest.approx(21)
    assert contrast(Color.parse("#777777"), Color.parse("#ffffff")) == pytest.approx(
        4.48, abs=0.005
    )


def faint(pilot: Pilot[None]) -> list[tuple[float, str]]:
    """The words, figures and curves on the screen that cannot be read."""
    texts = []
    for strip in pilot.app.screen._compositor.render_strips():
        for text, style, _ in strip:
            shown = any(c.isalnum() or 0x2800 < ord(c) <= 0x28FF or c in "✗✓▲▼" for c in text)
            if (
                shown
                and style
                and style.color
                and style.bgcolor
                and style.color.triplet
                and style.bgcolor.triplet
            ):
                ratio = contrast(
                    Color.from_rich_color(style.color), Color.from_rich_color(style.bgcolor)
                )
                if ratio < LEAST:
                    texts.append((round(ratio, 2), text))
    return texts


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.usefixtures("own_home")
@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
async def test_every_screen_can_be_read(
    training_trace: Path, viewing: Any, until: Any, theme: str
) -> None:
    async with viewing(training_trace, size=(120, 36)) as pilot:
        pilot.app.theme = theme
        await until(pilot, lambda: pilot.app.screen.runs and pilot.app.screen.verdicts)
        for keys in ("down", "down", "enter", *"vvvv", "e", "enter", "t"):
            await pilot.press(keys)
            await settled(pilot)
            assert faint(pilot) == [], type(pilot.app.screen).__name__
