"""Imports OpenAI's JSON lines: chat messages (also exported by ajet), logs of request and response
(chat completions and Responses), batch output.

A row of messages becomes an episode with a single call, whose reply is a final assistant message;
rows exported by ajet restore every call. A row with a response becomes an episode with a single
call. Other keys become task metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from typing import Any

from pydantic import BaseModel, ValidationError

from ajet_sdk.dialects.message_parts import request_messages
from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Episode, Reward
from ajet_tools.trace.export.conversations import about
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, stable_id, task_of

_OURS = (*about(Episode()), "messages", "tools", "calls")
"""Columns of ajet's own rows; others are metadata of the task."""


def read(rows: Iterable[Row], bad: BadRows) -> Iterator[Parsed]:
    """Read an episode per row; consecutive rows with the same `episode_id` are one episode."""
    for _, group in groupby(_understood(rows, bad), _episode_key):  # in order, in little memory
        same = list(group)
        try:
            if "messages" in same[0].value:
                yield _conversations(same)
            else:
                yield _exchange(same[0])
        except (ValidationError, TypeError, ValueError, KeyError, AttributeError) as error:
            bad.add(same[0].where, f"cannot be read as an episode: {str(error).splitlines()[0]}")


def _understood(rows: Iterable[Row], bad: BadRows) -> Iterator[Row]:
    for row in rows:
        problem = _problem(row.value)
        if problem:
            bad.add(row.where, problem)
        else:
            yield row


def _episode_key(row: Row) -> object:
    named = row.value.get("episode_id")
    if "messages" in row.value and isinstance(named, str) and named:
        return named
    return row.number, row.where


def _problem(value: object) -> str | None:
    """Return why a row is not understood, or None."""
    if not isinstance(value, Mapping):
        return f"is not an object (got {type(value).__name__})"
    if value.get("messages") is not None:
        return request_problem(value)
    request = _body(value, _REQUEST)
    response = _body(value, _RESPONSE)
    if request is None and response is None:
        return f"has neither messages nor a request or response; it has {', '.join(value)[:80]}"
    if request is not None and request_problem(request):
        return f"has a request without messages, input or prompt: {', '.join(request)[:80]}"
    if response and not is_reply(response) and _error(value, response) is None:
        return f"has a response without choices or output: {', '.join(response)[:80]}"
    return None


def request_problem(request: Mapping[str, object]) -> str | None:
    """Return what the messages of a request lack, or None."""
    if are_messages(request_messages(request)):
        return None
    return "has messages that are not a list of objects with a role"


def are_messages(value: object) -> bool:
    """Whether a value is a list of messages, or of the items of the Responses."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, Mapping) and _is_message(message) for message in value)


_ITEMS = ("message", "reasoning", "item_reference", "mcp_list_tools", "mcp_approval_request")


def _is_message(message: Mapping[str, object]) -> bool:
    kind = str(message.get("type"))
    is_item = kind in _ITEMS or kind.endswith(("_call", "_call_output", "_response"))
    return is_item or isinstance(message.get("role"), str)


def is_reply(response: Mapping[str, object]) -> bool:
    """Whether a response has a choice or an item of output, each of a known form."""
    if isinstance(response.get("output"), list):
        return are_messages(response["output"])
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    for choice in choices:
        if not isinstance(choice, Mapping):
            return False
        if not isinstance(choice.get("text"), str) and not are_messages([choice.get("message")]):
            return False
    return True


def _conversations(rows: Sequence[Row]) -> Parsed:
    first = rows[0]
    episode_id = first.value.get("episode_id") or stable_id("messages", first.number, first.text)
    calls: list[Call] = []
    for row in rows:
        calls += _calls(row.value, episode_id)
    calls.sort(key=lambda call: call.index)
    fields: dict[str, Any] = {"split": ""}
    if "calls" in first.value:
        names = ("run_id", "group_id", "attempt", "step", "split", "status")
        fields = {name: first.value[name] for name in names}
    metadata = {name: value for name, value in first.value.items() if name not in _OURS}
    task_id = first.value.get("task_id")
    task_fields = {}
    if task_id not in (None, ""):
        task_fields = {"task_id": str(task_id)}
    episode = Episode(
        **fields,
        episode_id=episode_id,
        task=task_of(first.value["messages"], metadata, episode_id, task_fields),
        calls=tuple(calls),
        rewards=_rewards([row.value for row in rows]),
        started_at=UNKNOWN_TIME,
        ended_at=UNKNOWN_TIME,
    )
    return Parsed(episode=episode)


class _Turn(BaseModel):
    """A call in a row exported by ajet; `message` is the index of its reply."""

    call_id: str
    message: int
    index: int = 0


def _calls(value: Mapping[str, Any], episode_id: str) -> Iterator[Call]:
    messages = value["messages"]
    if isinstance(value.get("calls"), list):
        turns = [_Turn.model_validate(turn) for turn in value["calls"]]
    else:
        last = len(messages) - (messages[-1].get("role") == "assistant")
        turns = [_Turn(call_id=stable_id("call", episode_id), message=last)]
    for turn in turns:
        request = {"messages": messages[: turn.message]}
        if value.get("tools"):
            request["tools"] = value["tools"]
        response = {}
        if turn.message < len(messages):
            response = {"choices": [{"index": 0, "message": messages[turn.message]}]}
        yield Call(
            call_id=turn.call_id,
            episode_id=episode_id,
            index=turn.index,
            agent=value.get("agent") or "default",
            trainable=False,
            request=request,
            response=response,
            started_at=UNKNOWN_TIME,
            ended_at=UNKNOWN_TIME,
        )


def _rewards(values: Sequence[Mapping[str, object]]) -> tuple[Reward, ...]:
    """Return a reward per agent, or a single one if all agents have the same."""
    by_agent = {str(value.get("agent") or ""): value.get("reward") for value in values}
    rewards = {a: reward for a, reward in by_agent.items() if isinstance(reward, int | float)}
    if len(rewards) == len(by_agent) and len(set(rewards.values())) == 1:
        return (Reward(value=next(iter(rewards.values()))),)
    return tuple(Reward(value=value, agent=agent or None) for agent, value in rewards.items())


_REQUEST = ("request", "input", "body")
_RESPONSE = ("response", "output")
"""Keys of request and response in logs; the batch API has `body`, and a `response` with an HTTP
status."""
_TOP = (*_REQUEST, *_RESPONSE, "error", "episode_id", "choices")


def _is_bare(value: Mapping[str, object]) -> bool:
    """Whether a row is itself a completion, or a response of the Responses."""
    return isinstance(value.get("choices"), list) or value.get("object") == "response"


def _body(value: Mapping[str, object], names: Sequence[str]) -> Mapping[str, object] | None:
    """Return the object under the first key, or its `body`."""
    if _is_bare(value):
        return value if names is _RESPONSE else None
    for name in names:
        outer = value.get(name)
        if isinstance(outer, Mapping):
            body = outer.get("body")
            if isinstance(body, Mapping):
                return body
            return outer
    return None


def _exchange(row: Row) -> Parsed:
    value: Mapping[str, Any] = row.value
    request = dict(_body(value, _REQUEST) or {})
    response: dict[str, Any] = dict(_body(value, _RESPONSE) or {})
    episode_id = str(value.get("episode_id") or stable_id("exchange", row.number, row.text))
    at = _created(response)
    choices = response.get("choices") or [{}]
    finish_reason = choices[0].get("finish_reason")
    error = _error(value, response)
    call = Call(
        call_id=stable_id("call", episode_id),
        episode_id=episode_id,
        trainable=False,
        model=str(response.get("model") or request.get("model") or ""),
        request=request,
        response=response,
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
        started_at=at,
        ended_at=at,
        error=error,
        request_id=str(value.get("custom_id") or ""),
    )
    metadata = {}
    if not _is_bare(value):
        metadata = {name: content for name, content in value.items() if name not in _TOP}
    episode = Episode(
        episode_id=episode_id,
        task=task_of(request_messages(request), metadata, episode_id),
        split="",
        calls=(call,),
        status="failed" if error else "succeeded",
        error=error,
        started_at=at,
        ended_at=at,
    )
    return Parsed(episode=episode)


def _created(response: Mapping[str, object]) -> datetime:
    created = response.get("created", response.get("created_at"))
    if isinstance(created, int | float) and 0 < created < 1e11:
        return datetime.fromtimestamp(created, timezone.utc)
    return UNKNOWN_TIME


def _error(value: Mapping[str, object], response: Mapping[str, object]) -> str | None:
    for error in (value.get("error"), response.get("error")):
        if isinstance(error, Mapping):
            return str(error.get("message") or dict(error))
        if error:
            return str(error)
    outer = value.get("response")
    status = None
    if isinstance(outer, Mapping):
        status = outer.get("status_code")
    if isinstance(status, int) and status >= 400:
        return f"HTTP {status}"
    return None
