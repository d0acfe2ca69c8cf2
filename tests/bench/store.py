"""The trace store: how fast calls are written, what an episode's ids cost, how fast they are read
back."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ajet_sdk.samples.prefixes import PrefixIndex
from ajet_sdk.trace.reader import calls_of, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run
from tests.bench import Figure

CALLS = 12_000
IDS = 1_000
TEXT = 4_096
TURNS = 50


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        rate, waited = _write(Path(directory) / "rate.duckdb")
        return [
            Figure("calls written (4 KB, 1,000 ids)", rate, "calls/s", ">= 3,000", rate >= 3_000),
            Figure("put, 99th percentile", waited * 1e3, "ms"),
            *_episode(Path(directory) / "episode.duckdb"),
        ]


def _write(path: Path) -> tuple[float, float]:
    """Calls with nothing in common, so that nothing is saved by prefixes."""
    rng = np.random.default_rng(0)
    words = [rng.bytes(TEXT // 2).hex() for _ in range(64)]
    logprobs = -rng.random(IDS // 2).astype(np.float32)
    calls = [
        Call(
            episode_id=f"e{i // 8}",
            index=i % 8,
            request={
                "model": "m",
                "messages": [{"role": "user", "content": f"{i} {words[i % 64]}"}],
            },
            response={"choices": [{"message": {"role": "assistant", "content": "short"}}]},
            prompt_ids=rng.integers(0, 150_000, IDS // 2, dtype=np.int32),
            output_ids=rng.integers(0, 150_000, IDS // 2, dtype=np.int32),
            logprobs=logprobs,
        )
        for i in range(CALLS)
    ]
    waits: list[float] = []
    writer = TraceWriter(path)
    started = time.perf_counter()
    for call in calls:
        before = time.perf_counter()
        writer.put(call)
        waits.append(time.perf_counter() - before)
        if call.index == 7:
            writer.put(Episode(episode_id=call.episode_id))
    writer.flush(None)
    seconds = time.perf_counter() - started
    writer.close()
    return CALLS / seconds, float(np.quantile(waits, 0.99))


def _episode(path: Path) -> list[Figure]:
    """One long conversation among others."""
    rng = np.random.default_rng(1)
    writer = TraceWriter(path)
    writer.put(Run())
    distinct = 0
    for episode in range(20):
        prompt, index = rng.integers(0, 150_000, 400, dtype=np.int32), PrefixIndex()
        messages: list[dict[str, Any]] = [{"role": "system", "content": "s" * 1600}]
        for turn in range(TURNS):
            messages = [*messages, {"role": "user", "content": f"{turn} " + "o" * 800}]
            output = rng.integers(0, 150_000, 120, dtype=np.int32)
            request = {"model": "m", "messages": messages}
            call = Call(
                episode_id=f"e{episode}",
                index=turn,
                request=request,
                prompt_ids=prompt,
                output_ids=output,
            )
            writer.put(index.add(call))
            messages = [*messages, {"role": "assistant", "content": "r" * 480}]
            distinct += 0 if turn < TURNS - 1 else len(prompt) + len(output)
            prompt = np.concatenate([prompt, output, rng.integers(0, 150_000, 200, dtype=np.int32)])
    writer.flush(None)
    sql = "SELECT sum(len(prompt_suffix) + len(output_ids)) AS n FROM calls"
    stored = int(writer.query(sql).to_pylist()[0]["n"])
    writer.close()
    with open_trace(path) as reader:
        started = time.perf_counter()
        assert len(calls_of(reader, "e7")) == TURNS
        objects = time.perf_counter() - started
        started = time.perf_counter()
        assert (
            reader.query("SELECT prompt_ids FROM calls_full WHERE episode_id = 'e7'").num_rows
            == TURNS
        )
        view = time.perf_counter() - started
    cost = stored / distinct
    return [
        Figure("ids of a 50-turn episode", cost, "x its distinct tokens", "<= 1.2", cost <= 1.2),
        Figure("a 50-turn episode as calls", objects * 1e3, "ms"),
        Figure("a 50-turn episode by calls_full", view * 1e3, "ms"),
    ]
