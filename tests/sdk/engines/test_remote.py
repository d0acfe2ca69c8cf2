"""The remote engine against a real HTTP server that does as it is told: what is sent, believed, and
tried again."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

import ajet
from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.engines import pace
from ajet_sdk.engines.open import at_endpoint
from ajet_sdk.engines.remote import RemoteEngine
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import (
    ConfigError,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    RequestRefused,
)
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.gateway.http_door import read_json
from ajet_sdk.protocols import Answer, Sampling
from tests.serving import serving

USER = [{"role": "user", "content": "hi"}]
Answering = Callable[[dict[str, Any]], tuple[int, Any, dict[str, str]]]


class Server:
    """Answers each request with what `answering` says, and keeps the bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.clients: set[tuple[str, int]] = set()
        self.answering: Answering = lambda body: (200, completion(), {})
        self.url = ""

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        body = await read_json(receive, scope)
        self.bodies.append(body)
        self.clients.add(tuple(scope["client"]))
        status, value, headers = self.answering(body)
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        pairs = [(name.encode(), text.encode()) for name, text in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": content})


def completion(**choice: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "hello", "refusal": None}
    choices = [{"index": 0, "message": message, "finish_reason": "stop", **choice}]
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "cost": 0.25,
        "prompt_tokens_details": None,
    }
    return {
        "id": "x",
        "object": "chat.completion",
        "model": "served",
        "choices": choices,
        "usage": usage,
    }


def with_ids(count: int = 2) -> dict[str, Any]:
    entries = [{"token": "t", "logprob": -0.5 * n} for n in range(count)]
    reply = completion(token_ids=list(range(count)), logprobs={"content": entries})
    return {**reply, "prompt_token_ids": [7, 8, 9]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(pace, "FIRST_WAIT", 0.01)
    running = Server()
    with serving(running.app) as url:
        running.url = f"{url}/v1"
        yield running


def ask(engine: RemoteEngine, sampling: Sampling | None = None, **body: Any) -> Answer:
    async def scenario() -> Answer:
        try:
            request = {"model": "agent's", "messages": USER, **body}
            return await engine.answer(
                replace(CHAT.ask(request, "e", "a"), sampling=sampling or Sampling())
            )
        finally:
            await engine.aclose()

    return asyncio.run(scenario())


def error(
    status: int, message: str = "no", headers: dict[str, str] | None = None, **more: Any
) -> Any:
    return status, {"error": {"message": message, **more}}, headers or {}


def test_ids_and_logprobs_are_kept_where_the_server_gives_them(server: Server) -> None:
    server.answering = lambda body: (200, with_ids(), {})
    engine = RemoteEngine(server.url, "key", "policy")
    answer = ask(engine, Sampling(seed=4, max_tokens=9), stream=True, tools=[{"type": "function"}])
    (choice,) = answer.choices
    assert (choice.output_ids, choice.logprobs, answer.prompt_ids) == (
        [0, 1],
        [0.0, -0.5],
        [7, 8, 9],
    )
    assert choice.message == {"role": "assistant", "content": "hello"} and answer.model == "served"
    assert answer.usage == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "cost": 0.25,
    }
    (sent,) = server.bodies
    assert (
        sent["model"] == "policy"
        and "stream" not in sent
        and sent["tools"] == [{"type": "function"}]
    )
    assert (sent["seed"], sent["max_tokens"], sent["return_token_ids"], sent["logprobs"]) == (
        4,
        9,
        True,
        True,
    )


def test_ids_that_do_not_add_up_are_not_believed(server: Server) -> None:
    server.answering = lambda body: (200, with_ids(3), {})
    (choice,) = ask(RemoteEngine(server.url, "key", "policy")).choices
    assert (choice.output_ids, choice.logprobs) == (None, None)


def test_logprobs_of_another_distribution_are_not_kept(server: Server) -> None:
    server.answering = lambda body: (200, with_ids(), {})
    engine = RemoteEngine(server.url, "key", "policy")
    assert ask(engine, Sampling(temperature=0.7)).choices[0].logprobs is None
    assert ask(engine, Sampling(top_p=0.9)).choices[0].output_ids == [0, 1]


@pytest.mark.parametrize(("temperature", "recorded"), [(0.7, None), (1.0, [0.0, -0.5])])
def test_an_agent_sees_logprobs_that_are_not_recorded(
    server: Server, temperature: float, recorded: Any
) -> None:
    server.answering = lambda body: (200, with_ids(), {})

    async def scenario() -> None:
        with Gateway() as gateway:
            episode = gateway.open(EpisodeSpec("e", RemoteEngine(server.url, "key", "policy")))
            await episode.model().chat(USER, temperature=temperature, logprobs=True)
            (call,) = await episode.finish()
            shown = call.response["choices"][0]["logprobs"]["content"]
            assert [entry["logprob"] for entry in shown] == [0.0, -0.5]
            assert (None if call.logprobs is None else call.logprobs.tolist()) == recorded

    asyncio.run(scenario())


def test_a_server_that_refuses_ids_is_asked_without_from_then_on(server: Server) -> None:
    def answering(body: dict[str, Any]) -> Any:
        return (
            error(400, "unknown: return_token_ids")
            if "return_token_ids" in body
            else (200, completion(), {})
        )

    server.answering = answering
    engine = RemoteEngine(server.url, "key", "policy")
    for _ in range(2):
        assert ask(engine).choices[0].output_ids is None
    assert ["return_token_ids" in body for body in server.bodies] == [True, False, False]
    assert set(server.bodies[1]) == {"model", "messages", "temperature"}


def test_a_server_that_leaves_ids_out_is_not_asked_for_them_again(server: Server) -> None:
    engine = RemoteEngine(server.url, "key", "policy")
    ask(engine), ask(engine)
    assert ["return_token_ids" in body for body in server.bodies] == [True, False]


def test_newer_models_want_the_limit_by_another_name(server: Server) -> None:
    def answering(body: dict[str, Any]) -> Any:
        said = "Unsupported parameter: use 'max_completion_tokens' instead"
        return (
            error(400, said, param="max_tokens")
            if "max_tokens" in body
            else (200, completion(), {})
        )

    server.answering = answering
    engine = RemoteEngine(server.url, "key", "policy", with_ids=False)
    ask(engine, Sampling(max_tokens=5)), ask(engine, Sampling(max_tokens=6))
    assert [body.get("max_completion_tokens") for body in server.bodies] == [None, 5, 6]


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_busy_server_is_asked_again(server: Server, status: int) -> None:
    server.answering = lambda body: (
        error(status) if len(server.bodies) < 3 else (200, completion(), {})
    )
    assert ask(RemoteEngine(server.url, "key", "policy")).choices[0].message is not None
    assert len(server.bodies) == 3


def test_retry_after_is_heeded_and_the_last_failure_is_told(server: Server) -> None:
    server.answering = lambda body: error(429, "slow down", {"retry-after": "0.2"})
    started = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"slow down.*3 attempts") as raised:
        ask(RemoteEngine(server.url, "key", "policy", retries=2))
    assert (
        raised.value.infrastructure
        and time.monotonic() - started >= 0.4
        and len(server.bodies) == 3
    )


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_stays_busy_is_said_once_for_many_requests(
    server: Server, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.answering = lambda body: (
        error(status) if len(server.bodies) < 8 else (200, completion(), {})
    )

    async def scenario() -> None:
        engine = RemoteEngine(server.url, "secret-key", "policy")
        asked = CHAT.ask({"messages": USER}, "e", "a")
        await asyncio.gather(*(engine.answer(asked) for _ in range(5)))
        await engine.aclose()

    asyncio.run(scenario())
    [said] = [
        record.getMessage()
        for record in caplog.records
        if record.name == "ajet" and record.levelname == "WARNING"
    ]
    assert f"{server.url} answered {status}, " in said and "(1 so far); next request in" in said
    assert "secret-key" not in said and ("rollout.max_env_worker" in said) == (status == 429)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422])
def test_other_refusals_are_never_tried_again(server: Server, status: int) -> None:
    server.answering = lambda body: error(status, "not like this", param="messages")
    with pytest.raises(EngineError, match="not like this") as raised:
        ask(RemoteEngine(server.url, "key", "policy", with_ids=False))
    assert len(server.bodies) == 1
    assert isinstance(raised.value, RequestRefused) == (status in (400, 422))


def test_an_overflow_keeps_its_kind(server: Server) -> None:
    server.answering = lambda body: error(400, "too long", code="context_length_exceeded")
    with pytest.raises(ContextOverflow):
        ask(RemoteEngine(server.url, "key", "policy"))


def test_a_lost_connection_is_tried_again_and_then_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "FIRST_WAIT", 0.01)
    tries = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            for _ in range(3):
                connection, _ = listener.accept()
                tries.append(connection)
                connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with pytest.raises(EngineUnavailable, match="3 attempts"):
            ask(RemoteEngine(url, "key", "policy", retries=2))
    assert len(tries) == 3


def test_connections_end_with_their_event_loop(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway's loop may end before its engine is closed."""
    engine = RemoteEngine(server.url, "key", "policy")
    asyncio.run(engine.answer(CHAT.ask({"messages": USER}, "e", "a")))
    asyncio.run(engine.aclose())
    del engine
    gc.collect()
    assert "Unclosed" not in caplog.text


def test_a_proxy_that_the_environment_names_is_asked(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert (
        ask(RemoteEngine("http://model.invalid/v1", "key", "policy")).choices[0].message is not None
    )
    assert len(server.bodies) == 1
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    ask(RemoteEngine(server.url, "key", "policy"))  # on this machine: no proxy stands between
    assert len(server.bodies) == 2


def test_a_silent_server_runs_into_the_time_limit(server: Server) -> None:
    def answering(body: dict[str, Any]) -> Any:
        time.sleep(0.5)
        return 200, completion(), {}

    server.answering = answering
    with pytest.raises(EngineUnavailable, match="ReadTimeout"):
        ask(RemoteEngine(server.url, "key", "policy", timeout=0.1, retries=0))


@pytest.mark.parametrize("nonsense", [b"<html>", b"[]", b'{"choices": []}'])
def test_nonsense_is_an_unavailable_engine(server: Server, nonsense: bytes) -> None:
    server.answering = lambda body: (200, nonsense, {})
    with pytest.raises(EngineUnavailable):
        ask(RemoteEngine(server.url, "key", "policy"))


def test_a_body_that_cannot_be_decoded_is_an_unavailable_engine(server: Server) -> None:
    server.answering = lambda body: (200, b"no gzip", {"content-encoding": "gzip"})
    with pytest.raises(EngineUnavailable):
        ask(RemoteEngine(server.url, "key", "policy", retries=0))


def test_requests_at_once_have_a_connection_each_and_later_ones_use_them_again(
    server: Server,
) -> None:
    async def scenario() -> None:
        engine = RemoteEngine(server.url, "key", "policy")
        asked = CHAT.ask({"messages": USER}, "e", "a")
        for _ in range(3):
            await asyncio.gather(*(engine.answer(asked) for _ in range(30)))
        await engine.aclose()

    asyncio.run(scenario())
    assert len(server.bodies) == 90 and len(server.clients) <= 30


MISFITS: dict[str, Any] = {
    "no message": {"choices": [{"index": 0}]},
    "no role": {"choices": [{"index": 0, "message": {}}]},
    "a message that is text": {"choices": [{"message": "hello"}]},
    "choices that are no objects": {"choices": ["hello"]},
    "content that is a number": completion(message={"role": "assistant", "content": 7}),
    "a tool call without a name": completion(
        message={"role": "assistant", "tool_calls": [{"id": "a"}]}
    ),
    "an id above int32": completion(token_ids=[1, 2**31]),
    "an id below 0": completion(token_ids=[1, -1]),
    "an id that is a fraction": completion(token_ids=[1, 2.5]),
    "a prompt's id above int32": {
        **completion(token_ids=[1, 2]),
        "prompt_token_ids": [7, 8, 2**40],
    },
    "NaN": completion(
        token_ids=[1, 2], logprobs={"content": [{"token": "a", "logprob": float("nan")}] * 2}
    ),
    "-inf": completion(
        token_ids=[1, 2], logprobs={"content": [{"token": "a", "logprob": float("-inf")}] * 2}
    ),
    "a probability above 1": completion(
        token_ids=[1, 2], logprobs={"content": [{"token": "a", "logprob": 2.0}] * 2}
    ),
    "fewer log-probabilities": completion(
        token_ids=[1, 2], logprobs={"content": [{"token": "a", "logprob": -1.0}]}
    ),
    "no log-probability at all": completion(token_ids=[1, 2], logprobs={"content": []}),
    "more choices than asked for": {**completion(), "choices": completion()["choices"] * 2},
    "usage that is text": {**completion(), "usage": "much"},
}


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
def test_a_reply_of_another_shape_is_a_recorded_infrastructure_fault(
    server: Server, misfit: dict[str, Any]
) -> None:
    server.answering = lambda body: (200, misfit, {})

    async def scenario() -> None:
        with Gateway() as gateway:
            episode = gateway.open(EpisodeSpec("e", RemoteEngine(server.url, "key", "policy")))
            with pytest.raises(EngineUnavailable):
                await episode.model().chat(USER)
            (call,) = await episode.finish()
            assert call.error is not None and call.output_ids is None and call.logprobs is None
            [fault] = episode.errors
            assert isinstance(fault, EngineUnavailable) and str(fault) == call.error

    asyncio.run(scenario())


def test_a_reply_of_another_shape_is_quoted(server: Server) -> None:
    server.answering = lambda body: (200, {"choices": [{"index": 0}]}, {})
    with pytest.raises(EngineUnavailable, match=r"choices\[0\] has no message.*'index': 0"):
        ask(RemoteEngine(server.url, "key", "policy"))


def test_what_servers_leave_out_is_no_fault(server: Server) -> None:
    """A reply cut while it thought has no content, and a call of a tool may have no id."""
    thinking = {"role": "assistant", "reasoning_content": "hm"}
    call = {"function": {"name": "calc", "arguments": "{}"}}
    for message in (thinking, {"role": "assistant", "content": None, "tool_calls": [call]}):
        server.answering = lambda body, m=message: (
            200,
            completion(message=m, finish_reason=None),
            {},
        )
        (choice,) = ask(RemoteEngine(server.url, "key", "policy")).choices
        assert choice.message == {key: value for key, value in message.items() if value is not None}


def test_a_gateway_can_stand_before_another(server: Server) -> None:
    """A served policy gives its ids through two gateways, whole and streamed."""

    async def scenario() -> None:
        with Gateway() as inner, Gateway() as outer:
            policy = inner.open(
                EpisodeSpec("inner", ScriptedEngine(lambda ask: "yes", logprob=-1.0))
            )
            remote = RemoteEngine(f"{inner.url}/v1", policy.handle_key, "scripted")
            episode = outer.open(EpisodeSpec("outer", remote))
            assert (await episode.model().chat(USER)).content == "yes"
            (call,) = await episode.finish()
            assert (
                call.prompt_ids is not None
                and call.output_ids is not None
                and call.logprobs is not None
            )
            assert call.output_ids.tolist() == [*b"yes", 257] and call.policy_version is None

    asyncio.run(scenario())


def test_a_server_that_never_was_there_is_given_up_early() -> None:
    with (
        socket.socket() as taken
    ):  # bound and not listening: nobody else gets the port, and nothing answers
        taken.bind(("127.0.0.1", 0))
        engine = RemoteEngine(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "k", "m", retries=6)
        with pytest.raises(
            EngineUnavailable, match=r"\(ConnectError.*\); check the base URL .*\(2 attempts\)"
        ):
            ask(engine)


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"starts with http:// or https:// \(got 'localhost:8000'\)"
    ):
        RemoteEngine("localhost:8000", "k", "m")


@pytest.mark.slow
def test_httpx_is_whole_before_an_agent_runs() -> None:
    """Found with two threads: one made the engine's first request while the other imported
    openai."""
    code = (
        "import sys; from ajet_sdk.engines.remote import RemoteEngine; RemoteEngine('http://x/v1',"
        " 'k', 'm'); "
    )
    code += "print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@ajet.workflow
async def say(question: str) -> str:
    reply = await openai.AsyncOpenAI().chat.completions.create(
        model="gpt-4o-mini", messages=[{"role": "user", "content": question}]
    )
    return reply.choices[0].message.content or ""


@ajet.judge
def right(output: str, answer: str) -> float:
    return float(output == answer)


@pytest.mark.slow
def test_a_name_that_is_no_path_is_asked_at_the_endpoint_of_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    tasks = [{"question": "What?", "answer": "hello"}]
    config = ajet.Config(model={"path": "gpt-4o-mini"}, experiment_dir=tmp_path / "out")
    report = ajet.run(config, workflow=say, judge=right, tasks=tasks)
    assert report.reward == 1.0 and [body["model"] for body in server.bodies] == ["gpt-4o-mini"]
    (tmp_path / "here").mkdir()
    for path in (tmp_path / "here", "./none"):  # a path is no name, whatever the environment says
        assert at_endpoint(ajet.Config(model={"path": path})).model.base_url is None
    monkeypatch.delenv("OPENAI_BASE_URL")
    with pytest.raises(
        ConfigError, match=r"there is no directory gpt-4o-mini; .*OPENAI_BASE_URL.*owner/name"
    ):
        ajet.run(config, workflow=say, judge=right, tasks=tasks)
