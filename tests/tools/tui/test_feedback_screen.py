"""Feedback of a person: kept with author and time, shown again, and never lost to an error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static, TextArea

from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, Run
from ajet_tools.trace.queries.records import feedback_of
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.dialogs import FeedbackScreen
from tests.waiting import settled

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("own_home")]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOGNAME", "ada")
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(
            Run(run_id="r"),
            Call(call_id="c1", episode_id="e1"),
            Episode(episode_id="e1", run_id="r"),
        )
    return tmp_path / "trace.duckdb"


@asynccontextmanager
async def asked(
    trace: Path,
    episode_id: str = "e1",
    call_id: str | None = None,
    size: tuple[int, int] = (80, 24),
) -> AsyncIterator[tuple[Pilot[None], FeedbackScreen]]:
    with open_trace(trace) as reader:
        app = TraceApp(reader, trace)
        async with app.run_test(size=size, notifications=True) as pilot:
            await settled(pilot)
            app.open_feedback(episode_id, call_id)
            await settled(pilot)
            assert isinstance(app.screen, FeedbackScreen)
            yield pilot, app.screen


def given(trace: Path) -> list[Feedback]:
    with open_trace(trace) as reader:
        return feedback_of(reader, "e1")[::-1]


@pytest.mark.slow
async def test_thumb_comment_and_correction_are_kept_and_shown_again(trace: Path) -> None:
    async with asked(trace) as (pilot, screen):
        assert "no feedback yet" in str(screen.query_one("#given Static").render())
        await pilot.press("plus")
        assert screen.query_one("#score", Input).value == "1" and screen.query_one("#up").has_class(
            "chosen"
        )
        await pilot.press("plus")
        assert screen.query_one("#score", Input).value == "", "the same thumb again takes it back"
        await pilot.press("minus", "tab", "tab", "tab", *"[b]bad", "tab", "4", "2", "ctrl+s")
        await settled(pilot)
        assert pilot.app.screen is not screen
    [row] = given(trace)
    assert (row.author, row.score, row.comment, row.correction) == ("ada", 0.0, "[b]bad", "42")
    async with asked(trace) as (_, screen):
        said = str(screen.query_one("#given Static").render())
        assert (
            "ada" in said
            and f"{row.at:%Y-%m-%d %H:%M}" in said
            and "[b]bad" in said
            and "should be: 42" in said
        )


@pytest.mark.slow
async def test_a_score_of_ones_own_on_a_call(trace: Path) -> None:
    async with asked(trace, call_id="c1") as (pilot, screen):
        screen.query_one("#score", Input).focus()
        await pilot.press(*"0.5", "enter")
        await settled(pilot)
    [row] = given(trace)
    assert row.score == 0.5 and row.call_id == "c1" and row.comment is None


@pytest.mark.slow
async def test_a_score_that_is_no_number_is_said_and_the_text_stays(trace: Path) -> None:
    async with asked(trace) as (pilot, screen):
        for score in ("good", "nan", "inf", "1e999"):
            screen.query_one("#wrong", Static).update("")
            screen.query_one("#score", Input).value = score
            screen.query_one("#comment", TextArea).text = "as I said"
            await pilot.press("ctrl+s")
            await settled(pilot)
            assert "not a number" in str(screen.query_one("#wrong").render()), score
            assert screen.query_one("#comment", TextArea).text == "as I said"
    assert not given(trace)


@pytest.mark.slow
async def test_nothing_to_keep_and_leaving(trace: Path) -> None:
    async with asked(trace) as (pilot, screen):
        await pilot.press("ctrl+s")
        assert "nothing to save" in str(screen.query_one("#wrong").render())
        await pilot.press("escape")
        await settled(pilot)
        assert pilot.app.screen is not screen
    assert not given(trace)


@pytest.mark.slow
async def test_an_episode_that_is_not_there_is_said_and_the_text_stays(trace: Path) -> None:
    async with asked(trace, episode_id="nobody") as (pilot, screen):
        screen.query_one("#comment", TextArea).text = "as I said"
        await pilot.press("ctrl+s")
        await settled(pilot)
        assert pilot.app.screen is screen and "no episode nobody" in str(
            screen.query_one("#wrong").render()
        )
        assert screen.query_one("#comment", TextArea).text == "as I said"
