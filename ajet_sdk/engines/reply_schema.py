"""Validates replies of models: the JSON of endpoints, the answers of engines, and replies passed
through to an agent.

An invalid reply is an infrastructure fault of the call: a wrong shape, an error beside or instead
of a choice, an unknown finish reason, or an empty reply without a sampled token. Otherwise it would
become an empty message that is judged and trained on, or an exception in the agent.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError
from typing_extensions import TypedDict

from ajet_sdk.dialects.finish import FINISH, finish_of
from ajet_sdk.errors import EngineUnavailable
from ajet_sdk.protocols import Answer, Ask, Choice

LARGEST_ID = 2**31 - 1
LARGEST_LOGPROB = 1e-3
"""A log-probability is at most 0, up to rounding, which adds far less than this."""
LOWEST_LOGPROB = float(np.finfo(np.float32).min)
SHOWN = 300
"""Characters of a reply that an error quotes."""

TokenId = Annotated[int, Field(strict=True)]
"""The range of all ids is checked at once, in a third of the time."""
LogProb = Annotated[float, Field(ge=LOWEST_LOGPROB, le=LARGEST_LOGPROB, allow_inf_nan=False)]


class _Function(BaseModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: str


class _ToolCall(BaseModel):
    id: str | None = None
    type: str = "function"
    function: _Function


class _CustomToolCall(BaseModel):
    """A call of one of OpenAI's custom tools, which only the agent and its endpoint know."""

    type: Literal["custom"]
    custom: dict[str, object]


TOOL_CALL = (
    '{"id": "call_1", "type": "function", "function": {"name": "search", "arguments": "{\\"q\\":'
    ' \\"…\\"}"}}'
)
"""The expected shape, for error messages."""


class _Message(BaseModel):
    role: Literal["assistant"]
    content: str | list[object] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall | _CustomToolCall] | None = None
    function_call: _Function | None = None


class _TokenLogprob(TypedDict, total=False):  # one per token; a model would take four times as long
    token: str
    logprob: LogProb | None


class _Logprobs(BaseModel):
    """Log-probabilities in the shape of chat completions or completions."""

    content: list[_TokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[LogProb | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    """May contain minus infinity."""


class ReplyChoice(BaseModel):
    """A choice of a reply."""

    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    error: object = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None

    @cached_property
    def values(self) -> list[float | None]:
        """The log-probability of each token, None for omitted ones; empty without
        log-probabilities."""
        logprobs = self.logprobs
        if logprobs is None:
            return []
        if logprobs.content is not None:
            return [entry.get("logprob") for entry in logprobs.content]
        values = logprobs.token_logprobs or []
        return values[: len(logprobs.tokens)] if logprobs.tokens else values

    @property
    def tokens(self) -> list[str]:
        """The text of each token, empty for omitted ones."""
        if self.logprobs is not None and self.logprobs.content is not None:
            return [entry.get("token", "") for entry in self.logprobs.content]
        tokens = self.logprobs.tokens if self.logprobs is not None else None
        return (tokens or [""] * len(self.values))[: len(self.values)]


class ReplyJson(BaseModel):
    """The validated fields of `chat/completions` or `completions`; other fields are ignored."""

    choices: list[ReplyChoice] = Field(min_length=1)
    model: str | None = None
    usage: dict[str, object] | None = None
    prompt_token_ids: list[TokenId] | None = None


def read_reply(reply: Mapping[str, Any], route: str, source: str) -> ReplyJson:
    """Validate the reply of `source` to a request of `route`. Raises EngineUnavailable that quotes
    the invalid part."""
    if failed := reply.get("error") or reply.get("stream_error"):
        raise _misfit(source, route, f"it says an error: {failed!s:.{SHOWN}}", reply)
    try:
        read = ReplyJson.model_validate(reply)
    except ValidationError as error:
        raise _misfit(source, route, _wrong(error, ""), reply) from error
    needed = "message" if route == "chat/completions" else "text"
    sampled = (read.usage or {}).get("completion_tokens") or 0
    for index, (choice, raw) in enumerate(zip(read.choices, reply["choices"], strict=True)):
        if choice.error:
            raise _misfit(
                source, route, f"choices[{index}] says an error: {choice.error!s:.{SHOWN}}", reply
            )
        if getattr(choice, needed) is None:
            raise _misfit(source, route, f"choices[{index}] has no {needed}", reply)
        reason = choice.finish_reason
        if reason and reason not in FINISH and finish_of(reason) is None:
            raise _misfit(source, route, f"choices[{index}] ended for {reason!r}", reply)
        if not (sampled or choice.token_ids or choice.values or has_content(raw[needed])) and (
            finish_of(reason) != "content_filter"
        ):
            raise _misfit(
                source, route, f"choices[{index}] is empty, and no token was sampled", reply
            )
        ids = choice.token_ids
        if ids and not 0 <= min(ids) <= max(ids) <= LARGEST_ID:
            raise _misfit(
                source,
                route,
                f"choices[{index}].token_ids: ids must be from 0 to {LARGEST_ID}",
                reply,
            )
        if ids is not None and choice.logprobs is not None and len(choice.values) != len(ids):
            wrong = (
                f"choices[{index}] has {len(ids)} token ids and {len(choice.values)}"
                " log-probabilities"
            )
            raise _misfit(source, route, wrong, reply)
    return read


def tool_calls_fault(calls: object) -> str | None:
    """Return the error in the tool calls of a message for a template, with the expected shape; None
    if they are valid.

    Arguments may be an object here, as templates accept both.
    """
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, Mapping) else None
        fields = function if isinstance(function, Mapping) else {}
        name = fields.get("name")
        named = (
            isinstance(name, str)
            and name
            and isinstance(fields.get("arguments", ""), (str, Mapping))
        )
        if not named or not isinstance(calls, list):
            return (
                f"tool_calls[{index}] has another shape (got {call!r:.200}); expected a list of"
                f" {TOOL_CALL}"
            )
    return None


def has_content(message: object) -> bool:
    """Whether a text or a message has any content: text, reasoning, a tool call, a refusal."""
    if isinstance(message, Mapping):
        return any(value for name, value in message.items() if name != "role")
    return bool(message)


def _wrong(error: ValidationError, within: str) -> str:
    """The first validation error, with the expected shape of a tool call."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = [part for part in first["loc"] if part not in ("_ToolCall", "_CustomToolCall")]
    if "tool_calls" not in location:
        return f"{within}{_location(tuple(location))}: {first['msg']}"
    at = location.index("tool_calls") + 2
    value = error.errors(include_url=False)[0]["input"]
    return (
        f"{within}{_location(tuple(location[:at]))} has another shape"
        f" ({_location(tuple(location[at:]))}: {first['msg']}, in {value!r:.200}); expected"
        f" {TOOL_CALL}"
    )


def _location(location: tuple[int | str, ...]) -> str:
    spelt = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return spelt.lstrip(".") or "the reply"


def _misfit(source: str, route: str, wrong: str, reply: Mapping[str, object]) -> EngineUnavailable:
    shown = str(dict(reply))
    quoted = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
    return EngineUnavailable(f"{source} answered {route} with an invalid reply ({wrong}): {quoted}")


def checked_answer(answer: Answer, ask: Ask, source: str) -> Answer:
    """Validate an engine's answer and convert its ids to read-only int32 arrays. Raises
    EngineUnavailable.

    Valid is an answer with `n` choices, a message or text and a known finish reason in each, ids
    from 0 to 2^31 - 1, and a finite log-probability per id.
    """
    if not isinstance(answer, Answer):
        raise EngineUnavailable(
            f"{source} answered {ask.route} with a {type(answer).__name__}, not an Answer"
        )
    route = ask.route
    if len(answer.choices) != ask.sampling.n:
        raise EngineUnavailable(
            f"{source} answered {route} with {len(answer.choices)} choices, and n is"
            f" {ask.sampling.n}"
        )
    choices = list[Choice]()
    for index, choice in enumerate(answer.choices):
        choices.append(_checked_choice(choice, route, f"{source}, choice {index}"))
    if answer.prompt_ids is None:
        prompt = None
    else:
        prompt = _ids(answer.prompt_ids, f"{source}, prompt")
    return replace(answer, choices=tuple(choices), prompt_ids=prompt)


def _checked_choice(choice: Choice, route: str, where: str) -> Choice:
    if route == "chat/completions" and choice.message is not None:
        try:
            _Message.model_validate({"role": "assistant", **choice.message})
        except ValidationError as error:
            raise EngineUnavailable(f"{where}: {_wrong(error, 'message.')}") from error
    elif not isinstance(choice.text, str):
        raise EngineUnavailable(
            f"{where}: there is no {'message' if route == 'chat/completions' else 'text'}"
        )
    finish = FINISH.get(choice.finish_reason) or finish_of(choice.finish_reason)
    if finish is None:
        raise EngineUnavailable(
            f"{where}: it ended for {choice.finish_reason!r}, which is no reason that is known"
        )
    ids = None if choice.output_ids is None else _ids(choice.output_ids, where)
    if choice.logprobs is not None:
        _check_logprobs(choice.logprobs, where)
    for kind, values in (("log-probabilities", choice.logprobs), ("tokens", choice.tokens)):
        if ids is not None and values is not None and len(values) != len(ids):
            raise EngineUnavailable(f"{where}: {len(ids)} token ids and {len(values)} {kind}")
    return replace(choice, output_ids=ids, finish_reason=finish)


def _ids(values: Sequence[int], where: str) -> Any:
    if isinstance(values, array) and values.typecode == "i" and values:
        ids_N: npt.NDArray[np.generic] = np.frombuffer(values, dtype=np.int32)  # without a copy
    else:
        ids_N = np.array(values)
    whole = ids_N.ndim == 1 and (ids_N.dtype.kind in "iu" or not ids_N.size)
    if not whole or (ids_N.size and not 0 <= int(ids_N.min()) <= int(ids_N.max()) <= LARGEST_ID):
        raise EngineUnavailable(f"{where}: a token id is not an integer from 0 to {LARGEST_ID}")
    ids = ids_N.astype(np.int32, copy=False)
    ids.flags.writeable = False
    return ids


def _check_logprobs(values: Sequence[float], where: str) -> None:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise EngineUnavailable(f"{where}: a log-probability is not a number ({error})") from error
    if array.ndim != 1 or not bool(np.all((array >= LOWEST_LOGPROB) & (array <= LARGEST_LOGPROB))):
        raise EngineUnavailable(f"{where}: a log-probability is not finite, or above 0")


def fault_in(
    route: str, request: Mapping[str, object], response: Mapping[str, object], source: str
) -> str | None:
    """Why a response with status 200 is not a valid reply; None if it is valid, or not from a
    model.

    Other routes may end like a vendor's (`threads/…/messages`); the fields of the request
    distinguish them.
    """
    if route == "chat/completions" or (
        route == "completions" and ("choices" in response or "prompt" in request)
    ):
        try:
            read_reply(response, route, source)
        except EngineUnavailable as error:
            return str(error)
        return None
    read = next(
        (read for name, needed, read in _READ if route.endswith(name) and needed <= request.keys()),
        None,
    )
    if read is None:
        return None
    failed = response.get("error") or response.get("stream_error")
    wrong = f"it says an error: {failed!s:.{SHOWN}}" if failed else read(response, request)
    quoted = f"{dict(response)!s:.{SHOWN}}"
    if wrong is None:
        return None
    return f"{source} answered {route} with an invalid reply ({wrong}): {quoted}"


def _message(message: Mapping[str, object], request: Mapping[str, object]) -> str | None:
    """Validate a reply of Anthropic's Messages."""
    blocks = message.get("content")
    usage = message.get("usage")
    if not isinstance(blocks, list) or not all(
        isinstance(block, Mapping) and block.get("type") for block in blocks
    ):
        return "content is no list of blocks"
    for block in blocks:
        if block["type"] == "text" and not isinstance(block.get("text"), str):
            return "a block of text has no text"
        if block["type"] == "tool_use" and not (
            isinstance(block.get("name"), str) and isinstance(block.get("input"), Mapping)
        ):
            return (
                'a tool_use has another shape; expected {"type": "tool_use", "id": …, "name": "…",'
                ' "input": {…}}'
            )
    has_text = any(has_content({**block, "type": "", "id": ""}) for block in blocks)
    return _ended(message.get("stop_reason"), has_text, _number(usage, "output_tokens"))


def _response(response: Mapping[str, object], request: Mapping[str, object]) -> str | None:
    """Validate a reply of OpenAI's Responses."""
    status = response.get("status")
    items = response.get("output")
    if request.get("background") and status in ("queued", "in_progress"):
        return None
    if not isinstance(items, list) or not all(
        isinstance(item, Mapping) and item.get("type") for item in items
    ):
        return "output is no list of items"
    for item in items:
        parts = item.get("content") if item["type"] == "message" else []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            return "the content of a message is no list of parts"
        if any(
            part.get("type") == "output_text" and not isinstance(part.get("text"), str)
            for part in parts
        ):
            return "a part of text has no text"
        if item["type"] == "function_call" and not (
            isinstance(item.get("name"), str) and isinstance(item.get("arguments"), str)
        ):
            return (
                'a function_call has another shape; expected {"type": "function_call", "call_id":'
                ' …, "name": "…", "arguments": "{…}"}'
            )
    has_text = any(map(_says_something, items))
    reason = status
    if status == "incomplete":
        reason = _field(response.get("incomplete_details"), "reason") or status
    return _ended(reason, has_text, _number(response.get("usage"), "output_tokens"))


def _says_something(item: Mapping[str, Any]) -> bool:
    """Whether an item of a response has content; those without text, such as calls, always have."""
    if item["type"] not in ("message", "reasoning"):
        return True
    return any(has_content({**part, "type": ""}) for part in item.get("content") or ())


def _candidates(response: Mapping[str, object], request: Mapping[str, object]) -> str | None:
    """Validate a reply of Gemini."""
    candidates = response.get("candidates")
    usage = response.get("usageMetadata")
    if not candidates and finish_of(_field(response.get("promptFeedback"), "blockReason")):
        return None  # the prompt was filtered
    if not isinstance(candidates, list) or not candidates:
        return "there are no candidates"
    sampled = _number(usage, "candidatesTokenCount") + _number(usage, "thoughtsTokenCount")
    for candidate in candidates:
        if isinstance(candidate, Mapping):
            content = candidate.get("content")
        else:
            content = None
        if not isinstance(content or {}, Mapping) or not isinstance(candidate, Mapping):
            return "a candidate is no object with content"
        parts = (content or {}).get("parts") or []
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            return "the parts of a candidate are no list of objects"
        for part in parts:
            call = part.get("functionCall")
            if call is not None and not (
                isinstance(call, Mapping) and isinstance(call.get("name"), str)
            ):
                return (
                    'a functionCall has another shape; expected {"functionCall": {"name": "…",'
                    ' "args": {…}}}'
                )
            if not isinstance(part.get("text", ""), str):
                return "a part of text has no text"
        has_text = any(any(part.values()) for part in parts)
        if wrong := _ended(candidate.get("finishReason"), has_text, sampled):
            return wrong
    return None


_READ = (
    ("messages", {"messages", "max_tokens"}, _message),
    ("responses", {"input", "model"}, _response),
    (":generateContent", {"contents"}, _candidates),
    (":streamGenerateContent", {"contents"}, _candidates),
    (":streamGenerateContent?alt=sse", {"contents"}, _candidates),
)
"""By the end of the route: required fields of the request, and the validator of the reply."""


def _ended(reason: object, has_text: bool, sampled: int) -> str | None:
    finish = finish_of(reason)
    if finish is None:
        if reason:
            return f"it ended for {reason!r}"
        return "it says no reason of its end"
    if not has_text and not sampled and finish != "content_filter":
        return "it is empty, and no token was sampled"
    return None


def _number(usage: object, name: str) -> int:
    value = _field(usage, name)
    return value if isinstance(value, int) else 0


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, Mapping) else None
