"""The Compare screen: aligned, locked, and each of its keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.compare import CompareScreen
from ajet_tools.tui.trace.screen import TraceChanged
from tests.tools.tui.palette import choose
from tests.waiting import settled


@asynccontextmanager
async def compared(
    trace: Path, ids: Sequence[str], size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[Pilot[None], CompareScreen]]:
    app = TraceApp(open_trace(trace), trace)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        app.open_compare(ids)
        await settled(pilot)
        assert isinstance(app.screen, CompareScreen)
        yield pilot, app.screen


def shown(screen: CompareScreen) -> list[str]:
    return [screen.attempts[0].episode_id, screen.attempt.episode_id]


def painted(screen: CompareScreen) -> list[str]:
    side = screen.columns
    return [side.render_line(y).text.rstrip() for y in range(side.size.height)]


def said(screen: CompareScreen, selector: str) -> str:
    return str(screen.query_one(selector, Static).content)


@pytest.mark.asyncio
async def test_what_stands_in_the_heads_and_that_messages_stand_beside_each_other(
    token_trace: Any,
) -> None:
    async with compared(token_trace.file, ["good", "bad"]) as (_, screen):
        heads = said(screen, "ColumnHeads")
        for word in (
            "good",
            "bad",
            "succeeded, reward 1",
            "reward 0",
            "advantage +0.5",
            "(recomputed)",
            "24 trained",
        ):
            assert word in heads, word
        assert "parts: message 2, char 7, token 32" in heads
        line = next(line for line in painted(screen) if "Let me see." in line)
        assert line.split("│")[1].strip() == "Let me go."
        layout = screen.columns.layout_shown
        assert layout is not None and layout.first_difference is not None
        _, right = layout.lines[layout.first_difference]
        assert [text for text, kind in right if kind == "differs"] == ["go."]


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five attempts of twenty messages, each of which parts from the first later than the one
    before; and a twin."""
    file = tmp_path_factory.mktemp("attempts") / "trace.duckdb"
    with TraceWriter(file) as writer:
        writer.put(Run(run_id="r"), Run(run_id="other"))
        for n in range(6):
            messages = [
                {
                    "role": "assistant" if i % 2 else "user",
                    "content": f"line {i}{' odd' if 0 < n < 5 and i >= 4 * n else ''}",
                }
                for i in range(20)
            ]
            reply = {"choices": [{"message": messages[-1]}]}
            writer.put(
                Call(
                    call_id=f"c{n}",
                    episode_id=f"e{n}",
                    request={"messages": messages[:-1]},
                    response=reply,
                )
            )
            writer.put(
                Episode(
                    episode_id=f"e{n}", run_id="other" if n == 5 else "r", attempt=n, group_id="g"
                )
            )
    return file


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_first_difference_is_in_view_and_columns_scroll_as_one(attempts: Path) -> None:
    async with compared(attempts, ["e0", "e2"], size=(120, 15)) as (pilot, screen):
        columns = screen.columns
        assert columns.layout_shown is not None
        place = columns.layout_shown.first_difference
        for key in ("home", "end"):
            await pilot.press(key, "n")
            top = columns.scroll_offset.y
            assert place is not None and top <= place < top + columns.size.height
        await pilot.press("home")
        assert columns.scroll_offset.y == 0
        await pilot.press("down")
        rows = [line.split("│") for line in painted(screen)]
        assert all("line 0" in column for column in rows[0])
        await pilot.press("pagedown", "end")
        assert any("line 19" in line for line in painted(screen))
        await pilot.press("pageup", "up")
        assert columns.scroll_offset.y < columns.max_scroll_y


@pytest.mark.slow
@pytest.mark.asyncio
async def test_one_episode_after_the_other_is_beside_the_first_and_swapped(attempts: Path) -> None:
    ids = [f"e{n}" for n in range(6)]
    async with compared(attempts, ids) as (pilot, screen):
        assert shown(screen) == ["e0", "e1"]
        await pilot.press("right")
        assert shown(screen) == ["e0", "e2"] and "1 beside 3" in said(screen, "#head")
        await pilot.press(*["left"] * 3)
        assert shown(screen) == ["e0", "e1"]
        await pilot.press(*["right"] * 9)
        assert shown(screen) == ["e0", "e5"]
        heads = said(screen, "ColumnHeads")
        assert "says the same to the end" in heads and "run other" in heads
        await pilot.press(*["left"] * 9, "s")
        await settled(pilot)
        assert shown(screen) == ["e1", "e0"]
        await pilot.press("right")
        assert shown(screen) == ["e1", "e2"]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_opening_the_episode_its_tokens_and_copying_its_id(
    token_trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with compared(token_trace.file, ["good", "bad"]) as (pilot, screen):
        opened: list[Any] = []
        monkeypatch.setattr(screen.app, "open_episode", lambda *given: opened.append(given))
        monkeypatch.setattr(screen.app, "open_tokens", lambda *given: opened.append(given))
        await pilot.press("enter", "t")
        await choose(pilot, "Copy the episode's id")
        assert screen.app.clipboard == "bad"
        await pilot.press("s", "enter", "t")
        assert opened == [("bad", "b1"), ("bad", 0, 32), ("good", "g1"), ("good", 0, 32)]
        await pilot.press("escape")
        await settled(pilot)
        assert not isinstance(screen.app.screen, CompareScreen)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("ids", "word"),
    [
        ([], "There are no episodes to compare"),
        (["good"], "1 episode: nothing to compare it with"),
        (["good", "good"], "1 episode"),
        (["good", "nothing"], "the trace has no episode nothing"),
        (["mute", "blind"], "2 episodes"),
        (["mute"], "1 episode"),
    ],
    ids=str,
)
async def test_few_episodes_and_unknown_ones(token_trace: Any, ids: list[str], word: str) -> None:
    async with compared(token_trace.file, ids) as (pilot, screen):
        assert word in said(screen, "#head") + said(screen, "#empty")
        if ids != ["good"] and "mute" not in ids:
            await pilot.press("n", "N", "right", "left", "s")
            await pilot.press("down", "up", "pageup", "pagedown", "home", "end")
        await settled(pilot)


@pytest.mark.asyncio
async def test_hostile_text_stays_in_its_column(token_trace: Any) -> None:
    async with compared(token_trace.file, ["good", "hostile"]) as (_, screen):
        for y, line in enumerate(painted(screen)):
            assert screen.columns.render_line(y).cell_length == screen.columns.size.width
            assert not set(line) & set("\x1b\x07\u202e\r\t\x00\u200d")
        assert any("\\x1b[31mred" in line for line in painted(screen))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_reply_that_comes_meanwhile_is_shown(token_trace: Any, tmp_path: Path) -> None:
    file = tmp_path / "trace.duckdb"
    ask = [{"role": "user", "content": "Go on"}]
    with TraceWriter(file) as writer:
        writer.put(Call(episode_id="a", request={"messages": ask}, response={"content": "one"}))
        writer.put(Call(episode_id="b", request={"messages": ask}, response={"content": "two"}))
    async with compared(file, ["a", "b"]) as (pilot, screen):
        longer = [
            *ask,
            {"role": "assistant", "content": "two"},
            {"role": "user", "content": "and then?"},
        ]
        with TraceWriter(file) as writer:
            writer.put(
                Call(
                    episode_id="b",
                    index=1,
                    request={"messages": longer},
                    response={"content": "three"},
                )
            )
        screen.post_message(TraceChanged())
        await settled(pilot)
        assert "three" in "\n".join(painted(screen))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_how_it_looks(
    token_trace: Any, snap_compare: Callable[..., bool], size: tuple[int, int]
) -> None:
    app = TraceApp(open_trace(token_trace.file), token_trace.file)

    async def reach(pilot: Pilot[None]) -> None:
        app.sub_title = "trace.duckdb"
        app.open_compare(["good", "bad", "hostile"])
        await settled(pilot)
        await pilot.press("right")
        await settled(pilot)

    assert snap_compare(app, terminal_size=size, run_before=reach)
