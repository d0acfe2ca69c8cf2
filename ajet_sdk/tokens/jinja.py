"""Compiles chat templates with transformers' filters, functions and sandbox, and caches the JSON of
objects.

A template comes with a checkpoint, so it may be hostile. jinja2's sandbox keeps it from the
machine, and its texts are limited in size. Against templates that take forever, or all memory, each
is first tried on a conversation in a process with limits. This does not cover what a template does
only with certain messages: whoever wrote it made the weights, too.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ajet_sdk.errors import ConfigError
from ajet_sdk.sandbox import limited
from ajet_sdk.tokens.rendering import Rendering, Run, TooLong, with_turns
from ajet_sdk.types import Json, JsonView

LONGEST = 50_000_000
"""Longest rendering, in characters."""
LONGEST_SOURCE = 200_000
PROBE_SECONDS = 2.0
"""Processor time for the first renderings. The longest templates of vendors take 30 ms."""
PROBE_MEMORY = 512 << 20
"""Address space that they may take, in bytes."""

_OF_EVERY_DICT = frozenset(dir(dict))
_OF_A_LOOP = frozenset(("first", "last", "index", "index0", "length", "previtem", "nextitem"))


class Shown(Json):
    """An immutable object with its cached JSON, since every later prompt of the episode renders it
    again."""

    __slots__ = ("shown",)

    def __init__(self, values: JsonView) -> None:
        super().__init__(values)
        self.shown: dict[object, str] = {}
        """Cached JSON by the arguments of `tojson`."""


class _Generation(jinja2.ext.Extension):
    """The `generation` tag of training templates, which doesn't change the text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


def _raise(text: object) -> None:
    raise jinja2.TemplateError(str(text))


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter `tojson`."""
    how = (ensure_ascii, indent, tuple(separators or ()), sort_keys)
    if isinstance(value, Shown) and how in value.shown:
        return value.shown[how]
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if isinstance(value, Shown):
        value.shown[how] = text
    return text


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with fast access to a message's keys and a loop's attributes.

    Their lookup takes most of the time for rendering a long conversation.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_EVERY_DICT:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _OF_A_LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


@lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template. Raises ConfigError if it cannot be parsed, or takes too much time or
    memory."""
    if len(source) > LONGEST_SOURCE:
        raise ConfigError(f"the chat template has more than {LONGEST_SOURCE:,} characters")
    try:
        stopped = limited.call(
            "ajet_sdk.tokens.jinja:probe", (source,), seconds=PROBE_SECONDS, memory=PROBE_MEMORY
        )
    except limited.TooExpensive as error:
        stopped = _refusal(f"for a short conversation, {error}")
    if stopped:
        raise ConfigError(stopped)
    return _compiled(source)


def _compiled(source: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise
    try:
        code = environment.compile(with_turns(environment, source))
        template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template cannot be parsed: {error} (line {error.lineno})"
        ) from error
    except (RecursionError, SyntaxError, MemoryError) as error:
        raise ConfigError(
            f"the chat template cannot be parsed: it is nested too deeply ({error})"
        ) from error
    # Copied for each rendering, which is slow for a ChainMap.
    template.globals = dict(template.globals)
    return template


def probe(source: str) -> str | None:
    """Render conversations with each kind of message and a tool. Return why the template is
    refused."""
    call = {"name": "f", "arguments": {"a": "b"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    turns: list[Json] = [
        {"role": "user", "content": "question"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "result", "name": "f"},
        {"role": "assistant", "content": "answer", "reasoning_content": "reasons"},
    ]
    texts = [{"role": "system", "content": "instruction"}, *turns * 3]
    parts = [{**text, "content": [{"type": "text", "text": text["content"]}]} for text in texts]
    plain = [turns[0], turns[-1], turns[0]]
    try:
        template = _compiled(source)
    except ConfigError as error:
        return str(error)
    for messages in (plain[:1], plain, texts, parts):
        variables = {
            "messages": messages,
            "tools": tools if messages is texts else None,
            "add_generation_prompt": True,
            "strftime_now": datetime.now().strftime,
        }
        try:
            render(template, variables)
        except ConfigError as error:
            return str(error)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            pass  # many templates refuse some of these messages
    return None


def render(
    template: jinja2.Template, variables: JsonView, last: Rendering | None = None
) -> Rendering:
    """Render a template, from where the last rendering stays true. Raises ConfigError if it exceeds
    its limits, and errors of jinja2."""
    for watched in (True, False):
        try:
            return Run(variables, last, LONGEST, watched=watched).render(template)
        except TooLong as error:
            raise ConfigError(_refusal(f"it writes more than {LONGEST:,} characters")) from error
        except (SecurityError, OverflowError, MemoryError, RecursionError) as error:
            raise ConfigError(_refusal(repr(error))) from error
        except Exception:  # maybe of an operation that only a list has
            if not watched:
                raise
    raise AssertionError


def _refusal(reason: str) -> str:
    return (
        f"the chat template is broken or hostile and was stopped: {reason}. Take the checkpoint"
        " from a source that you trust, or replace its chat template"
    )
