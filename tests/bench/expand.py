"""`dataset expand`: how busy it keeps an endpoint that takes 200 ms, and what it takes itself for a row.

The endpoint is a process of its own, which answers each request after 200 ms with the one row that it is asked for. The
ideal is 64 requests every 200 ms. A bare loop, which sends as many requests and does nothing with the answers, says how
much of that this machine allows at the time. Time of our own is the processor's, of the whole run without the
endpoint's.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import httpx

from ajet_tools.dataset.endpoint import Endpoint
from ajet_tools.dataset.expand import Expansion
from ajet_tools.dataset.loopback import LoopbackTransport
from ajet_tools.dataset.recipe import Recipe
from ajet_tools.dataset.tables import Row
from tests.bench import Figure

ROWS = 2560
AT_ONCE = 64
LATENCY = 0.2


def main() -> list[Figure]:
    bare, seconds, own = _run()
    ideal = ROWS / AT_ONCE * LATENCY
    busy = ideal / seconds
    return [
        Figure("share of the ideal that a bare loop reaches", ideal / bare, ""),
        Figure(f"{ROWS} rows, {AT_ONCE} in flight, 200 ms each", seconds, "s", f"ideal {ideal:g}"),
        Figure("share of the ideal throughput", busy, "", ">= 0.9", busy >= 0.9),
        Figure("own time per row", own / ROWS * 1000, "ms", "< 5", own / ROWS < 0.005),
    ]


def _run() -> tuple[float, float, float]:
    """Seconds of the bare loop, of the run, and of the processor in it."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, LATENCY), daemon=True)
    server.start()
    url = here.recv()
    seeds = [Row(f"line {i}", _task(f"What is {i} times {i + 3}?", i * (i + 3))) for i in range(1, 13)]

    async def run() -> tuple[float, float, float]:
        bare = await _bare(url)
        endpoint = Endpoint(url, "writer", concurrency=AT_ONCE)
        expansion = Expansion(seeds, Recipe(ROWS, per_call=1, window=2 * AT_ONCE), endpoint)
        started, cpu = time.perf_counter(), time.process_time()
        result = await expansion.run()
        taken = bare, time.perf_counter() - started, time.process_time() - cpu
        await endpoint.aclose()
        if result.accepted != ROWS:
            raise RuntimeError(f"{result.accepted} rows of {ROWS}: {result.stopped}")
        return taken

    try:
        return asyncio.run(run())
    finally:
        server.terminate()
        server.join()


async def _bare(url: str) -> float:
    """Seconds for as many requests, with nothing done but to send them."""
    async with httpx.AsyncClient(transport=LoopbackTransport(60), trust_env=False) as client:
        left = iter(range(ROWS))

        async def one_after_another() -> None:
            for _ in left:
                await client.post(f"{url}/chat/completions", content=b"{}" * 700)

        started = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))
        return time.perf_counter() - started


def _task(query: str, answer: int) -> dict[str, Any]:
    return {"main_query": query, "metadata": {"answer": str(answer)}}


def _serve(there: Connection, latency: float) -> None:
    import uvicorn

    from ajet_sdk.gateway import listening_socket, respond

    listener = listening_socket("127.0.0.1", 0)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            continue
        await asyncio.sleep(latency)
        one, other = random.randint(100, 99_999), random.randint(100, 99_999)
        text = json.dumps([_task(f"What is {one} plus {other}?", one + other)])
        await respond(send, 200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    config = uvicorn.Config(answer, interface="asgi3", lifespan="off", log_config=None, access_log=False, backlog=256)
    there.send(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    uvicorn.Server(config).run([listener])
