"""Compiles chat templates with transformers' filters, functions and sandbox, and caches the JSON of
objects.

A template comes with a checkpoint, so it may be hostile. jinja2's sandbox protects the machine; in
addition, resources are metered here: every operator, filter, call, loop and buffer that creates or
reads a whole text or list is charged against the units of the rendering, even if the result is
dropped. Values that may be much larger than their operands are charged before they are created.
Loops are charged once at their start, by length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import _PassArg
from jinja2.visitor import NodeTransformer

from ajet_sdk.errors import ConfigError
from ajet_sdk.tokens.template_meter import (
    CHECKS,
    ITEM,
    MOST_UNITS,
    PASS,
    TOGETHER,
    add,
    charged,
    check_format,
    check_method,
    check_width,
    concat,
    join,
    made,
    meter,
    passed_on,
    read,
    searched,
    spend,
    spend_on,
    text_of,
)
from ajet_sdk.types import Json, JsonView

LONGEST = 50_000_000
"""Longest rendering, in characters."""
LONGEST_SOURCE = 200_000

_LAZY = frozenset(("length", "count", "first", "last", "default", "d", "items", "attr", "random"))
_LAZY |= {"map", "select", "selectattr", "reject", "rejectattr"}
"""Filters that create and read nothing, or work item by item."""
_SLOW = frozenset(
    (
        "title",
        "urlencode",
        "wordcount",
        "sort",
        "unique",
        "groupby",
        "dictsort",
        "string",
        "escape",
        "e",
        "forceescape",
    )
)
_NO_USE = frozenset(("wordwrap", "urlize", "striptags", "xmlattr", "pprint"))
"""Excluded filters: for web pages, or slow."""
_COMPARING = frozenset(
    (
        "==",
        "eq",
        "equalto",
        "!=",
        "ne",
        ">",
        "gt",
        "greaterthan",
        ">=",
        "ge",
        "<",
        "lt",
        "lessthan",
        "<=",
        "le",
        "in",
    )
)
_WALKING = frozenset(("join", "sum", "sort", "unique", "min", "max", "groupby", "list"))
"""Filters that consume a lazy one completely."""

_SIMPLE = frozenset(
    ("startswith", "endswith", "strip", "lstrip", "rstrip", "split", "upper", "lower", "find")
)
"""Text methods that are cheap with a short argument or none."""
_SHORT_ARGUMENT = 16
_OF_EVERY_DICT = frozenset(dir(dict))
_OF_A_LOOP = frozenset(("first", "last", "index", "index0", "length", "previtem", "nextitem"))
_LOOP, _ADD, _CONCAT, _LITERAL, _MADE, _READ, _SEARCHED = (
    f"ajet {name}" for name in ("loop", "+", "~", "[]", "made", "read", "searched")
)
"""Internal filters, with names that no template can use."""


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
    raise jinja2.TemplateError(text_of(text))


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
    check_width(indent, *how[2])
    read(value)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    written = dict(value) if isinstance(value, Shown) else value
    # Indentation grows with depth, so that indented JSON is charged piece by piece.
    text = (
        encoder.encode(written)
        if indent is None
        else "".join(map(charged, encoder.iterencode(written)))
    )
    if isinstance(value, Shown):
        value.shown[how] = text
    return text


@pass_context  # keeps jinja2 from calling it at compilation
def _charge_loop(_: Context, values: Any, weight: int) -> object:
    """Charges the items of a loop by their number."""
    if not hasattr(values, "__len__"):
        values = made(list(values))
    spend(weight * (len(values) + 1))
    return values


@pass_context
def _charge_literal(_: Context, value: object, size: int) -> object:
    spend(size)
    return value


class _Metered(NodeTransformer):
    """Meters everything except for calls and filters of the template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = _weight(node)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _LOOP, nodes.Const(weight))
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        operands: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add) and len(operands) < TOGETHER - 1:
            operands.append(left.right)
            left = left.left
        first, *rest = (self.visit(operand) for operand in (left, *reversed(operands)))
        return _filtered(first, _ADD, *rest)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node.nodes[0], _CONCAT, *node.nodes[1:])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        # The time of a comparison with a constant is bounded by the constant's length.
        constant = isinstance(node.expr, nodes.Const) or all(
            isinstance(each.expr, nodes.Const) for each in node.ops
        )
        for each in node.ops:
            searched = each.op in ("in", "notin")
            if searched if constant else True:
                each.expr = _filtered(each.expr, _SEARCHED if searched else _READ)
        if not constant:
            node.expr = _filtered(node.expr, _READ)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, _MADE, nodes.Const(8))
        if not isinstance(node.arg, nodes.Const):
            node.arg = _filtered(node.arg, _READ)
        return node

    def visit_List(self, node: Any) -> nodes.Node:
        size = ITEM * (2 + sum(1 for _ in node.find_all(nodes.Expr)))
        is_made = getattr(node, "ctx", "load") == "load" and node.find(nodes.Name) is not None
        self.generic_visit(node)
        return _filtered(node, _LITERAL, nodes.Const(size)) if is_made else node

    visit_Tuple = visit_Dict = visit_List

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = node.key if isinstance(node.key, nodes.Const) else _filtered(node.key, _READ)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:
        raise SecurityError("it changes how texts are escaped")


def _filtered(node: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(
        node, name, list(arguments), [], None, None, lineno=getattr(node, "lineno", 1)
    )


class _Generator(CodeGenerator):
    """Converts every output value by `text_of`."""

    def _output_child_pre(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:
        self.write("environment.text(")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with limits, and fast access to a message's keys and a loop's attributes.

    Their lookup takes most of the time for rendering a long conversation.
    """

    intercepted_binops = frozenset(("*", "**", "%", "-"))
    code_generator_class = _Generator
    concat = staticmethod(join)  # type: ignore[assignment]
    text = staticmethod(text_of)
    weight = PASS
    """Units of a call."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_EVERY_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is LoopContext and attribute in _OF_A_LOOP:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        called = tree.find_all((nodes.Macro, nodes.Block, nodes.CallBlock))
        self.weight = max(map(_weight, called), default=PASS)
        metered: nodes.Template = _Metered().visit(tree)
        return metered

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> object:
        if operator == "**":
            raise SecurityError("it uses **")
        if operator == "%" and isinstance(left, str):
            check_format(left, right)
        elif operator == "*":
            lengths = [
                len(operand) for operand in (left, right) if isinstance(operand, (str, list, tuple))
            ]
            numbers = [operand for operand in (left, right) if isinstance(operand, int)]
            spend_on(lengths[0] * max(numbers[0], 0) if lengths and numbers else 0)
        return made(super().call_binop(context, operator, left, right), 8)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is Macro:
            spend(__self.weight)
            return super().call(__context, __obj, *args, **kwargs)
        owner = getattr(__obj, "__self__", None)
        is_short = not args or (
            len(args) == 1 and type(args[0]) is str and len(args[0]) < _SHORT_ARGUMENT
        )
        if type(owner) is str and is_short and not kwargs and __obj.__name__ in _SIMPLE:
            spend(PASS + 2 * len(owner))
            return made(__obj(*args))
        spend(__self.weight if isinstance(__obj, (BlockReference, LoopContext)) else PASS)
        if isinstance(owner, str):
            check_method(owner, getattr(__obj, "__name__", ""), (*args, *kwargs.values()))
        elif isinstance(owner, (int, float, bytes)):
            raise SecurityError(f"it calls a method of {type(owner).__name__}")
        elif isinstance(owner, (list, tuple)):
            read([owner, args])
        elif isinstance(owner, (dict, LoopContext)):
            read(args)
        elif owner is not None:  # the output of strftime is up to 256 times as long as its format
            spend(256 * sum(len(argument) for argument in args if isinstance(argument, str)))
        elif args and isinstance(__obj, LoopContext):  # a recursive loop
            args = (_charge_loop(__context, args[0], PASS), *args[1:])
        return made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: object, **kwargs: object) -> Any:
            check_format(value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked


def _weight(node: nodes.Node) -> int:
    """Units of an iteration of a loop, or of a macro."""
    return PASS * (1 + sum(1 for _ in node.find_all(nodes.Expr)) // 50)


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter to charge what it reads and creates; it is never evaluated at compilation."""
    check, passed = CHECKS.get(name), getattr(function, "jinja_pass_arg", None)
    makes, simple = name not in _LAZY, name in ("trim", "upper", "lower", "length")
    reads, walks, factor = makes and name != "tojson", name in _WALKING, 9 if name in _SLOW else 0

    @pass_context
    def metered(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if simple and type(value) is str and not args and not kwargs:
            spend(ITEM + 3 * len(value))
            return function(value)
        spend(ITEM)
        if walks and isinstance(value, Iterator):
            value = made(list(value))
        if reads:
            before = meter.left
            read(value)
            for argument in (*args, *kwargs.values()):
                read(argument)
            spend(factor * (before - meter.left))
        if check is not None:
            check(value, *args, **kwargs)
        if passed is None:
            result = function(value, *args, **kwargs)
        else:
            by_kind = {_PassArg.context: context, _PassArg.eval_context: context.eval_ctx}
            result = function(by_kind.get(passed, context.environment), value, *args, **kwargs)
        if isinstance(result, Iterator):
            return passed_on(result)
        return made(result) if makes else result

    return metered


def _metered_test(function: Any) -> Callable[..., Any]:
    @wraps(function)
    def metered(*args: Any) -> Any:
        for argument in args:
            read(argument)
        return function(*args)

    return metered


@lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template. Raises ConfigError if it cannot be parsed."""
    if len(source) > LONGEST_SOURCE:
        raise ConfigError(f"the chat template has more than {LONGEST_SOURCE:,} characters")
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    filters = {**environment.filters, "tojson": to_json}
    environment.filters = {
        name: _metered_filter(name, filters[name]) for name in filters if name not in _NO_USE
    }
    environment.filters |= {_LOOP: _charge_loop, _LITERAL: _charge_literal}
    for name, function in (
        (_ADD, add),
        (_CONCAT, concat),
        (_MADE, made),
        (_READ, read),
        (_SEARCHED, searched),
    ):
        environment.filters[name] = function
    environment.tests = {
        name: _metered_test(test) if name in _COMPARING else test
        for name, test in environment.tests.items()
    }
    environment.globals["raise_exception"] = _raise
    del environment.globals["lipsum"]
    try:
        template = environment.from_string(source)
        template.globals = dict(
            template.globals
        )  # copied for each rendering, which is slow for a ChainMap
        return template
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template cannot be parsed: {error} (line {error.lineno})"
        ) from error
    except SecurityError as error:
        raise ConfigError(f"the chat template is refused: {error}") from error
    except (RecursionError, SyntaxError, MemoryError) as error:
        raise ConfigError(
            f"the chat template cannot be parsed: it is nested too deeply ({error})"
        ) from error


def render(template: jinja2.Template, variables: JsonView) -> str:
    """Render a template. Raises ConfigError if it exceeds its limits, and errors of jinja2."""
    pieces, size, meter.left = list[str](), 0, MOST_UNITS
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > LONGEST:
                raise SecurityError(f"it writes more than {LONGEST:,} characters")
            pieces.append(piece)
    except (SecurityError, OverflowError, MemoryError, RecursionError) as error:
        raise ConfigError(
            f"the chat template is broken or hostile and was stopped: {error}. Take the checkpoint"
            " from a source that you trust, or replace its chat template"
        ) from error
    return "".join(pieces)
