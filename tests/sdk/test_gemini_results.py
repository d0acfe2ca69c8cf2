"""Results of tools in Gemini's format: media reaches the model, and what can't be carried is
refused by name."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from google.genai import types

from ajet_sdk.dialects.gemini_requests import CALL_FIELDS, RESPONSE_FIELDS, read
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import RequestRefused
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway

PIXEL = base64.b64encode(b"pixel").decode()
IMAGE = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}


def body(response: dict[str, Any], call: dict[str, Any] | None = None) -> dict[str, Any]:
    called = {"id": "1", "name": "look", "args": {}, **(call or {})}
    return {
        "contents": [
            {"role": "user", "parts": [{"text": "look"}]},
            {"role": "model", "parts": [{"functionCall": called}]},
            {
                "role": "user",
                "parts": [{"functionResponse": {"id": "1", "name": "look", **response}}],
            },
        ]
    }


def test_images_of_a_result_follow_its_text() -> None:
    for parts in ([IMAGE], [{"inline_data": {"mime_type": "image/png", "data": PIXEL}}]):
        message = read(
            body({"response": {"result": "a pixel"}, "parts": parts}), "m", "generateContent"
        )["messages"][-1]
        assert message["role"] == "tool" and message["tool_call_id"] == "1"
        text, image = message["content"]
        assert text == {"type": "text", "text": "a pixel"}
        assert image["image_url"]["url"] == f"data:image/png;base64,{PIXEL}"
    for nothing in ({}, {"parts": []}, {"parts": None}, {"willContinue": False}):
        message = read(body({"response": {"result": "9"}, **nothing}), "m", "generateContent")[
            "messages"
        ][-1]
        assert message["content"] == "9"


@pytest.mark.parametrize(
    ("response", "call"),
    [
        ({"willContinue": True}, None),
        ({"will_continue": True}, None),
        ({"scheduling": "SILENT"}, None),
        ({"parts": [{"inlineData": {"mimeType": "audio/wav", "data": PIXEL}}]}, None),
        ({"parts": [{"fileData": {"fileUri": "gs://x"}}]}, None),
        ({"novel": 1}, None),
        ({}, {"willContinue": True}),
        ({}, {"partialArgs": [{"jsonPath": "$.a"}]}),
    ],
    ids=str,
)
def test_what_cannot_be_carried_is_refused(
    response: dict[str, Any], call: dict[str, Any] | None
) -> None:
    asked = body({"response": {"result": "9"}, **response}, call)
    with pytest.raises(RequestRefused):
        read(asked, "m", "generateContent")
    with Gateway() as gateway:
        model = gateway.open(EpisodeSpec("one", ScriptedEngine(lambda ask: "ok"))).model()
        url = f"{model.base_url[:-3]}/v1beta/models/m:generateContent"
        assert (
            httpx.post(url, headers={"x-goog-api-key": model.api_key}, json=asked).status_code
            == 400
        )


@pytest.mark.parametrize(
    ("kind", "known"),
    [(types.FunctionResponse, RESPONSE_FIELDS), (types.FunctionCall, CALL_FIELDS)],
)
def test_every_field_of_googles_client_is_known(kind: Any, known: Any) -> None:
    names = {field.alias or name for name, field in kind.model_fields.items()}
    assert names == set(known)
