"""Finds the cause of a split: why a call does not extend an earlier one, and what a user can do.

Two sides are compared: the call that was expected to be extended, and the request that did not
extend it. A cause is proven if undoing it makes the latter extend the former:

- Causes in the text (other ids, dropped reasoning, an end token, a stop string, a tool call with
  other spelling) are undone in the two texts.
- Causes in the request (tools, options, system prompt, history) are undone in the request, which is
  rendered again. Without the template, the cause is the change, if there is only one.
- If two changes have to be undone together, the cause is `several`; if nothing helps, `unknown`.
- No proof is needed if the messages don't extend the other call's (`parallel_branch`,
  `new_conversation`, `summarised`), and for `template_rewrites`, a request without changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from itertools import combinations
from typing import Any

from ajet_sdk.errors import RequestRefused
from ajet_sdk.samples.prefixes import common_start
from ajet_sdk.tokens.template import ChatTemplate, Message, meaning
from ajet_sdk.types import JsonView

HINTS: Mapping[str, str] = {
    "think_stripped": (
        "Earlier reasoning was dropped from the history: send `reasoning_content` back with each "
        "reply, or use a chat template that keeps the reasoning of earlier turns."
    ),
    "retokenised": (
        "The same text came back as different ids because the engine re-tokenizes the history. Let"
        " ajet make the prompt ids, or have the server accept and return token ids."
    ),
    "tool_call_reserialised": (
        "A tool call in the history differs in spelling from what the model wrote: use a chat "
        "template that renders tool calls as the model writes them."
    ),
    "tools_changed": (
        "The list of tools differs from the earlier call's: keep the tools and their order the same"
        " throughout an episode."
    ),
    "options_changed": (
        "The chat template's arguments differ from the earlier call's: keep them the same"
        " throughout an episode."
    ),
    "system_changed": (
        "The system prompt differs from the earlier call's: move what changes (time, state) into a "
        "later message."
    ),
    "history_edited": (
        "An earlier message was changed, removed or moved: only append to the history."
    ),
    "picture_changed": (
        "A picture in the history has other pixels than the earlier call's: send earlier pictures"
        " as they were, neither scaled nor compressed again with losses."
    ),
    "summarised": (
        "The history was shortened or summarized: expected when the context is full; otherwise"
        " raise the length at which the agent shortens it."
    ),
    "new_conversation": (
        "The call shares only a system prompt with earlier calls: expected if the agent starts a "
        "new conversation; give different roles different agent names."
    ),
    "parallel_branch": (
        "Another call continues from the same point (a retry, several choices, parallel calls): "
        "expected if the agent explores alternatives."
    ),
    "end_token": (
        "The reply ended with another token than the one the template writes at the end of a turn:"
        " make them the same in the generation config."
    ),
    "stop_string": (
        "The reply ended with a stop string that is missing in the history: let the agent append it"
        " to the reply, or let replies end with the end-of-turn token."
    ),
    "template_rewrites": (
        "The chat template renders earlier messages differently once the conversation continues: "
        "use a template whose text only grows."
    ),
    "several": "Several things changed between the calls, and each causes a split.",
    "unknown": "Unknown: the text is not available; pass `decode`, or record requests.",
}

REPLACEMENT = "\ufffd"
"""The decoded form of incomplete characters: a reply may be cut inside of one."""

_ATOM = re.compile(r"(?:\\u[0-9a-fA-F]{4})+|-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,4})?|\S")


@dataclass(eq=False)
class Side:
    """A call in a comparison."""

    messages: Sequence[Message] | None = None
    """Cleaned (`template.clean`); None if not recorded."""
    tools: Any = None
    options: JsonView = field(default_factory=dict)
    """Template arguments besides messages and tools."""
    reply: Message | None = None
    stop: Sequence[str] = ()
    """Stop strings of the call's sampling."""

    @cached_property
    def meanings(self) -> list[str]:
        """The meaning of each message (`template.meaning`)."""
        return [meaning(message) for message in self.messages or ()]

    @cached_property
    def reply_meaning(self) -> str:
        """The meaning of the reply."""
        return meaning(self.reply) if self.reply else ""


@dataclass(frozen=True)
class Texts:
    """Prompt and reply of a call, and the prompt of a later one, both from the same position before
    they diverge."""

    old: str
    """Prompt and reply of the earlier call."""
    new: str
    """The prompt that does not extend it."""
    reply_at: int
    """Start of the sampled reply in `old`."""
    last: str = ""
    """The last sampled token."""

    @property
    def sampled(self) -> str:
        return self.old[self.reply_at :]


def _atoms(text: str, start: int = 0) -> Iterator[tuple[str | Decimal, int]]:
    """Yields characters without blanks, with JSON escapes resolved, and numbers by value, each with
    its end."""
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
    """The end of the sampled text in `text`, if text[start:] starts with it apart from spelling;
    else None.

    Blanks, JSON escapes and the spelling of numbers may differ: templates trim replies and rewrite
    tool calls. A character in which the reply was cut is matched if the text has it, too.
    """
    if text.startswith(sampled, start):
        return start + len(sampled)
    whole = sampled.rstrip(REPLACEMENT)
    end = start
    there = _atoms(text, start)
    for atom, _ in _atoms(whole):
        counterpart, after = next(there, (None, end))
        if atom != counterpart:
            return None
        end = after
    for character in whole[len(whole.rstrip()) :] + sampled[len(whole) :]:
        end += text.startswith(character, end)
    return end


def explain(
    old: Side, new: Side, texts: Texts | None = None, template: ChatTemplate | None = None
) -> tuple[str, str]:
    """Explains why `new` does not extend `old`: a key of `HINTS`, and advice."""
    changed = _changes(old, new)
    if changed and changed[-1] in _ELSEWHERE:
        return _with_hint(changed[-1])
    if changed and changed[-1] == _SEEN:  # the texts are equal
        return _with_hint(*changed)
    if texts:
        explained = _of_text(old, texts, template, not _HISTORY & set(changed or ()))
    else:
        explained = []
    if explained:
        return _with_hint(*explained)
    if changed is None or not (changed or texts):
        return _with_hint("unknown")
    if template is not None and texts is not None and old.reply is not None:
        causes = _by_rendering(old, new, texts, template, changed)
        if not causes:
            return (
                "unknown",
                f"Unknown: the calls do not merge even with {', '.join(changed)} undone.",
            )
    else:
        causes = changed or ["template_rewrites"]
        if len(causes) > 1:
            return (
                "unknown",
                f"One of: {', '.join(causes)}; the chat template is needed to tell which.",
            )
    return _with_hint(*causes)


_ELSEWHERE = {"parallel_branch", "new_conversation", "summarised"}
"""Requests that don't continue the other call, so that there is nothing to undo."""
_SEEN = "picture_changed"
_HISTORY = {"history_edited", "think_stripped"}


def _with_hint(*causes: str) -> tuple[str, str]:
    if len(causes) == 1:
        return causes[0], HINTS[causes[0]]
    return "several", f"{', '.join(causes)}. {HINTS['several']}"


# What changed in the request


def _json(value: object) -> str:
    """JSON with its order of keys, which a template may show."""
    return json.dumps(value or None, default=str)


def _systems(messages: Sequence[Message]) -> int:
    """Number of leading system messages."""
    return next(
        (i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")),
        len(messages),
    )


def _changes(old: Side, new: Side) -> list[str] | None:
    """Causes in the requests, with one of `_ELSEWHERE` last.

    Empty if only a turn was added, None if the requests are not recorded.
    """
    changed = ["tools_changed"] if _json(old.tools) != _json(new.tools) else []
    changed += (
        ["options_changed"]
        if _json(sorted(old.options.items())) != _json(sorted(new.options.items()))
        else []
    )
    if old.messages is None or new.messages is None:
        return changed or None
    if _other_pictures(old.messages, new.messages):
        return [*changed, _SEEN]
    n_old = _systems(old.messages)
    n_new = _systems(new.messages)
    old_rest = old.meanings[n_old:]
    new_rest = new.meanings[n_new:]
    same = common_start(old_rest, new_rest)
    if same == len(new_rest):
        return ["parallel_branch"]
    if same == len(old_rest):
        history = _of_reply(old, new.messages[n_new + same])
    elif any(m["role"] == "assistant" for m in old.messages) and len(new_rest) < len(old_rest) + 1:
        history = "summarised"
    elif not same and not set(new_rest) & {*old_rest, old.reply_meaning}:
        history = "new_conversation"
    else:
        history = "history_edited"
    changed += ["system_changed"] if old.meanings[:n_old] != new.meanings[:n_new] else []
    return [*changed, history] if history else changed


def _other_pictures(old: Sequence[Message], new: Sequence[Message]) -> bool:
    """Whether the history differs in pictures alone."""
    history = new[: len(old)]
    return list(map(_pictures, old)) != list(map(_pictures, history)) and [
        meaning(_blind(message)) for message in old
    ] == [meaning(_blind(message)) for message in history]


def _pictures(message: Message) -> list[object]:
    content = message.get("content")
    if isinstance(content, list):
        return [part for part in content if _is_picture(part)]
    return []


def _blind(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": ["picture" if _is_picture(part) else part for part in content]}


def _is_picture(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _of_reply(old: Side, got: Message) -> str | None:
    """The change of the reply in the history; None if it is unchanged."""
    gave = old.reply
    if gave is None or meaning(got) == old.reply_meaning:
        return None
    if meaning({**got, **_SILENT}) == meaning({**gave, **_SILENT}):
        before = gave.get("content")
        after = got.get("content")
        same = before == after
        if isinstance(before, str) and isinstance(after, str):  # or its end
            short = after.strip()
            long = before.strip()
            same = same or (bool(short) and len(short) < len(long) and long.endswith(short))
        if same and not got.get("reasoning_content"):
            return "think_stripped"
    return "history_edited"


_SILENT = {"content": "", "reasoning_content": ""}


# Undoing it


def _undo(
    old: Side, new: Side, seen: Texts, template: ChatTemplate, causes: Sequence[str]
) -> Texts | None:
    """Renders the two texts with some changes undone; None if the template refuses them."""
    before = old.messages or ()
    after = new.messages or ()
    n_old = _systems(before)
    n_new = _systems(after)
    system = before[:n_old] if "system_changed" in causes else after[:n_new]
    turns = after[n_new:]
    if _HISTORY & set(causes):
        turns = [*before[n_old:], old.reply or {}, *turns[len(before) - n_old + 1 :]]
    tools = old.tools if "tools_changed" in causes else new.tools
    options = old.options if "options_changed" in causes else new.options
    at = datetime.now()
    try:
        prompt = template.render(
            [template.form_cleaned(m) for m in before], old.tools, at=at, **old.options
        )
        text = template.render(
            [template.form_cleaned(m) for m in [*system, *turns]], tools, at=at, **options
        )
    except RequestRefused:
        return None
    return Texts(prompt + seen.sampled, text, len(prompt), seen.last)


def _by_rendering(
    old: Side, new: Side, seen: Texts, template: ChatTemplate, changed: Sequence[str]
) -> list[str]:
    """The smallest set of changes to undo for the calls to merge, with a cause in the text if
    needed.

    Empty if the calls don't merge even with all changes undone.
    """
    if not changed:  # except for irrelevant keys (a name), which the template may show
        texts = _undo(old, new, seen, template, ("history_edited",))
        return [
            (
                "history_edited"
                if texts is not None and _begins(texts.old, texts)
                else "template_rewrites"
            )
        ]
    remaining: dict[tuple[str, ...], list[str]] = {}
    for size in range(1, len(changed) + 2):
        for undone in combinations(changed, size):
            texts = _undo(old, new, seen, template, undone)
            if texts is not None and _begins(texts.old, texts):
                return list(undone)
            same_reply = not (_HISTORY & set(changed)) - set(undone)
            remaining[undone] = _of_text(old, texts, template, same_reply) if texts else []
        for undone, causes in remaining.items():
            if causes and len(undone) == size - 1:
                return [*undone, *causes]
    return []


def _begins(text: str, texts: Texts) -> bool:
    """Whether the new text starts with an old one: exactly with its prompt, and with its reply
    apart from spelling."""
    prompt = texts.old[: texts.reply_at]
    return (
        texts.new.startswith(prompt)
        and align(text[len(prompt) :], texts.new, len(prompt)) is not None
    )


def _of_text(old: Side, texts: Texts, template: ChatTemplate | None, same_reply: bool) -> list[str]:
    """Causes in the texts that, if undone, make the new text extend the old one; empty without such
    causes.

    `same_reply`: the history has the unchanged reply, or is unknown.
    """
    if texts.new.startswith(texts.old):
        return ["retokenised"]
    start = max(
        0, min(common_start(texts.old, texts.new), texts.reply_at) - _BEFORE
    )  # drop most of the common prefix
    texts = Texts(texts.old[start:], texts.new[start:], texts.reply_at - start, texts.last)
    if same_reply and _begins(texts.old, texts):
        respelled = "{" in texts.sampled or (old.reply or {}).get("tool_calls")
        return ["tool_call_reserialised" if respelled else "retokenised"]
    block = _block(template)
    bare = _lacks_reasoning(old, texts.old, texts.new, block)
    shorter = list(_shorten(old, texts, block)) if same_reply else []
    for cause, text in shorter:
        if _begins(text, texts) and not (bare and cause == "tool_call_reserialised"):
            return [cause]
    if bare:
        return ["think_stripped"]
    return next(
        (["think_stripped", c] for c, t in shorter if _lacks_reasoning(old, t, texts.new, block)),
        [],
    )


def _shorten(old: Side, texts: Texts, block: re.Pattern[str] | None) -> Iterator[tuple[str, str]]:
    """Yields each possible cause, with the old text without the part that it changes."""
    sampled = texts.sampled
    reply = old.reply or {}
    stops = [at for stop in old.stop if (at := sampled.find(stop)) >= 0]
    if stops:
        yield "stop_string", texts.old[: texts.reply_at + min(stops)].rstrip()
    # Without its message, a truncated reply cannot be distinguished from one that ended.
    known = old.messages is not None or not texts.last.strip().isalnum()
    if texts.last and sampled.endswith(texts.last) and known:
        yield "end_token", texts.old.removesuffix(texts.last)
    content = reply.get("content")
    if (
        _shows_calls(reply, texts.new[texts.reply_at :])
        and isinstance(content, str)
        and content in sampled
    ):
        if block:
            thought = max((match.end() for match in block.finditer(sampled)), default=0)
        else:
            thought = 0
        yield (
            "tool_call_reserialised",
            texts.old[: texts.reply_at + max(thought, sampled.find(content) + len(content))],
        )


def _shows_calls(reply: Message, text: str) -> bool:
    """Whether a reply calls tools, and the text names each of them."""
    functions = [
        call.get("function") for call in reply.get("tool_calls") or () if isinstance(call, Mapping)
    ]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    return bool(names) and all(isinstance(name, str) and name in text for name in names)


def _block(template: ChatTemplate | None) -> re.Pattern[str] | None:
    """Pattern of a block of reasoning in the template's format, even if not closed."""
    marks = (template.reasoning if template is not None else None) or ("<think>", "</think>")
    opening, closing = (re.escape(mark.strip()) for mark in marks)
    if opening and closing:
        return re.compile(f"{opening}.*?(?:{closing}|\\Z)", re.DOTALL)
    return None


def _lacks_reasoning(old: Side, before: str, after: str, block: re.Pattern[str] | None) -> bool:
    """Whether the texts differ only in reasoning that the new one lacks."""
    if block is not None:
        bare_before = block.sub("", before)
        bare_after = block.sub("", after)
        if bare_before != before and align(bare_before, bare_after) is not None:
            return True
    thoughts = [
        message.get("reasoning_content") for message in [*(old.messages or ()), old.reply or {}]
    ]
    known = [
        thought.strip() for thought in thoughts if isinstance(thought, str) and thought.strip()
    ]
    gone = _missing_pieces(before, after) if known else None
    return bool(gone) and all(any(thought in piece for thought in known) for piece in gone or ())


_ANCHOR = 6
_SPAN = 40
_BACK = 24
_MOST = 64
_BEFORE = 200
"""Lengths for aligning texts, in characters: of a match to search for, of a match to verify, before
the divergence to search, and of common text to keep before it; and the maximum number of missing
pieces (`_MOST`)."""


def _missing_pieces(old: str, new: str) -> list[str] | None:
    """Pieces whose removal makes the old text a prefix of the new one; None if there are none."""
    pieces: list[str] = []
    while align(old, new) is None:
        drop = _find_drop(old, new, common_start(old, new))
        if drop is None or len(pieces) == _MOST:
            return None
        start, at = drop
        pieces.append(old[start:at])
        old = old[at:]
        new = new[start:]
    return pieces


def _find_drop(old: str, new: str, where: int) -> tuple[int, int] | None:
    """Positions of equal text near the divergence in the new text, and further on in the old
    text."""
    for start in range(where, max(-1, where - _BACK), -1):
        anchor = new[start : start + _ANCHOR]
        if len(anchor.strip()) < 3:
            continue
        at = old.find(anchor, where)
        while at > start:
            span = min(len(old) - at, len(new) - start, _SPAN)
            if span >= _ANCHOR and old.startswith(new[start : start + span], at):
                return start, at
            at = old.find(anchor, at + 1)
        for size in range(
            _ANCHOR - 1, 2, -1
        ):  # near the end of the old text, a shorter match suffices
            if old.endswith(anchor[:size]) and len(old) - size > max(start, where):
                return start, len(old) - size
    return None
