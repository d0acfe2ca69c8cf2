"""The viewer around its screens: help, commands, themes, ids, errors, a small terminal, no
colour."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import HelpPanel, Input

from ajet_sdk.errors import QueryError, TraceError
from ajet_tools.tui.base import GoScreen
from ajet_tools.tui.trace.episode import EpisodeScreen
from ajet_tools.tui.trace.run import RunScreen
from ajet_tools.tui.trace.runs import RunsScreen
from ajet_tools.tui.widgets.lines import TitleLine

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("own_home")]


_FRAME = {"ff5f57", "febc2e", "28c840", "c5c8c6"}
"""Of the window that a screenshot is drawn in."""


def shown(pilot: Pilot[None]) -> str:
    return "\n".join(strip.text for strip in pilot.app.screen._compositor.render_strips())


async def settled(pilot: Pilot[None], until: Any) -> None:
    await until(pilot, lambda: isinstance(pilot.app.screen, RunsScreen) and pilot.app.screen.runs)


@pytest.mark.slow
async def test_every_screen_has_its_keys(training_trace: Path, viewing: Any, until: Any) -> None:
    async with viewing(training_trace, size=(100, 50)) as pilot:
        await settled(pilot, until)
        places = {
            "runs": (lambda: None, ("Compare", "Episodes", "Quit")),
            "run": (lambda: pilot.app.open_run("aaaa0001"), ("View", "Failed", "Keys")),
            "episodes": (lambda: pilot.app.open_episodes("aaaa0001"), ("Keys",)),
            "episode": (lambda: pilot.app.open_episode("aae0001"), ("Keys",)),
            "tokens": (lambda: pilot.app.open_tokens("aae0001"), ("Keys",)),
            "compare": (lambda: pilot.app.open_compare(["aae0001", "aae0002"]), ("Keys",)),
        }
        for open_it, words in places.values():
            before = len(pilot.app.screen_stack)
            open_it()
            await pilot.app.workers.wait_for_complete()
            await pilot.pause()
            await pilot.press("question_mark")
            await until(pilot, lambda words=words: all(word in shown(pilot) for word in words))
            await pilot.press("question_mark")
            await until(pilot, lambda: not pilot.app.screen.query(HelpPanel))
            while len(pilot.app.screen_stack) > before:
                pilot.app.pop_screen()
                await pilot.pause()


async def test_the_list_of_keys_opens_and_closes(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    async with viewing(training_trace) as pilot:
        await settled(pilot, until)
        await pilot.press("question_mark")
        await until(pilot, lambda: pilot.app.screen.query(HelpPanel))
        await pilot.press("question_mark")
        await until(pilot, lambda: not pilot.app.screen.query(HelpPanel))


@pytest.mark.slow
async def test_go_to_an_id(training_trace: Path, viewing: Any, until: Any) -> None:
    async with viewing(training_trace) as pilot:
        await settled(pilot, until)
        for prefix, screen in (
            ("aaaa", RunScreen),
            ("aae0003", EpisodeScreen),
            ("aac0003", EpisodeScreen),
        ):
            pilot.app.action_go()
            await until(pilot, lambda: isinstance(pilot.app.screen, GoScreen))
            pilot.app.screen.query_one(Input).value = prefix
            await pilot.press("enter")
            await until(pilot, lambda screen=screen: isinstance(pilot.app.screen, screen))
            if screen is EpisodeScreen:
                assert pilot.app.screen.episode_id == "aae0003"
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(pilot.app.screen, RunsScreen))


@pytest.mark.slow
async def test_an_id_that_fits_nothing_is_a_word(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    async with viewing(training_trace) as pilot:
        await settled(pilot, until)
        pilot.app.open_found("zz")
        await until(pilot, lambda: "nothing in this trace" in shown(pilot))
        assert isinstance(pilot.app.screen, RunsScreen)
        pilot.app.open_found("aa")
        await until(pilot, lambda: "is ambiguous" in shown(pilot))


@pytest.mark.slow
async def test_the_palette_has_our_commands(training_trace: Path, viewing: Any, until: Any) -> None:
    async with viewing(training_trace) as pilot:
        await settled(pilot, until)
        commands = {
            command.title: command for command in pilot.app.get_system_commands(pilot.app.screen)
        }
        assert {"Go to an id", "Runs", "Theme", "Compare", "Episodes", "Copy id"} <= set(commands)
        assert "Cursor up" not in commands
        titles = [command.title for command in pilot.app.get_system_commands(pilot.app.screen)]
        assert sorted(titles) == sorted(set(titles)), "what has two keys is there once"
        pilot.app.open_run("aaaa0001")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        commands["Runs"].callback()
        await until(pilot, lambda: isinstance(pilot.app.screen, RunsScreen))
        commands["Copy id"].callback()
        await until(pilot, lambda: pilot.app.clipboard == "cccc0003")


@pytest.mark.slow
async def test_a_screen_can_be_left_while_its_title_changes(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    async with viewing(training_trace) as pilot:
        app = pilot.app
        for number in range(10):
            app.open_run("aaaa0001")
            await until(pilot, lambda: app.screen.query(TitleLine))
            app.screen.title, app.screen.sub_title = f"{number}", f"of {number}"
            app.pop_screen()
            await until(pilot, lambda: isinstance(app.screen, RunsScreen))
        await until(pilot, lambda: "math" in shown(pilot))


@pytest.mark.slow
async def test_light_and_dark(training_trace: Path, viewing: Any, until: Any) -> None:
    async with viewing(training_trace, run_id="aaaa0001") as pilot:
        await until(pilot, lambda: pilot.app.screen.panels)
        for theme in ("textual-light", "textual-dark"):
            pilot.app.theme = theme
            await pilot.pause()
            assert "reward" in shown(pilot)


@pytest.mark.slow
async def test_without_colour(
    training_trace: Path, viewing: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with viewing(training_trace, run_id="aaaa0001") as pilot:
        await until(pilot, lambda: "⠒train 0.8 •val 0.9" in shown(pilot))
        picture = pilot.app.export_screenshot()
        colors = set(re.findall(r"fill: #(\w{6})", picture)) | set(
            re.findall(r'fill="#(\w{6})"', picture)
        )
        assert colors and not {c for c in colors - _FRAME if len({c[:2], c[2:4], c[4:]}) > 1}


async def test_an_error_of_ours_is_a_word_and_said_once(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    async with viewing(training_trace) as pilot:
        await settled(pilot, until)

        async def fail() -> None:
            raise QueryError("[bold]too slow[/] and \x1b[31m")

        pilot.app.run_worker(fail())
        await until(pilot, lambda: "[bold]too slow[/] and \\x1b[31m" in shown(pilot))
        for _ in range(3):
            pilot.app.show_new_error(TraceError("the owner is gone"))
        await until(pilot, lambda: "the owner is gone" in shown(pilot))
        assert shown(pilot).count("the owner is gone") == 1


@pytest.mark.slow
async def test_a_fault_is_no_word(training_trace: Path, viewing: Any, until: Any) -> None:
    with pytest.raises(Exception, match="a fault"):
        async with viewing(training_trace) as pilot:
            await settled(pilot, until)

            async def fail() -> None:
                raise KeyError("a fault")

            pilot.app.run_worker(fail())
            await until(pilot, lambda: pilot.app._exception is not None)


async def test_q_quits(training_trace: Path, viewing: Any, until: Any) -> None:
    async with viewing(training_trace) as pilot:
        await settled(pilot, until)
        await pilot.press("q")
        await pilot.pause()
        assert pilot.app.return_code == 0
