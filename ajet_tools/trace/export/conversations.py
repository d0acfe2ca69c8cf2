"""The conversations of an episode: calls that go on from each other's messages, as one list of messages.

A call goes on from a conversation of its agent where its messages begin with all that was said there and it is
offered the same tools; else it opens another conversation. So each reply stands as a reply in exactly one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ajet_sdk.dialects.message_parts import reply_of
from ajet_sdk.tokens.template import same_reply
from ajet_sdk.types import Call, Episode

Message = Mapping[str, object]


@dataclass(frozen=True)
class Exchange:
    """One call of a chat: what was asked and what came back."""

    call: Call
    messages: tuple[Message, ...]
    reply: Message
    tools: list[object] | None


@dataclass(frozen=True)
class Conversation:
    """Messages as they were exchanged; `turns` says which of them are replies, and of which calls."""

    agent: str
    messages: tuple[Message, ...]
    tools: list[object] | None
    turns: tuple[tuple[str, int], ...]
    """(call_id, position of its reply in `messages`)."""


def exchange_of(call: Call) -> Exchange | None:
    """A call as an exchange of messages; None where it is none (a completion of plain text, a call without a reply)."""
    messages = call.request.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        return None
    reply = reply_of(call.response)
    if call.error is not None or not (reply.get("content") or reply.get("tool_calls")):
        return None
    system = call.request.get("system")  # Anthropic's dialect keeps it apart
    first = [{"role": "system", "content": system}] if system else []
    tools = call.request.get("tools")
    return Exchange(call, (*first, *messages), reply, tools if isinstance(tools, list) and tools else None)


def exchanges(episode: Episode) -> Iterator[Exchange]:
    """The agent's own exchanges, in order; a judge's calls are not among them."""
    for call in sorted(episode.calls, key=lambda c: (c.index, c.started_at)):
        exchange = exchange_of(call) if call.phase == "rollout" else None
        if exchange:
            yield exchange


def conversations(episode: Episode) -> list[Conversation]:
    """The conversations of an episode, in the order in which each began."""
    result: list[Conversation] = []
    for exchange in exchanges(episode):
        messages = (*exchange.messages, exchange.reply)
        turn = (exchange.call.call_id, len(exchange.messages))
        before = _longest(result, exchange)
        turns = () if before is None else result[before].turns
        conversation = Conversation(exchange.call.agent, messages, exchange.tools, (*turns, turn))
        if before is None:
            result.append(conversation)
        else:
            result[before] = conversation
    return result


def _longest(candidates: Sequence[Conversation], exchange: Exchange) -> int | None:
    best: int | None = None
    for i, known in enumerate(candidates):
        if known.agent != exchange.call.agent or known.tools != exchange.tools:
            continue
        longer = best is None or len(known.messages) > len(candidates[best].messages)
        if longer and _begins(exchange.messages, known.messages):
            best = i
    return best


def _begins(messages: Sequence[Message], start: Sequence[Message]) -> bool:
    if len(messages) < len(start):
        return False
    pairs = zip(reversed(start), reversed(messages[: len(start)]), strict=True)  # what differs is most often at the end
    return all(a is b or a == b or same_reply(a, b) for a, b in pairs)
