"""Output to the terminal, in which no text can move the cursor, set colours, hide itself or change direction.

`echo` prints a line and `console` makes a rich console; both escape control characters in replies of models, rows of
datasets and messages of errors. Nothing else prints; a test checks it.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import sys
import unicodedata
from collections.abc import Iterator
from datetime import date, datetime, time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_KEPT = "\n\t"
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
_JOINERS = "\u200c\u200d"
"""Needed by scripts and emoji; harmless."""
_COLOURS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_STYLED = re.compile("\ufdd0([1-3][1-6]?(?:;[12])?)\ufdd1(.*?)\ufdd2", re.S)
"""Text from `style`, marked by noncharacters; such marks in other text can only add a colour."""


def visible(text: str) -> str:
    """Escape control characters, escape sequences and direction marks of a text: \\x1b, \\u202e."""
    return "\n".join(line if line.isprintable() else "".join(map(_shown, line)) for line in text.split("\n"))


def _shown(c: str) -> str:
    plain = c in _KEPT or c in _JOINERS or c.isprintable() or unicodedata.category(c) not in _HIDDEN
    return c if plain else _spelled(c)


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def style(text: str, fg: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    codes = ";".join([*([_COLOURS[fg]] if fg else []), *(["1"] if bold else []), *(["2"] if dim else [])])
    return f"\ufdd0{codes}\ufdd1{text}\ufdd2" if codes else text


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a line, with `err` to standard error; colours only on a terminal."""
    stream = sys.stderr if err else sys.stdout
    if stream is None or stream.closed:  # closed by users' code
        return
    shown = "\x1b[\\1m\\2\x1b[0m" if stream.isatty() else "\\2"
    print(_STYLED.sub(shown, visible(text)), file=stream, flush=True)


def json_line(value: object, *, indent: int | None = 2) -> str:
    """A value as JSON for a terminal: what `visible` escapes is escaped in JSON's way."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=json_default)
    return "\n".join(line if line.isprintable() else "".join(map(_escaped, line)) for line in text.split("\n"))


def json_default(value: object) -> float | str:
    """JSON for values that JSON does not know, as `default` of `json.dumps`.

    Decimals are numbers; dates, times and intervals are text; bytes are text where they are UTF-8, else base64.
    """
    if isinstance(value, Decimal):
        return float(value) if value.is_finite() else str(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    return str(value)


def _escaped(c: str) -> str:
    return c if _shown(c) == c else json.dumps(c)[1:-1]


def console(**settings: Any) -> Console:
    """A rich console whose texts are `visible`; `settings` are rich's.

    It writes to its file in a notebook too, where rich would show each print in the cell.
    """
    return _console_class()(force_jupyter=False, **settings)


@functools.cache
def _console_class() -> type[Console]:
    from rich.console import Console
    from rich.segment import Segment

    class VisibleConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for text, form, control in super().render(renderable, options):
                yield Segment(text if control else visible(text), form, control)

    return VisibleConsole
