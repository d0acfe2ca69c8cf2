"""Calls from other threads into an event loop: each once, in order, with few wakings, whatever one
of them raises."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from ajet_sdk.engines.loop_calls import LoopCalls


def test_every_call_runs_once_and_those_of_a_thread_in_order() -> None:
    threads, each = 8, 2_000
    seen: list[tuple[int, int]] = []

    async def collect() -> None:
        calls = LoopCalls.for_loop(asyncio.get_running_loop())

        def post(thread: int) -> None:
            for number in range(each):
                calls.call(lambda a, b: seen.append((a, b)), thread, number)

        posting = [threading.Thread(target=post, args=(i,)) for i in range(threads)]
        for thread in posting:
            thread.start()
        while len(seen) < threads * each:
            await asyncio.sleep(0.001)
        for thread in posting:
            thread.join()
        await asyncio.sleep(0.01)

    asyncio.run(collect())
    assert len(seen) == threads * each
    for thread in range(threads):
        assert [number for by, number in seen if by == thread] == list(range(each))


def test_what_is_posted_while_the_loop_is_busy_wakes_it_once() -> None:
    async def count() -> int:
        loop = asyncio.get_running_loop()
        wakings, own = 0, loop.call_soon_threadsafe

        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal wakings
            wakings += 1
            return own(*arguments, **named)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        ran: list[int] = []

        def post() -> None:
            for number in range(100):
                LoopCalls.for_loop(loop).call(ran.append, number)

        thread = threading.Thread(target=post)
        thread.start()
        thread.join()  # the loop is held up, as by a long callback
        await asyncio.sleep(0.01)
        assert ran == list(range(100))
        return wakings

    assert asyncio.run(count()) == 1


def test_a_call_that_raises_is_told_and_the_next_one_runs() -> None:
    told: list[BaseException] = []
    ran: list[str] = []

    async def post() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))

        def broken() -> None:
            raise ValueError("broken")

        LoopCalls.for_loop(loop).call(broken)
        LoopCalls.for_loop(loop).call(ran.append, "next")
        await asyncio.sleep(0.01)

    asyncio.run(post())
    assert [str(error) for error in told] == ["broken"]
    assert ran == ["next"]


def test_calls_run_in_an_empty_context() -> None:
    variable = contextvars.ContextVar[str]("variable", default="empty")
    seen: list[str] = []

    async def post() -> None:
        variable.set("the poster's")
        LoopCalls.for_loop(asyncio.get_running_loop()).call(lambda: seen.append(variable.get()))
        await asyncio.sleep(0.01)

    asyncio.run(post())
    assert seen == ["empty"]


def test_a_closed_loop_is_told_to_the_poster() -> None:
    loop = asyncio.new_event_loop()
    calls = LoopCalls.for_loop(loop)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        calls.call(print)
