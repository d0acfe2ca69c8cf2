"""The ways in which a call can end, each through both doors: what the client gets, and what is
recorded, once."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from ajet_sdk.agent.context import AgentIdentity, current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.errors import EngineUnavailable, RequestRefused
from ajet_sdk.gateway import answer as answer_module
from ajet_sdk.gateway.access import ClientGone, HTTPError, Request
from ajet_sdk.gateway.answer import answer
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Answer, Ask, Choice
from tests.waiting import FOREVER, until_async

DOORS = ("http", "process")
BIG = "x" * 1_500_000


class Engine:
    """Answers once it is let go, with a text or an exception, and says whether it was cancelled."""

    model = "own"

    def __init__(self, text: str = "", error: Exception | None = None, waits: bool = False) -> None:
        self.text, self.error = text, error
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self.waits = waits
        self.cancelled = False

    async def answer(self, ask: Ask) -> Answer:
        self.asked.set()
        try:
            while self.waits and not self.go.is_set():
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error is not None:
            raise self.error
        return Answer((Choice({"content": self.text}, None, "stop", [1], [-1.0]),), self.model, [5])

    def forget(self, episode_id: str) -> None: ...

    async def aclose(self) -> None: ...


class Asked:
    """One request whose response has begun."""

    def __init__(self, episode: OpenEpisode, engine: Engine, response: httpx.Response) -> None:
        self.episode, self.engine = episode, engine
        self.parts = response.aiter_raw()

    async def part(self) -> str:
        return (await anext(self.parts)).decode()

    async def read(self) -> str:
        return "".join([part.decode() async for part in self.parts])


Steps = Callable[[Asked], Awaitable[Any]]


@dataclass
class Ending:
    name: str
    engine: Callable[[], Engine]
    recorded: str | None
    """A pattern of the call's error; None: it was delivered."""
    stream: bool = False
    status: int = 200
    reading: Steps = Asked.read
    """What the client does with the response."""
    meanwhile: Callable[[OpenEpisode, Engine, asyncio.Task[Any]], Awaitable[Any]] | None = None
    """What happens once the engine is asked."""
    shows: str = ""
    """A pattern of what the client has read."""
    breaks: type[BaseException] | None = None
    """What the client sees in place of a response's end."""
    spec: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=lambda: {"HEARTBEAT": 0.02})

    def __str__(self) -> str:
        return self.name


async def leave(asked: Asked) -> None:
    """Read a part and close the response."""
    await asked.part()


async def leave_unread(asked: Asked) -> None:
    """Close the response with nothing read of its body."""


async def let_go_after_a_heartbeat(asked: Asked) -> str:
    text = await asked.part()
    asked.engine.go.set()
    return text + await asked.read()


async def finish_after_a_heartbeat(asked: Asked) -> str:
    text = await asked.part()
    await asked.episode.finish()
    return text + await asked.read()


async def finish_after_a_part(asked: Asked) -> None:
    await asked.part()
    await asked.episode.finish()
    await asked.read()


async def finish(episode: OpenEpisode, engine: Engine, client: asyncio.Task[Any]) -> None:
    await episode.finish()


async def go_away(episode: OpenEpisode, engine: Engine, client: asyncio.Task[Any]) -> None:
    client.cancel()


READ = "undelivered: the client disconnected"
BROKEN = EngineUnavailable("the engine went away")
ENDINGS = [
    Ending("whole", lambda: Engine("hello"), None, shows="hello"),
    Ending("large", lambda: Engine(BIG), None, shows="x{1500000}"),
    Ending("large and left", lambda: Engine(BIG), READ, reading=leave),
    Ending("error", lambda: Engine(error=BROKEN), "went away", status=503, shows="went away"),
    Ending("timeout", lambda: Engine(waits=True), "call_timeout", status=503, shows="call_timeout",
           spec={"call_timeout": 0.05}),
    Ending("stream", lambda: Engine("hello"), None, True, shows=r"hello(.|\n)*\[DONE\]"),
    Ending("stream left", lambda: Engine(BIG), READ, True, reading=leave),
    Ending("slow stream", lambda: Engine("hello", waits=True), None, True,
           reading=let_go_after_a_heartbeat, shows=r"^: waiting\n\n(.|\n)*hello(.|\n)*\[DONE\]"),
    Ending("error before the first byte", lambda: Engine(error=BROKEN), "went away", True, status=503,
           shows="went away"),
    Ending("error after the first byte", lambda: Engine(error=BROKEN, waits=True), "went away", True,
           reading=let_go_after_a_heartbeat, shows=r"^: waiting\n\n(.|\n)*data: .*went away"),
    Ending("client gone while waiting", lambda: Engine(waits=True), "^undelivered$", meanwhile=go_away,
           breaks=asyncio.CancelledError),
    Ending("episode over while waiting", lambda: Engine(waits=True), "^undelivered$", meanwhile=finish, status=410,
           shows="is over"),
    Ending("episode over in a stream that waits", lambda: Engine(waits=True), "^undelivered$", True,
           reading=finish_after_a_heartbeat, shows="data: .*is over"),
    Ending("client gone in a stream that waits", lambda: Engine(waits=True), "^undelivered$", True,
           reading=leave),
    Ending("reply never read", lambda: Engine(BIG), READ, reading=leave_unread),
]  # fmt: skip


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with installed(), Gateway() as running:
        yield running


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("ending", ENDINGS, ids=str)
def test_each_end_leaves_one_record_and_nothing_in_flight(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, ending: Ending, door: str
) -> None:
    for name, value in ending.settings.items():
        monkeypatch.setattr(answer_module, name, value)
    asyncio.run(_run(gateway, ending, door))


async def _run(gateway: Gateway, ending: Ending, door: str) -> None:
    engine = ending.engine()
    episode = gateway.open(EpisodeSpec(door, engine, **ending.spec))
    client = asyncio.create_task(_client(episode, engine, ending, door))
    if ending.meanwhile is not None:
        await until_async(lambda: engine.asked.is_set() or client.done())
        await ending.meanwhile(episode, engine, client)
    if ending.breaks is not None:
        with pytest.raises(ending.breaks):
            await client
    else:
        status, text = await client
        assert status == ending.status and re.search(ending.shows, text or "")
    await until_async(lambda: episode.calls)
    calls = await episode.finish()
    assert len(calls) == 1
    error = calls[0].error
    assert error is None if ending.recorded is None else re.search(ending.recorded, error or "")
    assert not episode.in_flight
    assert engine.cancelled == (engine.waits and not engine.go.is_set())


async def _client(
    episode: OpenEpisode, engine: Engine, ending: Ending, door: str
) -> tuple[int, str | None]:
    model = episode.model()
    if door == "process":
        current_episode.set(episode.active)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": ending.stream}
    headers = {"authorization": f"Bearer {model.api_key}"}
    async with (
        httpx.AsyncClient(timeout=None, trust_env=False) as client,
        client.stream(
            "POST", f"{model.base_url}/chat/completions", json=body, headers=headers
        ) as response,
    ):
        return response.status_code, await ending.reading(Asked(episode, engine, response))


def test_an_episode_that_ends_in_the_middle_of_a_stream_breaks_it_off(gateway: Gateway) -> None:
    """Over a socket; within a process, the client has everything but the end at once."""
    ending = Ending(
        "episode over",
        lambda: Engine(BIG * 4),
        READ,
        True,
        reading=finish_after_a_part,
        breaks=httpx.RemoteProtocolError,
    )
    asyncio.run(_run(gateway, ending, "http"))


def test_both_doors_are_used(gateway: Gateway) -> None:
    """Or the table is of one door only."""
    served = gateway._server.server_state
    for door, requests in (("process", 0), ("http", 1)):
        asyncio.run(
            contextvars.copy_context().run(lambda door=door: _run(gateway, ENDINGS[0], door))
        )
        assert served.total_requests == requests


# Without a door


class Present:
    """A client that takes everything and stays."""

    in_parts = False

    def __init__(self) -> None:
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def drain(self) -> None: ...

    def has_unread(self) -> bool:
        return False


def request(stream: bool = False) -> Request:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    return Request("chat/completions", CHAT, body, AgentIdentity(), "rollout", Present())


def within(gateway: Gateway, scenario: Callable[[], Awaitable[Any]]) -> Any:
    """Run in the gateway's loop."""
    assert gateway._loop is not None
    return asyncio.run_coroutine_threadsafe(scenario(), gateway._loop).result(30)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_is_left_before_its_first_chunk_is_undelivered(
    gateway: Gateway, stream: bool
) -> None:
    """A generator that was never begun runs no `finally`."""
    episode = gateway.open(EpisodeSpec("one", Engine("hello")))

    async def scenario() -> None:
        async with await answer(episode, request(stream)):
            pass

    within(gateway, scenario)
    assert [call.error for call in episode.calls] == ["undelivered"] and not episode.in_flight


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_is_left_after_a_chunk_is_undelivered_but_after_the_last(
    gateway: Gateway, stream: bool
) -> None:
    async def take(chunks: int, episode: OpenEpisode) -> bool:
        async with await answer(episode, request(stream)) as reply:
            for _ in range(chunks):
                _, last = await anext(reply.chunks)
        return last

    for chunks in (1, 2):
        episode = gateway.open(EpisodeSpec(f"{chunks}", Engine("x" * 100_000)))
        last = within(gateway, lambda: take(chunks, episode))  # noqa: B023
        (call,) = episode.calls
        assert not episode.in_flight
        assert last == (call.error is None)
        if last:
            break
        assert (call.error or "").startswith("undelivered: the client disconnected")
    assert last and chunks == 1 + stream


def test_the_end_of_an_episode_is_410_and_no_cancellation(gateway: Gateway) -> None:
    """`finish` cancels the engine's work, and the door would take its CancelledError for its
    own."""
    engine = Engine(waits=True)
    episode = gateway.open(EpisodeSpec("one", engine))

    async def scenario() -> None:
        asking = asyncio.ensure_future(answer(episode, request()))
        await engine.asked.wait()
        await episode._close(True)
        with pytest.raises(HTTPError) as raised:
            await asking
        assert raised.value.status == 410

    within(gateway, scenario)
    assert [call.error for call in episode.calls] == ["undelivered"] and engine.cancelled


def test_a_door_that_is_cancelled_leaves_an_undelivered_call(gateway: Gateway) -> None:
    engine = Engine(waits=True)
    episode = gateway.open(EpisodeSpec("one", engine))

    async def scenario() -> None:
        asking = asyncio.ensure_future(answer(episode, request()))
        await engine.asked.wait()
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        assert asking.cancelled()
        await until_async(lambda: engine.cancelled)

    within(gateway, scenario)
    assert [call.error for call in episode.calls] == ["undelivered"] and not episode.in_flight


@pytest.mark.parametrize(
    "error", [RequestRefused("no tools"), EngineUnavailable("gone"), ValueError("a bug")], ids=repr
)
@pytest.mark.parametrize("leaves", ["as it fails", "and cancelling fails"])
def test_an_engine_that_fails_behind_a_client_that_left(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, error: Exception, leaves: str
) -> None:
    """asyncio complains of a task whose exception nobody asked for, when it is collected."""
    asked: list[Request] = []

    class Failing(Engine):
        async def answer(self, ask: Ask) -> Answer:
            with suppress(asyncio.CancelledError):
                asked[0].client.gone.set_result(None)
                if leaves == "and cancelling fails":
                    await asyncio.sleep(FOREVER)
            raise error

    episode = gateway.open(EpisodeSpec("one", Failing()))
    gc.collect()  # what other tests have left, of which asyncio complains too
    caplog.clear()

    async def scenario() -> None:
        asked.append(request())
        with pytest.raises(ClientGone):
            await answer(episode, asked[0])
        await asyncio.sleep(0)
        gc.collect()

    within(gateway, scenario)
    assert [(call.error or "").partition(":")[0] for call in episode.calls] == ["undelivered"]
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_client_that_leaves_between_two_chunks_is_noticed(gateway: Gateway) -> None:
    episode = gateway.open(EpisodeSpec("one", Engine("x" * 100_000)))

    async def scenario() -> None:
        asked = request(stream=True)
        async with await answer(episode, asked) as reply:
            with pytest.raises(ClientGone):
                async for _ in reply.chunks:
                    asked.client.gone.set_result(None)

    within(gateway, scenario)
    (call,) = episode.calls
    assert call.error is not None and call.error.startswith("undelivered")
