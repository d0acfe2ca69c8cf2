"""`dataset expand`: how busy it keeps an endpoint that takes 200 ms, and what it takes itself for a
row.

The endpoint answers each request after 200 ms with the one row that it is asked for. The ideal is
64 requests every 200 ms. A bare loop, which sends as many requests and does nothing with the
answers, says how much of that can be had.

It runs twice. By the processor's clock, with the endpoint in the same process, on the same core:
waits are exact, and what else the machine does has no part in it. By the clock on the wall, with
the endpoint in a process of its own: on a machine so busy that the bare loop falls short itself,
that says nothing. Time of our own is the processor's, of the process without the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ajet_sdk.engines.client import ModelClient
from ajet_sdk.engines.http import Endpoint as Wire
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.pipeline import Pipeline
from ajet_tools.dataset.generate.settings import GenerationConfig
from tests.bench import Figure, _clock

ROWS = 2560
AT_ONCE = 64
LATENCY = 0.2
IDEAL = ROWS / AT_ONCE * LATENCY


def main() -> list[Figure]:
    alone, real = _clock.run(_in_one_process()), _in_two_processes()
    share, busy = IDEAL / alone.seconds, IDEAL / real.seconds
    told = True if busy >= 0.9 else False if IDEAL / real.bare >= 0.95 else None
    return [
        Figure("by the processor's clock: a bare loop", IDEAL / alone.bare, "of the ideal"),
        Figure(
            f"by the processor's clock: {ROWS} rows, {AT_ONCE} in flight",
            share,
            "of the ideal",
            ">= 0.9",
            share >= 0.9,
        ),
        Figure("by the wall's: a bare loop", IDEAL / real.bare, "of the ideal"),
        Figure(
            f"by the wall's: {ROWS} rows, {AT_ONCE} in flight", busy, "of the ideal", ">= 0.9", told
        ),
        Figure("own time per row", real.own / ROWS * 1000, "ms", "< 5", real.own / ROWS < 0.005),
    ]


@dataclass(frozen=True)
class _Taken:
    """Seconds of the bare loop and of the run, and of the processor in the run."""

    bare: float
    seconds: float
    own: float


async def _in_one_process() -> _Taken:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    async with server:
        taken = await _run(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        await asyncio.sleep(1)  # until it has seen that its connections are closed
        return taken


def _in_two_processes() -> _Taken:
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(there,), daemon=True)
    server.start()
    try:
        return asyncio.run(_run(here.recv()))
    finally:
        server.terminate()
        server.join()


async def _run(url: str) -> _Taken:
    clock = asyncio.get_running_loop().time
    started = clock()
    await _bare(url)
    bare = clock() - started
    seeds = [
        Row(f"line {i}", _task(f"What is {i} times {i + 3}?", i * (i + 3))) for i in range(1, 13)
    ]
    endpoint = ModelClient(url, "writer", concurrency=AT_ONCE)
    source = Expansion(seeds, GenerationConfig(ROWS, per_call=1, window=2 * AT_ONCE))
    started, processor = clock(), time.process_time()
    result = await Pipeline(source, endpoint).run()
    taken = _Taken(bare, clock() - started, time.process_time() - processor)
    await endpoint.aclose()
    if result.accepted != ROWS:
        raise RuntimeError(f"{result.accepted} rows of {ROWS}: {result.stopped}")
    return taken


async def _bare(url: str) -> None:
    """As many requests, with nothing done but to send them."""
    wire, left = Wire(url, "none", timeout=60, retries=0), iter(range(ROWS))

    async def one_after_another() -> None:
        for _ in left:
            await wire.post("chat/completions", {"content": "{}" * 700})

    await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))
    await wire.aclose()


def _task(query: str, answer: int) -> dict[str, Any]:
    return {"main_query": query, "metadata": {"answer": str(answer)}}


def _serve(there: Connection) -> None:
    async def run() -> None:
        server = await asyncio.start_server(_answer, "127.0.0.1", 0, backlog=256)
        there.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        await server.serve_forever()

    asyncio.run(run())


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Plain HTTP, on a connection that is kept: as little work as an endpoint can make of it."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = (line.partition(b":") for line in head.lower().split(b"\r\n"))
            await reader.readexactly(
                next(int(value) for name, _, value in lines if name == b"content-length")
            )
            await asyncio.sleep(LATENCY)
            one, other = random.randint(100, 99_999), random.randint(100, 99_999)
            text = json.dumps([_task(f"What is {one} plus {other}?", one + other)])
            body = json.dumps(
                {"choices": [{"message": {"role": "assistant", "content": text}}]}
            ).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    writer.close()
