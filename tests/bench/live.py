"""What an attached viewer costs a run, and how soon it shows what is new: beside a trainer, the
math tutorial's.

The tutorial trains in a process of its own, its model made by its recipe first; the real viewer,
headless in this process, stands on one screen after another. The cost is processor time that the
trainer spent on the viewer's questions, as a share of a core. The delay is from an episode's end to
the list that has drawn it. Both are of the machine as busy as it is: its load is among the figures.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from ajet_sdk.errors import TraceError
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import now
from ajet_tools.tui.trace.app import TraceApp
from tests.bench import Figure

WINDOW = 20.0
PATIENCE = 600.0
_TUTORIAL = Path(__file__).parents[2] / "tutorial" / "example_math_agent" / "math_agent.yaml"
Pause = Callable[[float], Awaitable[None]]


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        trainer = _train(Path(directory))
        try:
            shares, delays = asyncio.run(_watch(Path(directory) / "run", trainer))
        finally:
            trainer.terminate()
            trainer.wait()
    figures = [
        Figure(
            f"a viewer on the screen {name}: of the trainer's core",
            100 * share,
            "CPU-%",
            "< 4",
            share < 0.04,
        )
        for name, share in shares.items()
    ]
    median = statistics.median(delays)
    return [
        *figures,
        Figure(
            "an episode in the list after its end, median of the clock",
            median,
            "s",
            "about 1",
            median < 1.5,
        ),
        Figure("  the slowest of them", max(delays), "s"),
        Figure(
            "  processes that wanted a core, of a minute",
            os.getloadavg()[0],
            f"on {os.cpu_count()} cores",
        ),
    ]


def _train(directory: Path) -> subprocess.Popen[bytes]:
    """The math tutorial, without validations, until it is ended."""
    values = {
        "experiment_dir": directory / "run",
        "model.path": directory / "calculator",
        "trainer_common.total_steps": 10_000,
        "trainer_common.test_freq": 10_000,
        "trainer_common.val_before_train": "false",
        "trainer_common.logger": "[console]",
    }
    overrides = [f"ajet.{name}={value}" for name, value in values.items()]
    command = [sys.executable, "-m", "ajet", "--conf", str(_TUTORIAL), *overrides]
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env={"OPENAI_API_KEY": "none", **os.environ}
        )


async def _watch(
    path: Path, trainer: subprocess.Popen[bytes]
) -> tuple[dict[str, float], list[float]]:
    reader, run = await _begun(path, trainer)
    app = TraceApp(reader, path)
    shares: dict[str, float] = {}
    delays: list[float] = []
    async with app.run_test(size=(120, 40)) as pilot:
        for name, opens in _screens(app, run):
            opens()
            await pilot.pause(5.0)  # what it reads first is not what following costs
            spent, began = reader.spent, time.monotonic()
            if name == "episodes":
                delays = await _delays(app, pilot.pause)
            else:
                await pilot.pause(WINDOW)
            shares[name] = (reader.spent - spent) / (time.monotonic() - began)
    reader.close()
    return shares, delays


def _screens(app: Any, run: str) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "runs", lambda: None
    yield "run", lambda: app.open_run(run)
    yield "episodes", lambda: app.open_episodes(run)


async def _begun(path: Path, trainer: subprocess.Popen[bytes]) -> tuple[Any, str]:
    """The trace once a step's episodes are in it, and its run."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and trainer.poll() is None:
        await asyncio.sleep(0.5)
        try:
            reader = open_trace(path / "trace.duckdb")
            rows = reader.query(
                "SELECT run_id FROM episodes GROUP BY run_id HAVING count(*) > 128"
            ).to_pylist()
        except TraceError:  # not there yet, or its gateway is not
            continue
        if rows:
            return reader, rows[0]["run_id"]
    raise RuntimeError(
        f"the trainer did not get going: {(path.parent / 'log').read_text()[-2000:]}"
    )


async def _delays(app: Any, pause: Pause) -> list[float]:
    """Of each episode that comes into the rows on the screen."""
    table, found = app.screen.table, list[float]()
    known = set(app.screen.listing.ids())
    deadline = time.monotonic() + 2 * WINDOW
    while time.monotonic() < deadline:
        await pause(0.02)
        drawn = [row for at in range(table.size.height - 1) if (row := table.row(at)) is not None]
        new = [row for row in drawn if row["episode_id"] not in known]
        found += [(now() - row["ended_at"]).total_seconds() for row in new]
        if new:  # those below the screen came with them
            known |= set(app.screen.listing.ids())
    return found
