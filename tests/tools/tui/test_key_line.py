"""The line of keys: what fits is shown, the lists of all keys always, and a click is the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.events import AppBlur

from ajet_tools.tui.base import HelpScreen
from ajet_tools.tui.trace.episodes import EpisodesScreen
from ajet_tools.tui.widgets.lines import KeyLine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("own_home")]


def line(pilot: Any) -> str:
    keys = pilot.app.screen.query_one(KeyLine)
    return str(keys.render_line(0).text)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
async def test_keys_that_fit_are_shown_and_where_all_are_always(
    training_trace: Path, viewing: Any, until: Any, width: int
) -> None:
    async with viewing(training_trace, size=(width, 24)) as pilot:
        await until(pilot, lambda: "Keys" in line(pilot))
        shown = line(pilot)
        assert len(shown) == width and shown.rstrip().endswith("? Keys  ^p palette")
        assert shown.startswith(" w Why ")
        assert ("y Copy id" in shown) or width < 80


@pytest.mark.slow
async def test_a_click_is_the_key(training_trace: Path, viewing: Any, until: Any) -> None:
    async with viewing(training_trace, size=(100, 24)) as pilot:
        await until(
            pilot, lambda: "Episodes" in line(pilot) and getattr(pilot.app.screen, "runs", None)
        )
        await pilot.click(KeyLine, offset=(line(pilot).index("Episodes") + 2, 0))
        await until(pilot, lambda: isinstance(pilot.app.screen, EpisodesScreen))
        await until(pilot, lambda: "filter" in line(pilot))
        await pilot.click(KeyLine, offset=(line(pilot).index("Keys"), 0))
        await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))


@pytest.mark.slow
async def test_a_screen_that_opens_in_a_window_without_the_focus_shows_its_keys(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    """As a link does that opens a tab of the browser in the background; what it shows stays while
    the window waits."""
    async with viewing(training_trace, size=(100, 24)) as pilot:
        await until(
            pilot, lambda: "Episodes" in line(pilot) and getattr(pilot.app.screen, "runs", None)
        )
        pilot.app.post_message(AppBlur())
        await until(pilot, lambda: not pilot.app.app_focus)
        assert "Episodes" in line(pilot)
        await pilot.app.screen.run_action("episodes")
        await until(pilot, lambda: isinstance(pilot.app.screen, EpisodesScreen))
        await until(pilot, lambda: "filter" in line(pilot))
