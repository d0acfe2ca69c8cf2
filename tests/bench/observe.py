"""`ajet.trace`: what it adds to a call of a deployed agent, in processor time of all threads and in
waiting.

The same client and endpoint without it, with it, and with `durable=True`, in turn, the less of two;
as fast as one client calls, and at 10 calls a second.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import httpx

from ajet_sdk.capture.observe import trace
from tests.bench import Figure
from tests.bench._measure import Taken
from tests.bench.gateway import Fixed

ROUNDS = 2
FAST, PACED = 500, 100
PROMPT = "word " * 300
REPLY = {
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "word " * 100},
            "finish_reason": "stop",
        }
    ]
}


def main() -> list[Figure]:
    fixed = Fixed({"id": "x", "model": "gpt", **REPLY})
    try:
        return [*_figures(fixed.url, FAST, 0.0), *_figures(fixed.url, PACED, 0.1)]
    finally:
        fixed.close()


def _figures(url: str, calls: int, pause: float) -> list[Figure]:
    with tempfile.TemporaryDirectory() as scratch:
        kinds: dict[str, Callable[[], AbstractContextManager[trace | None]]] = {
            "": nullcontext,
            "ajet.trace": lambda: trace(Path(scratch) / "served"),
            "durable": lambda: trace(Path(scratch) / "served", durable=True),
        }
        taken: dict[str, list[Taken]] = {kind: [] for kind in kinds}
        for _ in range(ROUNDS):
            for kind, observing in kinds.items():
                with observing() as tracing:
                    taken[kind].append(_taken(url, calls, pause, tracing))
    cpu = {kind: min(t.cpu for t in many) / calls * 1000 for kind, many in taken.items()}
    wall = {kind: min(t.wall for t in many) / calls * 1000 for kind, many in taken.items()}
    at = f"at {1 / pause:g} calls/s" if pause else "as fast as it goes"
    added = [
        Figure(
            f"{kind} adds to a call, {at}",
            cpu[kind] - cpu[""],
            "CPU-ms",
            "<= 1",
            cpu[kind] - cpu[""] <= 1,
        )
        for kind in ("ajet.trace", "durable")
    ]
    waits = [
        Figure(f"{kind}: a call waits longer, {at}", wall[kind] - wall[""], "ms")
        for kind in taken
        if kind
    ]
    return [
        Figure(f"a call without ajet.trace, {at}", cpu[""], "CPU-ms"),
        *added,
        *(waits if not pause else []),
    ]


def _taken(url: str, calls: int, pause: float, tracing: trace | None) -> Taken:
    """The calls, until all of them are in the file."""
    body = {"model": "gpt", "messages": [{"role": "user", "content": PROMPT}]}
    with httpx.Client(trust_env=False) as client:
        client.post(f"{url}/chat/completions", json=body)
        cpu, start = time.process_time(), time.perf_counter()
        for number in range(calls):
            time.sleep(max(0.0, start + number * pause - time.perf_counter()))
            client.post(f"{url}/chat/completions", json=body)
        wall = time.perf_counter() - start
        if tracing is not None:
            tracing.flush()
    return Taken(wall, time.process_time() - cpu)
