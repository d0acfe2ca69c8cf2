"""Merging: long conversations, a batch of them, and how the time per token grows with the number of
calls.

In CPU time: the work is single-threaded, and the machine may be shared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

import numpy as np

from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.samples.timelines import merge
from ajet_sdk.types import Call
from tests.bench import Figure

SYSTEM, OBSERVATION, REPLY = 400, 200, 120
BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def conversation(turns: int, seed: int, episode: str) -> list[Call]:
    """One conversation in which each prompt is the one before, its reply, and an observation."""
    draw = np.random.default_rng(seed)
    prompt = np.concatenate((np.arange(SYSTEM), draw.integers(0, 50_000, OBSERVATION))).astype(
        np.int32
    )
    calls = []
    for turn in range(turns):
        output = draw.integers(0, 50_000, REPLY).astype(np.int32)
        at = BEGAN + timedelta(seconds=turn)
        calls.append(
            Call(
                call_id=f"{episode}-{turn}",
                episode_id=episode,
                index=turn,
                prompt_ids=prompt,
                output_ids=output,
                logprobs=np.full(REPLY, -1.0, np.float32),
                started_at=at,
                ended_at=at,
            )
        )
        prompt = np.concatenate(
            (prompt, output, draw.integers(0, 50_000, OBSERVATION).astype(np.int32))
        )
    return calls


def one_shots(n: int, seed: int = 0) -> list[Call]:
    """Calls of one length that share a system prompt and nothing else."""
    draw = np.random.default_rng(seed)
    system = np.arange(SYSTEM, dtype=np.int32)
    prompts = draw.integers(0, 50_000, (n, OBSERVATION), dtype=np.int32)
    outputs = draw.integers(0, 50_000, (n, REPLY), dtype=np.int32)
    logprobs = np.full(REPLY, -1.0, np.float32)
    return [
        Call(
            call_id=str(i),
            episode_id="e",
            prompt_ids=np.concatenate((system, prompts[i])),
            output_ids=outputs[i],
            logprobs=logprobs,
            started_at=BEGAN + timedelta(seconds=i),
            ended_at=BEGAN + timedelta(seconds=i),
        )
        for i in range(n)
    ]


def fastest(episodes: Sequence[Sequence[Call]], repeat: int = 5) -> float:
    """CPU seconds to merge every episode, the best of a few."""
    best = float("inf")
    for _ in range(repeat):
        started = time.process_time()
        for calls in episodes:
            merge(calls)
        best = min(best, time.process_time() - started)
    return best


def main() -> list[Figure]:
    figures = []
    for episodes, turns in ((4, 200), (64, 20)):
        unplaced = [conversation(turns, i, f"e{i}") for i in range(episodes)]
        for of, calls in (("", [place_all(one) for one in unplaced]), (", not placed", unplaced)):
            ms = 1e3 * fastest(calls)
            figures.append(
                Figure(
                    f"merge of {episodes} x {turns} turns{of}", ms, "CPU-ms", "under 50", ms < 50
                )
            )
    times = {
        n: fastest([one_shots(n)], repeat=3 if n < 100_000 else 1) / n
        for n in (1_000, 10_000, 100_000)
    }
    ratio = max(times.values()) / min(times.values())
    figures += [
        Figure(f"merge of {n:,} calls, per call", 1e6 * each, "CPU-us") for n, each in times.items()
    ]
    figures.append(
        Figure("time per token, slowest against fastest", ratio, "x", "within 2", ratio <= 2)
    )
    return figures
