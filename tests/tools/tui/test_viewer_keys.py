"""The keys of the trace viewer: a letter means one thing on every screen."""

from __future__ import annotations

import string
from collections import defaultdict

from textual.binding import Binding
from textual.screen import Screen

from ajet_tools.tui.trace.compare import CompareScreen
from ajet_tools.tui.trace.dialogs import ExplanationScreen, FeedbackScreen, TextScreen
from ajet_tools.tui.trace.episode import EpisodeScreen
from ajet_tools.tui.trace.episodes import EpisodesScreen
from ajet_tools.tui.trace.run import RunScreen
from ajet_tools.tui.trace.runs import RunsScreen
from ajet_tools.tui.trace.tokens import TokensScreen

SCREENS: tuple[type[Screen], ...] = (
    RunsScreen,
    RunScreen,
    EpisodesScreen,
    EpisodeScreen,
    TokensScreen,
    CompareScreen,
    TextScreen,
    ExplanationScreen,
    FeedbackScreen,
)


def test_a_letter_means_one_thing_on_every_screen() -> None:
    """Its descriptions begin with the same word: `c` compares, `n` goes to the next one."""
    meanings: dict[str, set[str]] = defaultdict(set)
    for screen in SCREENS:
        for binding in screen.BINDINGS:
            assert isinstance(binding, Binding)
            for key in binding.key.split(","):
                if key in string.ascii_letters:
                    word = binding.description.replace(":", " ").split()[0]
                    meanings[key].add(word)
    assert {key: words for key, words in meanings.items() if len(words) > 1} == {}
