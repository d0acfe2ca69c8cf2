"""Imports OpenAI's JSON lines: chat messages (also exported by ajet), logs of request and response
(chat completions and Responses), batch output.

A row of messages becomes an episode with a single call, whose reply is a final assistant message;
rows exported by ajet restore every call. A row with a response becomes an episode with a single
call. Other keys become task metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime, timezone

from pydantic import BaseModel, ValidationError

from ajet_sdk.dialects.message_parts import request_messages
from ajet_sdk.tasks.json_rows import BadRows, Row
from ajet_sdk.types import Call, Episode, JsonView, Reward
from ajet_tools.trace.export.conversations import about
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, stable_id, task_of, text_of

_OURS = tuple(about(Episode()))


def read(rows: Iterable[Row], bad: BadRows) -> Iterator[Parsed]:
    """Read an episode per row; consecutive rows with the same `episode_id` are one episode."""
    same: list[Row] = []
    for row in rows:
        problem = _problem(row.value)
        if problem:
            bad.add(row.where, problem)
            continue
        if same and not (_key(row.value) and _key(row.value) == _key(same[0].value)):
            yield from _parse(same, bad)
            same = []
        same.append(row)
    if same:
        yield from _parse(same, bad)


def _problem(value: object) -> str | None:
    """Return why a row is not understood, or None."""
    if not isinstance(value, Mapping):
        return f"is not an object (got {type(value).__name__})"
    messages = value.get("messages")
    if messages is not None:
        if _are_messages(messages, {"role"}):
            return None
        return "has messages that are not a list of objects with a role"
    request, response = _body(value, _REQUEST), _body(value, _RESPONSE)
    if request is None and response is None:
        names = ", ".join(map(str, value))
        return f"has neither messages nor a request or response; it has {names[:80]}"
    if request is not None and not _are_messages(request_messages(request)):
        return f"has a request without messages, input or prompt: {', '.join(request)[:80]}"
    if response and not _is_reply(response) and _error(value, response) is None:
        return f"has a response without choices or output: {', '.join(response)[:80]}"
    return None


def _are_messages(value: object, names: Set[str] = frozenset(("role", "type"))) -> bool:
    """Whether a value is a list of messages, or of items of the Responses, which have a type."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(message, Mapping) and message.keys() & names for message in value)


def _is_reply(response: Mapping[str, object]) -> bool:
    output = response.get("output")
    if isinstance(output, list):
        return _are_messages(output)
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        return False
    for choice in choices:
        if not isinstance(choice, Mapping):
            return False
        message = choice.get("message")
        if not isinstance(choice.get("text"), str) and not (
            isinstance(message, Mapping) and "role" in message
        ):
            return False
    return True


def _key(value: Mapping[str, object]) -> str | None:
    episode_id = value.get("episode_id")
    return (
        episode_id if isinstance(episode_id, str) and episode_id and "messages" in value else None
    )


def _parse(rows: Sequence[Row], bad: BadRows) -> Iterator[Parsed]:
    try:
        first = rows[0]
        yield _exchange(first) if "messages" not in first.value else _conversations(rows)
    except (ValidationError, TypeError, ValueError, KeyError, AttributeError) as error:
        bad.add(rows[0].where, f"cannot be read as an episode: {str(error).splitlines()[0]}")


def _conversations(rows: Sequence[Row]) -> Parsed:
    first = rows[0].value
    episode_id = _key(first) or stable_id("messages", rows[0].number, rows[0].text)
    calls: list[Call] = []
    for row in rows:
        calls += _calls(row.value, episode_id)
    calls.sort(key=lambda call: call.index)
    known = (
        {name: first[name] for name in ("run_id", "group_id", "attempt", "step", "split", "status")}
        if "calls" in first
        else {"split": ""}
    )
    extra = {n: v for n, v in first.items() if n not in (*_OURS, "messages", "tools", "calls")}
    task_fields = {"task_id": first["task_id"]} if text_of(first.get("task_id")) else {}
    return Parsed(
        episode=Episode(
            **known,
            episode_id=episode_id,
            task=task_of(first["messages"], extra, episode_id, task_fields),
            calls=tuple(calls),
            rewards=_rewards([row.value for row in rows]),
            started_at=UNKNOWN_TIME,
            ended_at=UNKNOWN_TIME,
        )
    )


class _Turn(BaseModel):
    """A call in a row exported by ajet; `message` is the index of its reply."""

    call_id: str
    message: int
    index: int = 0


def _calls(value: JsonView, episode_id: str) -> Iterator[Call]:
    messages, tools = value["messages"], value.get("tools")
    listed = value.get("calls")
    if isinstance(listed, list):
        turns = [_Turn.model_validate(turn) for turn in listed]
    else:
        last = len(messages) - (messages[-1].get("role") == "assistant")
        turns = [_Turn(call_id=stable_id("call", episode_id), message=last)]
    for turn in turns:
        reply = messages[turn.message] if turn.message < len(messages) else None
        yield Call(
            call_id=turn.call_id,
            episode_id=episode_id,
            index=turn.index,
            agent=value.get("agent") or "default",
            trainable=False,
            request={"messages": messages[: turn.message], **({"tools": tools} if tools else {})},
            response={} if reply is None else {"choices": [{"index": 0, "message": reply}]},
            started_at=UNKNOWN_TIME,
            ended_at=UNKNOWN_TIME,
        )


def _rewards(values: Sequence[Mapping[str, object]]) -> tuple[Reward, ...]:
    """Return a reward per agent, or a single one if they are equal or no agent is named."""
    by_agent = {
        text_of(v.get("agent")): reward
        for v in values
        if isinstance(reward := v.get("reward"), int | float)
    }
    if len(set(by_agent.values())) == 1 and len(by_agent) == len(
        {text_of(v.get("agent")) for v in values}
    ):
        return (Reward(value=next(iter(by_agent.values()))),)
    return tuple(Reward(value=value, agent=agent) for agent, value in by_agent.items())


_REQUEST = ("request", "input", "body")
_RESPONSE = ("response", "output")
"""Keys of request and response in logs; the batch API has `body`, and a `response` with an HTTP
status."""
_TOP = (*_REQUEST, *_RESPONSE, "error", "episode_id", "choices")


def _body(value: Mapping[str, object], names: Sequence[str]) -> Mapping[str, object] | None:
    """Return the object under the first key, or its `body`; a bare completion or response of the
    Responses is its own response."""
    is_completion = isinstance(value.get("choices"), list)
    if is_completion or value.get("object") == "response":
        return value if names is _RESPONSE else None
    for name in names:
        outer = value.get(name)
        if isinstance(outer, Mapping):
            body = outer.get("body")
            return body if isinstance(body, Mapping) else outer
    return None


def _exchange(row: Row) -> Parsed:
    value: Mapping[str, object] = row.value
    request, response = dict(_body(value, _REQUEST) or {}), dict(_body(value, _RESPONSE) or {})
    episode_id = text_of(value.get("episode_id")) or stable_id("exchange", row.number, row.text)
    at = _created(response)
    choices = response.get("choices")
    finish = choices[0].get("finish_reason") if isinstance(choices, list) and choices else None
    error = _error(value, response)
    call = Call(
        call_id=stable_id("call", episode_id),
        episode_id=episode_id,
        trainable=False,
        model=str(response.get("model") or request.get("model") or ""),
        request=request,
        response=response,
        finish_reason=finish if isinstance(finish, str) else None,
        started_at=at,
        ended_at=at,
        error=error,
        request_id=str(value.get("custom_id") or ""),
    )
    bare = response == value
    extra = {} if bare else {name: v for name, v in value.items() if name not in _TOP}
    return Parsed(
        episode=Episode(
            episode_id=episode_id,
            task=task_of(request_messages(request), extra, episode_id),
            split="",
            calls=(call,),
            status="failed" if error else "succeeded",
            error=error,
            started_at=at,
            ended_at=at,
        )
    )


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
    status = outer.get("status_code") if isinstance(outer, Mapping) else None
    return f"HTTP {status}" if isinstance(status, int) and status >= 400 else None
