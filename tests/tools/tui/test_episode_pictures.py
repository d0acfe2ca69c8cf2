"""Pictures in the viewer: drawn below their message, opened with `o`, one block of tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import webbrowser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from rich.console import Console

from ajet_sdk.pictures import PlacedPicture, picture_of
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Call, Episode
from ajet_tools.trace.episode.half_blocks import ROWS, half_blocks
from ajet_tools.trace.queries.records import Record
from ajet_tools.trace.tokens.layout import labels, lay_out
from ajet_tools.trace.tokens.view import episode_tokens, timeline_view
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.widgets.messages import Messages
from tests.drawings import drawn, file_of, part, png, text
from tests.tools.trace.test_pictures import episode_with, written
from tests.tools.tui.palette import choose
from tests.waiting import until_async


@pytest.mark.parametrize("size", [(64, 64), (1, 1), (1, 3), (3000, 10), (10, 3000), (20, 9)])
def test_a_picture_fits(size: tuple[int, int]) -> None:
    picture = picture_of(file_of(drawn(1, *size)))
    lines = half_blocks(picture, 40).plain.split("\n")
    assert 1 <= len(lines) <= ROWS
    assert len({len(line) for line in lines}) == 1 and 1 <= len(lines[0]) <= 40


def test_its_colours_are_those_of_its_pixels() -> None:
    picture = picture_of(file_of(drawn(1, 3, 2)))
    drawing = half_blocks(picture, 40)
    pixels = np.asarray(picture.image())
    console = Console(color_system="truecolor", force_terminal=True, width=40)
    segments = [segment for segment in drawing.render(console) if segment.text == "▀"]
    for column, segment in enumerate(segments):
        assert segment.style is not None
        assert segment.style.color is not None and segment.style.bgcolor is not None
        assert segment.style.color.triplet == tuple(pixels[0, column])
        assert segment.style.bgcolor.triplet == tuple(pixels[1, column])


def test_a_removed_picture_is_not_drawn() -> None:
    picture = dataclasses.replace(picture_of(png(1)), data=b"")
    assert half_blocks(picture, 40).plain == ""


def test_a_picture_is_drawn_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    path = written(tmp_path / "trace.duckdb", episode_with(png(1)))

    async def look() -> None:
        with open_trace(path) as reader:
            app = TraceApp(reader, path)
            async with app.run_test(size=(100, 60)) as pilot:
                app.open_episode("e")
                messages: Any = None

                def is_shown() -> bool:
                    nonlocal messages
                    messages = next(iter(app.screen.query(Messages)), None)
                    return messages is not None and any(b.pictures for b in messages.blocks)

                await until_async(is_shown)
                place = next(n for n, b in enumerate(messages.blocks) if b.pictures)
                messages.choose(place)
                await pilot.pause()
                lines = [strip.text for strip in messages._strips(place)]
                assert sum("▀" * 8 in line for line in lines) == 4
                assert picture_of(png(1)).line in "\n".join(lines)
                await choose(pilot, "Open the picture")
                await until_async(lambda: bool(opened))

    asyncio.run(look())
    [url] = opened
    file = Path(unquote(urlsplit(url).path))
    assert file.read_bytes() == png(1) and file.suffix == ".png"
    assert file.stat().st_mode & 0o077 == 0
    file.unlink()


def test_the_tokens_of_a_picture_are_one_block() -> None:
    call = Call(
        call_id="c",
        episode_id="e",
        request={"messages": [{"role": "user", "content": [text("?"), part(png(1))]}]},
        prompt_ids=[1, 9, 9, 9, 2],
        output_ids=[3],
        logprobs=[-0.5],
    )
    tokens = episode_tokens(Record(Episode(episode_id="e", calls=(call,))))
    [timeline] = tokens.merged.timelines
    placed = PlacedPicture(1, 4, picture_of(png(1)), 9)
    timeline = timeline.model_copy(update={"pictures": (placed,)})
    merged = dataclasses.replace(tokens.merged, timelines=(timeline,))
    view = timeline_view(dataclasses.replace(tokens, merged=merged), 0)
    line = f"[{picture_of(png(1)).line}, 3 tokens]"
    assert labels(view) == ["1 ", line, "", "", "2 ", "3 "]
    layout = lay_out(labels(view), 80)
    assert [piece[1] for piece in layout.lines[0]] == ["1 ", line, "2 ", "3 "]
