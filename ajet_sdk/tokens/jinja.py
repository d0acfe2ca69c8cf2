"""Chat templates compiled: transformers' filters, functions and sandbox, and objects whose JSON is kept.

A template comes with a checkpoint, so it may be hostile. jinja2's sandbox keeps it from the machine, and here what it
may use up is bounded: how often its loops and calls run, how long the texts that it keeps and writes are. Loops are
charged as a whole where they begin, by their length, so that the steps of a loop cost nothing more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from ajet_sdk.errors import ConfigError
from ajet_sdk.types import Json, JsonView

MOST_STEPS = 500_000
"""Steps of loops and calls in one rendering."""
LONGEST = 50_000_000
"""Characters of a rendering, and items or characters of a value that a template makes."""

_OF_EVERY_DICT = frozenset(dir(dict))
_OF_A_LOOP = frozenset(("first", "last", "index", "index0", "length", "previtem", "nextitem"))
_BUDGET, _LOOP, _VALUE = "ajet steps left", "ajet loop", "ajet value"
"""A variable and filters that no template can name."""
_WIDEST = 10_000
_ITEM = 256
"""Characters that an item of a list or an object counts as, beside its own."""
_WIDE = re.compile(r"\d{5,}")


class Shown(Json):
    """An object that every later prompt of its episode shows again, with the spellings that a template gave it.

    It must not change.
    """

    __slots__ = ("shown",)

    def __init__(self, values: JsonView) -> None:
        super().__init__(values)
        self.shown: dict[object, str] = {}
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
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter `tojson`."""
    _check_width(indent)
    if not isinstance(value, Shown):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    how = (ensure_ascii, indent, tuple(separators or ()), sort_keys)
    if how not in value.shown:
        value.shown[how] = json.dumps(
            dict(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
    return value.shown[how]


# What a template may use up


def _check_length(length: int) -> None:
    if length > LONGEST:
        raise SecurityError(f"it makes a value of more than {LONGEST:,} characters or items")


def _check_width(*widths: object) -> None:
    """Of a text's padding, which is a number or a text."""
    for width in widths:
        if (len(width) if isinstance(width, str) else width if isinstance(width, int) else 0) > _WIDEST:
            raise SecurityError(f"it pads a text by more than {_WIDEST:,}")


@pass_context
def _charge_loop(context: Context, values: Any) -> object:
    """What a loop goes through, charged by its length."""
    if not hasattr(values, "__len__"):
        values = list(values)
    _charge(context, len(values) + 1)
    return values


def _charge(context: Context, steps: int) -> None:
    budget = context.parent.get(_BUDGET)
    if budget is not None:
        budget[0] -= steps
        if budget[0] < 0:
            raise SecurityError(f"it takes more than {MOST_STEPS:,} steps")


def _check_value(value: object) -> object:
    """A value that is kept in a variable, or made of others."""
    if isinstance(value, (str, list, tuple, dict, Namespace)):
        _check_length(len(value) if isinstance(value, str) else _size(value))
    return value


def _size(value: object) -> int:
    """Characters of a value as it is written, about: what is in it twice counts twice. Counted up to `LONGEST`."""
    size, pending = 0, [value]
    while pending and size <= LONGEST:
        item = pending.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, (Mapping, list, tuple, Namespace)):
            inner = object.__getattribute__(item, "_Namespace__attrs") if isinstance(item, Namespace) else item
            size += _ITEM * len(inner)
            if size <= LONGEST:
                pending.extend(inner.values() if isinstance(inner, Mapping) else inner)
    return size


def _check_replace(text: str, old: object, new: object) -> None:
    _check_length(len(text) + text.count(str(old)) * len(str(new)))


class _Bounded(NodeTransformer):
    """Has each loop charged, and each value checked that is kept."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _LOOP)
        return node

    def visit_Assign(self, node: jinja2.nodes.Assign) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.node = _filtered(node.node, _VALUE)
        return node

    def visit_List(self, node: Any) -> Any:
        self.generic_visit(node)
        made = getattr(node, "ctx", "load") == "load" and node.find(jinja2.nodes.Name) is not None
        return _filtered(node, _VALUE) if made else node

    visit_Tuple = visit_Dict = visit_List

    def visit_AssignBlock(self, node: jinja2.nodes.AssignBlock) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, _VALUE)
        return node


def _filtered(node: object, name: str) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=getattr(node, "lineno", 1))


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with bounds, and a short way to a message's keys and to what a loop knows of itself.

    Most of a long conversation's rendering is looking them up.
    """

    intercepted_binops = frozenset(("*", "**", "%"))

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_EVERY_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _OF_A_LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Bounded().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "**":
            raise SecurityError("it uses **")
        if operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif operator == "*":
            texts = [len(operand) for operand in (left, right) if isinstance(operand, (str, list, tuple))]
            numbers = [operand for operand in (left, right) if isinstance(operand, int)]
            _check_length(texts[0] * numbers[0] if texts and numbers else 0)
            _check_width(*map(int.bit_length, numbers))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _charge(__context, 1)
        for value in (*args, *kwargs.values()):
            if isinstance(value, (str, list)):
                _check_length(len(value))
        if isinstance(__obj, LoopContext) and args:  # a recursive loop
            args = (_charge_loop(__context, args[0]), *args[1:])
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            if __obj.__name__ == "replace" and len(args) > 1:
                _check_replace(text, args[0], args[1])
            elif __obj.__name__ == "join" and args and isinstance(args[0], (list, tuple)):
                _check_length(len(text) * len(args[0]) + sum(len(str(argument)) for argument in args[0]))
            else:
                _check_width(*(argument for argument in (*args, *kwargs.values()) if isinstance(argument, int)))
        made = super().call(__context, __obj, *args, **kwargs)
        return _check_value(made) if __obj is dict else made

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: object, **kwargs: object) -> Any:
            _check_format(value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked


def _check_format(text: str, values: object) -> None:
    if _WIDE.search(text):
        raise SecurityError("it formats a text with a width of more than four digits")
    if "*" in text or re.search(r"\{[^{}]*\{", text):
        _check_width(*(values if isinstance(values, tuple) else (values,)))


def _bounded_filter(function: Callable[..., object], check: Callable[..., None]) -> object:
    """A filter of jinja2 behind a check of its arguments, without what jinja2 itself passes first."""
    skip = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def bounded(*args: object, **kwargs: object) -> object:
        check(*args[skip:], **kwargs)
        return function(*args, **kwargs)

    return bounded


def _check_padding(_: object, *widths: object, **named: object) -> None:
    _check_width(*widths, *named.values())


def _check_joined(values: object, d: object = "", **_: object) -> None:
    if isinstance(values, (list, tuple)):
        _check_length(len(str(d)) * len(values) + sum(len(value) for value in values if isinstance(value, str)))


_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "indent", "wordwrap", "batch", "slice"), _check_padding),
    "format": lambda text, *values, **named: _check_format(str(text), (*values, *named.values())),
    "replace": lambda text, old, new, *_, **__: _check_replace(str(text), old, new),
    "join": _check_joined,
}


@lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Raises ConfigError where it cannot be parsed."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters |= {name: _bounded_filter(environment.filters[name], check) for name, check in _CHECKS.items()}
    environment.filters |= {"tojson": to_json, _LOOP: _charge_loop, _VALUE: _check_value}
    environment.globals["raise_exception"] = _raise
    del environment.globals["lipsum"]
    try:
        template = environment.from_string(source)
        template.globals = dict(template.globals)  # copied at each rendering, and a ChainMap is slow at it
        return template
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template cannot be parsed: {error} (line {error.lineno})") from error
    except (RecursionError, SyntaxError, MemoryError) as error:
        raise ConfigError(f"the chat template cannot be parsed: it is nested too deeply ({error})") from error


def render(template: jinja2.Template, variables: JsonView) -> str:
    """The text of a template. Raises ConfigError where it uses up more than it may, and what jinja2 raises."""
    pieces, size = list[str](), 0
    try:
        for piece in template.generate({**variables, _BUDGET: [MOST_STEPS]}):
            size += len(piece)
            _check_length(size)
            pieces.append(piece)
    except (SecurityError, OverflowError, MemoryError, RecursionError) as error:
        raise ConfigError(
            f"the chat template is broken or hostile and was stopped: {error}. Take the checkpoint from a source that "
            "you trust, or replace its chat template"
        ) from error
    return "".join(pieces)
