"""Conversations of an episode, and their export as OpenAI messages and ShareGPT rows.

A call extends a conversation of its agent if its messages begin with that conversation and it has
the same tools; otherwise it opens another one. Each reply is a turn of exactly one conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ajet_sdk.dialects.message_parts import content_text, picture_url, reply_of
from ajet_sdk.tokens.template import same_reply
from ajet_sdk.types import Call, Episode
from ajet_tools.trace.export.demonstrations import is_cut
from ajet_tools.trace.export.job import Job, Row
from ajet_tools.trace.queries.records import Record

Message = Mapping[str, object]


@dataclass(frozen=True)
class Exchange:
    """A chat call: request messages and reply."""

    call: Call
    messages: tuple[Message, ...]
    reply: Message
    tools: list[object] | None


@dataclass(frozen=True)
class Conversation:
    """A conversation, with the calls of its replies."""

    agent: str
    messages: tuple[Message, ...]
    tools: list[object] | None
    turns: tuple[tuple[str, int], ...]
    """(call_id, index of its reply in `messages`)."""


def exchange_of(call: Call) -> Exchange | None:
    """Parse a chat call; None for a text completion, or a call without a reply."""
    messages = call.request.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(m, Mapping) for m in messages)
    ):
        return None
    reply = reply_of(call.response)
    if call.error is not None or not (reply.get("content") or reply.get("tool_calls")):
        return None
    system = call.request.get("system")  # separate in Anthropic's dialect
    first = [{"role": "system", "content": system}] if system else []
    tools = call.request.get("tools")
    return Exchange(
        call, (*first, *messages), reply, tools if isinstance(tools, list) and tools else None
    )


def exchanges(episode: Episode) -> Iterator[Exchange]:
    """Yield the chat calls of agents, in order, without those of judges."""
    for call in sorted(episode.calls, key=lambda c: (c.index, c.started_at)):
        exchange = None
        if call.phase == "rollout":
            exchange = exchange_of(call)
        if exchange:
            yield exchange


def conversations(episode: Episode) -> list[Conversation]:
    """Return the conversations of an episode, in order of their first calls."""
    result: list[Conversation] = []
    for exchange in exchanges(episode):
        messages = (*exchange.messages, exchange.reply)
        turn = (exchange.call.call_id, len(exchange.messages))
        extended = [i for i, known in enumerate(result) if _extends(exchange, known)]
        longest = max(extended, key=lambda i: len(result[i].messages), default=None)
        turns = () if longest is None else result[longest].turns
        conversation = Conversation(exchange.call.agent, messages, exchange.tools, (*turns, turn))
        if longest is None:
            result.append(conversation)
        else:
            result[longest] = conversation
    return result


def _extends(exchange: Exchange, known: Conversation) -> bool:
    start = exchange.messages[: len(known.messages)]
    if (
        known.agent != exchange.call.agent
        or known.tools != exchange.tools
        or len(start) < len(known.messages)
    ):
        return False
    pairs = zip(
        reversed(known.messages), reversed(start), strict=True
    )  # most differences are near the end
    return all(a is b or a == b or same_reply(a, b) for a, b in pairs)


def about(
    episode: Episode, agent: str | None = None, call_id: str | None = None
) -> dict[str, object]:
    """Return the common fields of all rows of an episode: ids, status, reward."""
    return {
        "episode_id": episode.episode_id,
        "run_id": episode.run_id,
        "group_id": episode.group_id,
        "task_id": episode.task.task_id,
        "attempt": episode.attempt,
        "step": episode.step,
        "split": episode.split,
        "decoding": episode.decoding,
        "status": episode.status,
        "agent": agent,
        "reward": episode.reward if agent is None else episode.value(agent, call_id),
    }


def message_rows(job: Job, records: Iterable[Record]) -> Iterator[Row]:
    """Yield a row per conversation, with `messages`, `tools`, and the calls of its replies in
    `calls`."""
    for record in records:
        call_by_id = {call.call_id: call for call in record.episode.calls}
        rows: list[Row] = []
        every, cut = whole_conversations(record.episode, keep_cut=job.keep_cut)
        for conversation in every:
            calls = [_turn(call_by_id[c], i) for c, i in conversation.turns]
            row = {"messages": conversation.messages, "tools": conversation.tools}
            rows.append({**row, **about(record.episode, conversation.agent), "calls": calls})
        yield from job.counted(record, rows, cut=cut)


def _turn(call: Call, place: int) -> dict[str, object]:
    turn: dict[str, object] = {"call_id": call.call_id, "index": call.index, "message": place}
    return {**turn, "cut": True} if is_cut(call) else turn


def whole_conversations(
    episode: Episode, *, keep_cut: bool = False
) -> tuple[list[Conversation], int]:
    """Return the conversations up to their first cut reply, and the number of cut replies left out.

    One whose first reply is cut is left out; what followed a cut reply goes with it.
    """
    result: list[Conversation] = []
    every = conversations(episode)
    cut = set() if keep_cut else cut_turns(episode, every)
    for conversation in every:
        first = next(
            (n for n, (call_id, _) in enumerate(conversation.turns) if call_id in cut), None
        )
        if first is None:
            result.append(conversation)
        elif first > 0:
            end = conversation.turns[first - 1][1] + 1
            shorter = replace(
                conversation, messages=conversation.messages[:end], turns=conversation.turns[:first]
            )
            result.append(shorter)
    return result, len(cut)


def cut_turns(episode: Episode, every: Sequence[Conversation]) -> set[str]:
    """Return the calls of conversations whose reply was cut at its limit."""
    turns: set[str] = set()
    for conversation in every:
        turns.update(call_id for call_id, _ in conversation.turns)
    return {call.call_id for call in episode.calls if call.call_id in turns and is_cut(call)}


def sharegpt_rows(job: Job, records: Iterable[Record]) -> Iterator[Row]:
    """Yield a row per conversation in ShareGPT's format, as read by LLaMA-Factory and Axolotl."""
    for record in records:
        every, cut = whole_conversations(record.episode, keep_cut=job.keep_cut)
        rows = [{**sharegpt(c.messages, c.tools), **about(record.episode, c.agent)} for c in every]
        yield from job.counted(record, rows, cut=cut)


_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "human",
    "assistant": "gpt",
    "tool": "observation",
}


def sharegpt(
    messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None
) -> dict[str, object]:
    """Convert messages to ShareGPT's `conversations` of `from` and `value`, with tool calls and
    tools as JSON texts."""
    turns: list[dict[str, str]] = []
    urls: list[str] = []
    for message in messages:
        turns += _turns(message)
        urls += filter(None, map(picture_url, _parts(message)))
    row: dict[str, object] = {"conversations": turns}
    if urls:
        row["images"] = urls
    offered = []
    for tool in tools or ():
        offered.append(tool.get("function", tool) if isinstance(tool, Mapping) else tool)
    row["tools"] = json.dumps(offered, ensure_ascii=False) if offered else ""
    return row


_IMAGE = "<image>"
"""The place of the next entry of `images`, as LLaMA-Factory reads it."""


def _parts(message: Mapping[str, object]) -> list[object]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _turns(message: Mapping[str, object]) -> Iterator[dict[str, str]]:
    role = str(message.get("role", ""))
    calls = message.get("tool_calls")
    functions = []
    if isinstance(calls, list):
        functions = [_function(call) for call in calls]
    parts = [_IMAGE if picture_url(part) else part for part in _parts(message)]
    content = content_text(parts or message.get("content"))
    if content or not functions:
        yield {"from": _ROLES.get(role, role), "value": content}
    if functions:
        called: object = functions[0] if len(functions) == 1 else functions
        yield {"from": "function_call", "value": json.dumps(called, ensure_ascii=False)}


def tool_call(id: object, name: object, arguments: object) -> dict[str, object]:
    """Return a tool call in OpenAI's form, whose arguments are a text."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _function(call: object) -> object:
    function = None
    if isinstance(call, Mapping):
        function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {"name": function.get("name"), "arguments": arguments}
    return {"name": function.get("name"), "arguments": arguments}
