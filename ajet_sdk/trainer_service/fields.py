"""Fields of a client's JSON, by type. What is missing, of another type or out of range is refused
(400)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ajet_sdk.dialects.json import Json
from ajet_sdk.errors import RequestRefused

LARGEST = 2**53
"""Largest number of a request; JSON's numbers are exact up to there."""
MOST_SAMPLES = 1024
"""Largest `num_samples` of a request."""
MOST_ALTERNATIVES = 1024
"""Largest `topk_prompt_logprobs` of a request, whose answer has this number of values for each
token."""
_LONGEST = 4096
_SESSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,127}")


def text(body: Mapping[str, object], name: str) -> str:
    """A required text. Raises RequestRefused."""
    value = body.get(name)
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise RequestRefused(f"{name} must be a text (got {value!r:.100})", name)
    return value


def optional_text(body: Mapping[str, object], name: str) -> str | None:
    """A text, or None. Raises RequestRefused."""
    return None if body.get(name) is None else text(body, name)


def whole(body: Mapping[str, object], name: str, low: int = 0, high: int = LARGEST) -> int:
    """A required whole number within bounds. Raises RequestRefused."""
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestRefused(
            f"{name} must be a whole number from {low} to {high} (got {value!r:.100})", name
        )
    return value


def optional_whole(
    body: Mapping[str, object], name: str, low: int = 0, high: int = LARGEST
) -> int | None:
    """A whole number within bounds, or None. Raises RequestRefused."""
    return None if body.get(name) is None else whole(body, name, low, high)


def session_id(body: Mapping[str, object]) -> str:
    """The id of a session as this server makes them: letters, digits and hyphens. Raises
    RequestRefused."""
    value = text(body, "session_id")
    if not _SESSION.fullmatch(value):
        raise RequestRefused(
            f"{value!r:.100} is no id of a session; use the id from create_session", "session_id"
        )
    return value


def check_model(body: Json) -> None:
    """Raise RequestRefused for fields of create_model or load_weights of another type."""
    for name in ("base_model", "path", "model_id", "weights_access_token"):
        optional_text(body, name)
    lora = optional_mapping(body, "lora_config")
    if lora is not None:
        optional_whole(lora, "rank")
        optional_whole(lora, "seed", -LARGEST)
        for name in ("train_attn", "train_mlp", "train_unembed"):
            optional_bool(lora, name)
    optional_bool(body, "optimizer")
    for name in ("optimizer_config", "user_metadata"):
        optional_mapping(body, name)


def check_numbered(body: Json) -> None:
    """Raise RequestRefused for fields of an optimizer step, or of saving weights, of another
    type."""
    optional_text(body, "path")
    optional_whole(body, "sampling_session_seq_id")
    optional_bool(body, "overwrite")
    for name in ("user_metadata", "optimizer_params"):
        optional_mapping(body, name)
    for name, value in (optional_mapping(body, "adam_params") or {}).items():
        if name != "type":
            _number(value, f"adam_params.{name}")


def check_sample(body: Json) -> None:
    """Raise RequestRefused for fields of a request to sample of another type, or out of range."""
    prompt = body.get("prompt")
    chunks = prompt.get("chunks") if isinstance(prompt, Mapping) else None
    if not isinstance(chunks, list) or not all(isinstance(chunk, Mapping) for chunk in chunks):
        raise RequestRefused("prompt must be an object with a list of chunks", "prompt")
    for chunk in chunks:
        if chunk.get("type", "encoded_text") == "encoded_text":
            _tokens(chunk.get("tokens"), "prompt")
    parameters = optional_mapping(body, "sampling_params")
    if parameters is None:
        raise RequestRefused("sampling_params must be an object", "sampling_params")
    for name in ("temperature", "top_p"):
        if parameters.get(name) is not None:
            _number(parameters[name], name)
    optional_whole(parameters, "top_k", -1)
    optional_whole(parameters, "max_tokens", 1)
    optional_whole(parameters, "seed", -LARGEST)
    stop = parameters.get("stop")
    if isinstance(stop, list) and stop and not all(isinstance(item, str) for item in stop):
        _tokens(stop, "stop")
    elif stop is not None and not isinstance(stop, str | list):
        raise RequestRefused(
            f"stop must be a text, or a list of texts or tokens (got {stop!r:.100})", "stop"
        )
    optional_whole(body, "num_samples", 1, MOST_SAMPLES)
    optional_whole(body, "prompt_logprobs_last_n")
    top = body.get("topk_prompt_logprobs")
    if top is not None and top is not False:
        whole(body, "topk_prompt_logprobs", 0, MOST_ALTERNATIVES)


def optional_mapping(body: Mapping[str, object], name: str) -> Mapping[str, object] | None:
    """An object, or None. Raises RequestRefused."""
    value = body.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise RequestRefused(f"{name} must be an object (got {value!r:.100})", name)
    return value


def optional_bool(body: Mapping[str, object], name: str) -> None:
    if body.get(name) is not None and not isinstance(body[name], bool):
        raise RequestRefused(f"{name} must be true or false (got {body[name]!r:.100})", name)


def _number(value: object, name: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > LARGEST:
        raise RequestRefused(f"{name} must be a number (got {value!r:.100})", name)


def _tokens(value: object, name: str) -> None:
    if not isinstance(value, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31
        for token in value
    ):
        raise RequestRefused(f"{name} must be a list of token ids", name)
