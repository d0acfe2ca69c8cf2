"""Limits of a chat template, in units charged for every text or list that is created or read."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any, TypeVar

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

T = TypeVar("T")

MOST_UNITS = 300_000_000
"""Units of a rendering: created bytes, read characters, and `PASS` for a call or an iteration of a
loop."""
LONGEST_VALUE = 10_000_000
"""Longest created value, in characters or items."""

_WIDEST = 10_000
PASS = 400
"""Units of a call, or of an iteration of a loop or a macro with fifty expressions."""
ITEM = 64
"""Bytes per item of a created list."""
_NODE = 256
"""Units of reading an item of a list or an object, besides its text."""
_SHORT = 1_000
TOGETHER = 8
"""Number of operands of + that are charged together."""
_WIDE = re.compile(r"\d{5,}")
_ALLOWED = frozenset(name for name in dir(str) if not name.startswith("_")) - {
    "translate",
    "maketrans",
    "encode",
}


class _Meter(threading.local):
    left = MOST_UNITS


meter = _Meter()


def spend(units: int) -> None:
    left = meter.left = meter.left - units
    if left < 0:
        raise SecurityError(
            f"it makes or reads more than {MOST_UNITS:,} characters, items and steps"
        )


def spend_on(length: int) -> None:
    """Charge a value of this length before it is created."""
    if length > LONGEST_VALUE:
        raise SecurityError(f"it makes a value of more than {LONGEST_VALUE:,} characters or items")
    spend(length)


def charged(text: str) -> str:
    spend(len(text) + ITEM)
    return text


def passed_on(values: Iterator[T]) -> Iterator[T]:
    """Charges each item of a lazy filter."""
    for value in values:
        spend(ITEM)
        yield value


def made(value: T, item: int = ITEM) -> T:
    """Charges a created value by its memory, without that of its items."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        spend_on(len(value) if value.isascii() else 4 * len(value))
    elif isinstance(value, (list, tuple, dict, bytes)):
        spend_on(len(value))
        spend(item * len(value))
    elif isinstance(value, int):
        check_width(value.bit_length())
    return value


def read(value: T) -> T:
    """Charges reading a value by the length of its text; repeated parts count repeatedly."""
    if isinstance(value, str):
        spend(len(value))
    elif isinstance(value, _CONTAINERS):
        pending: list[Any] = [value]
        while pending:
            item = pending.pop()
            kind = type(item)
            if kind is str:
                spend(len(item))
            elif (
                kind is list
                or kind is tuple
                or (kind not in _PLAIN and isinstance(item, _CONTAINERS))
            ):
                inner: Any = (
                    object.__getattribute__(item, "_Namespace__attrs")
                    if kind is Namespace
                    else item
                )
                spend(_NODE * (len(inner) + 1))
                pending.extend(inner)
                if kind is dict or isinstance(inner, Mapping):
                    pending.extend(inner.values())
            elif isinstance(item, str):
                spend(len(item))
    return value


def searched(value: T) -> T:
    """Charges searching a value."""
    return value if isinstance(value, dict) else read(value)


_PLAIN = frozenset((int, float, bool, type(None)))
_CONTAINERS = (Mapping, list, tuple, Namespace, ValuesView, ItemsView)


def text_of(value: object) -> str:
    """Converts a value to text, as the template renders it."""
    return value if type(value) is str else made(str(read(value)))


def check_width(*widths: object) -> None:
    """Limit a text's padding, given as a number or a text."""
    for width in widths:
        if (
            len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
        ) > _WIDEST:
            raise SecurityError(f"it pads a text, or has a number, by more than {_WIDEST:,}")


def join(pieces: Iterable[str]) -> str:
    """Joins the output of macros and blocks."""
    pieces = list(pieces)
    spend_on(sum(map(len, pieces)))
    return made("".join(pieces))


def concat(*values: object) -> str:
    return join(map(text_of, values))


def add(*values: Any) -> Any:
    """Adds at most `TOGETHER` operands."""
    try:
        total = "".join(values)
    except TypeError:
        total = values[0]
        for value in values[1:]:
            total = made(total + value, 8)
        return total
    left = meter.left = meter.left - len(total)
    return made(total) if len(total) > _SHORT or left < 0 else total


def check_method(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    """Charge what a text's method reads and creates."""
    if name not in _ALLOWED:
        raise SecurityError(f"it calls str.{name}")
    longest = 0
    for argument in arguments:
        if isinstance(argument, str):
            longest = max(longest, len(argument))
        elif isinstance(argument, int):
            check_width(argument)
        else:
            read(argument)
    # Some compare a long argument at every position.
    spend(len(text) * (longest + 1 if name.endswith("strip") else longest // 64 + 1))
    if name == "replace" and len(arguments) > 1:
        _check_replace(text, *arguments)
    elif name == "join" and arguments:
        _check_joined(arguments[0], text)
    elif name == "expandtabs":
        spend_on(
            text.count("\t")
            * max([8, *(argument for argument in arguments if isinstance(argument, int))])
        )


def _check_replace(text: str, old: object, new: object, *_: object) -> None:
    spend_on(len(text) + text.count(str(old)) * len(str(new)))


def check_format(text: str, values: object) -> None:
    """Charge each placeholder as if it had the longest value and the greatest width."""
    spend(10 * len(text))
    if _WIDE.search(text):
        raise SecurityError("it formats a text with a width of more than four digits")
    if "*" in text or re.search(r"\{[^{}]*\{", text):
        check_width(*(values if isinstance(values, tuple) else (values,)))
        width = _WIDEST
    else:
        width = max(map(int, re.findall(r"\d+", text)), default=0)
    before = meter.left
    read(values)
    spend_on((text.count("%") + text.count("{")) * (4 * (before - meter.left) + width))


def _check_indent(text: object, width: int | str = 4, *_: object, **__: object) -> None:
    check_width(width)
    spend_on((str(text).count("\n") + 1) * (len(width) if isinstance(width, str) else width))


def _check_parts(_: object, count: int, *fill: object, **__: object) -> None:
    check_width(count)
    spend(2 * ITEM * count)


def _check_joined(values: object, d: object = "", *_: object, **__: object) -> None:
    if isinstance(values, (list, tuple)):
        spend_on(len(str(d)) * len(values))


CHECKS: dict[str, Callable[..., None]] = {
    "center": lambda _, *widths, **named: check_width(*widths, *named.values()),
    "indent": _check_indent,
    "trim": lambda text, chars="", *_: spend(len(str(text)) * len(str(chars or ""))),
    **dict.fromkeys(("batch", "slice"), _check_parts),
    "format": lambda text, *values, **named: check_format(str(text), (*values, *named.values())),
    "replace": lambda text, old, new, *_, **__: _check_replace(str(text), old, new),
    "join": _check_joined,
}
