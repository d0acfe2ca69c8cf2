"""What is sent to a model host is answered by the policy, is no inference, or ends the episode
before it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import httpx
import httpx2
import openai
import pytest
import requests
import urllib3
from websockets.asyncio.client import connect
from websockets.sync.client import connect as connect_sync

from ajet_sdk.agent.context import ActiveEpisode, HostGuard
from ajet_sdk.capture import uncaptured
from ajet_sdk.capture.hooks import installed
from ajet_sdk.capture.routing import Reroute, decide
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import UncapturedTraffic
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from tests.sdk.episodes import episode_of, swallow_refusal
from tests.sdk.test_capture import run_in


def sdk(name: str) -> Any:
    """A vendor's package, imported where a test uses it: each worker of pytest-xdist imports every
    module of tests."""
    return importlib.import_module(name)


CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "contents": [],
}
MESSAGE = {"role": "user", "content": "hi"}


@pytest.fixture
def opened() -> Iterator[OpenEpisode]:
    with installed(), Gateway() as gateway:
        yield gateway.open(EpisodeSpec("one", ScriptedEngine(lambda ask: "ok"), guard=HostGuard()))


def outcome(active: ActiveEpisode, method: str, url: str) -> str:
    """What becomes of a request whose body could be of any dialect; of a call over gRPC."""
    try:
        if method == "GRPC":
            with grpc.insecure_channel(url.split("/")[2]) as channel:
                channel.unary_unary(
                    url.partition("://")[2].partition("/")[1:2][0] + "/".join(url.split("/")[3:])
                )(b"", timeout=0.001)
        plan = decide(active, method, url, {}, lambda: MESSAGE if "/threads/" in url else CHAT)
    except UncapturedTraffic:
        return "refused"
    except grpc.RpcError:
        return "passes"
    return "answered" if isinstance(plan, Reroute) else "passes"


def test_what_the_sdks_of_vendors_send(opened: OpenEpisode) -> None:
    """The table was derived from their source; new versions are added to it."""
    lines = (Path(__file__).parent / "vendor_routes.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    assert len(rows) > 450 and {row[3] for row in rows} == {"answered", "passes", "refused"}
    found = run_in(
        opened, lambda: [outcome(opened.active, method, url) for _, method, url, _ in rows]
    )
    assert [row for row, result in zip(rows, found, strict=True) if result != row[3]] == []


POSTS = re.compile(r"self\._(?:post|put|patch)\(\s*(?:path_template\(\s*)?f?\"(/[^\"]*)\"")
PATHS = re.compile(r"(?:path|endpoint_url) = '([^']+)'")
ANSWERED = {
    "openai": {"/chat/completions", "/completions", "/responses", "/responses/input_tokens"},
    "anthropic": {"/v1/messages", "/v1/messages/count_tokens"},
    "google.genai": {":generateContent", ":streamGenerateContent?alt=sse", ":countTokens"},
}
PASSES = {
    "openai": {"/embeddings", "/moderations", "/files", "/uploads", "/vector_stores"},
    "anthropic": {"/v1/files"},
    "google.genai": {":embedContent", ":batchEmbedContents", ":asyncBatchEmbedContent", ":computeTokens", "files",
                     "files/ID", "files:register", "upload/v1beta/files", "upload/v1beta/ID:uploadToFileSearchStore"},
}  # fmt: skip
BASES = {
    "openai": ("https://api.openai.com/v1", POSTS),
    "anthropic": ("https://api.anthropic.com", POSTS),
    "google.genai": ("https://generativelanguage.googleapis.com/v1beta/", PATHS),
}


@pytest.mark.parametrize("package", BASES)
def test_every_post_of_an_installed_sdk(opened: OpenEpisode, package: str) -> None:
    """Whatever a new version adds is refused until it is in one of the two lists."""
    base, pattern = BASES[package]
    root = Path(str(importlib.import_module(package).__file__)).parent
    found = {
        path
        for file in root.rglob("*.py")
        for path in pattern.findall(file.read_text(encoding="utf-8"))
    }
    paths = {re.sub(r"\{+[^{}]*\}+", "ID", path) for path in found}
    paths = {path.replace("upload/ID/", "upload/v1beta/").split("?beta")[0] for path in paths}
    assert len(paths) > (25 if package == "google.genai" else 100)
    by_outcome: dict[str, set[str]] = {"answered": set(), "passes": set(), "refused": set()}
    for path in paths:
        url = base + ("models/m" + path.removeprefix("ID") if path.startswith("ID:") else path)
        by_outcome[outcome(opened.active, "POST", url)].add(
            path.removeprefix("ID") if path.startswith("ID:") else path
        )
    assert by_outcome["answered"] == ANSWERED[package]
    top = {
        path for path in by_outcome["passes"] if not re.match(r"/(?:uploads|vector_stores)/", path)
    }
    assert top == PASSES[package]


def by_openai(path: str) -> Callable[[], Any]:
    def act() -> Any:
        client: Any = openai.OpenAI(max_retries=0)
        for name in path.split(".")[:-1]:
            client = getattr(client, name)
        return client.__getattribute__(path.split(".")[-1])

    return act


def posting(library: Any, url: str) -> Callable[[], Any]:
    return lambda: library.post(url, json=CHAT)


def by_urllib() -> Any:
    request = urllib.request.Request("https://api.cohere.com/v1/chat", json.dumps(CHAT).encode())
    return urllib.request.urlopen(request)


def by_urllib3() -> Any:
    return urllib3.PoolManager().request(
        "PUT", "https://api.replicate.com/v1/predictions", json=CHAT
    )


def by_putrequest() -> Any:
    connection = http.client.HTTPSConnection("api.openai.com")
    connection.putrequest("POST", "/v1/chat/completions")
    connection.endheaders(b"{}")


async def by_aiohttp() -> Any:
    url = "https://bedrock-runtime.us-east-1.amazonaws.com/model/anthropic.claude/invoke"
    async with aiohttp.ClientSession() as session, session.post(url, json=CHAT) as response:
        return response.status


async def by_aiohttp_websocket() -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect("wss://api.openai.com/v1/realtime") as socket,
    ):
        return socket


async def by_async_httpx() -> Any:
    async with httpx.AsyncClient() as client:
        return await client.post(
            "https://dashscope.aliyuncs.com/api/v1/services/aigc/text-generation/generation"
        )


async def by_websockets() -> Any:
    async with connect("wss://generativelanguage.googleapis.com/ws/live") as socket:
        return socket


def by_grpc() -> Any:
    with grpc.secure_channel("dns:///api.x.ai:443", grpc.ssl_channel_credentials()) as channel:
        return channel.unary_unary("/xai_api.Chat/GetCompletion")(b"")


def by_grpc_stream() -> Any:
    with grpc.insecure_channel("us-central1-aiplatform.googleapis.com:443") as channel:
        method = "/google.cloud.aiplatform.v1.PredictionService/StreamGenerateContent"
        return list(channel.unary_stream(method)(b""))


async def by_async_grpc() -> Any:
    async with grpc.aio.insecure_channel("api.x.ai:443") as channel:
        return await channel.unary_unary("/xai_api.Sample/SampleText")(b"")


SHAPES: list[Callable[[], Any]] = [
    lambda: openai.OpenAI(max_retries=0).beta.assistants.create(model="m"),
    lambda: openai.OpenAI(max_retries=0).beta.threads.create_and_run(assistant_id="a"),
    lambda: openai.OpenAI(max_retries=0).beta.threads.messages.create(
        "t", role="user", content="hi"
    ),
    lambda: openai.OpenAI(max_retries=0).conversations.create(
        items=[{"role": "user", "content": "hi"}]
    ),
    lambda: openai.OpenAI(max_retries=0).responses.compact(model="m", input="hi"),
    lambda: openai.OpenAI(max_retries=0).images.generate(model="m", prompt="hi"),
    lambda: openai.OpenAI(max_retries=0).post("/chat/completions", body=[1], cast_to=object),
    lambda: sdk("anthropic").Anthropic(max_retries=0).messages.batches.create(requests=[]),
    lambda: sdk("google.genai").Client().interactions.create(model="m", input="hi"),
    posting(requests, "https://api.mistral.ai/v1/conversations"),
    posting(httpx2, "https://router.huggingface.co/hf-inference/models/m"),
    posting(
        httpx, "https://us-central1-aiplatform.googleapis.com/v1/projects/p/endpoints/1:predict"
    ),
    by_urllib,
    by_urllib3,
    by_putrequest,
    by_aiohttp,
    by_aiohttp_websocket,
    by_async_httpx,
    by_websockets,
    lambda: connect_sync("wss://api.openai.com/v1/realtime"),
    lambda: httpx.get("https://api.openai.com/v1/realtime", headers={"Upgrade": "websocket"}),
    by_grpc,
    by_grpc_stream,
    by_async_grpc,
]


@pytest.mark.filterwarnings(
    "ignore:deprecated", "ignore:The Assistants API"
)  # they are called all the same
@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_a_call_that_slips_past_ends_the_episode_though_others_were_captured(
    shape: Callable[[], Any],
) -> None:
    """And though the agent's framework swallows the error. No name is looked up: there is no
    network here."""

    async def act() -> None:
        openai.OpenAI().chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}]
        )
        with contextlib.suppress(Exception):
            result = shape()
            if asyncio.iscoroutine(result):
                await result

    episode = episode_of(act)
    assert (episode.status, episode.cause, episode.rewards) == (
        "failed",
        "UncapturedTraffic",
        (),
    ), episode.error
    assert len(episode.calls) == 1
    for said in ("rollout.allowed_urls", "rollout.on_uncaptured: warn"):
        assert said in str(episode.error)


def unreachable(request: Any) -> httpx.Response:
    return httpx.Response(200, json={"url": str(request.url)})


def sent(url: str, body: Any = CHAT, **rollout: Any) -> tuple[str, str | None]:
    """Status and cause of an episode that posts to a URL by a client without a network."""

    def act() -> None:
        with httpx.Client(transport=httpx.MockTransport(unreachable)) as client:
            client.post(url, json=body)

    episode = episode_of(act, **rollout)
    return episode.status, episode.cause


REFUSED, PASSED = ("failed", "UncapturedTraffic"), ("succeeded", None)


@pytest.mark.parametrize(
    "path",
    [
        "localhost:11434/api/chat",
        "127.0.0.1:11434/api/generate",
        "localhost:1234/api/v1/chat",
        "[::1]:30000/generate",
        "localhost:8080/completion",
        "localhost:8080/infill",
        "localhost:8000/v2/models/llm/generate",
        "localhost:8000/invocations",
    ],
)
def test_a_model_server_of_this_machine_is_known_by_port_and_path(path: str) -> None:
    assert sent(f"http://{path}") == REFUSED


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("localhost:8000/chat", CHAT),
        ("localhost:8000/api/users", CHAT),
        ("localhost:8000/generate", {"report": "sales"}),
        ("localhost:8080/step", {"messages": []}),
        ("localhost:11434/api/embed", {"model": "m", "input": "x"}),
        ("localhost:11434/api/show", {"model": "m"}),
        ("localhost:8001/generate", CHAT),
        ("tools.example.com:8000/generate", CHAT),
    ],
)
def test_an_application_on_such_a_port_is_left_alone(path: str, body: dict[str, Any]) -> None:
    assert sent(f"http://{path}", body) == PASSED


def test_the_gateway_itself_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, opened: OpenEpisode
) -> None:
    monkeypatch.setattr(uncaptured, "LOCAL_PORTS", frozenset((int(opened.url.rpartition(":")[2]),)))
    url, headers = (
        f"{opened.active.base_url}/generate",
        {"authorization": f"Bearer {opened.active.api_key}"},
    )
    for library in (httpx, requests):
        answer = run_in(
            opened, lambda module=library: module.post(url, json=CHAT, headers=headers, timeout=300)
        )
        assert answer.status_code == 404 and "does not serve the route generate" in answer.text
    assert opened.errors == []


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ("https://api.openai.com/v1/images", PASSED),
        ("https://api.openai.com/v1/images/generations", PASSED),
        ("https://api.openai.com", PASSED),
        ("https://api.openai.com/v1/image", REFUSED),
        ("https://api.openai.com/v1/audio", REFUSED),
    ],
)
def test_urls_that_the_config_allows(allowed: str, expected: tuple[str, str | None]) -> None:
    assert (
        sent("https://api.openai.com:443/v1/images/generations?x=1", allowed_urls=[allowed])
        == expected
    )


def test_with_warn_such_calls_pass() -> None:
    assert sent("https://api.cohere.com/v1/chat", on_uncaptured="warn") == PASSED


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_another_process_swallows_ends_the_episode_too(method: str) -> None:
    def act() -> None:
        with ProcessPoolExecutor(1, mp_context=get_context(method)) as pool:
            assert pool.submit(swallow_refusal).result() == "no answer"

    episode = episode_of(act)
    assert (episode.status, episode.cause) == ("failed", "UncapturedTraffic")
