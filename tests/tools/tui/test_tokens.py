"""The Tokens screen: each key, each kind of episode, and how it looks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Run
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.screen import TraceChanged
from ajet_tools.tui.trace.tokens import TokensScreen
from ajet_tools.tui.widgets.token_text import TokenText
from tests.tools.tui.palette import choose
from tests.waiting import settled

SIZES = [(80, 24), (120, 40)]


@asynccontextmanager
async def format_tokens(
    trace: Path,
    episode: str,
    *,
    timeline: int = 0,
    token: int = 0,
    size: tuple[int, int] = (80, 24),
) -> AsyncIterator[tuple[Pilot[None], TokensScreen]]:
    app = TraceApp(open_trace(trace), trace)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        app.open_tokens(episode, timeline, token)
        await settled(pilot)
        assert isinstance(app.screen, TokensScreen)
        yield pilot, app.screen


def painted(screen: TokensScreen) -> str:
    """The lines of the text as they stand on the screen."""
    text = screen.text
    return "\n".join(text.render_line(y).text.rstrip() for y in range(text.size.height))


def said(screen: TokensScreen, selector: str) -> str:
    return str(screen.query_one(selector, Static).content)


@pytest.mark.asyncio
async def test_the_text_and_what_is_said_of_a_token(token_trace: Any) -> None:
    async with format_tokens(token_trace.file, "good", token=3) as (pilot, screen):
        assert "<|im_start|>user⏎" in painted(screen) and "Café?" in painted(screen)
        assert "timeline 1 of 1" in said(screen, "#head") and "masked in" in said(screen, "#head")
        assert screen.text.cursor == 3 and "token 3 of" in said(screen, "TokenPanel")
        assert "prompt: given to the model" in said(screen, "TokenPanel")
        await pilot.press("m")
        panel = said(screen, "TokenPanel")
        assert (
            "bytes 4c" in panel
            and "trained: its probability was pushed up (advantage +0.5)" in panel
        )
        assert "sampler -0.0010" in panel and "entropy 0 nats" in panel and "call 0 g1" in panel


@pytest.mark.slow
@pytest.mark.asyncio
async def test_arrows_go_by_token_and_line(token_trace: Any) -> None:
    async with format_tokens(token_trace.file, "good") as (pilot, screen):
        text = screen.text
        await pilot.press("right", "right", "left")
        assert text.cursor == 1
        await pilot.press("down")
        assert text.layout_shown is not None
        assert text.layout_shown.line_of[text.cursor] == 1
        await pilot.press("home", "up")
        assert text.cursor == 0
        await pilot.press("up", "left")
        assert text.cursor == 0, "the cursor stays in the text"
        await pilot.press("end")
        assert screen.view is not None and text.cursor == len(screen.view) - 1
        await pilot.press("right")
        assert text.cursor == len(screen.view) - 1
        await pilot.press("pageup", "home", "pagedown")
        assert text.cursor > 0
        await pilot.click(TokenText, offset=(9, 0))
        assert text.cursor == text.layout_shown.token_at(text.scroll_offset.y, 2)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_jumps_to_spans_unlikely_tokens_and_gaps(token_trace: Any) -> None:
    async with format_tokens(token_trace.file, "good") as (pilot, screen):
        view, text = screen.view, screen.text
        assert view is not None
        spans = view.span_starts.tolist()
        reached = []
        for key in ("m", "m", "m", "N"):
            await pilot.press(key)
            reached.append(text.cursor)
        assert reached == [spans[0], spans[1], spans[0], spans[1]]
        await pilot.press("l")
        assert view.sampler[text.cursor] == np.nanmin(view.sampler)
        lowest = text.cursor
        await pilot.press("l")
        assert text.cursor != lowest and view.sampler[text.cursor] >= view.sampler[lowest]
        await pilot.press("N")
        assert text.cursor == lowest
        await pilot.press("home", "x")
        assert abs(view.gap[text.cursor]) == np.nanmax(np.abs(view.gap))
        widest = text.cursor
        await pilot.press("n", "N")
        assert text.cursor == widest


@pytest.mark.slow
@pytest.mark.asyncio
async def test_forks_and_timelines(token_trace: Any) -> None:
    async with format_tokens(token_trace.file, "bad") as (pilot, screen):
        await pilot.press("b")
        assert screen.view is not None and screen.text.cursor == screen.view.forks[0].at
        assert "fork: here it was left by timeline 2" in said(screen, "TokenPanel")
        assert "◆" in painted(screen)
        await pilot.press("right_square_bracket")
        await settled(pilot)
        assert (
            screen.view.index == 1
            and "timeline 2 of 2" in said(screen, "#head")
            and screen.text.cursor == 0
        )
        await pilot.press("b")
        assert "fork: this timeline left timeline 1" in said(screen, "TokenPanel")
        await pilot.press("m")
        assert "older than rollout.max_staleness" in said(screen, "TokenPanel")
        await pilot.press("left_square_bracket")
        await settled(pilot)
        assert screen.view.index == 0


@pytest.mark.slow
@pytest.mark.asyncio
async def test_advantages_of_an_older_file_are_recomputed(token_trace: Any) -> None:
    async with format_tokens(token_trace.file, "bad") as (pilot, screen):
        await pilot.press("m")
        await choose(pilot, "Colour by advantage")
        assert "recomputed from its group" in said(screen, "TokenPanel")
        assert "recomputed from the group" in said(screen, "Legend")


@pytest.mark.asyncio
async def test_each_colouring_has_a_legend_and_is_told_without_colour(token_trace: Any) -> None:
    async with format_tokens(token_trace.file, "good") as (pilot, screen):
        legends = []
        for _ in range(6):
            legends.append(said(screen, "Legend"))
            await pilot.press("v")
        names = (
            "loss mask",
            "log-probability",
            "advantage",
            "policy version",
            "trainer minus sampler",
            "entropy",
        )
        assert all(name in legend for name, legend in zip(names, legends, strict=True))
        assert "current" in legends[3] and "the step trained version 4" in legends[3]
        assert screen.text.shading == "mask"
        await choose(pilot, "Colour by entropy")
        assert screen.text.shading == "entropy"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_without_colour_marks_tell_what_was_trained(
    token_trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with format_tokens(token_trace.file, "good") as (pilot, screen):
        await pilot.press("end")
        lines = [screen.text.render_line(y) for y in range(screen.text.size.height)]
        underlined = "".join(
            s.text for line in lines for s in line if s.style and s.style.underline
        )
        assert underlined == "Let me see.<|im_end|>Très bien.<|im_end|>"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_search_and_going_to_a_position(token_trace: Any) -> None:
    async with format_tokens(token_trace.file, "good") as (pilot, screen):
        text = screen.text
        assert screen.view is not None and screen.view.spelled is not None
        await pilot.press("slash", *"LET ME", "enter")
        first = text.cursor
        assert screen.view.spelled.text[screen.view.spelled.starts[first] :].startswith("Let me")
        assert screen.focused is text
        await pilot.press("slash", *[*("backspace",) * 6, *"im_end"], "enter")
        here = text.cursor
        await pilot.press("n")
        assert text.cursor > here
        await pilot.press("N")
        assert text.cursor == here
        await pilot.press("escape")
        assert isinstance(screen.app.screen, TokensScreen), "the first escape ends the search"
        await pilot.press("slash", *("backspace",) * 6, *"zzz", "enter")
        assert screen.query_one("#search").display and text.cursor == here
        await pilot.press("escape")
        await choose(pilot, "Go to a position")
        await pilot.press(*"50%", "enter")
        assert text.cursor == len(screen.view) // 2
        await choose(pilot, "Go to a position")
        await pilot.press(*"1000000", "enter")
        assert screen.query_one("#goto").display
        await pilot.press("escape")
        await choose(pilot, "Go to a position")
        await pilot.press(*"7", "enter")
        assert text.cursor == 7


@pytest.mark.slow
@pytest.mark.asyncio
async def test_copying_and_the_way_to_other_screens(
    token_trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with format_tokens(token_trace.file, "good") as (pilot, screen):
        app = screen.app
        await pilot.press("m", "y")
        assert app.clipboard == "L"
        await choose(pilot, "Copy the timeline's text")
        assert screen.view is not None and screen.view.spelled is not None
        assert app.clipboard == screen.view.spelled.text and "è" in app.clipboard
        await pilot.press("right")
        await choose(pilot, "Play again: copy the command that samples from here")
        assert app.clipboard == f"ajet trace branch good {token_trace.file} --at g1 --token 1"
        await pilot.press("left")
        opened: list[Any] = []
        monkeypatch.setattr(app, "open_episode", lambda *given: opened.append(given))
        monkeypatch.setattr(app, "open_compare", lambda *given: opened.append(given))
        await pilot.press("enter")
        await choose(pilot, "Compare the attempts of the group")
        await settled(pilot)
        assert opened == [("good", "g1"), (["good", "bad"],)]
        await pilot.press("escape")
        await settled(pilot)
        assert not isinstance(app.screen, TokensScreen)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_hostile_text_cannot_leave_its_cells(token_trace: Any) -> None:
    for size in ((80, 24), (60, 15)):
        async with format_tokens(token_trace.file, "hostile", size=size) as (pilot, screen):
            text = painted(screen)
            assert "[bold red]x[/] \\x1b[31mred\\x1b]0;t\\x07" in text and "漢字" in text
            assert not set(text) & set("\x1b\x07\u202e\r\t\x00\u200d")
            for y in range(screen.text.size.height):
                assert screen.text.render_line(y).cell_length == screen.text.size.width
            assert screen.view is not None
            for _ in range(0, len(screen.view), 7):
                await pilot.press("right")
            await pilot.press("m")
            assert "not trained: the episode failed" in said(screen, "TokenPanel")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("episode", "word"),
    [
        ("blind", "None of the episode's 1 calls has token ids"),
        ("mute", "The episode made no call"),
        ("nothing", "the trace has no episode nothing"),
    ],
)
@pytest.mark.asyncio
async def test_an_episode_without_tokens_says_why_and_no_key_breaks_it(
    token_trace: Any, episode: str, word: str
) -> None:
    async with format_tokens(token_trace.file, episode) as (pilot, screen):
        assert word in said(screen, "#empty") and not screen.text.display
        await pilot.press(
            "m", "l", "f", "x", "v", "right_square_bracket", "n", "y", "left", "right"
        )
        await choose(pilot, "Colour by advantage")
        await choose(pilot, "Copy the timeline's text")
        await choose(pilot, "Compare the attempts of the group")
        await pilot.press(
            "up",
            "down",
            "pageup",
            "home",
            "end",
            "enter",
            "escape",
            "slash",
            "a",
            "enter",
            "escape",
        )
        assert word in said(screen, "#empty")


def byte_level(directory: Path) -> Path:
    """A tokenizer whose ids are the byte-level alphabet's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    directory.mkdir()
    made.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.slow
@pytest.mark.asyncio
async def test_ids_stand_in_for_text_where_the_tokenizer_is_not_at_hand(tmp_path: Path) -> None:
    file = tmp_path / "trace.duckdb"
    with TraceWriter(file) as writer:
        writer.put(Run(run_id="r", config={"ajet": {"model": {"path": "nowhere/at-all"}}}))
        writer.put(Call(episode_id="e", prompt_ids=[11, 12], output_ids=[13], logprobs=[-1.0]))
    async with format_tokens(file, "e") as (pilot, screen):
        assert "11 12 13" in painted(screen)
        assert "ids, not text: the run's model.path nowhere/at-all is not a directory here" in said(
            screen, "#head"
        )
        await pilot.press("slash", *"13", "enter")
        assert screen.text.cursor == 2
        await choose(pilot, "Copy the timeline's text")
        assert screen.app.clipboard == "11 12 13"
        assert isinstance(screen.app, TraceApp)
        screen.app.tokenizer = byte_level(tmp_path / "model")
        screen.app.pop_screen()
        screen.app.open_tokens("e")
        await settled(pilot)
        shown = screen.app.screen
        assert isinstance(shown, TokensScreen) and "ids, not text" not in said(shown, "#head")
        assert shown.opened is not None and shown.opened.known is not None


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_call_that_comes_while_one_reads_keeps_the_cursor(tmp_path: Path) -> None:
    file = tmp_path / "trace.duckdb"
    with TraceWriter(file) as writer:
        writer.put(Run(run_id="r", config={"ajet": {"model": {"scripted": "a.py->b"}}}))
        writer.put(Call(episode_id="e", prompt_ids=[65, 66], output_ids=[67], logprobs=[-1.0]))
    async with format_tokens(file, "e", token=1) as (pilot, screen):
        with TraceWriter(file) as writer:
            ids = {"prompt_ids": [65, 66, 67, 10], "output_ids": [68], "logprobs": [-2.0]}
            writer.put(Call(episode_id="e", index=1, **ids))
        screen.post_message(TraceChanged())
        await settled(pilot)
        assert screen.view is not None and len(screen.view) == 5 and screen.text.cursor == 1
        assert "ABC" in painted(screen)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_another_width_keeps_the_cursor_in_sight(token_trace: Any) -> None:
    async with format_tokens(token_trace.file, "good", size=(120, 40)) as (pilot, screen):
        await pilot.press("end")
        cursor = screen.text.cursor
        await pilot.resize_terminal(60, 15)
        await settled(pilot)
        text = screen.text
        assert text.cursor == cursor and text.layout_shown is not None
        line = int(text.layout_shown.line_of[cursor])
        assert text.scroll_offset.y <= line < text.scroll_offset.y + text.size.height


@pytest.mark.slow
@pytest.mark.parametrize(
    ("episode", "keys", "size"),
    [
        ("good", ["m"], (80, 24)),
        ("good", ["l", "v"], (120, 40)),
        ("bad", ["b", "v", "v"], (80, 24)),
        ("hostile", ["v", "v", "v", "v"], (80, 24)),
        ("blind", [], (120, 40)),
    ],
    ids=["loss mask", "log-probability", "fork", "hostile", "no ids"],
)
def test_how_it_looks(
    token_trace: Any,
    snap_compare: Callable[..., bool],
    episode: str,
    keys: list[str],
    size: tuple[int, int],
) -> None:
    app = TraceApp(open_trace(token_trace.file), token_trace.file)

    async def reach(pilot: Pilot[None]) -> None:
        app.sub_title = "trace.duckdb"
        app.open_tokens(episode)
        await settled(pilot)
        await pilot.press(*keys)
        await settled(pilot)

    before: Callable[[Pilot[None]], Awaitable[None]] = reach
    assert snap_compare(app, terminal_size=size, run_before=before)
