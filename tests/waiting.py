"""Waiting in tests: for a condition, never for a span of time.

Where it never holds, the test fails before pytest's limit, which would end the worker and hide the
place. A screen that never shows what it is to show fails its test sooner, with what it shows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from textual.pilot import Pilot

T = TypeVar("T")
FOREVER = 3_600.0  # seconds, for what is to hang: a test that really waits for it runs into pytest's limit
NEVER = 900.0  # seconds without what a test waits for, less than pytest's limit
HANGS = 240.0  # seconds without what a screen is to show, on the busiest of machines


def until(holds: Callable[[], T]) -> T:
    """What `holds` returns, once that is true."""
    give_up = time.monotonic() + NEVER
    while not (value := holds()):
        assert time.monotonic() < give_up, "what this test waits for never came"
        time.sleep(0.005)
    return value


def is_running(pid: int) -> bool:
    """A process that nobody has reaped yet is over all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_async(holds: Callable[[], T]) -> T:
    give_up = time.monotonic() + NEVER
    while not (value := holds()):
        assert time.monotonic() < give_up, "what this test waits for never came"
        await asyncio.sleep(0.005)
    return value


async def until_shown(pilot: Pilot[None], holds: Callable[[], T]) -> T:
    """The same for an app under test: what is under way on its screen goes on meanwhile; how it
    failed is raised."""
    give_up = time.monotonic() + HANGS
    while time.monotonic() < give_up:
        await pilot.pause(0.02)
        if pilot.app._exception is not None:  # run_test() would raise it at its end only
            raise pilot.app._exception
        if held := holds():
            return held
    screen = "\n".join(strip.text for strip in pilot.app.screen._compositor.render_strips())
    raise AssertionError(f"this never came on the screen, which shows\n{screen}")


async def settled(pilot: Pilot[None]) -> None:
    """Until every worker has done its work and it is drawn."""
    for _ in range(3):
        await pilot.pause()
        await pilot.app.workers.wait_for_complete()
    await pilot.pause()
