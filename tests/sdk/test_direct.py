"""Requests of the gateway's own process: they take no socket, and nothing else about them is
different."""

from __future__ import annotations

import asyncio
import contextvars
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import httpx2
import openai
import pytest

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.access import Access, locate
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.gateway.process_door import ProcessDoor
from ajet_sdk.protocols import Ask
from tests.waiting import until

URL = "http://model.invalid/v1/chat/completions"
PLACE = locate("/v1/chat/completions", "", {})


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def within(episode: OpenEpisode, function: Callable[[], Any]) -> Any:
    """Call a function (or coroutine function) as the episode's workflow."""

    def call() -> Any:
        current_episode.set(episode.active)
        result = function()
        return asyncio.run(result) if asyncio.iscoroutine(result) else result

    return contextvars.copy_context().run(call)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with installed(), Gateway() as made:
        yield made


def served(gateway: Gateway) -> int:
    """Requests that came over a socket."""
    count: int = gateway._server.server_state.total_requests
    return count


class Slow:
    """Answers once it is let go."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go = threading.Event()
        self.contexts: list[Any] = []

    async def __call__(self, ask: Ask) -> str:
        self.contexts.append(current_episode.get())
        self.asked.set()
        while not self.go.is_set():
            await asyncio.sleep(0.005)
        return "late"


def opened(gateway: Gateway, reply: Any, name: str = "one") -> OpenEpisode:
    return gateway.open(EpisodeSpec(name, ScriptedEngine(reply)))


def ask_sync(module: Any, **options: Any) -> Callable[[], Any]:
    def ask() -> Any:
        with module.Client() as client:
            return client.post(URL, json=body("hello"), **options)

    return ask


def ask_async(module: Any, **options: Any) -> Callable[[], Any]:
    async def ask() -> Any:
        async with module.AsyncClient() as client:
            return await client.post(URL, json=body("hello"), **options)

    return ask


KINDS = [pytest.param(ask, module, id=f"{ask.__name__}-{module.__name__}")
         for ask in (ask_sync, ask_async) for module in (httpx, httpx2)]  # fmt: skip


@pytest.mark.parametrize(("ask", "module"), KINDS)
def test_no_socket_is_used_and_the_answer_is_the_same(
    gateway: Gateway, ask: Any, module: Any
) -> None:
    episode = opened(gateway, ["hi there"])
    response = within(episode, ask(module))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json()["choices"][0]["message"]["content"] == "hi there"
    assert str(response.request.url) == URL
    assert 0 < response.elapsed.total_seconds() < 10
    (call,) = episode.calls
    assert call.error is None and call.trainable
    assert served(gateway) == 0


@pytest.mark.parametrize(("ask", "module"), KINDS)
def test_a_read_timeout_is_the_clients_own_and_the_call_undelivered(
    gateway: Gateway, ask: Any, module: Any
) -> None:
    slow = Slow()
    episode = opened(gateway, slow)
    with pytest.raises(module.ReadTimeout, match=r"0\.2 s"):
        within(episode, ask(module, timeout=0.2))
    until(lambda: len(episode.calls) == 1)
    assert episode.calls[0].error == "undelivered"


def test_the_gateway_answers_outside_of_every_episode(gateway: Gateway) -> None:
    """A request that the engine itself makes, to a server of its own, must not be taken for the
    agent's."""
    slow = Slow()
    slow.go.set()
    within(opened(gateway, slow), ask_async(httpx))
    assert slow.contexts == [None]


def test_streams_arrive_in_parts_and_one_closed_early_is_undelivered(gateway: Gateway) -> None:
    episode = opened(gateway, ["one two three four five six seven eight"] * 2)
    client = openai.OpenAI(api_key="k", base_url="http://model.invalid/v1", max_retries=0)

    def whole() -> str:
        parts = client.chat.completions.create(
            model="m", messages=body("x")["messages"], stream=True
        )
        return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)

    assert within(episode, whole) == "one two three four five six seven eight"
    slow = Slow()
    late = opened(gateway, slow, "two")

    def early() -> None:
        with httpx.stream("POST", URL, json=body("x", stream=True)):
            pass

    thread = threading.Thread(target=lambda: within(late, early), daemon=True)
    thread.start()
    slow.asked.wait()
    asyncio.run(late.finish())
    thread.join()
    assert [call.error for call in late.calls] == ["undelivered"]
    assert [call.error for call in episode.calls] == [None]
    assert served(gateway) == 0


@pytest.mark.parametrize("size", [100, 200_000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_left_half_read_is_undelivered(gateway: Gateway, stream: bool, size: int) -> None:
    """Found in training: every token of a reply was trained of which the agent had read 48
    characters."""

    def ask() -> None:
        with (
            httpx.Client() as client,
            client.stream("POST", URL, json=body("go", stream=stream)) as response,
        ):
            next(response.iter_raw(48))

    async def aask() -> None:
        async with (
            httpx.AsyncClient() as client,
            client.stream("POST", URL, json=body("go", stream=stream)) as response,
        ):
            async for _ in response.aiter_raw(48):
                break

    for name, agent in (("sync", ask), ("async", aask)):
        episode = opened(gateway, ["x" * size], name)
        within(episode, agent)
        (call,) = asyncio.run(episode.finish())
        assert call.output_ids is not None and re.match(
            "undelivered: the client (read|disconnected)", call.error or ""
        )


@pytest.mark.parametrize("module", [httpx, httpx2])
def test_an_answer_in_one_part_can_be_read_as_a_stream(gateway: Gateway, module: Any) -> None:
    episode = opened(gateway, ["whole"] * 2)

    def ask() -> bytes:
        with module.stream("POST", URL, json=body("x")) as response:
            return b"".join(response.iter_raw())

    async def aask() -> bytes:
        async with (
            module.AsyncClient() as client,
            client.stream("POST", URL, json=body("x")) as response,
        ):
            return b"".join([part async for part in response.aiter_raw()])

    assert b"whole" in within(episode, ask) and b"whole" in within(episode, aask)
    assert [call.error for call in episode.calls] == [None, None] and served(gateway) == 0


def test_headers_may_hold_any_text(gateway: Gateway) -> None:
    headers = {b"x-title": "🦊 Füchse".encode()}
    assert (
        within(
            opened(gateway, ["fine"]), lambda: httpx.post(URL, json=body("x"), headers=headers)
        ).status_code
        == 200
    )


def test_errors_and_retries_are_those_of_http(gateway: Gateway) -> None:
    episode = opened(gateway, ["x"])
    refused = within(episode, lambda: httpx.post(URL, json=body("x", use_beam_search=True)))
    assert refused.status_code == 400 and refused.headers["x-should-retry"] == "false"
    asyncio.run(episode.finish())
    over = within(episode, lambda: httpx.post(URL, json=body("x")))
    assert over.status_code == 410


def test_a_handle_goes_direct_too(gateway: Gateway) -> None:
    episode = opened(gateway, ["by handle"] * 2)
    client = episode.model().openai()

    def ask() -> Any:
        return client.chat.completions.create(model="m", messages=body("x")["messages"])

    assert within(episode, ask).choices[0].message.content == "by handle"
    assert served(gateway) == 0
    assert (
        ask().choices[0].message.content == "by handle"
    )  # outside of the workflow: over HTTP, with the same key
    until(lambda: served(gateway) == 1)


@pytest.mark.parametrize("ask", [ask_sync, ask_async])
def test_a_gateway_that_stops_ends_what_waits(ask: Any) -> None:
    slow = Slow()
    with installed():
        gateway = Gateway().start()
        episode = opened(gateway, slow)
        ended: list[BaseException | int] = []

        def run() -> None:
            try:
                ended.append(within(episode, ask(httpx)).status_code)
            except httpx.HTTPError as error:
                ended.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        slow.asked.wait()
        gateway.close()
        thread.join()
        assert len(ended) == 1
        with pytest.raises(httpx.ConnectError):
            within(episode, ask(httpx))


def test_what_a_stopped_loop_never_came_to_is_broken_off() -> None:
    loop, told = asyncio.new_event_loop(), list[Any]()
    door = ProcessDoor(Access(), loop)
    door.ask(PLACE, b"{}", told.append)
    loop.close()
    door.close()
    assert told == [None]
    with pytest.raises(RuntimeError):
        door.ask(PLACE, b"{}", told.append)


def test_a_call_that_blocks_the_agents_own_loop_is_answered(gateway: Gateway) -> None:
    episode = opened(gateway, ["fine"])

    async def blocking() -> int:
        return ask_sync(httpx)().status_code  # type: ignore[no-any-return]

    assert within(episode, blocking) == 200


def test_a_request_over_the_limit_is_refused_and_recorded(gateway: Gateway) -> None:
    episode = opened(gateway, ["hi"])
    response = within(episode, lambda: httpx.post(URL, json=body("x" * 17_000_000)))
    assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"
    (call,) = episode.calls
    assert call.error == response.json()["error"]["message"]
