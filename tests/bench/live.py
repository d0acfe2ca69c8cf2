"""What an attached viewer costs a run, and how soon it shows a call.

A process with a trace writer and a gateway, on a trace of 200,000 calls, records 20 calls a second; the real viewer,
headless in this process, stands on one screen after another. The cost is processor time of the run's process with a
viewer over that without, as a share of a core. The delay is from a call's end to the screen that has drawn it.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ajet_sdk.types import now
from tests.bench import Figure
from tests.bench.view import make

EPISODES = 20_000
WINDOW = 12.0
RATE = 20
SCREENS = ("runs", "run", "episodes", "episode")


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.duckdb"
        make(path, EPISODES, 200)
        run = Process(path)
        try:
            shares, delays = asyncio.run(_watch(run, path))
        finally:
            run.end()
    figures = [
        Figure(f"a viewer on the screen {name}: of the run's core", 100 * share, "CPU-%", "< 2", share < 0.02)
        for name, share in shares.items()
    ]
    delay = statistics.median(delays)
    return [
        *figures,
        Figure("a call shown after its end, median of the clock", delay, "s", "< 1", delay < 1),
        Figure("  the slowest", max(delays), "s"),
    ]


class Process:
    """The run; says how much processor time it has used."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, "-m", __name__, str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.used()

    def used(self) -> float:
        """Seconds of processor time until now."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("used\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    async def share(self, seconds: float) -> float:
        """Of a core, over so many seconds."""
        before, began = self.used(), time.perf_counter()
        await asyncio.sleep(seconds)
        return (self.used() - before) / (time.perf_counter() - began)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


async def _watch(run: Process, path: Path) -> tuple[dict[str, float], list[float]]:
    from ajet_sdk.trace.reader import open_trace
    from ajet_tools.tui.app import TraceApp

    alone = [await run.share(WINDOW)]
    reader = open_trace(path)
    app = TraceApp(reader, path)
    shares: dict[str, float] = {}
    async with app.run_test(size=(120, 40)) as pilot:
        for name in SCREENS:
            if name == "run":
                app.open_run("run")
            elif name == "episodes":
                app.open_episodes("run")
            elif name == "episode":
                app.open_episode("live")
            await pilot.pause(6.0)  # what it reads first is not what following costs
            shares[name] = await run.share(WINDOW)
        delays = await _delays(app, lambda: pilot.pause(0.02))
    reader.close()
    alone.append(await run.share(WINDOW))
    return {name: share - statistics.mean(alone) for name, share in shares.items()}, delays


async def _delays(app: Any, pause: Callable[[], Any]) -> list[float]:
    """On the screen of an episode to which calls are added."""
    found, known = list[float](), set(app.screen.story.calls)
    deadline = time.monotonic() + WINDOW
    while time.monotonic() < deadline:
        await pause()
        calls = app.screen.story.calls
        found += [(now() - calls[id].ended_at).total_seconds() for id in calls.keys() - known]
        known |= calls.keys()
    return found


def record(path: Path) -> None:
    """The run's process: calls of one episode that goes on, and of others that end."""
    import threading
    from itertools import count

    from ajet_sdk.gateway import Gateway
    from ajet_sdk.trace.writer import TraceWriter
    from ajet_sdk.types import Call, Episode, Reward, Run, new_id

    writer = TraceWriter(path)
    gateway = Gateway(writer).start()
    writer.put(Run(run_id="run", name="bench", backbone="local"))
    ended = threading.Event()

    def call(episode_id: str, index: int) -> Call:
        return Call(
            episode_id=episode_id,
            index=index,
            request={"messages": [{"role": "user", "content": f"question {index}"}]},
            response={"choices": [{"message": {"role": "assistant", "content": f"reply {index}"}}]},
            prompt_ids=list(range(index, index + 50)),
            output_ids=list(range(30)),
            logprobs=[-1.0] * 30,
            started_at=now(),
            ended_at=now(),
        )

    def work() -> None:
        for i in count():
            if ended.wait(1 / RATE):
                return
            if i % RATE == 0:
                writer.put(call("live", i // RATE))
                continue
            id = new_id()
            writer.put(call(id, 0))
            writer.put(Episode(episode_id=id, run_id="run", step=1, rewards=(Reward(value=1.0),)))

    worker = threading.Thread(target=work)
    worker.start()
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    ended.set()
    worker.join()
    gateway.close()
    writer.close()


if __name__ == "__main__":
    record(Path(sys.argv[1]))
