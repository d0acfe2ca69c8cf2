"""Export and import: episodes a minute of each format, and that memory does not grow with the
trace."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run, Task
from ajet_tools.trace.export import Format, export
from ajet_tools.trace.imports import import_files
from ajet_tools.trace.queries.episodes import exported_ids
from tests.bench import Figure
from tests.bench._memory import peak_megabytes

EPISODES = 1_000
TURNS = 4
TEXT = 800
"""Characters of each message."""
MEASURED: tuple[Format, ...] = ("messages", "preferences", "tokens", "otlp", "native")
GOAL = 10_000
"""Episodes a minute."""


def main() -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for scale in (1, 4):
            _make(folder / f"{scale}.duckdb", scale * EPISODES)
        for format in MEASURED:
            rate, small = _apart("export", folder / "1.duckdb", format, folder / f"1.{format}")
            _, large = _apart("export", folder / "4.duckdb", format, folder / f"4.{format}")
            figures += _figures(f"export {format}", rate, small, large)
        for format in ("messages", "otlp", "native"):
            rate, small = _apart(
                "import", folder / f"1.{format}", format, folder / f"1.{format}.duckdb"
            )
            _, large = _apart(
                "import", folder / f"4.{format}", format, folder / f"4.{format}.duckdb"
            )
            figures += _figures(f"import {format}", rate, small, large)
    return figures


def _figures(what: str, rate: float, small: float, large: float) -> list[Figure]:
    growth = large / small
    return [
        Figure(what, rate, "episodes/min", f">= {GOAL:,}", rate >= GOAL),
        Figure(
            f"{what}, memory of 4x the size", growth, f"x ({small:.0f} MB)", "<= 1.3", growth <= 1.3
        ),
    ]


def _apart(verb: str, source: Path, format: str, target: Path) -> tuple[float, float]:
    """Episodes a minute and peak memory in MB, in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.exchange", verb, str(source), format, str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rate, peak = done.stdout.split()[-2:]
    return float(rate), float(peak)


def _make(path: Path, count: int) -> None:
    """Groups of eight conversations of a few turns, with token ids."""
    rng = np.random.default_rng(0)
    words = [_prose(rng) for _ in range(64)]
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="run", config={"ajet": {"backbone": "debug"}}, status="finished"))
        for i in range(count):
            prompt, messages = (
                rng.integers(0, 150_000, 200, dtype=np.int32),
                [{"role": "system", "content": words[0]}],
            )
            calls = []
            for turn in range(TURNS):
                messages = [
                    *messages,
                    {"role": "user", "content": f"{i // 8} {turn} {words[(i // 8 + turn) % 64]}"},
                ]
                output, reply = (
                    rng.integers(0, 150_000, 100, dtype=np.int32),
                    f"{i} {words[(i * 7 + turn) % 64]}",
                )
                message = {"role": "assistant", "content": reply}
                calls.append(
                    Call(
                        episode_id=f"e{i}",
                        index=turn,
                        request={"model": "m", "messages": messages},
                        response={"choices": [{"index": 0, "message": message}]},
                        prompt_ids=prompt,
                        output_ids=output,
                        logprobs=-rng.random(100).astype(np.float32),
                    )
                )
                messages = [*messages, message]
                prompt = np.concatenate(
                    [prompt, output, rng.integers(0, 150_000, 100, dtype=np.int32)]
                )
            rewards = (Reward(value=float(i % 8)),)
            task = Task(task_id=f"t{i // 8}", main_query=words[i % 64])
            writer.put(*place_all(calls))
            of = {"run_id": "run", "group_id": f"g{i // 8}", "attempt": i % 8, "step": 1}
            writer.put(Episode(episode_id=f"e{i}", task=task, rewards=rewards, **of))  # type: ignore[arg-type]
            if i % 500 == 499:
                writer.flush(None)


def _prose(rng: np.random.Generator) -> str:
    """Words and numbers, as agents write them."""
    known = [
        "the",
        "model",
        "says",
        "that",
        "of",
        "12",
        "apples",
        "(about",
        "3.5",
        "kg)",
        "calc(4*3-12)",
        "= 0.",
    ]
    return " ".join(rng.choice(known, TEXT // 5))[:TEXT]


def _work(verb: str, source: str, format: Format, target: str) -> None:
    started = time.perf_counter()
    if verb == "export":
        with open_trace(Path(source)) as reader:
            count = export(reader, exported_ids(reader), format, Path(target)).episodes
    else:
        count = import_files([Path(source)], Path(target)).episodes
    seconds = time.perf_counter() - started
    print(60 * count / seconds, peak_megabytes())


if __name__ == "__main__":
    _work(*sys.argv[1:])  # type: ignore[arg-type]
