"""Every parameter of the vendors' own clients: honoured, recorded without effect, or refused by its
name."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

from ajet_sdk.dialects.anthropic_requests import MESSAGE_FIELDS, TOOL_FIELDS
from ajet_sdk.dialects.fields import COMPLETIONS, Fields
from ajet_sdk.dialects.gemini_requests import CONFIG_FIELDS, GEMINI_FIELDS
from ajet_sdk.dialects.openai_responses import RESPONSE_FIELDS
from ajet_sdk.dialects.table import endpoint
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import RequestRefused
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway

USER = [{"role": "user", "content": "hi"}]
OF_THE_CLIENT = frozenset(
    ("httpOptions", "shouldReturnHttpResponse", "automaticFunctionCalling", "automaticContinuation")
)
"""Google's client keeps these to itself."""
SENT_AS = {"modelSelectionConfig": "modelConfig", "generationOutputConfig": "outputConfig"}


def typed(*types: Any) -> set[str]:
    return {name for one in types for name in typing.get_type_hints(one, include_extras=True)}


def camel(names: Any) -> set[str]:
    found = {re.sub(r"_([a-z])", lambda part: part[1].upper(), name) for name in names}
    return {SENT_AS.get(name, name) for name in found}


def parameters() -> Iterator[tuple[str, set[str], set[str]]]:
    """Where they are, their names by the clients' types, and those that a table has."""
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import BetaToolParam
    from anthropic.types.beta import message_count_tokens_params as beta_counts
    from anthropic.types.beta import message_create_params as beta
    from google.genai import types as genai
    from openai.types import completion_create_params as text
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import input_token_count_params, response_create_params

    messages = (
        message_create_params.MessageCreateParamsNonStreaming,
        message_create_params.MessageCreateParamsStreaming,
        beta.MessageCreateParamsNonStreaming,
        beta.MessageCreateParamsStreaming,
        message_count_tokens_params.MessageCountTokensParams,
        beta_counts.MessageCountTokensParams,
    )
    yield "Messages", typed(*messages), set(MESSAGE_FIELDS)
    yield "tools of Messages", typed(BetaToolParam), set(TOOL_FIELDS)
    yield "chat completions", typed(*typing.get_args(chat.CompletionCreateParams)), set(COMPLETIONS)
    yield "completions", typed(*typing.get_args(text.CompletionCreateParams)), set(COMPLETIONS)
    responses = (
        *typing.get_args(response_create_params.ResponseCreateParams),
        input_token_count_params.InputTokenCountParams,
    )
    yield "Responses", typed(*responses), set(RESPONSE_FIELDS)
    config = camel(genai.GenerateContentConfig.model_fields) | camel(
        genai.CountTokensConfig.model_fields
    )
    yield "Gemini", config - OF_THE_CLIENT, {*GEMINI_FIELDS, *CONFIG_FIELDS}
    yield (
        "Gemini's generationConfig",
        camel(genai.GenerationConfig.model_fields),
        set(CONFIG_FIELDS),
    )


@pytest.mark.slow
def test_every_parameter_of_the_vendors_clients_is_in_a_table() -> None:
    left_out = {place: names - known for place, names, known in parameters() if names - known}
    assert left_out == {}
    assert sum(len(names) for _, names, _ in parameters()) > 150


BODIES: Mapping[str, tuple[str, dict[str, Any], Fields]] = {
    "messages": ("messages", {"messages": USER, "max_tokens": 9}, MESSAGE_FIELDS),
    "responses": ("responses", {"input": "hi"}, RESPONSE_FIELDS),
    "gemini": ("models/m:generateContent", {"contents": "hi"}, GEMINI_FIELDS),
    "config": ("models/m:generateContent", {"contents": "hi"}, CONFIG_FIELDS),
    "chat": ("chat/completions", {"messages": USER}, COMPLETIONS),
}


@pytest.mark.parametrize("dialect", BODIES)
def test_what_is_refused_is_refused_by_name_and_with_what_to_do(dialect: str) -> None:
    route, body, known = BODIES[dialect]
    spoken = endpoint(route).dialect
    assert spoken is not None
    for name, field in known.items():
        asked = (
            {**body, "generationConfig": {name: "x"}}
            if dialect == "config"
            else {**body, name: "x"}
        )
        if field.effect == "refused" and dialect != "chat":
            with pytest.raises(
                RequestRefused,
                match=rf'{name}=("x"|\*\*\*) is not supported; {re.escape(field.note)}',
            ) as raised:
                spoken.neutral(asked, {})
            assert raised.value.parameter == name and field.note
        elif field.effect == "no effect":
            assert spoken.form.ask(spoken.neutral(asked, {}), "e", "a") == spoken.form.ask(
                spoken.neutral(body, {}), "e", "a"
            ) or dialect in ("chat", "responses")


@pytest.fixture
def episode(gateway: Gateway) -> OpenEpisode:
    return gateway.open(EpisodeSpec("one", ScriptedEngine(lambda ask: "yes")))


def post(episode: OpenEpisode, route: str, body: dict[str, Any]) -> httpx.Response:
    model = episode.model()
    headers = {"authorization": f"Bearer {model.api_key}"}
    return httpx.post(f"{model.base_url}/{route}", json=body, headers=headers, trust_env=False)


def test_what_has_no_effect_is_recorded(episode: OpenEpisode) -> None:
    for route, body, name, value in (
        (
            "messages",
            {"model": "m", "messages": USER, "max_tokens": 9},
            "billing_policy",
            {"type": "billing_policy"},
        ),
        ("messages", {"model": "m", "messages": USER, "max_tokens": 9}, "fallbacks", "default"),
        ("responses", {"model": "m", "input": "hi"}, "client_metadata", {"a": 1}),
        ("models/m:generateContent", {"contents": "hi"}, "safetySettings", [{"category": "X"}]),
        ("models/m:generateContent", {"contents": "hi"}, "safety_settings", [{"category": "X"}]),
    ):
        assert post(episode, route, {**body, name: value}).status_code == 200
        assert episode.calls[-1].request["x_without_effect"] == {name: value}
    assert (
        post(
            episode, "responses", {"model": "m", "input": "hi", "metadata": {"a": "b"}}
        ).status_code
        == 200
    )
    assert (
        episode.calls[-1].request["metadata"] == {"a": "b"}
        and "x_without_effect" not in episode.calls[-1].request
    )


def test_what_a_tool_may_have(episode: OpenEpisode) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {"model": "m", "messages": USER, "max_tokens": 9}
    sound = {
        **tool,
        "allowed_callers": ["direct"],
        "defer_loading": False,
        "cache_control": {"type": "ephemeral"},
    }
    assert post(episode, "messages", {**body, "tools": [sound]}).status_code == 200
    refused = post(episode, "messages", {**body, "tools": [{**tool, "input_examples": [{"a": 1}]}]})
    assert (
        refused.status_code == 400
        and "write the examples into the tool's description" in refused.text
    )


@pytest.mark.parametrize(
    ("route", "says"),
    [
        (
            "responses/compact",
            "responses/compact: no conversation is compacted; shorten the input yourself",
        ),
        (
            "responses/resp_1/cancel",
            "responses/resp_1/cancel: no response is made in the background",
        ),
        ("conversations", "conversations: no conversation has an id; set previous_response_id"),
        ("conversations/c/items", "conversations/c/items: no conversation has an id"),
        (
            "embeddings",
            "the policy does not serve the route embeddings; it serves chat/completions",
        ),
    ],
)
def test_a_route_that_is_not_served_says_what_to_do(
    episode: OpenEpisode, route: str, says: str
) -> None:
    answer = post(episode, route, {"model": "m", "input": "hi"})
    assert answer.status_code == 404 and says in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            {"background": True},
            "background=true is not supported; no response is made in the background",
        ),
        ({"conversation": "c"}, 'conversation="c" is not supported; set previous_response_id'),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "x"}]},
            "input[0] of type 'compaction' is not supported",
        ),
        ({"personality": "friendly"}, "personality"),
    ],
)
def test_responses_that_need_a_server_of_openais_are_refused_by_name(
    episode: OpenEpisode, more: Any, says: str
) -> None:
    answer = post(episode, "responses", {"model": "m", "input": "hi", **more})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]
