"""How the runs, a run and the SQL console look, on a real small trace with fixed ids and times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from ajet_sdk.trace.reader import open_trace
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.run import RunScreen
from ajet_tools.tui.trace.runs import RunsScreen
from tests.tools.tui.palette import choose

pytestmark = pytest.mark.usefixtures("own_home")
SIZES = [(80, 24), (120, 40)]
COMMANDS = ("View: curves", "View: ledger", "View: metrics", "View: config")


def look(
    snap: Any,
    trace: Path,
    until: Any,
    size: tuple[int, int],
    *keys: str,
    run_id: str | None = None,
    theme: str = "textual-dark",
) -> bool:
    """Compare the picture after some keys with the one that is kept."""

    async def before(pilot: Pilot[None]) -> None:
        pilot.app.theme = theme
        first = RunsScreen if run_id is None else RunScreen
        await until(
            pilot, lambda: isinstance(pilot.app.screen, first) and _settled(pilot)
        )  # a key is of its screen
        for key in keys:
            if key in COMMANDS:
                await choose(pilot, key)
            else:
                await pilot.press(key)
            await pilot.pause(0.1)
            await until(pilot, lambda: _settled(pilot))
        await pilot.pause(0.2)

    with open_trace(trace) as reader:
        app = TraceApp(reader, Path("launcher_record/math"), run_id)
        return bool(snap(app, terminal_size=size, run_before=before))


def _settled(pilot: Pilot[None]) -> bool:
    screen = pilot.app.screen
    return bool(getattr(screen, "panels", True) and getattr(screen, "runs", True))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_runs(snap_compare: Any, training_trace: Path, until: Any, size: tuple[int, int]) -> None:
    assert look(snap_compare, training_trace, until, size, "down", "down")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "view"), zip(SIZES * 2, COMMANDS, strict=True), ids=str)
def test_run(
    snap_compare: Any, training_trace: Path, until: Any, size: tuple[int, int], view: str
) -> None:
    assert look(snap_compare, training_trace, until, size, view, run_id="aaaa0001")


@pytest.mark.slow
def test_a_light_theme(snap_compare: Any, training_trace: Path, until: Any) -> None:
    assert look(
        snap_compare, training_trace, until, SIZES[0], run_id="aaaa0001", theme="textual-light"
    )


@pytest.mark.slow
def test_keys(snap_compare: Any, training_trace: Path, until: Any) -> None:
    assert look(snap_compare, training_trace, until, SIZES[0], "question_mark", run_id="aaaa0001")
