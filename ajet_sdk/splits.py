"""Why a call does not go on from an earlier one: the causes, what a user can do, and how they are told apart.

Two sides are compared: the call that was expected to go on, and the request that did not go on from it. What the
messages say is looked at first, then the text. Nothing here knows a marker of any chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from ajet_sdk.template import Message, meaning

__all__ = ["HINTS", "REPLACEMENT", "Side", "align", "explain"]

HINTS: Mapping[str, str] = {
    "think_stripped": "Earlier reasoning is no longer shown: send `reasoning_content` back with each reply, or use a "
    "chat template that keeps the reasoning of earlier turns.",
    "retokenised": "The same text came back as other ids: the engine re-tokenises history. Let ajet make the prompt "
    "ids, or have the server take and return token ids.",
    "tool_call_reserialised": "A tool call is written otherwise in the history than the model wrote it: use a chat "
    "template that shows tool calls in the model's own spelling.",
    "tools_changed": "The list of tools differs from the earlier call's: keep it, and its order, through an episode.",
    "options_changed": "The chat template's arguments differ from the earlier call's: keep them through an episode.",
    "system_changed": "The system prompt differs from the earlier call's: put what changes (time, state) into a later "
    "message.",
    "history_edited": "An earlier message was changed, left out or moved: append to the history only.",
    "summarised": "The history was shortened or summarised: expected where it no longer fits; else raise the length "
    "at which the agent shortens it.",
    "new_conversation": "The call shares nothing with earlier ones but a system prompt: expected where an agent "
    "begins anew; different roles are better told apart as different agents.",
    "parallel_branch": "Another call goes on from the same place (a retry, several choices, parallel calls): expected "
    "where the agent tries several ways.",
    "end_token": "The reply ended with another token than the template writes at a turn's end (a stop string, or "
    "another end token): make the two the same in the generation config.",
    "template_rewrites": "The chat template shows earlier messages otherwise once the conversation goes on: use a "
    "template whose text only grows.",
    "unknown": "The text is not at hand: pass `decode`, or record requests, to learn more.",
}

REPLACEMENT = "\ufffd"
"""What decoding shows for bytes that are no whole character: a reply may be cut inside one."""

_ATOM = re.compile(r"(?:\\u[0-9a-fA-F]{4})+|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,4})?|\S")


@dataclass(eq=False)
class Side:
    """One call as the comparison sees it."""

    messages: Sequence[Message] | None = None
    """Cleaned (`template.clean`); None where they are not at hand."""
    tools: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """The template's arguments beside messages and tools."""
    reply: Message | None = None

    @cached_property
    def said(self) -> list[str]:
        """What each message says (`template.meaning`)."""
        return [meaning(message) for message in self.messages or ()]


def _atoms(text: str, start: int = 0) -> Iterator[tuple[str | Decimal, int]]:
    """The text without blanks, its JSON escapes resolved and its numbers by value; each with where it ends."""
    for match in _ATOM.finditer(text, start):
        atom = match.group()
        if len(atom) > 1 and atom[0] == "\\":
            for character in json.loads(f'"{atom}"'):
                yield character, match.end()
        elif atom[-1] in "0123456789":
            yield Decimal(atom), match.end()
        else:
            yield atom, match.end()


def align(sampled: str, text: str, start: int = 0) -> int | None:
    """Where in `text` the sampled text ends if text[start:] begins by spelling it, else None.

    Blanks, JSON escapes and the spelling of numbers may differ: templates trim replies and write tool calls their way.
    A character that the reply was cut in is matched where the text has it too.
    """
    if text.startswith(sampled, start):
        return start + len(sampled)
    whole = sampled.rstrip(REPLACEMENT)
    end, there = start, _atoms(text, start)
    for atom, _ in _atoms(whole):
        other, after = next(there, (None, end))
        if atom != other:
            return None
        end = after
    for character in whole[len(whole.rstrip()) :] + sampled[len(whole) :]:
        end += text.startswith(character, end)
    return end


def explain(
    old: Side,
    new: Side,
    old_text: str | None = None,
    new_text: str | None = None,
    reply_at: int = 0,
    same_until_last: bool = False,
) -> str:
    """Why `new` does not go on from `old`: a key of `HINTS`.

    Args:
        old_text: prompt and reply of the earlier call, or both texts from one place before they part.
        new_text: the prompt that does not start with it.
        reply_at: where the sampled reply begins in `old_text`.
        same_until_last: only the last sampled token of `old` is missing from `new`.
    """
    if _json(old.tools) != _json(new.tools):
        return "tools_changed"
    if _json(old.options) != _json(new.options):
        return "options_changed"
    if old.messages is not None and new.messages is not None:
        cause = _by_messages(old, new)
        if cause is not None:
            return cause
    if old_text is None or new_text is None:
        return "unknown"
    return _by_text(old, old_text, new_text, reply_at, same_until_last)


def _json(value: Any) -> str:
    return json.dumps(value or None, sort_keys=True, default=str)


def _systems(messages: Sequence[Message]) -> int:
    """How many first messages are the system's."""
    return next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _by_messages(old: Side, new: Side) -> str | None:
    """The cause, as far as the messages differ; None where they go on from the old call's and its reply."""
    assert old.messages is not None and new.messages is not None
    n = _common(old.said, new.said)
    if n == len(new.messages):
        return "parallel_branch"
    if n < len(old.messages):
        return _history(old, new)
    if old.reply is None:
        return None
    return _reply(old.reply, new.messages[n])


def _history(old: Side, new: Side) -> str:
    asked, now = _systems(old.messages or ()), _systems(new.messages or ())
    old_rest, new_rest = old.said[asked:], new.said[now:]
    goes_on = _common(old_rest, new_rest)
    if old.said[:asked] != new.said[:now] and goes_on:
        return "system_changed"
    several_turns = any(m["role"] == "assistant" for m in old.messages or ())
    if several_turns and len(new_rest) < len(old_rest) + 1:
        return "summarised"
    if not goes_on and not set(new_rest) & {*old_rest, *([meaning(old.reply)] if old.reply else [])}:
        return "new_conversation"
    return "history_edited"


def _reply(gave: Message, got: Message) -> str | None:
    """What became of the reply in the history; None where it is the same."""
    if meaning(got) == meaning(gave):
        return None
    if got["role"] != gave["role"]:
        return "history_edited"
    if meaning({**got, **_SILENT}) == meaning({**gave, **_SILENT}):
        before, after = gave.get("content"), got.get("content")
        kept = before == after or (isinstance(before, str) and isinstance(after, str) and _is_tail(after, before))
        if kept and not got.get("reasoning_content"):
            return "think_stripped"
    return "history_edited"


_SILENT = {"content": "", "reasoning_content": ""}


def _is_tail(short: str, long: str) -> bool:
    short, long = short.strip(), long.strip()
    return bool(short) and len(short) < len(long) and long.endswith(short)


def _by_text(old: Side, old_text: str, new_text: str, reply_at: int, same_until_last: bool) -> str:
    if new_text.startswith(old_text):
        return "retokenised"
    where = _common_text(old_text, new_text)
    if same_until_last:
        return "end_token"
    if _reasoning_gone(old, old_text, new_text) or _dropped(old_text, new_text, where):
        return "think_stripped"
    if where >= reply_at:
        sampled = old_text[reply_at:]
        respelled = "{" in sampled and align(sampled, new_text, reply_at) is not None
        if respelled or (old.reply or {}).get("tool_calls"):
            return "tool_call_reserialised"
        if align(sampled, new_text, reply_at) is not None:
            return "retokenised"
    return "template_rewrites"


def _reasoning_gone(old: Side, old_text: str, new_text: str) -> bool:
    """Whether the reasoning of a reply stands in the old text and not in the new."""
    for message in [*(old.messages or ()), old.reply or {}]:
        thought = message.get("reasoning_content")
        thought = thought.strip() if isinstance(thought, str) else ""
        if thought and thought in old_text and thought not in new_text:
            return True
    return False


def _common_text(a: str, b: str) -> int:
    """Length of the common prefix, by bisection: slices compare much faster than characters do one by one."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_ANCHOR = 6


def _dropped(old_text: str, new_text: str, where: int) -> bool:
    """Whether the new text goes on, near where they part, with what stands further on in the old: a piece is gone."""
    for start in range(where, max(-1, where - 24), -1):
        anchor = new_text[start : start + _ANCHOR]
        if len(anchor.strip()) < 3:
            continue
        at = old_text.find(anchor, where)
        while at > start:
            span = min(len(old_text) - at, len(new_text) - start, 400)
            if span >= _ANCHOR and old_text.startswith(new_text[start : start + span], at):
                return True
            at = old_text.find(anchor, at + 1)
    return False
