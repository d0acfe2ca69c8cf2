"""Tokenizes recorded calls again, with another tokenizer and chat template.

Prompts are built by `PromptBuilder`, as in an engine, with the recorded replies as sampled tokens:
their recorded ids if this tokenizer made them, else the encoded text that the template renders for
the reply.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.dialects.json import Json
from ajet_sdk.engines.picture_text import encode_text, with_image_parts
from ajet_sdk.engines.prompts import Prompt, PromptBuilder
from ajet_sdk.engines.reply_text import reply_text
from ajet_sdk.errors import RequestRefused
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.tokens.template import ChatTemplate, Message, clean
from ajet_sdk.types import Call, now


def calls_of(
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None,
    episode_id: str,
    *,
    begin: int = 0,
) -> list[Call]:
    """Make a call of each assistant message from index `begin` on, with the messages before it,
    without token ids."""
    at = now()
    offered = {"tools": list(tools)} if tools else {}
    spoken = [
        i for i, message in enumerate(messages) if i >= begin and message["role"] == "assistant"
    ]
    return [
        Call(
            call_id=f"{episode_id}.{position}",
            episode_id=episode_id,
            index=index,
            request={"messages": [dict(message) for message in messages[:position]], **offered},
            response={"choices": [{"message": dict(messages[position])}]},
            started_at=at + timedelta(microseconds=index),
            ended_at=at + timedelta(microseconds=index),
        )
        for index, position in enumerate(spoken)
    ]


def by_request(calls: Iterable[Call]) -> list[tuple[Call, ...]]:
    """Group the calls of the workflow by request, in order of their start; calls of judges are left
    out."""
    grouped: dict[str, list[Call]] = {}
    for call in sorted(calls, key=lambda c: (c.started_at, c.index)):
        if call.phase == "rollout":
            grouped.setdefault(call.request_id or call.call_id, []).append(call)
    return [tuple(sorted(choices, key=lambda c: c.index)) for choices in grouped.values()]


@dataclass(slots=True)
class Findings:
    """What the replies of an episode lose or double by being tokenized."""

    faults: list[str] = field(default_factory=list)
    """Why a reply would teach something else."""
    losses: list[str] = field(default_factory=list)
    """Parts of replies that the template doesn't render."""
    in_hermes_form: bool = False
    """Whether tools or calls are written as text, as the template doesn't render them."""


def retokenise(
    calls: Sequence[Call], tokenizer: Tokenizer, findings: Findings | None = None
) -> list[Call]:
    """Tokenize the calls of an episode with another tokenizer; returned in order of their start.

    Log-probabilities are zeros, as they are unknown for these tokens. Calls of judges, calls
    without messages or a prompt (another dialect) and calls without a reply are left out. Raises
    RequestRefused if the template refuses a request, ConfigError without a valid template.

    What replies lose is added to `findings`; recorded ids of this tokenizer lose nothing.
    """
    work = _Work(tokenizer, findings or Findings())
    for choices in by_request(calls):
        work.take(choices)
    return place_all(sorted(work.calls, key=lambda call: (call.started_at, call.index)))


class _Work:
    def __init__(self, tokenizer: Tokenizer, findings: Findings) -> None:
        self.tokenizer = tokenizer
        self.findings = findings
        self.template = ChatTemplate.of(tokenizer.chat_template, tokenizer.variables)
        self.calls: list[Call] = []
        self._agents: dict[str, PromptBuilder] = {}
        self._waiting: list[
            tuple[PromptBuilder, Prompt, Call, list[int], Mapping[str, object]]
        ] = []
        self._same: bool | None = None

    def take(self, choices: Sequence[Call]) -> None:
        """Tokenize a request and its replies; it may continue replies that ended before it
        began."""
        answered = [call for call in choices if _reply(call) is not None]
        body = choices[0].request
        chat = isinstance(body.get("messages"), list)
        plain = isinstance(body.get("prompt"), str)
        if not answered or not (chat or plain) or "system" in body:
            return
        began = choices[0].started_at
        for ready in [waiting for waiting in self._waiting if waiting[2].ended_at <= began]:
            ready[0].commit(ready[1], ready[3], ready[4])
            self._waiting.remove(ready)
        self._chat(choices[0].agent, body, answered) if chat else self._plain(body, answered)

    def _plain(self, body: Json, calls: Sequence[Call]) -> None:
        prompt = encode_text(self.tokenizer, body["prompt"])
        for call in calls:
            text = str((_reply(call) or {}).get("content") or "")
            self._add(call, prompt, self._recorded_ids(call) or encode_text(self.tokenizer, text))

    def _chat(self, agent: str, body: Json, calls: Sequence[Call]) -> None:
        messages = _checked(body["messages"], takes_pictures=self.tokenizer.pictures is not None)
        tools = body.get("tools") or None
        options = _options(body)
        tokens = self._agents.setdefault(agent, PromptBuilder(self.tokenizer))
        prompt = tokens.prompt(messages, tools, **options)
        replies = [dict(_reply(call) or {}) for call in calls]
        if self.template.in_hermes_form([*messages, *replies], tools):
            self.findings.in_hermes_form = True
        for call in calls:
            reply = dict(_reply(call) or {})
            output = self._recorded_ids(call)
            if output is None:
                shown = with_image_parts(messages)
                output = self._spelled(
                    prompt.text, shown, reply, tools, options, call.finish_reason
                )
            self._waiting.append((tokens, prompt, call, output, reply))
            self._add(call, prompt.ids, output, prompt.pictures)

    def _add(
        self,
        call: Call,
        prompt: Sequence[int],
        output: Sequence[int],
        pictures: tuple[PlacedPicture, ...] = (),
    ) -> None:
        changed: dict[str, object] = {
            "prompt_ids": _ids(prompt),
            "output_ids": _ids(output),
            "pictures": pictures,
            "logprobs": np.zeros(len(output), dtype=np.float32),
        }
        self.calls.append(call.model_copy(update=changed))

    def _recorded_ids(self, call: Call) -> list[int] | None:
        """The recorded ids, if this tokenizer made them: they decode to the reply, and so does the
        first prompt's."""
        if call.prompt_ids is None or call.output_ids is None:
            return None
        if self._same is None:
            messages = call.request.get("messages") or [{"content": call.request.get("prompt")}]
            self._same = self._spells(call.prompt_ids.tolist(), clean(messages[-1]))
        ids: list[int] = call.output_ids.tolist()
        if not self._same or not self._spells(ids, clean(_reply(call) or {})):
            return None
        return ids

    def _spells(self, ids: Sequence[int], message: Message) -> bool:
        try:
            text = self.tokenizer.decode(ids)
        except (IndexError, ValueError, OverflowError):  # ids beyond the vocabulary
            return False
        called = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        shown_texts = [message.get("content"), message.get("reasoning_content"), *called]
        return all(shown.strip() in text for shown in shown_texts if isinstance(shown, str))

    def _spelled(
        self,
        head: str,
        messages: Sequence[Mapping[str, object]],
        reply: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] | None,
        options: Json,
        finish: str | None,
    ) -> list[int]:
        """The ids of a reply as the template renders it after the generation prompt, up to the end
        of the turn."""
        ends = [
            text for i in sorted(self.tokenizer.eos_ids) if (text := self.tokenizer.decode([i]))
        ]
        taught = reply_text(
            self.template, head, messages, reply, tools, options, ends, cut=finish == "length"
        )
        self.findings.faults += taught.faults
        self.findings.losses += taught.losses
        return encode_text(self.tokenizer, taught.text)


def _reply(call: Call) -> Mapping[str, object] | None:
    """The reply message of a call; None without one, or in another dialect."""
    choices = call.response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, Mapping):
        return None
    if isinstance(first.get("message"), Mapping):
        message: Mapping[str, object] = first["message"]
        return message
    if isinstance(first.get("text"), str):
        return {"role": "assistant", "content": first["text"]}
    return None


def _options(body: Json) -> Json:
    """The template's arguments from a request, as in an engine."""
    template_options = body.get("chat_template_kwargs")
    if isinstance(template_options, Mapping):
        options = dict(template_options)
    else:
        options = {}
    if body.get("reasoning_effort") is not None:
        options.setdefault("reasoning_effort", body["reasoning_effort"])
    return options


def _checked(messages: Sequence[Any], *, takes_pictures: bool) -> list[Message]:
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestRefused(f"messages[{index}] is not an object", "messages")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                continue
            if isinstance(part, dict):
                kind = part.get("type")
            else:
                kind = type(part).__name__
            if kind != "image_url" or not takes_pictures:
                raise RequestRefused(
                    f"a message contains a part of type {kind!r}, which the model does not take",
                    "messages",
                )
    return list(messages)


def _ids(values: Sequence[int]) -> npt.NDArray[np.int32]:
    array = np.array(values, dtype=np.int32)
    array.flags.writeable = False
    return array
