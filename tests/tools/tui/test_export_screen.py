"""Data in one keystroke: asked once, remembered, never over another file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Select

from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run, Task
from ajet_tools.tui.settings import Settings
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.episodes import EpisodesScreen
from ajet_tools.tui.trace.export import ExportScreen
from tests.waiting import settled

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("own_home")]


@asynccontextmanager
async def viewed(tmp_path: Path) -> AsyncIterator[tuple[Pilot[None], EpisodesScreen]]:
    file = tmp_path / "trace.duckdb"
    if not file.exists():
        with TraceWriter(file) as writer:
            writer.put(Run(run_id="run-1"))
            for i in range(3):
                request = {"messages": [{"role": "user", "content": f"write to someone{i}@example.com"}]}
                response = {"choices": [{"message": {"role": "assistant", "content": "done"}}]}
                writer.put(Call(call_id=f"c{i}", episode_id=f"e{i}", request=request, response=response))
                task = Task(task_id=f"t{i}", main_query="write")
                writer.put(Episode(episode_id=f"e{i}", run_id="run-1", task=task, rewards=(Reward(value=i),)))
    with open_trace(file) as reader:
        app = TraceApp(reader, file)
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            screen = EpisodesScreen("run-1")
            await app.push_screen(screen)
            await settled(pilot)
            yield pilot, screen


def rows(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def notices(pilot: Pilot[None]) -> str:
    return "\n".join(notice.message for notice in pilot.app._notifications)


@pytest.mark.slow
async def test_asked_once_then_one_key_writes_to_a_name_that_is_free(tmp_path: Path) -> None:
    async with viewed(tmp_path) as (pilot, screen):
        await pilot.press("e")
        await settled(pilot)
        assert isinstance(pilot.app.screen, ExportScreen)
        pilot.app.screen.query_one(Select).value = "messages"
        await settled(pilot)
        file = Path(pilot.app.screen.query_one(Input).value)
        assert file == tmp_path / "messages-run-1.jsonl"
        await pilot.press("enter")
        await settled(pilot)
        assert pilot.app.screen is screen and len(rows(file)) == 3
        assert "3 rows of 3 episodes as messages" in notices(pilot) and "3 values redacted" in notices(pilot)
        assert "example.com" not in file.read_text(), "redacted"
        await pilot.press("space", "e")
        await settled(pilot)
        assert pilot.app.screen is screen and len(rows(tmp_path / "messages-run-1-2.jsonl")) == 1
    assert Settings.load().export_format == "messages"
    async with viewed(tmp_path) as (pilot, screen):
        await pilot.press("slash", *"reward>0", "enter")
        await settled(pilot)
        await pilot.press("e")
        await settled(pilot)
        assert len(rows(tmp_path / "messages-run-1-3.jsonl")) == 2, "with no selection, what the filter shows"
        await pilot.press("E")
        await settled(pilot)
        assert isinstance(pilot.app.screen, ExportScreen), "it can be asked again"
        await pilot.press("escape")
        await settled(pilot)
        assert pilot.app.screen is screen


@pytest.mark.slow
async def test_a_file_that_is_there_is_not_overwritten_and_the_name_is_kept(tmp_path: Path) -> None:
    taken = tmp_path / "taken.jsonl"
    taken.write_text("mine")
    async with viewed(tmp_path) as (pilot, _):
        await pilot.press("e")
        await settled(pilot)
        for name, wrong in (
            (str(taken), "already exists"),
            (str(tmp_path), "not a file name"),
            ("", "this is not a file name"),
        ):
            pilot.app.screen.query_one(Input).value = name
            await pilot.press("enter")
            await settled(pilot)
            assert wrong in str(pilot.app.screen.query_one("#wrong").render())
            assert pilot.app.screen.query_one(Input).value == name
        pilot.app.screen.query_one(Input).value = str(tmp_path / "no" / "such" / "x.jsonl" / "y")
        (tmp_path / "no").write_text("a file")
        await pilot.press("enter")
        await settled(pilot)
        assert isinstance(pilot.app.screen, ExportScreen), "what cannot be written is said, and can be mended"
        assert str(pilot.app.screen.query_one("#wrong").render())
    assert taken.read_text() == "mine"


@pytest.mark.slow
async def test_escape_stops_and_nothing_is_written(tmp_path: Path) -> None:
    async with viewed(tmp_path) as (pilot, _):
        await pilot.press("e")
        await settled(pilot)
        asked = pilot.app.screen
        assert isinstance(asked, ExportScreen)
        asked.action_write()
        asked.action_leave()
        await settled(pilot)
        assert not list(tmp_path.glob("*.jsonl"))
