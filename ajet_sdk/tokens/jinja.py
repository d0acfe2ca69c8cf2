"""Chat templates compiled: transformers' filters, functions and sandbox, and objects whose JSON is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.runtime import LoopContext

from ajet_sdk.errors import ConfigError

__all__ = ["Shown", "compile_template", "to_json"]

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


class _Generation(jinja2.ext.Extension):
    """The `generation` tag of training templates: it marks text and changes none."""

    tags = {"generation"}

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise(text: str) -> None:
    raise jinja2.TemplateError(text)


def to_json(
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
def compile_template(source: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = _raise
    try:
        template = environment.from_string(source)
        template.globals = dict(template.globals)  # copied at each rendering, and a ChainMap is slow at it
        return template
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template cannot be parsed: {error} (line {error.lineno})") from error
