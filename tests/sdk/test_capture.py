"""Capture of unmodified clients: what is rerouted, what passes through recorded, and what is left
alone.

The endpoint that agents believe they ask is a second gateway, reached under `/v1` with a key, as
any server would be.
"""

from __future__ import annotations

import asyncio
import contextvars
import http.client
import json
import subprocess
import sys
import textwrap
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
import httpx
import httpx2
import openai
import pytest
import requests
import urllib3

import ajet
from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import EngineUnavailable
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from tests.sdk.episodes import episode_of_workflow
from tests.serving import serving

NOWHERE = "http://model.invalid/v1"
module_client = openai.OpenAI(api_key="sk-module", base_url=NOWHERE, max_retries=0)
module_async_client = openai.AsyncOpenAI(api_key="sk-module", base_url=NOWHERE, max_retries=0)


def echo(prefix: str) -> ScriptedEngine:
    return ScriptedEngine(lambda ask: f"{prefix} {ask.body['messages'][-1]['content']}")


def body(text: str, model: str = "gpt", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


@dataclass
class World:
    """A gateway with hooks installed, and an endpoint elsewhere."""

    gateway: Gateway
    elsewhere: OpenEpisode

    @property
    def url(self) -> str:
        return f"{self.elsewhere.url}/v1"

    @property
    def key(self) -> str:
        return self.elsewhere.handle_key

    def open(self, episode_id: str = "one", **spec: Any) -> OpenEpisode:
        return self.gateway.open(EpisodeSpec(episode_id, echo("policy"), **spec))


@pytest.fixture
def world() -> Iterator[World]:
    with installed(), Gateway() as gateway, Gateway() as other:
        yield World(gateway, other.open(EpisodeSpec("elsewhere", echo("elsewhere"))))


def run_in(episode: OpenEpisode, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function (or coroutine function) as the episode's workflow."""

    def call() -> Any:
        current_episode.set(episode.active)
        result = function(*args)
        return asyncio.run(result) if asyncio.iscoroutine(result) else result

    return contextvars.copy_context().run(call)


# One sender for each way to ask: (url, key, text, stream) -> the reply's text


def with_openai(url: str, key: str, text: str, stream: bool) -> str:
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    if not stream:
        return client.chat.completions.create(**body(text)).choices[0].message.content or ""
    return "".join(
        c.choices[0].delta.content or ""
        for c in client.chat.completions.create(**body(text), stream=True)
    )


async def with_async_openai(url: str, key: str, text: str, stream: bool) -> str:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        if not stream:
            return (await client.chat.completions.create(**body(text))).choices[
                0
            ].message.content or ""
        chunks = await client.chat.completions.create(**body(text), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


def with_httpx(url: str, key: str, text: str, stream: bool, library: Any = httpx) -> str:
    headers = {"authorization": f"Bearer {key}"}
    with library.Client(timeout=300) as client:
        if not stream:
            return said(
                client.post(f"{url}/chat/completions", json=body(text), headers=headers).json()
            )
        request = body(text, stream=True)
        with client.stream(
            "POST", f"{url}/chat/completions", json=request, headers=headers
        ) as response:
            return pieces(response.iter_lines())


def with_httpx2(url: str, key: str, text: str, stream: bool) -> str:
    return with_httpx(url, key, text, stream, httpx2)


def with_requests(url: str, key: str, text: str, stream: bool) -> str:
    headers = {"authorization": f"Bearer {key}"}
    request = body(text, stream=stream)
    with requests.post(
        f"{url}/chat/completions", json=request, headers=headers, stream=stream, timeout=300
    ) as response:
        return (
            pieces(line.decode() for line in response.iter_lines())
            if stream
            else said(response.json())
        )


async def with_aiohttp(url: str, key: str, text: str, stream: bool) -> str:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/chat/completions", json=body(text, stream=stream)) as response,
    ):
        if stream:
            return pieces([line.decode().strip() async for line in response.content])
        return said(await response.json())


def with_urllib(url: str, key: str, text: str, stream: bool) -> str:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    data = json.dumps(body(text, stream=stream)).encode()
    request = urllib.request.Request(f"{url}/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        return (
            pieces(line.decode().strip() for line in response)
            if stream
            else said(json.loads(response.read()))
        )


def with_http_client(url: str, key: str, text: str, stream: bool) -> str:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=300)
    connection.request(
        "POST",
        f"{parts.path}/chat/completions",
        json.dumps(body(text, stream=stream)),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    response = connection.getresponse()
    answer = b"".join(iter(lambda: response.read(100), b"")).decode()
    connection.close()
    return pieces(answer.splitlines()) if stream else said(json.loads(answer))


def with_urllib3(url: str, key: str, text: str, stream: bool) -> str:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urllib3.PoolManager(headers=headers) as pool:
        response = pool.request(
            "POST",
            f"{url}/chat/completions",
            json=body(text, stream=stream),
            preload_content=not stream,
            retries=False,
            timeout=300,
        )
        if not stream:
            return said(response.json())
        return pieces(b"".join(response.stream(100)).decode().splitlines())


def said(response: dict[str, Any]) -> str:
    return str(response["choices"][0]["message"]["content"])


def pieces(lines: Any) -> str:
    events = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


SENDERS = [
    with_openai,
    with_async_openai,
    with_httpx,
    with_httpx2,
    with_requests,
    with_aiohttp,
    with_urllib,
    with_http_client,
    with_urllib3,
]
Sender = Callable[[str, str, str, bool], str | Awaitable[str]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sender", SENDERS)
def test_an_unmodified_client_is_answered_by_the_policy(
    world: World, sender: Sender, stream: bool
) -> None:
    episode = world.open()
    assert run_in(episode, sender, NOWHERE, "sk-secret", "hello", stream) == "policy hello"
    (call,) = asyncio.run(episode.finish())
    assert (call.error, call.trainable, call.agent, call.request["model"]) == (
        None,
        True,
        "default",
        "gpt",
    )
    assert call.output_ids is not None
    assert "sk-secret" not in call.model_dump_json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sender", SENDERS)
def test_what_is_not_the_policys_passes_through_recorded(
    world: World, sender: Sender, stream: bool
) -> None:
    episode = world.open(policy_models=frozenset({"the-policy"}))
    assert run_in(episode, sender, world.url, world.key, "hello", stream) == "elsewhere hello"
    (call,) = asyncio.run(episode.finish())
    assert (call.error, call.trainable, call.model, call.output_ids) == (None, False, "gpt", None)
    assert said(call.response) == "elsewhere hello" and call.finish_reason == "stop"
    assert call.request["messages"] == body("hello")["messages"]
    assert world.key not in call.model_dump_json()
    assert len(world.elsewhere.calls) == 1


def test_clients_made_before_the_run_are_captured(world: World) -> None:
    episode = world.open()

    async def agent() -> str:
        first = module_client.chat.completions.create(**body("one")).choices[0].message.content
        second = await module_async_client.chat.completions.create(**body("two"))
        return f"{first}, {second.choices[0].message.content}"

    assert run_in(episode, agent) == "policy one, policy two"


def test_parse_and_raw_responses_are_captured_too(world: World) -> None:
    episode = world.open()

    def agent() -> str:
        raw = module_client.chat.completions.with_raw_response.create(**body("raw"))
        with module_client.chat.completions.stream(**body("streamed")) as stream:
            final = stream.get_final_completion()
        return f"{raw.parse().choices[0].message.content}, {final.choices[0].message.content}"

    assert run_in(episode, agent) == "policy raw, policy streamed"
    assert len(episode.calls) == 2


HEADERS = {"X-Ajet-Agent": "critic"}


def headed_requests(url: str, content: str) -> str:
    return requests.post(url, data=content, headers=HEADERS, timeout=300).text


async def headed_aiohttp(url: str, content: str) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=content, headers=HEADERS) as response,
    ):
        return await response.text()


def headed_httpx(url: str, content: str) -> str:
    return httpx.post(url, content=content, headers=HEADERS, timeout=300).text


@pytest.mark.parametrize("send", [headed_requests, headed_aiohttp, headed_httpx])
def test_a_body_of_plain_text_and_headers_in_capitals_are_read(
    world: World, send: Callable[[str, str], Any]
) -> None:
    episode, text = world.open(), "Grüße 🦊"
    content = json.dumps(body(text), ensure_ascii=False)
    answer = json.loads(run_in(episode, send, f"{NOWHERE}/chat/completions", content))
    assert answer["choices"][0]["message"]["content"] == f"policy {text}"
    assert [call.agent for call in episode.calls] == ["critic"]


def test_a_handles_own_request_goes_as_the_library_sends_it(world: World) -> None:
    """Whatever its body is: only the gateway has to read it."""
    episode = world.open()
    url, headers = (
        f"{world.gateway.url}/v1/chat/completions",
        {"authorization": f"Bearer {episode.handle_key}"},
    )
    content = json.dumps(body("x")).encode()

    async def pieces_of_it() -> AsyncIterator[bytes]:
        yield content

    async def with_aiohttp() -> int:
        post = {"data": pieces_of_it(), "headers": headers}
        async with aiohttp.ClientSession() as session, session.post(url, **post) as response:
            return response.status

    assert (
        run_in(episode, lambda: requests.post(url, headers=headers, timeout=300).status_code) == 400
    )
    for module in (requests, httpx, httpx2):
        part = {"data" if module is requests else "content": iter([content[:9], content[9:]])}
        assert (
            run_in(
                episode,
                lambda m=module, p=part: m.post(url, headers=headers, timeout=300, **p).status_code,
            )
            == 200
        )
    assert run_in(episode, with_aiohttp) == 200


def test_headers_name_the_agent(world: World) -> None:
    episode = world.open(trainable_targets=("wolf",))
    headers = {"x-ajet-agent": "the wolf", "x-ajet-target": "wolf"}
    run_in(
        episode, lambda: module_client.chat.completions.create(**body("a"), extra_headers=headers)
    )
    assert [(call.agent, call.target_tag) for call in episode.calls] == [("the wolf", "wolf")]


def test_outside_of_an_episode_nothing_is_touched(world: World) -> None:
    assert with_openai(world.url, world.key, "hello", False) == "elsewhere hello"
    episode = world.open()
    token_url = f"{world.url}/embeddings"
    answer = run_in(episode, lambda: httpx.post(token_url, json={"model": "m", "input": "x"}))
    assert answer.status_code == 401
    chat = f"{world.url}/channels/7/messages"
    run_in(episode, lambda: httpx.post(chat, json={"content": "hello"}))
    run_in(episode, lambda: httpx.get(f"{world.url}/chat/completions"))
    run_in(episode, lambda: httpx.post(f"{world.url}/chat/completions", content=b"not json"))
    assert episode.calls == ()


def test_every_dialect_goes_to_the_policy_and_passes_through_otherwise(world: World) -> None:
    request: dict[str, Any] = {
        "model": "gpt",
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "hi"}],
    }

    def messages(url: str) -> int:
        return httpx.post(
            f"{url}/messages", json=request, headers={"x-api-key": "sk-ant"}
        ).status_code

    def gemini(url: str) -> int:
        contents = {"contents": [{"parts": [{"text": "hi"}]}]}
        return httpx.post(
            f"{url}beta/models/gpt:generateContent?key=sk-g", json=contents
        ).status_code

    def responses(url: str) -> None:
        openai.OpenAI(base_url=url, api_key="sk-no", max_retries=0).responses.create(
            model="gpt", input="hi"
        )

    policy, other = world.open("policy"), world.open("other", policy_models=frozenset({"else"}))
    run_in(policy, responses, NOWHERE)
    assert run_in(policy, messages, NOWHERE) == run_in(policy, gemini, NOWHERE) == 200
    with pytest.raises(openai.AuthenticationError):
        run_in(other, responses, world.url)
    assert run_in(other, messages, world.url) == run_in(other, gemini, world.url) == 401
    assert [(c.error, c.trainable) for c in policy.calls] == [(None, True)] * 3
    assert (
        len({tuple(c.prompt_ids.tolist()) for c in policy.calls if c.prompt_ids is not None}) == 1
    )
    assert [(c.error, c.model, c.trainable) for c in other.calls] == [
        ("HTTP 401", "gpt", False)
    ] * 3


def test_a_second_model_is_refused_and_says_so(world: World) -> None:
    episode = world.open()

    def agent() -> None:
        module_client.chat.completions.create(**body("a", model="small"))
        module_client.chat.completions.create(**body("b", model="large"))

    with pytest.raises(openai.BadRequestError, match=r"'small'.*'large'"):
        run_in(episode, agent)
    assert type(episode.errors[0]).__name__ == "ModelAmbiguous"


def test_where_a_handle_is_used_only_the_handle_is_the_policys(world: World) -> None:
    episode = world.open(uses_handle=True)

    async def agent() -> list[str]:
        handle = (await episode.model().chat(body("a")["messages"])).content
        return [handle, with_openai(world.url, world.key, "b", False)]

    assert run_in(episode, agent) == ["policy a", "elsewhere b"]
    assert [(call.trainable, call.model) for call in episode.calls] == [
        (True, "scripted"),
        (False, "gpt"),
    ]


def test_judges_are_recorded_and_never_rerouted(world: World) -> None:
    async def scenario() -> None:
        episode = world.open()
        async with episode.judging():
            assert (
                await with_async_openai(world.url, world.key, "score it", True)
                == "elsewhere score it"
            )
        (call,) = await episode.finish()
        assert (call.phase, call.trainable, call.error) == ("judge", False, None)

    asyncio.run(scenario())


def test_a_stream_that_the_agent_closes_early_is_recorded_as_far_as_it_went(world: World) -> None:
    episode = world.open(policy_models=frozenset({"the-policy"}))
    text = "a long story " * 2000

    def agent() -> None:
        request, headers = body(text, stream=True), {"authorization": f"Bearer {world.key}"}
        with httpx.stream(
            "POST", f"{world.url}/chat/completions", json=request, headers=headers
        ) as response:
            for _ in zip(range(3), response.iter_lines(), strict=False):
                pass

    run_in(episode, agent)
    (call,) = episode.calls
    assert call.error in (None, "undelivered") and call.response["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_passes_through_and_is_none_is_recorded_as_a_fault(stream: bool) -> None:
    misfit = {"id": "x", "choices": [{"index": 0}]}
    content = (
        b"data: " + json.dumps({"error": {"message": "no"}}).encode() + b"\n\n"
        if stream
        else json.dumps(misfit)
    )
    kind = "text/event-stream" if stream else "application/json"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", kind.encode())],
            }
        )
        await send({"type": "http.response.body", "body": content if stream else content.encode()})

    with installed(), Gateway() as gateway, serving(app) as url:
        episode = gateway.open(
            EpisodeSpec("one", echo("policy"), policy_models=frozenset({"the-policy"}))
        )
        run_in(
            episode,
            lambda: (
                httpx.post(f"{url}/v1/chat/completions", json=body("hello", stream=stream)).text
            ),
        )
        (call,) = episode.calls
    assert "an invalid reply" in (call.error or "")
    assert isinstance(episode.errors[0], EngineUnavailable)


def test_an_endpoint_that_is_not_there_is_recorded_and_raises_as_before(world: World) -> None:
    episode = world.open(policy_models=frozenset({"the-policy"}))
    with pytest.raises(httpx.ConnectError):
        run_in(episode, with_httpx, "http://127.0.0.1:9/v1", "k", "hello", False)
    with pytest.raises(requests.ConnectionError):
        run_in(episode, with_requests, "http://127.0.0.1:9/v1", "k", "hello", False)
    with pytest.raises(aiohttp.ClientConnectorError):
        run_in(episode, with_aiohttp, "http://127.0.0.1:9/v1", "k", "hello", False)
    assert ["Connect" in (call.error or "") for call in episode.calls] == [True, True, True]


def test_threads_and_executors_keep_the_episode(world: World) -> None:
    episode = world.open()

    async def agent() -> list[str]:
        out: list[str] = []

        def ask(text: str) -> None:
            out.append(with_httpx(NOWHERE, "k", text, False))

        thread = threading.Thread(target=ask, args=("thread",))
        thread.start()
        await asyncio.to_thread(thread.join)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ask, "pool").result()
            list(pool.map(ask, ["map"]))
        await asyncio.get_running_loop().run_in_executor(None, ask, "executor")
        await asyncio.to_thread(ask, "to_thread")
        await asyncio.gather(
            *(with_async_openai(NOWHERE, "k", f"task {n}", False) for n in range(2))
        )
        return out

    assert run_in(episode, agent) == [
        f"policy {how}" for how in ("thread", "pool", "map", "executor", "to_thread")
    ]
    assert len(episode.calls) == 7


def test_a_shared_pool_serves_each_episode_as_its_own(world: World) -> None:
    one, two = world.open("one"), world.open("two")
    with ThreadPoolExecutor(1) as pool:

        def agent(text: str) -> str:
            return pool.submit(with_httpx, NOWHERE, "k", text, False).result()

        run_in(one, agent, "first")
        run_in(two, agent, "second")
        assert (
            pool.submit(with_httpx, world.url, world.key, "third", False).result()
            == "elsewhere third"
        )
    assert [c.request["messages"][0]["content"] for c in one.calls] == ["first"]
    assert [c.request["messages"][0]["content"] for c in two.calls] == ["second"]


def test_a_left_over_thread_cannot_reach_a_model_after_the_episode(world: World) -> None:
    episode = world.open()

    def agent() -> threading.Thread:
        def later() -> None:
            go_on.wait()
            outcome.append(
                httpx.post(f"{world.url}/chat/completions", json=body("late")).status_code
            )

        thread = threading.Thread(target=later)
        thread.start()
        return thread

    go_on, outcome = threading.Event(), list[int]()
    thread = run_in(episode, agent)
    asyncio.run(episode.finish())
    go_on.set()
    thread.join()
    assert outcome == [410] and world.elsewhere.calls == ()


def test_everything_is_restored_at_the_end() -> None:
    def wrapped() -> list[Any]:
        clients = [m.Client.send for m in (httpx, httpx2)] + [
            m.AsyncClient.send for m in (httpx, httpx2)
        ]
        others = [
            urllib3.HTTPConnectionPool.urlopen,
            aiohttp.ClientSession._request,
            threading.Thread.start,
        ]
        return [
            *clients,
            *others,
            ThreadPoolExecutor.submit,
            subprocess.Popen.__init__,
            *sys.meta_path,
        ]

    before = wrapped()
    with installed():
        during = wrapped()
        assert all(a is not b for a, b in zip(before[:9], during[:9], strict=True))
        with pytest.raises(KeyError), installed():
            assert wrapped() == during
            raise KeyError
        assert wrapped() == during
    assert wrapped() == before


def test_what_an_agent_instruments_stays_so_and_each_call_is_recorded_once() -> None:
    """As OpenTelemetry's instrumentations do it, which an agent may switch on within its first
    episode."""
    start, run, send = threading.Thread.start, threading.Thread.run, httpx.Client.send
    seen: list[str] = []

    def instrument() -> Callable[[], None]:
        ours, theirs = threading.Thread.start, httpx.Client.send

        def started(self: Any) -> None:
            self.context = "set by start"
            ours(self)

        def ran(self: Any) -> None:
            seen.append(self.context)
            run(self)

        def sent(self: Any, request: Any, **kwargs: Any) -> Any:
            seen.append("sent")
            return theirs(self, request, **kwargs)

        threading.Thread.start, threading.Thread.run = started, ran  # type: ignore[method-assign]
        httpx.Client.send = sent  # type: ignore[method-assign, assignment]

        def undone() -> None:
            threading.Thread.start, threading.Thread.run = ours, run  # type: ignore[method-assign]
            httpx.Client.send = theirs  # type: ignore[method-assign]

        return undone

    def agent() -> str:
        said: list[str] = []
        thread = threading.Thread(target=lambda: said.append(with_httpx(NOWHERE, "k", "x", False)))
        thread.start()
        thread.join()
        return said[0]

    uninstrument = None
    for _ in range(3):
        with installed(), Gateway() as gateway:
            uninstrument = uninstrument or instrument()
            episode = gateway.open(EpisodeSpec("one", echo("policy")))
            assert run_in(episode, agent) == "policy x"
            assert len(episode.calls) == 1
            assert seen.count("sent") == 1 and seen[0] == "set by start"
        seen.clear()
        world = threading.Thread(target=seen.clear)  # outside of a run, too
        world.start()
        world.join()
    uninstrument()
    with installed():
        pass
    assert (threading.Thread.start, threading.Thread.run, httpx.Client.send) == (start, run, send)


@pytest.mark.slow
def test_a_library_that_is_imported_during_the_run_is_captured() -> None:
    program = """
        import asyncio, sys
        from ajet_sdk.capture.hooks import installed
        from ajet_sdk.config.api_keys import placeholder_keys
        from ajet_sdk.engines.scripted import ScriptedEngine
        from ajet_sdk.gateway.gateway import EpisodeSpec, Gateway
        from ajet_sdk.agent.context import current_episode

        with placeholder_keys(), installed(), Gateway() as gateway:
            episode = gateway.open(EpisodeSpec("e", ScriptedEngine(lambda ask: "policy")))
            current_episode.set(episode.active)
            assert not {"openai", "httpx", "httpx2", "requests", "aiohttp"} & set(sys.modules)
            import openai, requests, httpx

            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            print(openai.OpenAI().chat.completions.create(**body).choices[0].message.content)
            for library in (requests, httpx):
                print(library.post("https://model.invalid/v1/chat/completions", json=body).status_code)
            assert type(httpx.__spec__.loader).__name__ == "SourceFileLoader"
            assert len(asyncio.run(episode.finish())) == 3
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == ["policy", "200", "200"], done.stderr


@pytest.mark.parametrize("place", ["header", "query"])
def test_a_key_that_a_server_repeats_is_stored_nowhere(place: str) -> None:
    key = "company/key+0123456789"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answer = {"error": {"message": f"Incorrect API key provided: {key}", "code": [key]}}
        content = json.dumps(answer).replace("/", "\\/").encode()
        await send(
            {
                "type": "http.response.start",
                "status": 401,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": content})

    with serving(app) as url:

        @ajet.workflow
        def agent() -> ajet.Reward:
            headers = {"authorization": f"Bearer {key}"} if place == "header" else {}
            query = "" if place == "header" else f"?key={quote(key, safe='')}"
            reply = httpx.post(
                f"{url}/v1/chat/completions{query}", json=body("hello"), headers=headers
            )
            raise ValueError(reply.json()["error"]["message"])

        episode = episode_of_workflow(agent, policy_models=["else"])
    assert (episode.cause, len(episode.calls)) == ("EngineUnavailable", 1)
    assert "Incorrect API key provided" in (episode.error or "")
    assert key not in episode.model_dump_json()
