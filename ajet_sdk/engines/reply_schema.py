"""What a model's reply must look like: one schema for the JSON of an endpoint and for the answer of any engine.

What does not fit is an infrastructure fault of the call. Read leniently, such a reply would be an empty message that is
judged and trained on, or an exception somewhere in the agent.
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

from ajet_sdk.errors import EngineUnavailable
from ajet_sdk.protocols import Answer, Ask, Choice

__all__ = ["ReplyChoice", "ReplyJson", "checked_answer", "read_reply"]

LARGEST_ID = 2**31 - 1
LARGEST_LOGPROB = 1e-3
"""A log-probability is at most 0; what rounding adds is far less than this."""
LOWEST_LOGPROB = float(np.finfo(np.float32).min)
SHOWN = 300
"""Characters of a reply that an error quotes."""

TokenId = Annotated[int, Field(strict=True)]
"""The range is checked of all at once, which takes a third of the time."""
LogProb = Annotated[float, Field(ge=LOWEST_LOGPROB, le=LARGEST_LOGPROB, allow_inf_nan=False)]


class _Function(BaseModel):
    name: str
    arguments: str


class _ToolCall(BaseModel):
    id: str | None = None
    type: str = "function"
    function: _Function


class _OtherToolCall(BaseModel):
    """A kind of tool call that only the agent and its endpoint know."""

    type: Literal["custom"]


class _Message(BaseModel):
    role: Literal["assistant"]
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall | _OtherToolCall] | None = None


class _TokenLogprob(TypedDict, total=False):  # there is one for each token, and models take four times as long
    token: str
    logprob: LogProb | None


class _Logprobs(BaseModel):
    """In either dialect's shape."""

    content: list[_TokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[LogProb | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    """What could not be drawn is minus infinity."""


class ReplyChoice(BaseModel):
    """One of a reply's choices."""

    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None

    @cached_property
    def values(self) -> list[float | None]:
        """The log-probability of each token, None where the endpoint leaves it out; empty where it gives none."""
        given = self.logprobs
        if given is None:
            return []
        if given.content is not None:
            return [one.get("logprob") for one in given.content]
        values = given.token_logprobs or []
        return values[: len(given.tokens)] if given.tokens else values

    @property
    def tokens(self) -> list[str]:
        """The text of each token, as far as the endpoint gives it."""
        if self.logprobs is not None and self.logprobs.content is not None:
            return [one.get("token", "") for one in self.logprobs.content]
        given = self.logprobs.tokens if self.logprobs is not None else None
        return (given or [""] * len(self.values))[: len(self.values)]


class ReplyJson(BaseModel):
    """The JSON of `chat/completions` or `completions`, as far as it is read. What else is in it passes."""

    choices: list[ReplyChoice] = Field(min_length=1)
    model: str | None = None
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[TokenId] | None = None


def read_reply(reply: Mapping[str, Any], route: str, source: str) -> ReplyJson:
    """The reply of `source` to a request of `route`. Raises EngineUnavailable, which quotes what does not fit."""
    try:
        read = ReplyJson.model_validate(reply)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _misfit(source, route, f"{_place(first['loc'])}: {first['msg']}", reply) from error
    needed = "message" if route == "chat/completions" else "text"
    for index, choice in enumerate(read.choices):
        if getattr(choice, needed) is None:
            raise _misfit(source, route, f"choices[{index}] has no {needed}", reply)
        ids = choice.token_ids
        if ids and not 0 <= min(ids) <= max(ids) <= LARGEST_ID:
            raise _misfit(source, route, f"choices[{index}].token_ids: ids must be from 0 to {LARGEST_ID}", reply)
        if ids is not None and choice.logprobs is not None and len(choice.values) != len(ids):
            wrong = f"choices[{index}] has {len(ids)} token ids and {len(choice.values)} log-probabilities"
            raise _misfit(source, route, wrong, reply)
    return read


def _place(location: tuple[int | str, ...]) -> str:
    spelt = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return spelt.lstrip(".") or "the reply"


def _misfit(source: str, route: str, wrong: str, reply: Mapping[str, Any]) -> EngineUnavailable:
    shown = str(dict(reply))
    quoted = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}…"
    return EngineUnavailable(f"{source} answered {route} with an invalid reply ({wrong}): {quoted}")


def checked_answer(answer: Answer, ask: Ask, source: str) -> Answer:
    """The answer, its ids as read-only int32 arrays. Raises EngineUnavailable where it is none.

    Whatever engine gave it: as many choices as were asked for, a message or a text in each, ids from 0 to 2^31 - 1,
    finite log-probabilities, one for each id.
    """
    if not isinstance(answer, Answer):
        raise EngineUnavailable(f"{source} answered {ask.route} with a {type(answer).__name__}, not an Answer")
    route = ask.route
    if len(answer.choices) != ask.sampling.n:
        raise EngineUnavailable(
            f"{source} answered {route} with {len(answer.choices)} choices, and n is {ask.sampling.n}"
        )
    choices = list[Choice]()
    for index, choice in enumerate(answer.choices):
        choices.append(_checked_choice(choice, route, f"{source}, choice {index}"))
    prompt = None if answer.prompt_ids is None else _ids(answer.prompt_ids, f"{source}, prompt")
    return replace(answer, choices=tuple(choices), prompt_ids=prompt)


def _checked_choice(choice: Choice, route: str, where: str) -> Choice:
    if route == "chat/completions" and choice.message is not None:
        try:
            _Message.model_validate({"role": "assistant", **choice.message})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise EngineUnavailable(f"{where}: message{_place((*('',), *first['loc']))}: {first['msg']}") from error
    elif not isinstance(choice.text, str):
        raise EngineUnavailable(f"{where}: there is no {'message' if route == 'chat/completions' else 'text'}")
    ids = None if choice.output_ids is None else _ids(choice.output_ids, where)
    if choice.logprobs is not None:
        _check_logprobs(choice.logprobs, where)
    for what, values in (("log-probabilities", choice.logprobs), ("tokens", choice.tokens)):
        if ids is not None and values is not None and len(values) != len(ids):
            raise EngineUnavailable(f"{where}: {len(ids)} token ids and {len(values)} {what}")
    return replace(choice, output_ids=ids)


def _ids(values: Sequence[int], where: str) -> Any:
    if isinstance(values, array) and values.typecode == "i" and values:
        found: npt.NDArray[Any] = np.frombuffer(values, dtype=np.int32)  # the engine's own, not held twice
    else:
        found = np.array(values)
    whole = found.ndim == 1 and (found.dtype.kind in "iu" or not found.size)
    if not whole or (found.size and not 0 <= int(found.min()) <= int(found.max()) <= LARGEST_ID):
        raise EngineUnavailable(f"{where}: a token id is not an integer from 0 to {LARGEST_ID}")
    ids = found.astype(np.int32, copy=False)
    ids.flags.writeable = False
    return ids


def _check_logprobs(values: Sequence[float], where: str) -> None:
    try:
        found = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise EngineUnavailable(f"{where}: a log-probability is not a number ({error})") from error
    if found.ndim != 1 or not bool(np.all((found >= LOWEST_LOGPROB) & (found <= LARGEST_LOGPROB))):
        raise EngineUnavailable(f"{where}: a log-probability is not finite, or above 0")
