"""Gemini's API: converts completions to candidates, whole, as events or a JSON array; requests:
`gemini_requests`."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from ajet_sdk.dialects.finish import Finish
from ajet_sdk.dialects.gemini_requests import GEMINI_FIELDS, SIGNED, read, shows_thoughts
from ajet_sdk.dialects.json import Stored, arguments_of, json_bytes
from ajet_sdk.dialects.openai_chat import ChatDialect, pieces
from ajet_sdk.types import Json

FINISH: dict[Finish, str] = {
    "stop": "STOP",
    "length": "MAX_TOKENS",
    "tool_calls": "STOP",
    "function_call": "STOP",
    "content_filter": "SAFETY",
}
STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    410: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


@dataclass(frozen=True, slots=True)
class Gemini(ChatDialect):
    """The routes models/NAME:generateContent, :streamGenerateContent and :countTokens."""

    name: str
    """The name of the model, from the path."""
    method: str
    sse: bool = False
    """Stream server-sent events instead of a JSON array."""

    fields = GEMINI_FIELDS

    @property
    def media_type(self) -> str:  # type: ignore[override]
        return ChatDialect.media_type if self.sse else "application/json"

    def keep_alive(self, request_id: str, model: str, body: Mapping[str, object]) -> bytes:
        return b"\n"  # Google's client would read a comment as JSON

    def neutral(self, body: Json, stored: Mapping[str, Json]) -> Json:
        return read(body, self.name, self.method)

    def streams(self, body: Mapping[str, object]) -> bool:
        return self.method == "streamGenerateContent"

    def response(self, completion: Json, request: Json, body: Json, stored: Stored) -> Json:
        shown = shows_thoughts(body)
        usage = completion["usage"]
        return {
            "candidates": [_candidate(choice, shown) for choice in completion["choices"]],
            "usageMetadata": {
                "promptTokenCount": usage.get("prompt_tokens", 0),
                "candidatesTokenCount": usage.get("completion_tokens", 0),
                "totalTokenCount": usage.get("total_tokens", 0),
            },
            "modelVersion": completion["model"],
            "responseId": str(completion["id"]).rpartition("-")[2],
        }

    def events(self, response: Json, body: Mapping[str, object]) -> list[bytes]:
        """Return the response in chunks: texts in pieces, whole calls, and the finish reason with
        the last."""
        common = {
            name: value
            for name, value in response.items()
            if name not in ("candidates", "usageMetadata")
        }
        chunks = list[Json]()
        for candidate in response["candidates"]:
            parts = [piece for part in candidate["content"]["parts"] for piece in _in_pieces(part)]
            for part in parts[:-1]:
                content = {"parts": [part], "role": "model"}
                chunks.append(
                    {"candidates": [{"content": content, "index": candidate["index"]}], **common}
                )
            chunks.append(
                {
                    "candidates": [
                        {**candidate, "content": {"parts": parts[-1:], "role": "model"}}
                    ],
                    **common,
                }
            )
        chunks[-1]["usageMetadata"] = response["usageMetadata"]
        if self.sse:
            return [b"data: " + json_bytes(chunk) + b"\n\n" for chunk in chunks]
        encoded = [b",\n" + json_bytes(chunk) for chunk in chunks]
        encoded[0] = b"[" + encoded[0][2:]
        encoded[-1] += b"]"
        return encoded

    def error(self, status: int, message: str, code: str | None, param: str | None) -> Json:
        name = STATUS.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
        return {"error": {"code": status, "message": message, "status": name}}

    def error_event(self, error: Json) -> bytes:
        if self.sse:
            return b"data: " + json_bytes(error) + b"\n\n"
        return b"[" + json_bytes(error) + b"]"

    def count(self, tokens: int) -> Json:
        return {"totalTokens": tokens}

    def model(self, name: str) -> Json:
        methods = ["generateContent", "countTokens"]
        return {
            "name": f"models/{name}",
            "displayName": name,
            "version": "1",
            "supportedGenerationMethods": methods,
        }

    def models(self, names: list[str]) -> Json:
        return {"models": [self.model(name) for name in names]}


# Responses


def _candidate(choice: Json, shown: bool) -> Json:
    message = choice["message"]
    thought = message.get("reasoning_content")
    text = message.get("content")
    calls = message.get("tool_calls") or ()
    parts = list[Json]()
    if text or not calls:
        parts.append({"text": text or ""})
    for call in calls:
        function = call["function"]
        parts.append(
            {
                "functionCall": {
                    "id": call["id"],
                    "name": function["name"],
                    "args": arguments_of(function),
                }
            }
        )
    if thought:
        parts[0]["thoughtSignature"] = base64.b64encode(
            SIGNED + thought.encode("utf-8", "replace")
        ).decode()
        if shown:
            parts.insert(0, {"text": thought, "thought": True})
    candidate: Json = {
        "content": {"parts": parts, "role": "model"},
        "finishReason": FINISH[choice["finish_reason"]],
        "index": choice["index"],
    }
    chosen = ((choice.get("logprobs") or {}).get("content")) or ()
    if chosen:
        candidate["avgLogprobs"] = sum(token["logprob"] for token in chosen) / len(chosen)
        candidate["logprobsResult"] = {
            "chosenCandidates": [_token(token) for token in chosen],
            "topCandidates": [
                {"candidates": [_token(top) for top in token["top_logprobs"]]} for token in chosen
            ],
        }
    return candidate


def _token(token: Json) -> Json:
    return {"token": token["token"], "logProbability": token["logprob"]}


def _in_pieces(part: Json) -> list[Json]:
    if "text" not in part:
        return [part]
    texts = pieces(part["text"]) or [""]
    common = {
        name: value for name, value in part.items() if name not in ("text", "thoughtSignature")
    }
    parts = [{"text": text, **common} for text in texts]
    if "thoughtSignature" in part:
        parts[-1]["thoughtSignature"] = part["thoughtSignature"]
    return parts
