"""The Episode screen: an episode of 200 turns, opened in the real app, and what one more call costs
it.

The goal is judged in CPU time of this process, for the machine may be shared; the wall-clock time
is printed beside it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ajet_sdk.samples.prefixes import PrefixIndex
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Reward, Run, Task
from ajet_tools.tui.trace.app import TraceApp
from ajet_tools.tui.trace.episode import EpisodeScreen
from tests.bench import Figure

TURNS, OPENINGS = 200, 5
BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def write(path: Path) -> None:
    """A conversation of 200 tool-calling turns, 64,000 ids at its end."""
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "Mend the **build**.\n\n- first\n- then\n" * 10}
    ]
    prompt, index = list(range(1, 200)), PrefixIndex()
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="run", config={"ajet": {"model": {"scripted": "a.py:b"}}}))
        for turn in range(TURNS):
            tool = {
                "id": f"t{turn}",
                "type": "function",
                "function": {"name": "sh", "arguments": '{"line": "make"}'},
            }
            reply = {
                "role": "assistant",
                "content": f"Step {turn}: `make` again.\n" * 8,
                "tool_calls": [tool],
            }
            output = [turn % 250] * 120
            at = BEGAN + timedelta(seconds=turn)
            call = Call(
                call_id=f"c{turn}",
                episode_id="long",
                index=turn,
                request={"messages": list(messages)},
                response={"choices": [{"message": reply}]},
                prompt_ids=list(prompt),
                output_ids=output,
                logprobs=[-0.5] * len(output),
                started_at=at,
                ended_at=at + timedelta(milliseconds=700),
            )
            writer.put(index.add(call))
            ids = {"run_id": "run", "step": 1, "episode_id": "long", "call_id": call.call_id}
            writer.put(LedgerEntry(outcome="trained", tokens=len(output), **ids))
            result = {
                "role": "tool",
                "tool_call_id": f"t{turn}",
                "content": f"error {turn}: no rule\n" * 20,
            }
            messages += [reply, result]
            prompt += [*output, *[turn % 250] * 200]
        task = Task(task_id="t", main_query="Mend the build.")
        writer.put(
            Episode(
                episode_id="long", run_id="run", step=1, task=task, rewards=(Reward(value=1.0),)
            )
        )
        writer.put(Run(run_id="run", status="finished"))


async def measure(path: Path) -> list[tuple[float, float]]:
    """CPU and wall seconds of each opening, until the conversation is drawn."""
    with open_trace(path) as reader:
        app = TraceApp(reader, path)
        times = []
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause()
            for _ in range(OPENINGS):
                began = time.process_time(), time.perf_counter()
                app.open_episode("long")
                while not (
                    isinstance(app.screen, EpisodeScreen) and app.screen.overview is not None
                ):
                    await asyncio.sleep(0.005)
                await pilot.pause()
                times.append((time.process_time() - began[0], time.perf_counter() - began[1]))
                app.pop_screen()
                await pilot.pause()
    return times


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.duckdb"
        write(path)
        times = asyncio.run(measure(path))
    first, typical = times[0][0], statistics.median(cpu for cpu, _ in times)
    return [
        Figure(
            f"an episode of {TURNS} turns opened, the first time",
            first,
            "CPU-s",
            "< 0.5",
            first < 0.5,
        ),
        Figure(f"  the median of {OPENINGS} times", typical, "CPU-s", "< 0.5", typical < 0.5),
        Figure("  the quickest by the clock", min(wall for _, wall in times), "s"),
    ]
