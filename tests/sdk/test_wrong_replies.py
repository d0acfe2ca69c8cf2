"""Replies that are none, in four dialects, whole and streamed: each is a recorded fault, never a
success with 0."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.dialects.finish import FINISH, finish_of
from ajet_sdk.engines import pace
from ajet_sdk.engines.remote import RemoteEngine
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ConfigError, EndpointMisconfigured
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.types import Episode, Reward, Task
from tests.gateways import shared_gateway
from tests.serving import serving

Json = dict[str, Any]
Body = bytes | Json | list[Any]


class Server:
    """Answers every request with the same bytes."""

    def __init__(self) -> None:
        self.url, self.asked = "", 0
        self.status, self.body, self.kind = 200, b"", "application/json"

    def says(self, body: Body | str, status: int = 200) -> None:
        self.kind = (
            "text/event-stream"
            if isinstance(body, bytes) and body[:5] in (b"data:", b"event")
            else "application/json"
        )
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status, self.asked = status, 0

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.asked += 1
        headers = [(b"content-type", self.kind.encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server()
    with serving(running.app) as running.url:
        yield running


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "FIRST_WAIT", 0.001)


USER = [{"role": "user", "content": "?"}]
REQUESTS: dict[str, tuple[str, Json]] = {
    "chat": ("v1/chat/completions", {"messages": USER}),
    "responses": ("v1/responses", {"input": "?"}),
    "messages": ("v1/messages", {"messages": USER, "max_tokens": 99}),
    "gemini": ("v1beta/models/MODEL:generateContent", {"contents": [{"parts": [{"text": "?"}]}]}),
}


def request(dialect: str, stream: bool, model: str, *, sse: bool = True) -> tuple[str, Json]:
    route, body = REQUESTS[dialect]
    if dialect == "gemini":
        streamed = "streamGenerateContent" + ("?alt=sse" if sse else "")
        return (
            route.replace("MODEL", model).replace(
                "generateContent", streamed if stream else "generateContent"
            ),
            body,
        )
    return route, {**body, "model": model, "stream": stream}


@ajet.workflow
async def swallow(task: ajet.Task) -> Reward:
    """Asks once, takes whatever comes, and gives a reward of 0."""
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        asked = task.metadata
        with contextlib.suppress(httpx.HTTPError):
            await client.post(f"{asked['url']}/{asked['route']}", json=asked["body"])
    return Reward(value=0.0)


def episodes(
    engine: Any, asked: list[tuple[str, Json]], url: str, workflow: Any = swallow, judge: Any = None
) -> list[Episode]:
    config = load_config(
        values={"rollout": {"policy_models": ["policy"], "max_retries": 0, "llm_hosts": []}}
    )
    attempts = [
        Attempt(
            Task(main_query=f"{i}", metadata={"url": url, "route": route, "body": body}),
            group_id=f"{i}",
        )
        for i, (route, body) in enumerate(asked)
    ]

    async def main() -> list[Episode]:
        try:
            return await run_batch(
                workflow, judge, attempts, engine=engine, gateway=shared_gateway(), config=config
            )
        finally:
            await engine.aclose()

    return asyncio.run(main())


def of_the_policy(server: Server) -> list[Episode]:
    """An episode for each dialect, whole and streamed, whose policy is the server."""
    asked = [request(dialect, stream, "policy") for dialect in REQUESTS for stream in (False, True)]
    return episodes(
        RemoteEngine(f"{server.url}/v1", "key", "policy", retries=1), asked, "http://127.0.0.1:9"
    )


def passed_through(server: Server, dialect: str, stream: bool, *, sse: bool = True) -> Episode:
    """An episode whose agent asks the server itself."""
    asked = [request(dialect, stream, "theirs", sse=sse)]
    [episode] = episodes(ScriptedEngine(lambda ask: "x"), asked, server.url)
    return episode


def assert_lost(episode: Episode, says: str = "") -> None:
    assert (episode.status, episode.infrastructure, episode.rewards) == (
        "failed",
        True,
        (),
    ), episode.error
    [call] = episode.calls
    assert call.error is not None and says in (episode.error or "")


def chat(message: Any = None, usage: Any = None, **choice: Any) -> Json:
    message = {"role": "assistant", "content": "hello"} if message is None else message
    found = {
        "id": "c",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}],
    }
    return {**found, "model": "m", "usage": usage or {"prompt_tokens": 3, "completion_tokens": 0}}


def calling(*calls: Any) -> Json:
    return chat(
        {"role": "assistant", "content": None, "tool_calls": list(calls)},
        finish_reason="tool_calls",
    )


EMPTY = {"role": "assistant", "content": ""}
WRONG_REASONS = (
    "abort",
    "aborted",
    "error",
    "cancelled",
    "timeout",
    "insufficient_system_resource",
    "network_error",
    "null",
    "unknown",
    "in_progress",
    "something_new",
    "error: stop",
)
OF_THE_POLICY: dict[str, Body] = {
    "nothing": b"",
    "a page": b"<html><body>502 Bad Gateway</body></html>",
    "half of an object": b'{"choices": [{"message": {"role": "assistant", "content": "he',
    "text": b'"hello"',
    "a list": [chat()],
    "null": b"null",
    "no choices": {"id": "c", "object": "chat.completion"},
    "an empty list of choices": {"choices": []},
    "choices that are null": {"choices": None},
    "a choice that is null": {"choices": [None]},
    "no message": {"choices": [{"index": 0, "finish_reason": "stop"}]},
    "a message that is text": chat("hello"),
    "content that is a number": chat({"role": "assistant", "content": 7}),
    "content that is an object": chat({"role": "assistant", "content": {"text": "hello"}}),
    "another role": chat({"role": "user", "content": "hello"}),
    "a finish reason that is a number": chat(finish_reason=3),
    "a choice too many": {**chat(), "choices": chat()["choices"] * 2},
    "usage that is text": {**chat(), "usage": "much"},
    "an error": {"error": {"message": "the model is overloaded", "type": "server_error"}},
    "an error that is text": {"error": "the model is overloaded"},
    "an error with the code of a status": {"error": {"message": "provider down", "code": 502}},
    "an error beside the choices": {
        **chat(),
        "error": {"message": "stopped half way", "code": 502},
    },
    "an error in a choice": chat(error={"message": "stopped half way", "code": 502}),
    "a message of an error": {"object": "error", "message": "out of memory", "code": 40303},
    "an empty reply": chat(EMPTY),
    "an empty reply without a count": {
        **chat({"role": "assistant", "content": None}),
        "usage": None,
    },
    "a message without content": chat({"role": "assistant"}),
    "a tool call of another shape": calling({"name": "search", "arguments": "{}"}),
    "a tool call without a name": calling(
        {"id": "1", "type": "function", "function": {"arguments": "{}"}}
    ),
    "a tool call whose name is empty": calling(
        {"id": "1", "function": {"name": "", "arguments": "{}"}}
    ),
    "a function call without a name": chat(
        {"role": "assistant", "function_call": {"name": None, "arguments": "{}"}}
    ),
    "a tool call whose name is null": calling(
        {"id": "1", "function": {"name": None, "arguments": "{}"}}
    ),
    "a tool call whose arguments are an object": calling(
        {"id": "1", "function": {"name": "f", "arguments": {}}}
    ),
    "a tool call that is text": calling("search"),
    "tool calls that are an object": chat({"role": "assistant", "tool_calls": {"name": "f"}}),
    "a custom tool call without its input": calling({"id": "1", "type": "custom", "name": "f"}),
    "a stream that was not asked for": (
        b'data: {"choices": [{"delta": {"content": "hello"}}]}\n\ndata: [DONE]\n\n'
    ),
    **{f"ended for {reason}": chat(finish_reason=reason) for reason in WRONG_REASONS},
}


@pytest.mark.parametrize("body", OF_THE_POLICY.values(), ids=OF_THE_POLICY)
def test_a_wrong_reply_of_the_policys_endpoint_is_a_fault_in_every_dialect(
    server: Server, body: Body
) -> None:
    server.says(body)
    found = of_the_policy(server)
    assert len(found) == 8
    for episode in found:
        assert_lost(episode)


def test_a_sound_reply_is_scored_in_every_dialect(server: Server) -> None:
    server.says(chat())
    assert [(e.status, e.reward) for e in of_the_policy(server)] == [("succeeded", 0.0)] * 8


@pytest.mark.parametrize("status", [429, 500, 503, 529])
def test_a_busy_endpoint_is_asked_again_and_then_a_fault(server: Server, status: int) -> None:
    server.says({"error": {"message": "busy"}}, status)
    for episode in of_the_policy(server):
        assert_lost(episode, f"answered {status}")
    assert server.asked == 16
    server.says({"error": {"message": "busy", "code": status}})  # with a status of 200
    of_the_policy(server)
    assert server.asked == 16


# What passes through to an agent


def sse(*events: Any, done: bool = False) -> bytes:
    data = [
        f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events
    ]
    return "".join([*data, "data: [DONE]\n\n" if done else ""]).encode()


def named(*events: Json) -> bytes:
    return b"".join(
        f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events
    )


MESSAGE = {
    "id": "m", "type": "message", "role": "assistant", "model": "theirs",
    "content": [{"type": "text", "text": "hello"}],
    "stop_reason": "end_turn", "usage": {"input_tokens": 3, "output_tokens": 1},
}  # fmt: skip
RESPONSE = {
    "id": "r", "object": "response", "status": "completed", "error": None, "model": "theirs",
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}],
    "usage": {"input_tokens": 3, "output_tokens": 1},
}  # fmt: skip
CANDIDATES = {
    "candidates": [
        {
            "content": {"role": "model", "parts": [{"text": "hello"}]},
            "finishReason": "STOP",
            "index": 0,
        }
    ],
    "usageMetadata": {"promptTokenCount": 3, "candidatesTokenCount": 1},
}
SOUND: dict[str, Json] = {
    "chat": chat(),
    "messages": MESSAGE,
    "responses": RESPONSE,
    "gemini": CANDIDATES,
}


def chunk(delta: Json, reason: str | None = None, **more: Any) -> Json:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": reason, **more}],
    }


def message_events(message: Json) -> list[Json]:
    events: list[Json] = [
        {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    ]
    for index, block in enumerate(message["content"]):
        events.append(
            {"type": "content_block_start", "index": index, "content_block": {**block, "text": ""}}
        )
        delta = {"type": "text_delta", "text": block["text"]}
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    end = {
        "type": "message_delta",
        "delta": {"stop_reason": message["stop_reason"]},
        "usage": message["usage"],
    }
    return [*events, end, {"type": "message_stop"}]


def streamed(dialect: str, reply: Json) -> bytes:
    """A sound reply, or one with another reason, as its vendor streams it."""
    if dialect == "chat":
        choice = reply["choices"][0]
        return sse(chunk(choice["message"]), chunk({}, choice["finish_reason"]), done=True)
    if dialect == "messages":
        return named(*message_events(reply))
    if dialect == "gemini":
        return sse(reply)
    begun = {
        "type": "response.created",
        "response": {**reply, "status": "in_progress", "output": []},
    }
    return named(begun, {"type": f"response.{reply['status']}", "response": reply})


def changed(reply: Json, path: str, value: Any) -> Json:
    """The reply with another value at `a.0.b`; LEFT_OUT: without it."""
    whole: Json = copy.deepcopy(reply)
    *way, last = [int(step) if step.isdecimal() else step for step in path.split(".")]
    place: Any = whole
    for step in way:
        place = place[step]
    if value is LEFT_OUT:
        del place[last]
    else:
        place[last] = value
    return whole


LEFT_OUT = object()
REASON = {
    "chat": "choices.0.finish_reason",
    "messages": "stop_reason",
    "gemini": "candidates.0.finishReason",
}
WHOLE: dict[str, dict[str, Body]] = {
    "messages": {
        "no content": changed(MESSAGE, "content", LEFT_OUT),
        "content that is text": changed(MESSAGE, "content", "hello"),
        "a block without a type": changed(MESSAGE, "content", [{"text": "hello"}]),
        "a text that is null": changed(MESSAGE, "content", [{"type": "text", "text": None}]),
        "an empty message": changed(changed(MESSAGE, "content", []), "usage.output_tokens", 0),
        "an empty text": changed(changed(MESSAGE, "content.0.text", ""), "usage", LEFT_OUT),
        "no reason": changed(MESSAGE, "stop_reason", None),
        "a tool call of another shape": changed(MESSAGE, "content", [{"type": "tool_use", "function": {"name": "f"}}]),
        "an error": {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}},
    },
    "responses": {
        "no output": changed(RESPONSE, "output", LEFT_OUT),
        "output that is text": changed(RESPONSE, "output", "hello"),
        "a text that is null": changed(RESPONSE, "output.0.content.0.text", None),
        "content that is text": changed(RESPONSE, "output.0.content", "hello"),
        "an empty output": changed(changed(RESPONSE, "output", []), "usage.output_tokens", 0),
        "failed": {**RESPONSE, "status": "failed", "output": [], "error": {"code": "server_error", "message": "no"}},
        "cancelled": {**RESPONSE, "status": "cancelled"},
        "queued, where nobody asked to wait": {**RESPONSE, "status": "queued", "output": []},
        "no status": changed(RESPONSE, "status", LEFT_OUT),
        "a tool call of another shape": changed(RESPONSE, "output", [{"type": "function_call", "function": {}}]),
    },
    "gemini": {
        "no candidates": changed(CANDIDATES, "candidates", LEFT_OUT),
        "an empty list of candidates": changed(CANDIDATES, "candidates", []),
        "content that is text": changed(CANDIDATES, "candidates.0.content", "hello"),
        "parts that are text": changed(CANDIDATES, "candidates.0.content.parts", "hello"),
        "a text that is null": changed(CANDIDATES, "candidates.0.content.parts.0.text", None),
        "empty": {"candidates": [{"finishReason": "STOP"}], "usageMetadata": {"promptTokenCount": 3}},
        "no reason": changed(CANDIDATES, "candidates.0.finishReason", LEFT_OUT),
        "a tool call of another shape": changed(CANDIDATES, "candidates.0.content.parts", [{"functionCall": {}}]),
        "an error": {"error": {"code": 503, "message": "overloaded", "status": "UNAVAILABLE"}},
    },
}  # fmt: skip
for dialect, path in REASON.items():
    for reason in ("abort", "ERROR", "FINISH_REASON_UNSPECIFIED", "something_new"):
        WHOLE.setdefault(dialect, {})[f"ended for {reason}"] = changed(SOUND[dialect], path, reason)
WHOLE["responses"]["incomplete for something new"] = {
    **RESPONSE, "status": "incomplete", "incomplete_details": {"reason": "something_new"},
}  # fmt: skip
STREAMED: dict[str, dict[str, bytes]] = {
    "chat": {
        "nothing": b"",
        "cut": sse(chunk({"role": "assistant", "content": "hel"})),
        "cut behind words that say the end": sse(chunk({"role": "assistant", "content": "data: [DONE]"})),
        "cut within an event": sse(chunk({"content": "hel"})) + b'data: {"choices": [{"del',
        "no event is JSON": sse("hello", done=True),
        "an event is not JSON": sse(chunk({"content": "he"}), "{broken", chunk({}, "stop"), done=True),
        "an error first": sse({"error": {"message": "overloaded"}}),
        "an error at the end": sse(chunk({"content": "he"}), {"error": {"message": "lost"}, "choices": []}, done=True),
        "an error in a chunk": sse(chunk({"content": "he"}), chunk({}, "error", error={"code": 502}), done=True),
        "an error beside a reason": sse(chunk({"content": "he"}), chunk({}, "stop", error={"code": 502}), done=True),
        "the end mark alone": sse(done=True),
        "empty": sse(chunk({"role": "assistant", "content": ""}), chunk({}, "stop"), done=True),
        "a tool call without a name": sse(
            chunk({"role": "assistant", "tool_calls": [{"index": 0, "name": "f"}]}), chunk({}, "tool_calls"), done=True
        ),
        "a page": b"<html>502</html>",
    },
    "messages": {
        "nothing": b"",
        "cut": named(*message_events(MESSAGE)[:3]),
        "cut before the reason": named(*message_events(MESSAGE)[:-2]),
        "an error": named(*message_events(MESSAGE)[:3], {"type": "error", "error": {"type": "overloaded_error"}}),
        "an error first": named({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
        "an event is not JSON": b"data: {broken\n\n" + named(*message_events(MESSAGE)),
        "empty": named(*message_events({**MESSAGE, "content": [], "usage": {"output_tokens": 0}})),
    },
    "responses": {
        "nothing": b"",
        "cut": named({"type": "response.created", "response": {**RESPONSE, "status": "in_progress"}}),
        "an error": named({"type": "error", "code": "server_error", "message": "no"}),
        "failed": streamed("responses", {**RESPONSE, "status": "failed", "error": {"message": "no"}}),
    },
    "gemini": {
        "nothing": b"",
        "cut": sse({"candidates": [{"content": {"parts": [{"text": "hel"}]}, "index": 0}]}),
        "an error": sse({"candidates": [{"content": {"parts": [{"text": "he"}]}}]}, {"error": {"code": 503}}),
        "an error first": sse({"error": {"code": 503, "message": "overloaded"}}),
    },
}  # fmt: skip
for dialect, wrong in WHOLE.items():
    for name, whole in wrong.items():
        if (
            name.startswith(("ended", "incomplete", "a tool call"))
            and isinstance(whole, dict)
            and dialect != "messages"
        ):
            STREAMED[dialect].setdefault(name, streamed(dialect, whole))
for reason in ("abort", "something_new"):
    STREAMED["messages"][f"ended for {reason}"] = streamed(
        "messages", {**MESSAGE, "stop_reason": reason}
    )
OF_OTHERS = [
    *(
        (dialect, False, name, body)
        for dialect, wrong in WHOLE.items()
        for name, body in wrong.items()
    ),
    *(
        (dialect, True, name, body)
        for dialect, wrong in STREAMED.items()
        for name, body in wrong.items()
    ),
]


def test_there_are_at_least_76_wrong_replies() -> None:
    assert len(OF_THE_POLICY) >= 40 and len(OF_OTHERS) >= 76


@pytest.mark.parametrize(
    ("dialect", "stream", "name", "body"), OF_OTHERS, ids=lambda part: str(part)[:40]
)
def test_a_wrong_reply_that_passes_through_is_a_fault(
    server: Server, dialect: str, stream: bool, name: str, body: Body
) -> None:
    server.says(body)
    assert_lost(passed_through(server, dialect, stream), "the agent's own request to the model")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", REQUESTS)
def test_a_sound_reply_that_passes_through_is_none(
    server: Server, dialect: str, stream: bool
) -> None:
    server.says(streamed(dialect, SOUND[dialect]) if stream else SOUND[dialect])
    episode = passed_through(server, dialect, stream)
    assert (episode.status, episode.reward) == ("succeeded", 0.0), episode.error
    assert (
        "hello" in json.dumps(episode.calls[0].response)
        and finish_of(episode.calls[0].finish_reason) == "stop"
    )


def test_geminis_stream_may_be_a_list(server: Server) -> None:
    first = {"candidates": [{"content": {"parts": [{"text": "hel"}]}, "index": 0}]}
    for body, sound in (
        ([first, CANDIDATES], True),
        ([first], False),
        ([{"error": {"code": 503}}], False),
    ):
        server.says(body)
        assert (passed_through(server, "gemini", True, sse=False).status == "succeeded") == sound


LEGITIMATE = {
    "chat": ("stop", "length", "tool_calls", "function_call", "content_filter", "eos_token", "eos", "stop_sequence",
             "model_length", "end_turn", "model_context_window_exceeded", "sensitive", "COMPLETE", "MAX_TOKENS",
             "tool-calls", "function_call_filter: MALFORMED_FUNCTION_CALL", "content_filter: RECITATION"),
    "messages": ("end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal", "compaction",
                 "model_context_window_exceeded"),
    "gemini": ("STOP", "MAX_TOKENS", "SAFETY", "RECITATION", "LANGUAGE", "OTHER", "BLOCKLIST", "PROHIBITED_CONTENT",
               "SPII", "MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS", "MALFORMED_RESPONSE"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dialect", LEGITIMATE)
def test_what_vendors_really_say_is_no_fault(server: Server, dialect: str) -> None:
    for reason in LEGITIMATE[dialect]:
        reply = changed(SOUND[dialect], REASON[dialect], reason)
        for stream in (False, True):
            server.says(streamed(dialect, reply) if stream else reply)
            assert passed_through(server, dialect, stream).status == "succeeded", reason
        if dialect == "chat":
            server.says(reply)
            assert {e.status for e in of_the_policy(server)} == {"succeeded"}, reason


@pytest.mark.slow
def test_every_reason_of_the_vendors_clients_is_known() -> None:
    """But for those by which a vendor says that there is no reply."""
    from typing import get_args

    from anthropic.types.beta import BetaStopReason
    from google.genai.types import BlockedReason, FinishReason
    from openai.types.chat.chat_completion import Choice

    faults = {
        "FINISH_REASON_UNSPECIFIED",
        "BLOCKED_REASON_UNSPECIFIED",
        "MISSING_THOUGHT_SIGNATURE",
        "PUP_LIMITED_DISABLED",
    }
    named = {*get_args(BetaStopReason), *get_args(Choice.model_fields["finish_reason"].annotation)}
    named |= {str(reason.value) for enum in (FinishReason, BlockedReason) for reason in enum}
    assert {name for name in named if finish_of(name) is None} <= faults
    assert not {"abort", "error", "failed", "cancelled", "", "timeout"} & FINISH.keys()


def test_what_is_empty_for_a_reason_is_no_fault(server: Server) -> None:
    """A reply of which only the end of the turn was sampled, or that was filtered, and a prompt
    that was."""
    for message, usage, reason in (
        (EMPTY, {"completion_tokens": 1}, "stop"), ({"role": "assistant"}, {"completion_tokens": 9}, "length"),
        ({"role": "assistant", "content": None}, None, "content_filter"),
        ({"role": "assistant", "content": None, "refusal": "no"}, None, "stop"),
    ):  # fmt: skip
        server.says({**chat(message, finish_reason=reason), "usage": usage})
        assert {e.status for e in of_the_policy(server)} == {"succeeded"}, reason
    server.says(
        {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 3}}
    )
    assert passed_through(server, "gemini", False).status == "succeeded"
    server.says({**MESSAGE, "content": []})
    assert passed_through(server, "messages", False).status == "succeeded"


def test_a_route_of_another_service_is_no_models(server: Server) -> None:
    """`threads/…/messages`, a form's `responses`."""
    for route, body in (
        ("v1/threads/t/messages", {"input": "x"}),
        ("forms/1/responses", {"input": {"a": 1}}),
    ):
        server.says({"id": "1", "ok": True})
        [episode] = episodes(ScriptedEngine(lambda ask: "x"), [(route, {**body})], server.url)
        assert episode.status == "succeeded", episode.error


def test_an_agent_that_asks_again_has_its_reply(server: Server) -> None:
    @ajet.workflow
    async def persistent(task: ajet.Task) -> Reward:
        route, body = request("chat", False, "theirs")
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            for reply in (chat(finish_reason="abort"), chat()):
                server.says(reply)
                await client.post(f"{server.url}/{route}", json=body)
        return Reward(value=1.0)

    [episode] = episodes(ScriptedEngine(lambda ask: "x"), [("", {})], server.url, persistent)
    assert (episode.status, episode.reward, len(episode.calls)) == ("succeeded", 1.0, 2)


def test_a_judge_that_makes_do_with_a_wrong_reply_gives_no_reward(server: Server) -> None:
    server.says(chat({"role": "assistant", "content": ""}, finish_reason="abort"))

    @ajet.workflow
    async def silent(task: ajet.Task) -> str:
        return "42"

    @ajet.judge
    async def lenient(output: str) -> Reward:
        route, body = request("chat", False, "theirs")
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            said = (await client.post(f"{server.url}/{route}", json=body)).json()
        return Reward(value=float("good" in said["choices"][0]["message"]["content"]))

    [episode] = episodes(ScriptedEngine(lambda ask: "x"), [("", {})], server.url, silent, lenient)
    assert (episode.status, episode.infrastructure, episode.rewards) == ("failed", True, ())
    assert "judge lenient" in (episode.error or "") and "'abort'" in (episode.error or "")


# Keys, addresses, names


SAYS: Mapping[int, str] = {
    401: "MY_KEY (model.api_key_env), which is not set", 402: "credit", 403: "no access to the model 'policy'",
    404: "check the base URL http", 405: "no model answers there", 410: "no model answers there",
    418: "no model answers there",
}  # fmt: skip


@pytest.mark.parametrize("status", SAYS)
@pytest.mark.parametrize("with_status", [True, False])
def test_an_endpoint_that_is_configured_wrongly_ends_the_run(
    server: Server, status: int, with_status: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    body = {"error": {"message": "no such thing", "code": status}}
    server.says(body, status if with_status else 200)
    values = {"model": {"base_url": f"{server.url}/v1", "name": "policy", "api_key_env": "MY_KEY"}}
    config = load_config(values={**values, "experiment_dir": str(tmp_path)})
    route, asked = request("chat", False, "policy")
    tasks = [
        Task(
            main_query=f"{n}", metadata={"url": "http://127.0.0.1:9", "route": route, "body": asked}
        )
        for n in range(9)
    ]
    with pytest.raises(ConfigError, match="no such thing") as raised:
        ajet.run(config, workflow=swallow, tasks=tasks)
    assert isinstance(raised.value, EndpointMisconfigured) and SAYS[status] in str(raised.value)


def test_a_prompt_that_moderation_flagged_is_the_requests_fault(server: Server) -> None:
    server.says(
        {
            "error": {
                "message": "flagged",
                "code": 403,
                "metadata": {"flagged_input": "x", "reasons": ["y"]},
            }
        },
        403,
    )
    assert {episode.status for episode in of_the_policy(server)} == {"succeeded"}


def test_a_judges_endpoint_too(server: Server) -> None:
    server.says({"error": {"message": "wrong key"}}, 401)

    @ajet.workflow
    async def silent(task: ajet.Task) -> str:
        return "42"

    for mode in ("pointwise", "listwise"):
        judge = ajet.LlmJudge(
            "Right.", model="grader", base_url=f"{server.url}/v1", api_key="k", mode=mode
        )
        with pytest.raises(
            EndpointMisconfigured,
            match=r"the judge's model grader: .*401: wrong key.*task_judge\.llm",
        ):
            episodes(ScriptedEngine(lambda ask: "x"), [("", {})] * 3, server.url, silent, judge)
