"""The gateway over real HTTP: routes, keys, errors, streams, what becomes of a call."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.engines.scripted import ByteTokenizer, ScriptedEngine
from ajet_sdk.errors import (
    ConfigError,
    ContextOverflow,
    EngineUnavailable,
    ModelAmbiguous,
    RequestRefused,
)
from ajet_sdk.gateway import access
from ajet_sdk.gateway import answer as answer_module
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Answer, Ask, Choice
from tests.waiting import FOREVER, until

USER = [{"role": "user", "content": "What is six times seven?"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}},
    }
]
CALLING = {
    "content": "Let me see.",
    "tool_calls": [{"function": {"name": "calc", "arguments": {"a": 6, "b": "ü"}}}],
}


Opener = Callable[..., OpenEpisode]


@pytest.fixture
def open_episode(gateway: Gateway) -> Opener:
    def open_one(replies: Any = "forty-two", episode_id: str = "one", **spec: Any) -> OpenEpisode:
        told = replies if callable(replies) else lambda ask: replies
        return gateway.open(
            EpisodeSpec(episode_id, ScriptedEngine(told, max_model_len=4000, logprob=-1.0), **spec)
        )

    return open_one


def post(
    episode: OpenEpisode, body: dict[str, Any], route: str = "chat/completions", **more: Any
) -> httpx.Response:
    model = episode.model()
    headers = {"authorization": f"Bearer {model.api_key}"}
    return httpx.post(f"{model.base_url}/{route}", json=body, headers=headers, timeout=300, **more)


def test_a_call_is_answered_and_recorded_with_the_ids_that_the_engine_saw(
    open_episode: Opener,
) -> None:
    episode = open_episode(seed=3)
    client = episode.model(agent="solver").openai()
    reply = client.chat.completions.create(
        model="anything", messages=USER, temperature=0.5, max_tokens=100, user="me"
    )
    assert reply.choices[0].message.content == "forty-two"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None and reply.usage.completion_tokens == len("forty-two") + 1
    (call,) = episode.calls
    tokenizer = episode.spec.engine.tokenizer
    assert call.prompt_ids is not None and call.output_ids is not None and call.logprobs is not None
    assert tokenizer.decode(call.prompt_ids.tolist()).endswith(
        "seven?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(call.output_ids.tolist()) == "forty-two<|im_end|>"
    assert len(call.logprobs) == len(call.output_ids)
    assert (call.agent, call.trainable, call.phase, call.error, call.index) == (
        "solver",
        True,
        "rollout",
        None,
        0,
    )
    assert call.request["user"] == "me" and call.request["model"] == "anything"
    assert call.response["choices"][0]["message"]["content"] == "forty-two"
    assert call.sampling["temperature"] == 0.5 and call.sampling["max_tokens"] == 100
    assert isinstance(call.sampling["seed"], int) and call.policy_version == 0


def test_each_choice_is_a_call_of_one_request(open_episode: Opener) -> None:
    episode = open_episode(lambda ask: ["a", "b", "c"])
    reply = post(episode, {"messages": USER, "n": 3}).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["a", "b", "c"]
    calls = episode.calls
    assert [call.response["choices"][0]["message"]["content"] for call in calls] == ["a", "b", "c"]
    assert (
        len({call.request_id for call in calls}) == 1 and len({call.call_id for call in calls}) == 3
    )
    assert [call.index for call in calls] == [0, 1, 2]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_what_the_whole_response_says(open_episode: Opener, n: int) -> None:
    episode = open_episode(CALLING)
    client = episode.model().openai()
    arguments: dict[str, Any] = {"model": "m", "messages": USER, "tools": TOOLS, "n": n}
    whole = client.chat.completions.create(**arguments)
    chunks = list(
        client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    for index in range(n):
        parts = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        message = whole.choices[index].message
        assert message.tool_calls is not None
        assert (
            "".join(part.delta.content or "" for part in parts) == message.content == "Let me see."
        )
        calls = [call for part in parts for call in part.delta.tool_calls or []]
        assert calls[0].id == message.tool_calls[0].id and calls[0].function.name == "calc"
        spelt = "".join(call.function.arguments or "" for call in calls)
        assert json.loads(spelt) == {"a": 6, "b": "ü"} and all(call.index == 0 for call in calls)
        assert parts[0].delta.role == "assistant" and parts[-1].finish_reason == "tool_calls"
    first, second = episode.calls[:n], episode.calls[n:]
    assert [call.response["choices"] for call in first] == [
        call.response["choices"] for call in second
    ]


def test_logprobs_and_ids_come_only_when_asked_for(open_episode: Opener) -> None:
    episode = open_episode("né")
    plain = post(episode, {"messages": USER}).json()
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None
    full = post(
        episode, {"messages": USER, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    ).json()
    call = episode.calls[1]
    assert call.prompt_ids is not None and call.output_ids is not None
    assert full["prompt_token_ids"] == call.prompt_ids.tolist()
    assert full["choices"][0]["token_ids"] == call.output_ids.tolist()
    content = full["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == "né<|im_end|>"
    assert {token["logprob"] for token in content} == {-1.0}


def test_completions_and_models(open_episode: Opener) -> None:
    episode = open_episode()
    client = episode.model().openai()
    reply = client.completions.create(model="m", prompt="Once", logprobs=0)
    assert reply.choices[0].text == "forty-two"
    assert reply.choices[0].logprobs is not None and reply.choices[0].logprobs.tokens is not None
    chunks = list(client.completions.create(model="m", prompt=[65, 66], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "forty-two"
    assert [call.prompt_ids.tolist() for call in episode.calls if call.prompt_ids is not None] == [
        list(b"Once"),
        [65, 66],
    ]
    assert [model.id for model in client.models.list()] == ["scripted"]


def test_other_routes_are_404_and_name_the_route(open_episode: Opener) -> None:
    episode = open_episode()
    for route in ("embeddings", "images/generations"):
        refused = post(episode, {"model": "m", "input": "x", "messages": USER}, route)
        assert refused.status_code == 404 and route in refused.json()["error"]["message"]
        assert refused.headers["x-should-retry"] == "false"
    assert httpx.get(f"{episode.url}/v2/nothing").status_code == 404
    base, headers = episode.model().base_url, bearer(episode.model().api_key)
    for answer in (
        httpx.get(f"{base}/files", headers=headers),
        httpx.post(f"{base}/files", headers=headers),
    ):
        assert answer.status_code == 404 and "files" in answer.json()["error"]["message"]
    get = httpx.get(
        f"{episode.model().base_url}/chat/completions", headers=bearer(episode.model().api_key)
    )
    assert get.status_code == 405


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


def test_who_asks_is_in_the_path_then_the_key_then_the_header(
    gateway: Gateway, open_episode: Opener
) -> None:
    one, two = open_episode(episode_id="one"), open_episode(episode_id="two")
    body = {"messages": USER}

    def ask(url: str, headers: dict[str, str]) -> int:
        return httpx.post(
            f"{gateway.url}{url}/chat/completions", json=body, headers=headers
        ).status_code

    key = one.model().api_key
    assert (
        ask("/episodes/one/wolf%2Fa;target=night/v1", bearer(key, **{"x-ajet-agent": "ignored"}))
        == 200
    )
    assert ask("/v1", bearer(key, **{"x-ajet-agent": "by-header", "x-ajet-episode": "two"})) == 200
    assert (
        ask("/v1", bearer(gateway.token, **{"x-ajet-episode": "two", "x-ajet-agent": "late"}))
        == 200
    )
    assert ask("/v1", {"x-api-key": key}) == 200
    assert [(c.agent, c.target_tag) for c in one.calls] == [
        ("wolf/a", "night"),
        ("by-header", None),
        ("default", None),
    ]
    assert [c.agent for c in two.calls] == ["late"]
    assert ask("/episodes/two/default/v1", bearer(key)) == 401
    assert ask("/episodes/one/default/v1", bearer("sk-foreign")) == 401
    assert ask("/v1", {}) == 401
    assert ask("/v1", bearer("sk-foreign", **{"x-ajet-episode": "one"})) == 401
    assert ask("/v1", bearer(gateway.token, **{"x-ajet-episode": "none"})) == 410


def test_a_finished_episode_is_410(open_episode: Opener) -> None:
    episode = open_episode()
    model = episode.model()
    assert post(episode, {"messages": USER}).status_code == 200
    calls = asyncio.run(episode.finish())
    assert len(calls) == 1
    client = model.openai()
    with pytest.raises(openai.APIStatusError, match="is over") as refused:
        client.chat.completions.create(model="m", messages=USER)
    assert refused.value.status_code == 410
    assert len(asyncio.run(episode.finish())) == 1


def test_an_episode_id_is_opened_once_at_a_time(open_episode: Opener) -> None:
    first = open_episode()
    with pytest.raises(ConfigError, match="already open"):
        open_episode()
    asyncio.run(first.finish())
    open_episode()


def test_malformed_requests_are_400_and_do_not_harm(
    open_episode: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = open_episode()
    base, headers = f"{episode.model().base_url}/chat/completions", bearer(episode.model().api_key)
    endless = json.dumps({"messages": USER, "max_tokens": float("inf")}).encode()
    for content, says in (
        (b"{", "not JSON"), (b"[1]", "JSON object"), (b"[" * 100_000, "not JSON"), (endless, "max_tokens"),
    ):  # fmt: skip
        refused = httpx.post(base, content=content, headers=headers)
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]
    for body, param in (
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages"),
        ({"messages": USER, "n": 0}, "n"),
        ({"messages": USER, "temperature": "hot"}, "temperature"),
        ({"messages": USER, "top_p": 0}, "top_p"),
        ({"messages": USER, "stop": [1]}, "stop"),
        ({"messages": USER, "tools": ["calc"]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": ["calc"]}]}, "messages"),
        ({"messages": USER, "stream": True, "stream_options": "usage"}, "stream_options"),
        ({"messages": USER, "logprobs": True, "top_logprobs": "few"}, "top_logprobs"),
    ):
        refused = post(episode, body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), body
    monkeypatch.setattr(access, "LARGEST_BODY", 100)
    assert post(episode, {"messages": USER, "user": "x" * 200}).status_code == 413
    assert all(call.error for call in episode.calls) and len(episode.calls) == 15
    assert episode.errors == []


def test_a_request_over_the_limit_is_refused_before_it_is_read(open_episode: Opener) -> None:
    """Found with 60 MB of text: 2.9 GB of memory, a traceback, and no record of the call."""
    episode = open_episode()
    client = Client(episode, length=600 * 2**20)  # of which no byte follows the first ones
    announced = client.read()
    client.socket.close()
    assert announced.startswith(b"HTTP/1.1 413") and b"629,145,600 bytes" in announced

    model, megabyte = episode.model(), b"x" * 2**20
    content = (megabyte for _ in range(200))
    url, headers = f"{model.base_url}/chat/completions", bearer(model.api_key)
    unannounced = httpx.post(url, content=content, headers=headers)
    assert (
        unannounced.status_code == 413
        and unannounced.json()["error"]["code"] == "request_too_large"
    )
    for call in episode.calls:
        assert "the limit is 134,217,728" in (call.error or "") and call.request == {}
    assert len(episode.calls) == 2 and episode.errors == []


MANY = [{"type": "text", "text": "x"}] * 60_000


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": [USER[0]] * 60_000}),
        ("chat/completions", {"messages": [{"role": "user", "content": MANY}]}),
        ("chat/completions", {"messages": USER, "tools": TOOLS * 60_000}),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": MANY}]}),
        ("messages", {"messages": [{"role": "user", "content": MANY}], "max_tokens": 9}),
        ("responses", {"input": [{"role": "user", "content": "x"}] * 60_000}),
        ("models/m:generateContent", {"contents": [{"parts": MANY}]}),
    ],
)
@pytest.mark.parametrize("captured", [False, True])
def test_a_request_of_very_many_parts_is_refused_and_recorded_without_them(
    open_episode: Opener, route: str, body: dict[str, Any], captured: bool
) -> None:
    """Each part costs far more than its bytes: 15 MB of them took the gateway's loop for 14
    processor seconds."""
    episode = open_episode()
    if captured:
        with installed():
            token = current_episode.set(episode.active)
            response = httpx.post(f"http://model.invalid/v1/{route}", json={"model": "m", **body})
            current_episode.reset(token)
    else:
        response = post(episode, {"model": "m", **body}, route)
    assert response.status_code == 413
    (call,) = episode.calls
    assert "60,0" in (call.error or "") and call.request == {}


class SlowTokenizer(ByteTokenizer):
    """Waits before it encodes a long text."""

    def __init__(self) -> None:
        self.waiting, self.goes_on = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        if len(text) > 100_000:
            self.waiting.set()
            assert self.goes_on.wait(FOREVER)
        return super().encode(text)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "long " * 100_000}]}),
        ("completions", {"prompt": "long " * 100_000}),
        ("messages/count_tokens", {"messages": [{"role": "user", "content": "long " * 100_000}]}),
    ],
)
def test_a_large_request_holds_up_no_other_episode(
    gateway: Gateway, route: str, body: dict[str, Any]
) -> None:
    tokenizer = SlowTokenizer()
    engine = ScriptedEngine(lambda ask: "hi", tokenizer=tokenizer)
    one, two = gateway.open(EpisodeSpec("one", engine)), gateway.open(EpisodeSpec("two", engine))
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(post, one, {"model": "m", "max_tokens": 9, **body}, route)
        try:
            assert tokenizer.waiting.wait(FOREVER)
            assert post(two, {"messages": USER}).status_code == 200 and not large.done()
        finally:
            tokenizer.goes_on.set()
        assert large.result().status_code == 200


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("logit_bias", {"x": 5}),
        ("frequency_penalty", 2.5),
        ("min_p", 1.1),
        ("stop_token_ids", ["x"]),
        ("guided_whitespace_pattern", " "),
    ],
)
def test_what_would_change_sampling_and_cannot_be_honoured_is_named(
    open_episode: Opener, parameter: str, value: Any
) -> None:
    episode = open_episode()
    refused = post(episode, {"messages": USER, "tools": TOOLS, parameter: value})
    assert refused.status_code == 400 and refused.headers["x-should-retry"] == "false"
    assert (
        refused.json()["error"]["param"] == parameter
        and parameter in refused.json()["error"]["message"]
    )
    assert parameter in (episode.calls[0].error or "")


def test_what_does_not_change_sampling_is_accepted_and_recorded(open_episode: Opener) -> None:
    episode = open_episode()
    harmless = {
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "logit_bias": {},
    }
    neutral = {
        "frequency_penalty": 0,
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stop": None,
    }
    reply = post(episode, {"messages": USER, "tools": TOOLS, **harmless, **neutral})
    assert reply.status_code == 200
    assert harmless.items() <= episode.calls[0].request.items()


def test_engine_errors_keep_their_kind(open_episode: Opener) -> None:
    faults: dict[str, Exception] = {
        "long": ContextOverflow("too long"),
        "down": EngineUnavailable("no engine"),
        "bad": RequestRefused("no such thing", "thing"),
        "bug": ZeroDivisionError("oops"),
    }

    def reply(ask: Ask) -> str:
        raise faults[ask.body["messages"][0]["content"]]

    episode = open_episode(reply)
    answers = {
        name: post(episode, {"messages": [{"role": "user", "content": name}]}) for name in faults
    }
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "long": 400,
        "down": 503,
        "bad": 400,
        "bug": 500,
    }
    assert answers["long"].json()["error"]["code"] == "context_length_exceeded"
    assert answers["bad"].json()["error"]["param"] == "thing"
    assert all(answer.headers["x-should-retry"] == "false" for answer in answers.values())
    assert [call.error for call in episode.calls][:3] == ["too long", "no engine", "no such thing"]
    assert "ZeroDivisionError" in (episode.calls[3].error or "")
    assert episode.context_overflow and isinstance(episode.errors[0], EngineUnavailable)


class Answering:
    """An engine of a user's own: whatever it is made to answer."""

    model = "own"

    def __init__(self, **changed: Any) -> None:
        choice = {
            "message": {"content": "yes"},
            "text": None,
            "finish_reason": "stop",
            "output_ids": [1, 2],
        }
        given = {
            **choice,
            "logprobs": [-1.0, -2.0],
            **{k: v for k, v in changed.items() if k != "prompt_ids"},
        }
        self.reply = Answer((Choice(**given),), "own", changed.get("prompt_ids", [5, 6]))

    async def answer(self, ask: Ask) -> Answer:
        return self.reply

    def forget(self, episode_id: str) -> None: ...

    async def aclose(self) -> None: ...


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"output_ids": [1, 2**31]}, "token id"),
        ({"output_ids": [1, -1]}, "token id"),
        ({"output_ids": [1, 2.0]}, "token id"),
        ({"output_ids": [1, 10**30]}, "token id"),
        ({"prompt_ids": [2**40]}, "token id"),
        ({"logprobs": [-1.0, float("nan")]}, "log-probability"),
        ({"logprobs": [-1.0, float("-inf")]}, "log-probability"),
        ({"logprobs": [-1.0, -1e300]}, "log-probability"),
        ({"logprobs": [-1.0, 0.5]}, "log-probability"),
        ({"logprobs": [-1.0, None]}, "log-probability"),
        ({"logprobs": [-1.0]}, "2 token ids and 1 log-probabilities"),
        ({"tokens": [b"a"]}, "2 token ids and 1 tokens"),
        ({"message": None}, "no message"),
        ({"message": {"content": 7}}, "content"),
        ({"message": {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}}, "arguments"),
    ],
)
def test_an_engines_answer_that_cannot_be_is_an_infrastructure_fault(
    gateway: Gateway, changed: dict[str, Any], says: str
) -> None:
    sound = gateway.open(EpisodeSpec("sound", Answering()))
    assert post(sound, {"messages": USER}).status_code == 200 and sound.errors == []
    assert (
        "1 choices, and n is 2"
        in post(sound, {"messages": USER, "n": 2}).json()["error"]["message"]
    )
    for stream in (False, True):
        episode = gateway.open(EpisodeSpec(f"one {stream}", Answering(**changed)))
        refused = post(episode, {"messages": USER, "stream": stream})
        assert refused.status_code == 503 and says in refused.json()["error"]["message"]
        (call,) = episode.calls
        assert says in (call.error or "") and call.output_ids is None
        assert isinstance(episode.errors[0], EngineUnavailable)


def test_a_prompt_longer_than_the_model_is_an_overflow(open_episode: Opener) -> None:
    episode = open_episode()
    refused = post(episode, {"messages": [{"role": "user", "content": "x" * 4000}]})
    assert (
        refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    )
    assert episode.context_overflow and episode.errors == []
    fits = post(
        episode, {"messages": [{"role": "user", "content": "x" * 3975}], "max_tokens": 4000}
    ).json()
    assert fits["choices"][0]["finish_reason"] == "length"


def test_retries_of_a_client_are_calls_of_their_own(open_episode: Opener) -> None:
    async def scenario() -> None:
        asked = []

        async def reply(ask: Ask) -> str:
            asked.append(ask)
            if len(asked) == 1:
                await asyncio.sleep(FOREVER)
            return "in time"

        episode = open_episode(reply)
        client = episode.model().async_openai().with_options(timeout=0.5, max_retries=20)
        reply_ = await client.chat.completions.create(model="m", messages=USER)
        assert reply_.choices[0].message.content == "in time"
        errors = [call.error for call in episode.calls]
        assert (
            len(errors) == len(asked) and set(errors[:-1]) == {"undelivered"} and errors[-1] is None
        )

    asyncio.run(scenario())


def test_a_long_wait_sends_comments_and_errors_come_as_events(
    open_episode: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_module, "HEARTBEAT", 0.05)

    async def reply(ask: Ask) -> str:
        await asyncio.sleep(0.3)
        if ask.body["messages"][0]["content"] == "fail":
            raise EngineUnavailable("the engine went away")
        return "late"

    episode = open_episode(reply)
    lines = post(episode, {"messages": USER, "stream": True}).text.split("\n")
    assert ": waiting" in lines and lines[-3] == "data: [DONE]"
    client = episode.model().openai()
    chunks = client.chat.completions.create(model="m", messages=USER, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "late"
    with pytest.raises(openai.APIError, match="went away"):
        list(
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "fail"}], stream=True
            )
        )
    assert [call.error for call in episode.calls] == [None, None, "the engine went away"]


def test_a_stream_closed_after_the_whole_reply_is_delivered(open_episode: Opener) -> None:
    episode = open_episode()
    model = episode.model()
    body = {"messages": USER, "stream": True}
    with httpx.stream(
        "POST", f"{model.base_url}/chat/completions", json=body, headers=bearer(model.api_key)
    ) as response:
        for line in response.iter_lines():
            if '"finish_reason":"stop"' in line:
                break
    (call,) = asyncio.run(episode.finish())
    assert call.error is None and call.output_ids is not None


class Client:
    """A socket that asks and reads as it likes, with a receive buffer that no system enlarges."""

    def __init__(self, episode: OpenEpisode, length: int | None = None, **body: Any) -> None:
        address = urlsplit(episode.model().base_url)
        content = json.dumps({"messages": USER, **body}).encode()
        head = f"POST {address.path}/chat/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        head += (
            f"authorization: Bearer {episode.handle_key}\r\ncontent-length:"
            f" {length or len(content)}\r\n\r\n"
        )
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        self.socket.settimeout(FOREVER)
        self.socket.connect((address.hostname, address.port))
        self.socket.sendall(head.encode() + content)

    def read(self, count: int | None = None) -> bytes:
        """So many bytes, or all."""
        found = b""
        while count is None or len(found) < count:
            part = self.socket.recv(min(4096, count - len(found)) if count else 65536)
            found += part
            if not part or (count is None and found.endswith((b"\r\n0\r\n\r\n", b"}}"))):
                break
        return found


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_long_reply_cut_after_one_read_is_undelivered(open_episode: Opener, stream: bool) -> None:
    """Found in training:
    `reply of 1,500,001 tokens, client read 48 characters: ledger trained 1,500,001`."""
    episode = open_episode("x" * 1_500_000, max_tokens=None)
    episode.spec.engine.chat.max_model_len = 10_000_000
    client = Client(episode, stream=stream)
    client.read(4096)
    client.socket.close()
    (call,) = asyncio.run(episode.finish())
    assert call.output_ids is not None and len(call.output_ids) == 1_500_001
    assert (call.error or "").startswith("undelivered")


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_reply_that_is_read_slowly_is_delivered(open_episode: Opener, stream: bool) -> None:
    episode = open_episode("x" * 500_000)
    episode.spec.engine.chat.max_model_len = 10_000_000
    client = Client(episode, stream=stream)
    head = client.read(1000)
    assert (head + client.read()).count(b"x") >= 500_000
    client.socket.close()
    (call,) = asyncio.run(episode.finish())
    assert call.error is None


def test_a_short_body_cut_after_one_read_is_undelivered_in_the_trace_too(tmp_path: Path) -> None:
    from ajet_sdk.trace.reader import open_trace
    from ajet_sdk.trace.writer import TraceWriter

    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer, Gateway(writer) as gateway:
        for name, whole in (("cut", False), ("whole", True)):
            episode = gateway.open(
                EpisodeSpec(name, ScriptedEngine(lambda ask: "forty-two " * 400))
            )
            client = Client(episode)
            client.read(None if whole else 200)
            (recorded,) = episode.calls
            assert recorded.error is None
            client.socket.close()
            (call,) = asyncio.run(episode.finish())
            assert call.error == (
                None if whole else "undelivered: the client disconnected before the end"
            )
    with open_trace(path) as reader:
        found = {row["episode_id"]: row["error"] for row in reader.query("FROM calls").to_pylist()}
    assert found["whole"] is None and found["cut"].startswith("undelivered")


def test_calls_outside_of_the_targets_go_to_their_debug_model_or_fail(open_episode: Opener) -> None:
    debug = ScriptedEngine(lambda ask: "debug", model="big", policy_version=None)
    episode = open_episode(trainable_targets=("wolf",), debug_models={"gpt-4o": debug})

    async def scenario() -> None:
        wolf = await episode.model("a", target_tag="wolf").chat(USER)
        by_agent = await episode.model("wolf").chat(USER)
        debugged = await episode.model("b", target_tag="villager", debug_model="gpt-4o").chat(USER)
        assert (wolf.content, by_agent.content, debugged.content) == (
            "forty-two",
            "forty-two",
            "debug",
        )
        for debug_model in (None, "gpt-5"):
            with pytest.raises(RequestRefused, match="villager"):
                await episode.model("b", target_tag="villager", debug_model=debug_model).chat(USER)

    asyncio.run(scenario())
    assert [(call.model, call.trainable) for call in episode.calls[:3]] == [
        ("scripted", True),
        ("scripted", True),
        ("big", False),
    ]
    assert isinstance(episode.errors[0], ConfigError) and "trainable_targets" in str(
        episode.errors[0]
    )
    assert episode.calls[2].policy_version is None


def test_judging_ends_the_rollout_and_is_never_trained(open_episode: Opener) -> None:
    async def scenario() -> None:
        episode = open_episode()
        handle = episode.model()
        await handle.chat(USER)
        async with episode.judging() as active:
            assert current_episode.get() is active and active.phase == "judge"
            with pytest.raises(Exception, match="410"):
                await handle.chat(USER)
            assert (await episode.model().chat(USER)).content == "forty-two"
            assert not active.reroutes
        assert current_episode.get() is None
        calls = await episode.finish()
        assert [(call.phase, call.trainable) for call in calls] == [
            ("rollout", True),
            ("judge", False),
        ]

    asyncio.run(scenario())


def test_two_models_and_no_policy_named_is_an_error_that_lists_both(open_episode: Opener) -> None:
    episode = open_episode()
    assert episode.answers("small") == "policy"
    captured = f"{episode.active.base_url}/chat/completions"
    headers = bearer(episode.active.api_key)
    assert (
        httpx.post(captured, json={"model": "small", "messages": USER}, headers=headers).status_code
        == 200
    )
    refused = httpx.post(captured, json={"model": "large", "messages": USER}, headers=headers)
    assert refused.status_code == 400
    assert (
        "'small'" in refused.json()["error"]["message"]
        and "'large'" in refused.json()["error"]["message"]
    )
    assert isinstance(episode.errors[0], ModelAmbiguous)


def test_which_captured_models_are_the_policys(open_episode: Opener) -> None:
    named = open_episode(episode_id="named", policy_models=frozenset({"a", "b"}))
    assert [named.answers(name) for name in ("a", "b", "c")] == ["policy", "policy", "other"]
    handle = open_episode(episode_id="handle", uses_handle=True)
    assert handle.answers("a") == "other" and not handle.active.reroutes
    refused = httpx.post(
        f"{named.active.base_url}/chat/completions",
        json={"model": "c", "messages": USER},
        headers=bearer(named.active.api_key),
    )
    assert refused.status_code == 400 and "policy_models" in refused.json()["error"]["message"]


def test_every_call_is_in_the_trace_once_and_can_be_read_live(tmp_path: Path) -> None:
    from ajet_sdk.trace.reader import open_trace
    from ajet_sdk.trace.writer import TraceWriter

    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer, Gateway(writer) as gateway:
        episode = gateway.open(EpisodeSpec("one", ScriptedEngine(lambda ask: "yes")))

        async def scenario() -> None:
            await asyncio.gather(*(episode.model(f"agent{n}").chat(USER) for n in range(20)))
            await episode.finish()

        asyncio.run(scenario())
        writer.flush(10)
        with open_trace(path) as reader:
            assert reader.query(
                "select count(*), count(distinct call_id) from calls"
            ).to_pylist() == [{"count_star()": 20, "count(DISTINCT call_id)": 20}]


def test_the_longest_reply_holds_for_every_reply_of_the_policy_to_the_workflow(
    open_episode: Opener,
) -> None:
    """Trained or not; another model's replies and a judge's are as long as they are asked for."""
    opponent = ScriptedEngine(lambda ask: "x" * 40)
    episode = open_episode("x" * 40, max_tokens=6, debug_models={"frozen": opponent})
    for agent, trainable in (("trained", True), ("untrained", False), ("frozen", False)):
        client = episode.model(agent, trainable=trainable).openai()
        client.chat.completions.create(model="m", messages=USER)

    async def judge() -> None:
        async with episode.judging():
            episode.model().openai().chat.completions.create(model="m", messages=USER)

    asyncio.run(judge())
    lengths = [len(call.output_ids) for call in episode.calls if call.output_ids is not None]
    assert lengths == [6, 6, 41, 41]
    assert [call.trainable for call in episode.calls] == [True, False, False, False]


def test_an_idle_gateway_sleeps() -> None:
    """Nothing is scheduled in its loop: it wakes up for a request, or to end."""

    async def timers() -> int:
        return len(asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]

    with Gateway() as gateway:
        until(lambda: gateway._server.started)
        assert gateway._loop is not None
        assert asyncio.run_coroutine_threadsafe(timers(), gateway._loop).result() == 0
