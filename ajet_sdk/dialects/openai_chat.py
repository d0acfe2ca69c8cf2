"""OpenAI's completions APIs: converts requests to `Ask`s, and answers to responses and server-sent
events."""

from __future__ import annotations

import marshal
import math
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import repeat

from ajet_sdk.dialects.fields import Fields
from ajet_sdk.dialects.json import Stored, json_bytes
from ajet_sdk.errors import RequestRefused
from ajet_sdk.protocols import Answer, Ask, Choice, Sampling
from ajet_sdk.types import Json, JsonView

PIECE = 48
"""Characters of a streamed piece of text."""

MOST_CHOICES = 128
MOST_ALTERNATIVES = 20
"""Alternatives per token: OpenAI's limit and vLLM's default."""

NUMBERS: dict[str, tuple[float | None, bool]] = {
    "max_completion_tokens": (1, True),
    "max_tokens": (1, True),
    "top_k": (-1, True),
    "seed": (None, True),
    "n": (1, True),
    "top_logprobs": (0, True),
    "temperature": (0, False),
    "top_p": (0, False),
    "min_p": (0, False),
    "min_tokens": (0, True),
    "frequency_penalty": (-2, False),
    "presence_penalty": (-2, False),
    "repetition_penalty": (0, False),
}
"""Numeric parameters: the lowest value, and whether it must be a whole number."""

NAMED = frozenset(
    (
        "model",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "n",
    )
)
"""Parameters that the gateway reads or that control sampling."""


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _event(value: Json) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


class Completions:
    """The route chat/completions, or completions without `chat`."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, *, chat: bool) -> None:
        self.chat = chat
        self.form = self
        self.fields: Fields = {}

    def opening(self, request_id: str, model: str, body: Mapping[str, object]) -> bytes:
        return b""

    def keep_alive(self, request_id: str, model: str, body: Mapping[str, object]) -> bytes:
        return b": waiting\n\n"

    def neutral(self, body: Json, stored: Mapping[str, Json]) -> Json:
        return body

    def ask(self, body: Mapping[str, object], episode_id: str, agent: str) -> Ask:
        """Convert a request for the engine, with its sampling. Raises RequestRefused if it is
        malformed."""
        route, needed = ("chat/completions", "messages") if self.chat else ("completions", "prompt")
        subject = body.get(needed)
        if not isinstance(subject, list if self.chat else (str, list)) or not subject:
            raise RequestRefused(f"{route} needs {needed}", needed)
        options = Json()
        named = Json()
        taken = ("messages", "tools") if self.chat else ("prompt",)
        for name, value in body.items():
            if name not in taken:
                (named if name in NAMED else options)[name] = value
        try:
            sampling = _sampling_of(marshal.dumps({**named, **options}, 2))
        except ValueError:  # nested too deeply
            sampling = read_sampling({**named, **options})
        wanted = options.get("logprobs")
        return Ask(
            sampling,
            episode_id,
            agent,
            messages=subject if self.chat else None,
            prompt=None if self.chat else subject,
            tools=body.get("tools") if self.chat else None,
            options=options,
            named=named,
            route="chat/completions" if self.chat else "completions",
            logprobs=wanted is not None
            and wanted is not False,  # a number for completions, possibly 0
        )

    def streams(self, body: Mapping[str, object]) -> bool:
        return bool(body.get("stream"))

    def completion(self, answer: Answer, ask: Ask, request_id: str) -> Json:
        """Return the whole response, with ids and log-probabilities if requested."""
        response: Json = {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + request_id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": int(time.time()),
            "model": answer.model,
            "choices": list(map(_choice, range(len(answer.choices)), answer.choices, repeat(ask))),
            "usage": dict(answer.usage) or _usage(answer),
        }
        if ask.options.get("return_token_ids"):
            response["prompt_token_ids"] = (
                None if answer.prompt_ids is None else [int(i) for i in answer.prompt_ids]
            )
        return response

    def response(self, completion: Json, request: Json, body: Json, stored: Stored) -> Json:
        return completion

    def events(self, response: JsonView, body: JsonView) -> list[bytes]:
        """Return the response as server-sent events: role, text, tool calls, finish, usage with the
        end mark."""
        base = {key: response[key] for key in ("id", "created", "model")}
        base["object"] = "chat.completion.chunk" if self.chat else "text_completion"
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        if with_usage:
            base["usage"] = None
        events = list[bytes]()
        for choice in response["choices"]:
            if self.chat:
                deltas = list(_chat_deltas(choice))
            else:
                end = {"finish_reason": choice["finish_reason"], "logprobs": choice.get("logprobs")}
                deltas = [
                    {"text": text, "finish_reason": None, "logprobs": None}
                    for text in pieces(choice["text"])
                ]
                deltas.append({"text": "", **end})
            if "token_ids" in choice:
                deltas[-1]["token_ids"] = choice["token_ids"]
            for number, delta in enumerate(deltas):
                chunk = {**base, "choices": [{"index": choice["index"], **delta}]}
                if "prompt_token_ids" in response and number == 0:
                    chunk["prompt_token_ids"] = response["prompt_token_ids"]
                events.append(_event(chunk))
        if with_usage:
            events.append(_event({**base, "choices": [], "usage": response["usage"]}))
        events[-1] += b"data: [DONE]\n\n"
        return events

    def error(self, status: int, message: str, code: str | None, param: str | None) -> Json:
        return error_body(
            message, "invalid_request_error" if status < 500 else "server_error", code, param
        )

    def error_event(self, error: Json) -> bytes:
        return _event(error)

    def model(self, name: str) -> Json:
        return {"id": name, "object": "model", "created": 0, "owned_by": "ajet"}

    def models(self, names: list[str]) -> Json:
        return {"object": "list", "data": [self.model(name) for name in names]}


CHAT = Completions(chat=True)
TEXT = Completions(chat=False)


class ChatDialect:
    """Base of dialects whose requests become chat completions."""

    form = CHAT
    fields: Fields = {}
    media_type = CHAT.media_type

    def opening(self, request_id: str, model: str, body: Mapping[str, object]) -> bytes:
        return b""

    def streams(self, body: Mapping[str, object]) -> bool:
        return bool(body.get("stream"))

    def error(self, status: int, message: str, code: str | None, param: str | None) -> Json:
        return CHAT.error(status, message, code, param)


@lru_cache(maxsize=256)
def _sampling_of(spelling: bytes) -> Sampling:
    """The sampling of marshalled parameters; cached, as most calls of a run have equal ones."""
    return read_sampling(marshal.loads(spelling))


def read_sampling(body: Mapping[str, object]) -> Sampling:
    """Read the sampling of a request. Raises RequestRefused for an invalid parameter."""
    named = Json()
    for name, (low, whole) in NUMBERS.items():
        value = body.get(name)
        named[name] = None if value is None else _number(name, value, low, whole)
    n = named["n"] or 1
    top_p = named["top_p"]
    top_k = named["top_k"]
    temperature = named["temperature"]
    if n > MOST_CHOICES:
        raise RequestRefused(f"n must be at most {MOST_CHOICES} (got {n})", "n")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RequestRefused(
            f"stream_options must be an object (got {body['stream_options']!r})", "stream_options"
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise RequestRefused(f"top_p must be above 0 and at most 1 (got {top_p})", "top_p")
    for name, most in (("min_p", 1), ("frequency_penalty", 2), ("presence_penalty", 2)):
        if (named[name] or 0) > most:
            raise RequestRefused(f"{name} must be at most {most} (got {named[name]})", name)
    if named["repetition_penalty"] == 0:
        raise RequestRefused(
            "repetition_penalty must be above 0 (1 has no effect)", "repetition_penalty"
        )
    if named["max_completion_tokens"] is None:
        limit = named["max_tokens"]
    else:
        limit = named["max_completion_tokens"]
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_p=1.0 if top_p is None else float(top_p),
        top_k=int(top_k) if top_k else -1,
        max_tokens=None if limit is None else int(limit),
        stop=_strings("stop", body.get("stop")),
        seed=None if named["seed"] is None else int(named["seed"]),
        n=int(n),
        min_p=float(named["min_p"] or 0),
        frequency_penalty=float(named["frequency_penalty"] or 0),
        presence_penalty=float(named["presence_penalty"] or 0),
        repetition_penalty=float(named["repetition_penalty"] or 1),
        logit_bias=_bias(body.get("logit_bias")),
        bad_words=_strings("bad_words", body.get("bad_words")),
        min_tokens=int(named["min_tokens"] or 0),
        stop_token_ids=_ids("stop_token_ids", body.get("stop_token_ids")),
        ignore_eos=bool(body.get("ignore_eos")),
        top_logprobs=_alternatives(body.get("logprobs"), named["top_logprobs"]),
    )


def _alternatives(logprobs: object, top: float | None) -> int:
    """Number of alternatives per token: `top_logprobs` for chat, where `logprobs` is a boolean,
    else `logprobs`."""
    if logprobs is None or isinstance(logprobs, bool):
        count = int(top or 0) if logprobs else 0
    else:
        count = int(_number("logprobs", logprobs, 0, True))
    if count > MOST_ALTERNATIVES:
        raise RequestRefused(
            f"at most {MOST_ALTERNATIVES} alternatives can be returned (got {count})",
            "top_logprobs",
        )
    return count


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    """`logit_bias`, an object of token ids and numbers from -100 to 100."""
    biases = list[tuple[int, float]]()
    for token, bias in (
        value.items() if isinstance(value, Mapping) else () if value is None else (("", value),)
    ):
        if isinstance(bias, (int, float)) and not isinstance(bias, bool):
            number = bias
        else:
            number = None
        if number is None or not -100 <= number <= 100 or not str(token).isdecimal():
            raise RequestRefused(
                "logit_bias must be an object that maps token ids to numbers from -100 to 100 (got"
                f" {value!r:.200})",
                "logit_bias",
            )
        if number:
            biases.append((int(token), float(number)))
    return tuple(sorted(biases))


def _ids(name: str, value: object) -> tuple[int, ...]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids
    ):
        raise RequestRefused(f"{name} must be a list of token ids (got {value!r:.200})", name)
    return tuple(sorted(set(ids)))


def _number(name: str, value: object, low: float | None, whole: bool) -> float | int:
    kind = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestRefused(f"{name} must be {kind} (got {value!r})", name)
    if not math.isfinite(value) or (low is not None and value < low):
        raise RequestRefused(f"{name} must be at least {low} (got {value!r})", name)
    if whole and value != int(value):
        raise RequestRefused(f"{name} must be {kind} (got {value!r})", name)
    return value


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(s, str) for s in strings):
        raise RequestRefused(f"{name} must be a string or a list of strings (got {value!r})", name)
    return tuple(filter(None, strings))


def _choice(index: int, choice: Choice, ask: Ask) -> Json:
    shaped: Json = {"index": index}
    if ask.messages is not None:
        message = choice.message or {"role": "assistant", "content": choice.text}
        shaped["message"] = {"role": "assistant", "content": None, **message}
        shaped["logprobs"] = (
            _chat_logprobs(choice, int(ask.options.get("top_logprobs") or 0))
            if ask.logprobs
            else None
        )
    else:
        shaped["text"] = choice.text or ""
        shaped["logprobs"] = _text_logprobs(choice) if ask.logprobs else None
    shaped["finish_reason"] = choice.finish_reason
    if choice.unread:
        shaped["unread_tool_call"] = True
    if choice.stop is not None:
        shaped["stop_reason"] = choice.stop
    if ask.options.get("return_token_ids"):
        shaped["token_ids"] = (
            None if choice.output_ids is None else [int(i) for i in choice.output_ids]
        )
    return shaped


def _token_texts(choice: Choice) -> list[tuple[str, list[int] | None]]:
    if choice.tokens is not None:
        return [(token.decode("utf-8", "replace"), list(token)) for token in choice.tokens]
    return [(f"token_id:{i}", None) for i in choice.output_ids or ()]


def _chat_logprobs(choice: Choice, top: int) -> Json | None:
    if choice.logprobs is None:
        return None
    content = []
    for place, ((text, data), logprob) in enumerate(
        zip(_token_texts(choice), choice.logprobs, strict=True)
    ):
        entry: Json = {"token": text, "logprob": float(logprob), "bytes": data}
        # Without alternatives of the engine, only the sampled token is shown.
        best = [entry] if choice.top is None else [
            {"token": token.decode("utf-8", "replace"), "logprob": value, "bytes": list(token)}
            for token, value in choice.top[place]
        ]  # fmt: skip
        content.append({**entry, "top_logprobs": best[:top]})
    return {"content": content, "refusal": None}


def _text_logprobs(choice: Choice) -> Json | None:
    if choice.logprobs is None:
        return None
    texts = [text for text, _ in _token_texts(choice)]
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    logprobs = [float(p) for p in choice.logprobs]
    top = [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)]
    if choice.top:
        for index, likely in enumerate(choice.top):
            top[index] = {token.decode("utf-8", "replace"): value for token, value in likely}
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": offsets[: len(texts)],
    }


def _usage(answer: Answer) -> dict[str, int]:
    prompt = len(answer.prompt_ids) if answer.prompt_ids is not None else 0
    completion = sum(len(c.output_ids) for c in answer.choices if c.output_ids is not None)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


SECRETS = frozenset(("api_key", "api-key", "apikey", "authorization", "headers", "extra_headers"))


def remove_secrets(body: Json) -> Json:
    """A copy of the body without the keys and headers that some proxies accept there."""
    cleaned = dict(body)
    for name in body:
        if name.lower() in SECRETS:
            del cleaned[name]
    return cleaned


def _chat_deltas(choice: Json) -> Iterator[Json]:
    def delta(value: Json, **extra: object) -> Json:
        return {"delta": dict(value), "finish_reason": None, "logprobs": None, **extra}

    message = choice["message"]
    yield delta(
        {"role": message["role"], "content": "" if message.get("content") is not None else None}
    )
    if message.get("reasoning_content"):
        for piece in pieces(message["reasoning_content"]):
            yield delta({"reasoning_content": piece})
    whole = choice.get("logprobs") is not None
    content = message.get("content") or ""
    for piece in [content] if whole and content else pieces(content):
        yield delta({"content": piece})
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        start = {"index": index, "id": call["id"], "type": "function"}
        yield delta(
            {"tool_calls": [{**start, "function": {"name": function["name"], "arguments": ""}}]}
        )
        for piece in pieces(function["arguments"]):
            yield delta({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    end = delta({})
    end.update(finish_reason=choice["finish_reason"], logprobs=choice.get("logprobs"))
    yield end


def pieces(text: str) -> list[str]:
    """Split a text into the pieces that are streamed."""
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
