"""A chat template: messages and tools in, text out, as transformers renders it.

Templates differ in what they read: some take content only as a list of parts, some want a tool call's arguments as a
string, some do not know the developer role. Which of these holds is found by probing the template itself, so that no
marker of any template stands in this code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.runtime import LoopContext

from ajet_sdk.errors import ConfigError, RequestRefused
from ajet_sdk.protocols import Tokenizer

__all__ = ["Arguments", "ChatTemplate", "Message", "Shown", "clean", "meaning", "same_reply"]

Message = dict[str, Any]

_REASONING = ("reasoning_content", "reasoning", "thinking")
_APART = {"role", "content", "tool_calls", *_REASONING}
_NEVER_RENDERED = {"refusal", "annotations", "audio", "function_call", "cache_control"}
_NOT_AS_IT_IS = _APART | _NEVER_RENDERED
_PROBE, _REASON, _TEXT = "probe", "zqreason", "zqtext"
_USER: dict[str, Any] = {"role": "user", "content": "zquser"}
_PROBE_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}


_OF_EVERY_DICT = frozenset(dir(dict))
_OF_A_LOOP = frozenset(("first", "last", "index", "index0", "length", "previtem", "nextitem"))


class Shown(dict[str, Any]):
    """An object that every later prompt of its episode shows again, with the spellings that a template gave it.

    It must not change.
    """

    __slots__ = ("shown",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.shown: dict[Any, str] = {}
        """By the arguments of `tojson`."""


class Arguments(Shown):
    """A tool call's arguments as an object, with the spelling they came in."""

    __slots__ = ("spelling",)

    def __init__(self, values: Mapping[str, Any], spelling: str) -> None:
        super().__init__(values)
        self.spelling = spelling


def _arguments(value: Any) -> Any:
    """The arguments as an object, blank ones as the empty one; what is no JSON object stays the string it is."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return Arguments({}, value or "{}")
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
    if not isinstance(parsed, Mapping):
        return value
    return Arguments(parsed, value if isinstance(value, str) else json.dumps(parsed, ensure_ascii=False))


def _content(value: Any) -> Any:
    """Parts that are all text become one string; nothing becomes the empty string."""
    if value is None:
        return ""
    if isinstance(value, list):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        if len(strings := [text for text in texts if isinstance(text, str)]) == len(texts):
            return "".join(strings)
    return value


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {"name": function}
    arguments = _arguments(function.get("arguments"))
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _spelt(call: dict[str, Any]) -> dict[str, Any]:
    """A cleaned tool call with its arguments as the string they came in."""
    function = call["function"]
    arguments = getattr(function["arguments"], "spelling", function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def clean(message: Mapping[str, Any]) -> Message:
    """One form for what clients write in many: parts or string, arguments as string or object, null keys."""
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
        out["tool_calls"] = [_tool_call(call) if isinstance(call, Mapping) else call for call in calls]
    return out


def meaning(cleaned: Message) -> str:
    """What a cleaned message says: its role, content, reasoning, and the calls by name and values of their arguments.

    Two messages of one meaning may still be shown differently, by a template that shows a name, an id or a spelling.
    """
    said: Message = {key: cleaned[key] for key in ("role", "content", "reasoning_content") if key in cleaned}
    calls = cleaned.get("tool_calls")
    if calls:
        said["tool_calls"] = [_called(call) for call in calls]
    return _spell(said)


_spell = json.JSONEncoder(sort_keys=True, default=str).encode
_EXACT = 2.0**53


def _called(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        arguments = given
    return [function.get("name"), _valued(arguments)]


def _valued(value: Any) -> Any:
    """JSON with each number spelt one way: 1.0 is 1."""
    if isinstance(value, Mapping):
        return {key: _valued(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_valued(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT else value


def same_reply(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two messages say the same, whatever form a client gave them."""
    return meaning(clean(a)) == meaning(clean(b))


class _Generation(jinja2.ext.Extension):
    """The `generation` tag of training templates: it marks text and changes none."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise(text: str) -> None:
    raise jinja2.TemplateError(text)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if not isinstance(value, Shown):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    how = (ensure_ascii, indent, tuple(separators or ()), sort_keys)
    if how not in value.shown:
        value.shown[how] = json.dumps(
            dict(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    return value.shown[how]


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a short way to a message's keys and to what a loop knows of itself.

    Most of a long conversation's rendering is looking them up.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_EVERY_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _OF_A_LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    try:
        template = environment.from_string(source)
        template.globals = dict(template.globals)  # copied at each rendering, and a ChainMap is slow at it
        return template
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template cannot be parsed: {error} (line {error.lineno})") from error


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ChatTemplate:
    """A compiled template and what it was found to read.

    Args:
        source: the Jinja text.
        variables: what the template reads beside messages and tools (`bos_token`, `eos_token`, ...).
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._source = source
        self._compiled = _compile(source)
        self._variables = dict(variables)
        self._parts = self._string_arguments = self._developer_is_system = False
        self._probe()

    @staticmethod
    def of(source: str | None, variables: Mapping[str, Any]) -> ChatTemplate:
        """The template of a tokenizer, compiled and probed once per source and variables. Raises ConfigError."""
        if not source:
            raise ConfigError(
                "the tokenizer has no chat template, so messages cannot be tokenized: add `chat_template` to "
                "its tokenizer_config.json, or use the completions route, which takes plain text"
            )
        frozen = tuple(sorted((k, _freeze(v)) for k, v in variables.items()))
        try:
            return _cached(source, frozen)
        except TypeError:  # a variable that cannot be hashed
            return ChatTemplate(source, variables)

    @staticmethod
    def known(tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a tokenizer; None where it has none, or one that does not parse."""
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
        told = [{"role": "developer", "content": "instruction"}, ask]
        self._developer_is_system = "instruction" not in (self._attempt(told) or "")

    def _attempt(self, messages: Iterable[Mapping[str, Any]]) -> str | None:
        try:
            return self.render([self.form(m) for m in messages])
        except RequestRefused:
            return None

    def form(self, message: Mapping[str, Any]) -> Message:
        """A client's message as this template reads it."""
        return self.form_cleaned(clean(message))

    def form_cleaned(self, cleaned: Message) -> Message:
        """The same of a message that was cleaned already, which stays as it is."""
        out = dict(cleaned)
        if self._developer_is_system and out["role"] == "developer":
            out["role"] = "system"
        if self._parts and isinstance(out["content"], str):
            out["content"] = [{"type": "text", "text": out["content"]}]
        if self._string_arguments and "tool_calls" in out:
            out["tool_calls"] = [_spelt(call) for call in out["tool_calls"]]
        return out

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        at: datetime | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The text of formed messages. `at` is the time that the template is told. Raises RequestRefused."""
        told: Callable[[str], str] = (at or datetime.now()).strftime
        variables = {**self._variables, **options, "strftime_now": told}
        variables |= {"messages": messages, "tools": list(tools) if tools else None}
        try:
            return self._compiled.render(add_generation_prompt=add_generation_prompt, **variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestRefused(f"the chat template rejected these messages: {error}", "messages") from error

    def render_begun(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        at: datetime | None = None,
        **options: Any,
    ) -> str:
        """The text of formed messages up to the end of the last one's content. Raises RequestRefused."""
        content = _content(messages[-1]["content"])
        text = self.render(messages, tools, at=at, add_generation_prompt=False, **options)
        said = content.strip() if isinstance(content, str) else ""
        place = text.rfind(said) if said else -1
        if messages[-1]["role"] != "assistant" or place < 0:
            raise RequestRefused(
                "continue_final_message needs a last message of the assistant whose content the chat template renders",
                "continue_final_message",
            )
        end, blanks = place + len(said), content[len(content.rstrip()) :]
        return text[:end] + (blanks if text.startswith(blanks, end) else "")

    def reply_text(self, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """What the template writes after its generation prompt for a reply; empty where it refuses."""
        formed = [self.form(m) for m in (_USER, message)]
        try:
            head, whole = self.render(formed[:1], tools), self.render(formed, tools, add_generation_prompt=False)
        except RequestRefused:
            return ""
        if whole.startswith(head):
            return whole[len(head) :]
        # A generation prompt that history does not keep (an opened think block, say): cut at the last common token.
        pairs = enumerate(zip(head, whole, strict=False))
        common = next((i for i, (a, b) in pairs if a != b), min(len(head), len(whole)))
        mark = max(whole.rfind(opening, 0, common) for opening in "<[")
        if mark >= 0 and not set(whole[mark:common]) & set(">] \n"):  # within a mark: both begin alike
            common = mark
        return whole[common:]

    @cached_property
    def reasoning(self) -> tuple[str, str] | None:
        """What the template writes before and behind a reply's reasoning, found by rendering; None: it shows none."""
        said = {"role": "assistant", "content": _TEXT, "reasoning_content": _REASON, "thinking": _REASON}
        body = self.reply_text(said)
        if _REASON in body and _TEXT in body:
            before, _, after = body.partition(_REASON)
            between = after.partition(_TEXT)[0]
            if between.strip():
                return (before if before.strip() else "<think>" if "</think>" in between else "", between)
        return ("<think>", "</think>") if "</think>" in self._source else None


@lru_cache(maxsize=64)
def _cached(source: str, variables: tuple[tuple[str, Any], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(variables))
