"""The keys of the viewers: few, and each means one thing on every screen of a trace."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.binding import Binding
from textual.command import CommandInput, CommandPalette
from textual.screen import Screen

import ajet_tools.tui
from ajet_tools.tui.trace.compare import CompareScreen
from ajet_tools.tui.trace.dialogs import ExplanationScreen, FeedbackScreen, TextScreen
from ajet_tools.tui.trace.episode import EpisodeScreen
from ajet_tools.tui.trace.episodes import EpisodesScreen
from ajet_tools.tui.trace.run import RunScreen
from ajet_tools.tui.trace.runs import RunsScreen
from ajet_tools.tui.trace.tokens import TokensScreen
from ajet_tools.tui.widgets.listing import ListingTable

PLACES: tuple[type[Any], ...] = (
    RunsScreen,
    RunScreen,
    EpisodesScreen,
    EpisodeScreen,
    TokensScreen,
    CompareScreen,
    TextScreen,
    ExplanationScreen,
    FeedbackScreen,
    ListingTable,
)
MOST = 80
"""Keys to bind, in all; an action that few need goes into a screen's PALETTE."""


def bindings(place: type[Any]) -> Iterator[tuple[str, Binding]]:
    """The keys that a class binds itself, one by one."""
    for binding in vars(place).get("BINDINGS", ()):
        assert isinstance(binding, Binding)
        for key in binding.key.split(","):
            yield key, binding


def classes() -> Iterator[type[Any]]:
    """Every class of the viewers."""
    for module in pkgutil.walk_packages(ajet_tools.tui.__path__, f"{ajet_tools.tui.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and value.__module__ == module.name:
                yield value


def test_a_key_means_one_thing_on_every_screen() -> None:
    """Its descriptions begin with the same word: `c` compares, `n` goes to the next one."""
    meanings: dict[str, set[str]] = defaultdict(set)
    for place in PLACES:
        for key, binding in bindings(place):
            if key not in ("escape", "left", "right"):  # back, and sideways
                meanings[key].add(binding.description.replace(":", " ").split()[0])
    assert {key: words for key, words in meanings.items() if len(words) > 1} == {}


def test_there_are_few_keys() -> None:
    bound = [(place.__name__, key) for place in classes() for key, _ in bindings(place)]
    assert len(bound) > 40
    assert len(bound) <= MOST, (
        f"{len(bound)} keys are bound; put rare actions into PALETTE: {bound}"
    )


def test_what_the_palette_offers_exists() -> None:
    for place in PLACES:
        for title, action in getattr(place, "PALETTE", ()):
            name = action.partition("(")[0]
            assert hasattr(place, f"action_{name}"), f"{place.__name__}: {title}"


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.usefixtures("own_home")
async def test_an_action_without_a_key_is_typed_into_the_palette(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    async with viewing(training_trace, run_id="aaaa0001") as pilot:
        screen: Screen[Any] = pilot.app.screen
        await until(pilot, lambda: screen.panels)
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(pilot.app.screen, CommandPalette))
        await pilot.press(*"view config")
        palette = pilot.app.screen
        await until(pilot, lambda: palette.query_one(CommandInput).value == "view config")
        await until(pilot, lambda: palette.query_one("CommandList").option_count > 0)
        await pilot.press("down", "enter")
        await until(pilot, lambda: pilot.app.screen is screen)
        await until(pilot, lambda: screen.query_one("ContentSwitcher").current == "config")
