"""The viewer on the files of a service that goes on meanwhile: they are rotated, and the oldest
go."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ajet_sdk.trace.reader import open_trace
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.episode import EpisodeScreen
from ajet_tools.tui.trace.episodes import EpisodesScreen
from ajet_tools.tui.trace.runs import RunsScreen
from tests.waiting import settled, until_shown

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("own_home")]

SERVICE = """
import sys

import httpx

from ajet_sdk.agent.context import observer
from ajet_sdk.capture.observe import trace
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway

with Gateway() as gateway:
    served = gateway.open(EpisodeSpec("elsewhere", ScriptedEngine(lambda ask: "yes")))
    client = httpx.Client(headers={"authorization": f"Bearer {served.handle_key}"}, timeout=None)
    with trace("served", rotate="20kB", keep="2MB") as tracing:
        for day in sys.stdin:
            for number in range(10):
                question = f"{day.strip()}.{number} " + "word " * 400
                body = {"model": "gpt", "messages": [{"role": "user", "content": question}]}
                with observer.get().episode("serve", {"question": question}):
                    client.post(f"{served.url}/v1/chat/completions", json=body).raise_for_status()
            tracing.flush()
            print("done", flush=True)
"""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Serves a day for each line that it is given, and begins a file each day."""
    command = [sys.executable, "-c", SERVICE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        serve(process, 0)
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


def serve(process: subprocess.Popen[str], day: int) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"day {day}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def stored(directory: Path) -> set[str]:
    with open_trace(directory) as reader:
        return set(reader.query("SELECT episode_id FROM episodes")["episode_id"].to_pylist())


def drawn(app: TraceApp) -> str:
    return "".join(strip.text for strip in app.screen._compositor.render_strips())


async def test_a_week_of_a_service_with_the_viewer_open(
    service: subprocess.Popen[str], tmp_path: Path
) -> None:
    directory, files = tmp_path / "served", set[str]()
    with open_trace(directory) as reader:
        app = TraceApp(reader, directory)
        async with app.run_test(size=(80, 24)) as pilot:
            screen = EpisodesScreen()
            await app.push_screen(screen)
            await settled(pilot)
            first = stored(directory)
            for day in range(1, 8):
                serve(service, day)
                files |= {file.name for file in directory.glob("*.duckdb")}
                assert sum(file.stat().st_size for file in directory.glob("*")) < 4_000_000
                await until_shown(
                    pilot,
                    lambda: screen.table.count and set(screen.table.places) == stored(directory),
                )
            there = stored(directory)
            assert len(files) >= 7 and not first & there
            app.open_episode(min(first))  # as somebody does who has its id
            await until_shown(pilot, lambda: "no episode with this id" in drawn(app))
            await pilot.press("escape", "enter")
            await until_shown(pilot, lambda: getattr(app.screen, "episode_id", "") in there)
            assert isinstance(app.screen, EpisodeScreen)
            app.action_runs()
            await until_shown(pilot, lambda: isinstance(app.screen, RunsScreen))
