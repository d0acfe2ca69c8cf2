"""The list of runs and the screen of one: what they say, each key, and that news moves nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Static, Tab

from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Metric, Run, now
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.dialogs import TextScreen
from ajet_tools.tui.trace.episodes import EpisodesScreen
from ajet_tools.tui.trace.run import RunScreen
from ajet_tools.tui.trace.runs import RunsScreen
from ajet_tools.tui.widgets.chart import Chart
from tests.tools.tui.palette import cells, choose

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("own_home")]


def text_of(screen: Any, selector: str) -> str:
    return str(screen.query_one(selector, Static).render())


def shown(app: TraceApp) -> str:
    """All that is on the screen."""
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


async def test_the_list_says_how_each_run_goes(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    async with viewing(training_trace, size=(120, 30)) as pilot:
        await until(pilot, lambda: len(cells(pilot.app.screen)) == 3)
        broken, cut_off, finished = cells(pilot.app.screen)
        await until(pilot, lambda: cells(pilot.app.screen)[2][1] == "· unclear")
        broken, cut_off, finished = cells(pilot.app.screen)
        assert finished[0] == "math" and finished[4] == "▁▂▃▄▅▆▇█ 0.8"
        assert finished[5:] == ["12/20", "3", "13m 00s", "aaaa0001"]
        assert cut_off[1].startswith("interrupted"), (
            "its process is gone, whatever the row in the file says"
        )
        assert cut_off[7] == "5m 00s", "to its last sign of life"
        assert broken[1] == "failed"
        await until(
            pilot, lambda: "ConfigError: [bold red]not markup[/] \\x1b[31mred" in shown(pilot.app)
        )
        await pilot.press("down", "down")
        await until(
            pilot,
            lambda: (
                "1 TimeoutError, 1 ValueError, 1 [bold]Odd[/] (3 of 24 episodes)"
                in shown(pilot.app)
            ),
        )


@pytest.mark.slow
async def test_keys_of_the_list(training_trace: Path, viewing: Any, until: Any) -> None:
    async with viewing(training_trace) as pilot:
        await until(pilot, lambda: pilot.app.screen.runs)
        await pilot.press("down")
        for key, screen in (
            ("enter", RunScreen),
            ("w", TextScreen),
            ("e", EpisodesScreen),
        ):
            await pilot.press(key)
            await until(pilot, lambda screen=screen: isinstance(pilot.app.screen, screen))
            assert getattr(pilot.app.screen, "run_id", "bbbb0002") == "bbbb0002"
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(pilot.app.screen, RunsScreen))
            assert pilot.app.screen.chosen["run_id"] == "bbbb0002"
        await pilot.press("escape")
        await pilot.pause()
        assert isinstance(pilot.app.screen, RunsScreen), "there is nothing behind the first screen"


async def test_escape_leaves_a_list_that_is_still_being_read(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    async with viewing(training_trace) as pilot:
        await until(pilot, lambda: pilot.app.screen.runs)
        reading = asyncio.Event()
        ask = pilot.app.ask

        async def held(function: Any, *args: Any, **kwargs: Any) -> Any:
            await reading.wait()  # as a large trace on a busy machine
            return await ask(function, *args, **kwargs)

        pilot.app.ask = held
        await pilot.press("e")
        await until(pilot, lambda: isinstance(pilot.app.screen, EpisodesScreen))
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunsScreen))
        reading.set()
        await pilot.pause()
        assert isinstance(pilot.app.screen, RunsScreen)


async def test_the_id_is_copied(training_trace: Path, viewing: Any, until: Any) -> None:
    async with viewing(training_trace) as pilot:
        await until(pilot, lambda: pilot.app.screen.runs)
        await pilot.press("y")
        assert pilot.app.clipboard == "cccc0003"


async def test_a_trace_without_a_run(tmp_path: Path, viewing: Any, until: Any) -> None:
    TraceWriter(tmp_path / "none.duckdb").__enter__().__exit__(None, None, None)
    async with viewing(tmp_path / "none.duckdb") as pilot:
        await until(pilot, lambda: "No run yet" in shown(pilot.app))
        await pilot.press("enter", "v", "y")
        await pilot.pause()
        assert isinstance(pilot.app.screen, RunsScreen)


@pytest.mark.slow
async def test_a_live_run_is_followed_and_the_cursor_stays(
    tmp_path: Path, viewing: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TraceApp, "FOLLOW_SECONDS", 0.1)
    file, begun = tmp_path / "trace.duckdb", now() - timedelta(minutes=2)
    with TraceWriter(file) as writer, Gateway(writer):
        writer.put(Run(run_id="old", status="finished", started_at=begun - timedelta(days=1)))
        writer.put(Run(run_id="live", started_at=begun))
        writer.flush()
        async with viewing(file) as pilot:
            await until(pilot, lambda: len(pilot.app.screen.runs) == 2)
            await until(
                pilot,
                lambda: "running" in shown(pilot.app) and "nothing new for 2m" in shown(pilot.app),
            )
            await pilot.press("down")
            await until(pilot, lambda: pilot.app.screen.chosen["run_id"] == "old")
            writer.put(
                Run(run_id="newer", started_at=now()), Episode(run_id="live", status="timeout")
            )
            writer.put(Metric(run_id="live", step=3, name="train/reward", value=0.5))
            writer.flush()
            await until(pilot, lambda: len(cells(pilot.app.screen)) == 3)
            assert pilot.app.screen.chosen["run_id"] == "old"
            assert [row[0] for row in cells(pilot.app.screen)] == ["newer", "live", "old"]
            await pilot.press("up", "enter")
            await until(
                pilot, lambda: isinstance(pilot.app.screen, RunScreen) and pilot.app.screen.panels
            )
            await pilot.press("right")
            writer.put(Metric(run_id="live", step=4, name="train/reward", value=0.75))
            writer.put(Run(run_id="live", status="finished", started_at=begun, ended_at=now()))
            writer.flush()
            await until(
                pilot, lambda: "finished" in shown(pilot.app) and "0.75" in shown(pilot.app)
            )


@pytest.mark.slow
async def test_a_run_has_the_curves_that_vary_one_below_the_other(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    async with viewing(training_trace, run_id="aaaa0001") as pilot:
        screen = pilot.app.screen
        await until(pilot, lambda: "step 12/20" in text_of(screen, "#head") and screen.query(Chart))
        assert "1 TimeoutError, " in text_of(screen, "#head")
        assert "runs › math — aaaa0001" in shown(pilot.app)
        await until(pilot, lambda: all(chart.panel for chart in screen.query(Chart)))
        assert [chart.panel.title for chart in screen.query(Chart)] == [
            *("reward", "success", "loss", "KL", "entropy", "tokens per episode", "tokens/s"),
            *("custom/score", "train/tokens_sampled"),
        ]
        await until(pilot, lambda: "reward ⠒train 0.8 •val 0.9 xgreedy 1" in shown(pilot.app))
        await pilot.press("end")
        await until(pilot, lambda: "train/tokens_sampled" in shown(pilot.app))


@pytest.mark.slow
async def test_a_run_has_ledger_metrics_and_config(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    async with viewing(training_trace, run_id="aaaa0001", size=(100, 30)) as pilot:
        screen = pilot.app.screen
        await until(pilot, lambda: screen.panels)
        await pilot.press("v")
        await until(pilot, lambda: "failures by cause" in shown(pilot.app))
        text = shown(pilot.app)
        assert "trained" in text and "252" in text and "84.0%" in text and "[bold]Odd[/]" in text
        assert "\x1b" not in text and "\u202e" not in text
        await pilot.press("v")
        await until(pilot, lambda: "custom/score" in shown(pilot.app))
        [reward] = [line for line in shown(pilot.app).splitlines() if "reward train" in line]
        assert reward.split()[-4:] == ["0.8", "0.25", "0.8", "12"]
        assert "train/episodes" in shown(pilot.app), "also what is constant"
        await choose(pilot, "View: config")
        await until(pilot, lambda: "total_steps: 20" in shown(pilot.app))
        await pilot.press("v")
        await until(pilot, lambda: screen.view == "curves")


@pytest.mark.slow
async def test_a_run_leads_to_its_episodes(training_trace: Path, viewing: Any, until: Any) -> None:
    async with viewing(training_trace, run_id="aaaa0001") as pilot:
        await until(pilot, lambda: pilot.app.screen.panels)
        await pilot.press("F")
        await until(pilot, lambda: isinstance(pilot.app.screen, EpisodesScreen))
        await until(pilot, lambda: "of 3" in shown(pilot.app))


@pytest.mark.slow
async def test_the_mouse_chooses_a_view(training_trace: Path, viewing: Any, until: Any) -> None:
    async with viewing(training_trace, run_id="aaaa0001") as pilot:
        screen = pilot.app.screen
        await until(pilot, lambda: "loss" in shown(pilot.app))
        await pilot.click(screen.query(Tab)[1])
        await until(pilot, lambda: screen.view == "ledger")


@pytest.mark.slow
async def test_a_run_without_a_metric_says_so(
    training_trace: Path, viewing: Any, until: Any
) -> None:
    async with viewing(training_trace, run_id="bbbb0002") as pilot:
        await until(pilot, lambda: "no metric yet" in shown(pilot.app))
        await pilot.press("v")
        await until(pilot, lambda: "No ledger yet" in shown(pilot.app))


@pytest.mark.slow
async def test_a_run_that_is_killed_becomes_interrupted(
    tmp_path: Path, viewing: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TraceApp, "FOLLOW_SECONDS", 0.1)
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom ajet_sdk.gateway.gateway import"
        " Gateway\nfrom ajet_sdk.trace.writer import TraceWriter\nfrom ajet_sdk.types import"
        " Run\nwith TraceWriter(Path(sys.argv[1])) as writer, Gateway(writer):\n   "
        " writer.put(Run(run_id='doomed'))\n    writer.flush()\n    print('up', flush=True)\n   "
        " time.sleep(3600)\n"
    )
    file = tmp_path / "trace.duckdb"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        async with viewing(file) as pilot:
            await until(pilot, lambda: "running" in shown(pilot.app))
            await until(pilot, lambda: pilot.app.live)
            process.kill()
            process.wait()
            await until(pilot, lambda: "interrupted" in shown(pilot.app) and not pilot.app.live)
            await until(pilot, lambda: "its process died without a message" in shown(pilot.app))
    finally:
        process.kill()
        process.wait()
