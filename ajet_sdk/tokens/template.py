"""Renders messages and tools by a chat template, as transformers does.

Templates differ in their input: some take content only as a list of parts, some want a tool call's
arguments as a string, some do not know the developer role, and many render no tools, for which the
Hermes format is used (`tokens.hermes`). These properties are found by probing the template, without
knowledge of particular templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2

from ajet_sdk.errors import ConfigError, RequestRefused
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.tokens.hermes import about_tools, with_calls_as_text, with_tools_as_text
from ajet_sdk.tokens.jinja import Shown, compile_template, render, to_json
from ajet_sdk.tokens.rendering import Rendering
from ajet_sdk.types import Json, JsonView

Message = Json

_REASONING = ("reasoning_content", "reasoning", "thinking")
_APART = {"role", "content", "tool_calls", *_REASONING}
_NEVER_RENDERED = {"refusal", "annotations", "audio", "function_call", "cache_control"}
_NOT_AS_IT_IS = _APART | _NEVER_RENDERED
_PROBE = "probe"
_REASON = "zqreason"
_TEXT = "zqtext"
_USER: Json = {"role": "user", "content": "zquser"}
_PROBE_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": "b"}'},
}
_NAME = "zqfunction"
_KEY = "zqkey"
_VALUE = "zqvalue"
_RESULT = "zqresult"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": ""}},
            "required": [],
        },
    },
}


class Arguments(Shown):
    """A tool call's arguments as an object, with their original text."""

    __slots__ = ("spelling",)

    def __init__(self, values: JsonView, spelling: str) -> None:
        super().__init__(values)
        self.spelling = spelling


def _arguments(value: object) -> Any:
    """Parses arguments to an object, empty for blank ones; other texts are unchanged."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return Arguments({}, value or "{}")
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    if not isinstance(parsed, Mapping):
        return value
    return Arguments(
        parsed, value if isinstance(value, str) else json.dumps(parsed, ensure_ascii=False)
    )


def _content(value: object) -> Any:
    """Joins text parts to one string; None becomes the empty string."""
    if value is None:
        return ""
    if isinstance(value, list):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        if len(strings := [text for text in texts if isinstance(text, str)]) == len(texts):
            return "".join(strings)
    return value


def _tool_call(call: Mapping[str, object]) -> dict[str, object]:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {"name": function}
    arguments = _arguments(function.get("arguments"))
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _spelt(call: Json) -> dict[str, object]:
    """Restores the original text of a cleaned tool call's arguments."""
    function = call["function"]
    arguments = getattr(function["arguments"], "spelling", function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def clean(message: JsonView) -> Message:
    """Normalizes a client's message: parts or string, arguments as string or object, null keys."""
    out: Message = {"role": message.get("role", ""), "content": _content(message.get("content"))}
    for key, value in message.items():
        if key not in _NOT_AS_IT_IS and value is not None and value != [] and value != {}:
            out[key] = value
    for key in _REASONING:
        if message.get(key):
            out["reasoning_content"] = out["thinking"] = message[key]
            break
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        out["tool_calls"] = [
            _tool_call(call) if isinstance(call, Mapping) else call for call in calls
        ]
    return out


def meaning(cleaned: Message) -> str:
    """Identifies a cleaned message by role, content, reasoning, and its calls' names and argument
    values.

    Messages with equal meaning may still be rendered differently, by names, ids or the spelling of
    arguments.
    """
    message: Message = {
        key: cleaned[key] for key in ("role", "content", "reasoning_content") if key in cleaned
    }
    calls = cleaned.get("tool_calls")
    if calls:
        message["tool_calls"] = [_called(call) for call in calls]
    return _spell(message)


_spell = json.JSONEncoder(sort_keys=True, default=str).encode
_EXACT = 2.0**53


def _called(call: object) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    raw = function.get("arguments")
    try:
        arguments = json.loads(raw) if isinstance(raw, str) else raw
    except ValueError:
        arguments = raw
    return [function.get("name"), _valued(arguments)]


def _valued(value: object) -> object:
    """Normalizes numbers in JSON: 1.0 becomes 1."""
    if isinstance(value, Mapping):
        return {key: _valued(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_valued(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


def same_reply(a: Mapping[str, object], b: Mapping[str, object]) -> bool:
    """Whether two messages have equal meaning, regardless of their format."""
    return meaning(clean(a)) == meaning(clean(b))


class ChatTemplate:
    """A compiled template with its probed properties.

    Args:
        source: the Jinja text.
        variables: of the template, besides messages and tools (`bos_token`, `eos_token`, ...).
    """

    def __init__(self, source: str, variables: JsonView) -> None:
        self._source = source
        self._compiled = compile_template(source)
        self._variables = dict(variables)
        self._parts = self._string_arguments = self._developer_is_system = False
        self.lacks: frozenset[str] = frozenset()
        """Features in the Hermes format, since the template doesn't render them: `tools`, `calls`
        (and results)."""
        self._leader = "system"
        """Role of the message with the tools."""
        self._probe()

    @staticmethod
    def of(source: str | None, variables: Mapping[str, object]) -> ChatTemplate:
        """Compiles and probes a template, once per source and variables. Raises ConfigError."""
        if not source:
            raise ConfigError(
                "the tokenizer has no chat template, so messages cannot be tokenized: add"
                " `chat_template` to its tokenizer_config.json, or use the completions route, which"
                " takes plain text"
            )
        frozen = tuple(
            sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in variables.items())
        )
        try:
            return _cached(source, frozen)
        except TypeError:  # a variable that cannot be hashed
            return ChatTemplate(source, variables)

    @staticmethod
    def known(tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a tokenizer; None without one, or if it cannot be parsed."""
        try:
            return ChatTemplate.of(tokenizer.chat_template, tokenizer.variables)
        except ConfigError:
            return None

    def _probe(self) -> None:
        ask = {"role": "user", "content": _PROBE}
        shown = self._attempt([ask])
        self._parts = shown is not None and _PROBE not in shown
        called = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
        if self._attempt([ask, called]) is None:
            self._string_arguments = True
            self._string_arguments = self._attempt([ask, called]) is not None
        developer = {"role": "developer", "content": "instruction"}
        self._developer_is_system = "instruction" not in (self._attempt([developer, ask]) or "")
        system = {"role": "system", "content": "instruction"}
        if "instruction" not in (self._attempt([system, ask]) or ""):
            self._leader = "user"
        offered = (self._attempt(messages, [_TOOL]) or "" for messages in ([ask], [system, ask]))
        tools = any(_NAME in text and _KEY in text for text in offered)
        self.lacks = frozenset(
            name for name, shown in (("tools", tools), ("calls", self._shows_calls())) if not shown
        )

    def _shows_calls(self) -> bool:
        """Whether the text has name, arguments and result of a call. Some templates require ids of
        nine letters, and some show only an id with the name."""
        for written in ("call00000", f"functions.{_NAME}:0"):
            function = {"name": _NAME, "arguments": json.dumps({_KEY: _VALUE})}
            calls = [{"id": written, "type": "function", "function": function}]
            messages: list[Message] = [
                {"role": "user", "content": _PROBE},
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "content": _RESULT, "tool_call_id": written, "name": _NAME},
            ]
            for tools in (None, [_TOOL]):
                text = (self._attempt(messages, tools) or "").rpartition(_PROBE)[2]
                if all(sign in text for sign in (_NAME, _KEY, _VALUE, _RESULT)):
                    return True
        return False

    def _attempt(
        self,
        messages: Iterable[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str | None:
        try:
            return self.render([self.form(m) for m in messages], tools)
        except RequestRefused:
            return None

    def in_hermes_form(self, messages: Sequence[Mapping[str, object]], tools: object) -> bool:
        """Whether a part of a request is written in the Hermes format, which the template would
        drop."""
        return bool(self.lacks) and (
            bool(tools) or ("calls" in self.lacks and about_tools(messages))
        )

    def _as_text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None
    ) -> tuple[list[Message], Sequence[JsonView] | None]:
        """Writes missing features as text into formed messages: calls, and tools if either is
        missing."""
        texts = [{**message, "content": _content(message["content"])} for message in messages]
        if "calls" in self.lacks:
            texts = with_calls_as_text(texts)
        if tools:
            texts = with_tools_as_text(
                texts, tools, to_json, self._leader, with_form="calls" in self.lacks
            )
        return ([self._in_parts(message) for message in texts] if self._parts else texts), None

    def _in_parts(self, message: Message) -> Message:
        content = message["content"]
        return {
            **message,
            "content": [{"type": "text", "text": content}] if isinstance(content, str) else content,
        }

    def form(self, message: Mapping[str, object]) -> Message:
        """Converts a client's message for this template."""
        return self.form_cleaned(clean(message))

    def form_cleaned(self, cleaned: Message) -> Message:
        """Converts a cleaned message for this template, without changing it."""
        out = dict(cleaned)
        if self._developer_is_system and out["role"] == "developer":
            out["role"] = "system"
        if self._parts:
            out = self._in_parts(out)
        if self._string_arguments and "tool_calls" in out and "calls" not in self.lacks:
            out["tool_calls"] = [_spelt(call) for call in out["tool_calls"]]
        return out

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonView] | None = None,
        *,
        at: datetime | None = None,
        add_generation_prompt: bool = True,
        **options: object,
    ) -> str:
        """Renders formed messages. `at` is the time for the template. Raises RequestRefused."""
        options["add_generation_prompt"] = add_generation_prompt
        return self.rendering(messages, tools, options, at=at).text

    def rendering(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonView] | None,
        options: JsonView,
        *,
        at: datetime | None = None,
        last: Rendering | None = None,
    ) -> Rendering:
        """As `render`, from where the `last` rendering stays true."""
        if self.in_hermes_form(messages, tools):
            messages, tools = self._as_text(messages, tools)
        strftime: Callable[[str], str] = (at or datetime.now()).strftime
        variables = {"add_generation_prompt": True, **self._variables, **options}
        variables |= {"strftime_now": strftime, "messages": messages}
        variables |= {"tools": list(tools) if tools else None}
        try:
            return render(self._compiled, variables, last)
        except ConfigError:
            raise
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise RequestRefused(
                f"the chat template rejected these messages: {error}", "messages"
            ) from error

    def render_begun(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonView] | None = None,
        *,
        at: datetime | None = None,
        **options: object,
    ) -> str:
        """Renders formed messages up to the end of the last one's content. Raises
        RequestRefused."""
        content = _content(messages[-1]["content"])
        options["add_generation_prompt"] = False
        text = self.rendering(messages, tools, options, at=at).text
        stripped = content.strip() if isinstance(content, str) else ""
        place = text.rfind(stripped) if stripped else -1
        if messages[-1]["role"] != "assistant" or place < 0:
            raise RequestRefused(
                "continue_final_message needs a last message of the assistant whose content the"
                " chat template renders",
                "continue_final_message",
            )
        end = place + len(stripped)
        blanks = content[len(content.rstrip()) :]
        return text[:end] + (blanks if text.startswith(blanks, end) else "")

    def reply_text(
        self, message: Mapping[str, object], tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """Renders a reply, after the generation prompt; empty if the template refuses."""
        formed = [self.form(m) for m in (_USER, message)]
        try:
            head = self.render(formed[:1], tools)
            whole = self.render(formed, tools, add_generation_prompt=False)
        except RequestRefused:
            return ""
        return self.rest(head, whole)

    @staticmethod
    def rest(head: str, whole: str) -> str:
        """What a conversation has behind its prompt `head`, which ends in the generation prompt."""
        if whole.startswith(head):
            return whole[len(head) :]
        # The history may lack a part of the generation prompt (an opened think block): cut at the
        # last common token.
        pairs = enumerate(zip(head, whole, strict=False))
        common = next((i for i, (a, b) in pairs if a != b), min(len(head), len(whole)))
        mark = max(whole.rfind(opening, 0, common) for opening in "<[")
        if mark >= 0 and not set(whole[mark:common]) & set(
            ">] \n"
        ):  # within a mark that starts in both
            common = mark
        return whole[common:]

    @cached_property
    def reasoning(self) -> tuple[str, str] | None:
        """The text around a reply's reasoning, found by rendering; None if the template doesn't
        show it."""
        reply = {
            "role": "assistant",
            "content": _TEXT,
            "reasoning_content": _REASON,
            "thinking": _REASON,
        }
        body = self.reply_text(reply)
        if _REASON in body and _TEXT in body:
            before, _, after = body.partition(_REASON)
            between = after.partition(_TEXT)[0]
            if between.strip():
                return (
                    before if before.strip() else "<think>" if "</think>" in between else "",
                    between,
                )
        return ("<think>", "</think>") if "</think>" in self._source else None


@lru_cache(maxsize=64)
def _cached(source: str, variables: tuple[tuple[str, object], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(variables))
