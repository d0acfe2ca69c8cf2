"""The text of a recorded reply as the policy would have sampled it after a prompt, and what it
loses of the reply.

It is rendered by the chat template. A template may render a past reply other than it prompts for
one: its generation prompt opens a block of reasoning that the history leaves out, or it renders no
reasoning or no end of the turn at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajet_sdk.errors import RequestRefused
from ajet_sdk.tokens.template import ChatTemplate, clean
from ajet_sdk.types import Json

_CLOSING = "\n{mark}\n\n"
"""Blanks around the mark that closes reasoning if the template shows none: those of Qwen and
DeepSeek."""


@dataclass(frozen=True, slots=True)
class ReplyText:
    """A reply after its prompt, up to the end of its turn."""

    text: str
    faults: tuple[str, ...] = ()
    """Why it would teach something else than the reply."""
    losses: tuple[str, ...] = ()
    """Parts of the reply that the template doesn't render, although the rest is the reply."""


def reply_text(
    template: ChatTemplate,
    head: str,
    messages: Sequence[Mapping[str, object]],
    reply: Mapping[str, object],
    tools: Sequence[Mapping[str, object]] | None,
    options: Json,
    ends: Sequence[str],
    *,
    cut: bool,
) -> ReplyText:
    """The text of `reply` after the prompt `head` of `messages`.

    Args:
        ends: texts of the tokens that end sampling.
        cut: the reply ended at its limit, and so has no end of the turn.
    """
    message = clean(reply)
    body = _rendered(template, head, messages, reply, tools, options)
    if body is None:
        body = str(message["content"]) + (ends[0] if ends else "")
    places = [(body.rindex(end), end) for end in ends if end in body]
    if places:
        at, end = max(places)
        body = body[:at] if cut else body[: at + len(end)]
    faults = [
        *_faults_of_reasoning(template, head, body, cut=cut),
        *_faults_of_end(message, ends, bool(places), cut=cut),
    ]
    losses: list[str] = []
    if not _shows(body, _without_reasoning(template, message["content"])):
        faults.append("the chat template does not render its text")
    for call in message.get("tool_calls") or ():
        name = call["function"]["name"] if isinstance(call, Mapping) else None
        if not _shows(body, name):
            faults.append(f"the chat template does not render its call of {name}")
    content = message["content"]
    if isinstance(content, str):
        besides = _bare(body).replace(_bare(content), "", 1)
    else:
        besides = body
    if not _shows(besides, message.get("reasoning_content")):
        losses.append("reasoning that the chat template does not render")
    return ReplyText(body, tuple(faults), tuple(losses))


def _rendered(
    template: ChatTemplate,
    head: str,
    messages: Sequence[Mapping[str, object]],
    reply: Mapping[str, object],
    tools: Sequence[Mapping[str, object]] | None,
    options: Json,
) -> str | None:
    """What the template renders behind the prompt; None if it refuses, or renders the conversation
    anew."""
    before = [template.form(message) for message in messages]
    try:
        whole = template.render(
            [*before, template.form(reply)], tools, add_generation_prompt=False, **options
        )
        asked = template.render(before, tools, add_generation_prompt=False, **options)
    except RequestRefused:
        return None
    if whole.startswith(head):
        return whole[len(head) :]
    if not whole.startswith(asked) or not head.startswith(asked):
        return None
    rest = template.rest(head, whole)
    marks = _open_block(template, head)
    if marks is None:
        return rest
    # the history has the reply without the block that the generation prompt opened
    opening, closing = marks
    message = clean(reply)
    reasoning = str(message.get("reasoning_content") or "")
    inside, mark, behind = rest.partition(closing.strip())
    if mark:  # the text itself has a block of reasoning
        reasoning = inside.replace(opening, "", 1).strip()
        rest = behind.lstrip()
    return f"{reasoning.strip()}{closing}{rest}"


def _open_block(template: ChatTemplate, head: str) -> tuple[str, str] | None:
    """The marks of reasoning if the generation prompt opens a block of it; None if it doesn't."""
    if template.reasoning is None:
        return None
    opening = template.reasoning[0].strip()
    closing = template.reasoning[1]
    if not opening or not head.rstrip().endswith(opening):
        return None
    return opening, closing if closing != closing.strip() else _CLOSING.format(mark=closing)


def _faults_of_reasoning(template: ChatTemplate, head: str, body: str, *, cut: bool) -> list[str]:
    marks = _open_block(template, head)
    if marks is None:
        return []
    opening = marks[0]
    closing = marks[1].strip()
    faults: list[str] = []
    if body.lstrip().startswith(opening):
        faults.append(f"it begins with {opening}, which the generation prompt has already")
    if closing not in body and not cut:
        faults.append(
            f"it has no {closing}, so its answer would be inside the block that the generation"
            " prompt opens"
        )
    return faults


def _faults_of_end(message: Json, ends: Sequence[str], ended: bool, *, cut: bool) -> list[str]:
    faults: list[str] = []
    texts = [
        text
        for text in (message["content"], message.get("reasoning_content"))
        if isinstance(text, str)
    ]
    texts += [_arguments(call) for call in message.get("tool_calls") or ()]
    literal = next((end for end in ends for text in texts if end in text), None)
    if literal is not None:
        faults.append(f"its text contains {literal}, which would end the reply there")
    if not ended and not cut:
        shown = ", ".join(ends) or "none"
        faults.append(
            f"the chat template ends it with none of the tokens that end sampling ({shown})"
        )
    return faults


def _arguments(call: object) -> str:
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping):
        arguments = function.get("arguments")
    else:
        arguments = None
    return str(getattr(arguments, "spelling", arguments))


def _without_reasoning(template: ChatTemplate, content: object) -> object:
    """The text behind a block of reasoning within a text, which templates move or drop."""
    if template.reasoning is None or not isinstance(content, str):
        return content
    return content.rpartition(template.reasoning[1].strip())[2]


_BLANKS = re.compile(r"\s+")


def _shows(body: str, text: object) -> bool:
    """Whether a text is in a body, regardless of blanks."""
    return not isinstance(text, str) or _bare(text) in _bare(body)


def _bare(text: str) -> str:
    return _BLANKS.sub("", text)
