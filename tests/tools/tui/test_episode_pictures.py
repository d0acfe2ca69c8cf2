"""Pictures in the viewer: drawn below their message, opened with `o`, one block of tokens."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import re
import sys
import webbrowser
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from rich.segment import Segment
from textual.app import App
from textual_image import renderable, widget

from ajet_sdk.pictures import PlacedPicture, picture_of
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Call, Episode
from ajet_tools.trace.episode.blocks import PICTURE_LINES
from ajet_tools.trace.queries.records import Record
from ajet_tools.trace.tokens.layout import labels, lay_out
from ajet_tools.trace.tokens.view import episode_tokens, timeline_view
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.dialogs import PictureScreen
from ajet_tools.tui.widgets import pictures as shown_pictures
from ajet_tools.tui.widgets.messages import Messages
from ajet_tools.tui.widgets.pictures import drawing_of
from tests.drawings import drawn, file_of, part, png, text
from tests.tools.trace.test_pictures import episode_with, written
from tests.waiting import until_async


@pytest.mark.parametrize("size", [(64, 64), (1, 1), (1, 3), (3000, 10), (10, 3000), (20, 9)])
def test_a_picture_fits(size: tuple[int, int]) -> None:
    lines = ["".join(part.text for part in line) for line in rendered(drawn(1, *size), 40)]
    assert 1 <= len(lines) <= PICTURE_LINES
    assert len({len(line) for line in lines}) == 1 and 1 <= len(lines[0]) <= 40


def rendered(image: Image.Image, width: int) -> list[list[Segment]]:
    """The lines of a drawing within a text."""
    drawing = drawing_of(picture_of(file_of(image)), width)
    assert drawing is not None
    console = Console(color_system="truecolor", force_terminal=True, file=io.StringIO())
    return console.render_lines(drawing, console.options.update(width=width), pad=False)


def test_its_colours_are_those_of_its_pixels() -> None:
    pixels = np.asarray(drawn(1, 3, 2))
    [line] = rendered(drawn(1, 3, 2), 40)
    assert [segment.text for segment in line] == ["▀"] * 3
    for column, segment in enumerate(line):
        assert segment.style is not None
        assert segment.style.color is not None and segment.style.bgcolor is not None
        assert segment.style.color.triplet == tuple(pixels[0, column])
        assert segment.style.bgcolor.triplet == tuple(pixels[1, column])


def test_a_removed_picture_is_not_drawn() -> None:
    picture = dataclasses.replace(picture_of(png(1)), data=b"")
    assert drawing_of(picture, 40) is None


KITTY = re.compile(r"\x1b_G([^;\x1b]*);?([^\x1b]*)\x1b\\")


def sent_to_kitty(output: str) -> list[tuple[dict[str, str], str]]:
    """The keys and the payload of each of its messages."""
    messages = []
    for keys, payload in KITTY.findall(output):
        pairs = dict(pair.split("=") for pair in keys.split(","))
        messages.append((pairs, payload))
    return messages


def test_kitty_gets_the_pixels_and_the_place_of_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "__stdout__", output)
    monkeypatch.setattr(shown_pictures, "INLINE", renderable.TGPImage)
    halves = Image.new("RGB", (30, 20), (255, 0, 0))
    halves.paste((0, 0, 255), (15, 0, 30, 20))
    path = written(tmp_path / "trace.duckdb", episode_with(file_of(halves)))

    async def look() -> list[str]:
        with open_trace(path) as reader:
            app = TraceApp(reader, path)
            async with app.run_test(size=(100, 60)) as pilot:
                app.open_episode("e")
                await until_async(lambda: "\x1b_G" in output.getvalue())
                await pilot.pause()
                [messages] = app.screen.query(Messages)
                return [messages.render_line(y).text for y in range(messages.size.height)]

    lines = [line for line in asyncio.run(look()) if "\U0010eeee" in line]
    messages = sent_to_kitty(output.getvalue())
    files: dict[str, str] = defaultdict(str)
    for keys, payload in messages:
        if keys.get("f") == "100":
            files[keys["i"]] += payload
    image = Image.open(io.BytesIO(base64.b64decode(next(iter(files.values())))))
    left, right = image.width // 4, 3 * image.width // 4
    assert image.getpixel((left, image.height // 2)) == (255, 0, 0)
    assert image.getpixel((right, image.height // 2)) == (0, 0, 255)
    places = [keys for keys, _ in messages if keys.get("a") == "p"]
    assert places[0]["c"] == "30" and places[0]["r"] == "10"
    assert lines[0].count("\U0010eeee") == 30 and len(lines) >= 10
    removed = [keys["I"] for keys, _ in messages if keys.get("a") == "d"]
    assert len(removed) == len(places), "nothing stays in the terminal"


@pytest.mark.parametrize("size", [(64, 64), (1, 1), (10, 3000), (3000, 10)])
@pytest.mark.parametrize("kind", [widget.SixelImage, widget.TGPImage, widget.HalfcellImage])
def test_a_picture_is_shown_large(
    monkeypatch: pytest.MonkeyPatch, kind: Any, size: tuple[int, int]
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(sys, "__stdout__", output)
    red = picture_of(file_of(Image.new("RGB", size, (255, 0, 0))))

    async def look() -> str:
        app: App[None] = App()
        async with app.run_test(size=(80, 24)) as pilot:
            screen = PictureScreen([red], kind)
            await app.push_screen(screen)
            await pilot.pause()
            [drawing] = screen.query(kind)
            assert 1 <= drawing.size.width <= 80 and 1 <= drawing.size.height <= 24
            [drawn] = drawing.children or [drawing]
            strips = drawn.render_lines(drawn.size.region)
            texts = [segment.text for strip in strips for segment in strip]
            await pilot.press("escape")
            assert app.screen is not screen
        return "".join(texts)

    text = asyncio.run(look())
    if kind is widget.SixelImage:
        assert text.count("\x1bP") == 1 and "#0;2;100;0;0" in text
    elif kind is widget.TGPImage:
        assert "\U0010eeee" in text and "\x1b_G" in output.getvalue()
    else:
        assert set(text) == {"▀"}


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
                await pilot.press("o")
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
