"""Output to the terminal, in which no text can move the cursor, set colors, hide itself or change
direction.

`echo` prints a line and `console` opens a rich console; both escape control characters in model
replies, dataset rows and error messages. Nothing else prints; a test checks it.
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
    from rich.progress import Progress

_KEPT = "\n\t"
_HIDDEN = frozenset(("Cc", "Cf", "Cs", "Co", "Zl", "Zp"))
_JOINERS = "\u200c\u200d"
"""Needed by scripts and emoji; harmless."""
_COLOURS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_STYLED = re.compile("\ufdd0([1-3][1-6]?(?:;[12])?)\ufdd1(.*?)\ufdd2", re.S)
"""Text from `style`, marked by noncharacters; such marks in other text can only add a colour."""


def visible(text: str) -> str:
    """Escape control characters, escape sequences and direction marks of a text: \\x1b, \\u202e."""
    return "\n".join(
        line if line.isprintable() else "".join(map(_shown, line)) for line in text.split("\n")
    )


def _shown(c: str) -> str:
    plain = c in _KEPT or c in _JOINERS or c.isprintable() or unicodedata.category(c) not in _HIDDEN
    return c if plain else _spelled(c)


def _spelled(character: str) -> str:
    code = ord(character)
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )


def style(text: str, fg: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    codes = ";".join(
        [*([_COLOURS[fg]] if fg else []), *(["1"] if bold else []), *(["2"] if dim else [])]
    )
    return f"\ufdd0{codes}\ufdd1{text}\ufdd2" if codes else text


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a line, with `err` to standard error; colours only on a terminal."""
    stream = sys.stderr if err else sys.stdout
    if stream is None or stream.closed:  # closed by users' code
        return
    shown = "\x1b[\\1m\\2\x1b[0m" if stream.isatty() else "\\2"
    print(_STYLED.sub(shown, visible(text)), file=stream, flush=True)


def json_line(value: object, *, indent: int | None = 2) -> str:
    """Formats JSON for a terminal: characters that `visible` would escape are escaped as in
    JSON."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, default=json_default)
    return "\n".join(
        line if line.isprintable() else "".join(map(_escaped, line)) for line in text.split("\n")
    )


def json_default(value: object) -> float | str:
    """Converts other values to JSON, as `default` of `json.dumps`.

    Decimals become numbers, dates, times and intervals text, bytes text if they are UTF-8, else
    base64.
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
    """Opens a rich console that escapes text with `visible`; `settings` are rich's.

    In a notebook it writes to its file, too, where rich would show each print in the cell.
    """
    return _console_class()(force_jupyter=False, **settings)


@functools.cache
def _console_class() -> type[Console]:
    from rich.console import Console
    from rich.segment import Segment

    class VisibleConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterator[Segment]:
            for text, form, control in super().render(renderable, options):
                yield Segment(text if control else visible(text), form, control)

    return VisibleConsole


class ProgressBar:
    """Within the block, a bar on stderr if that is a terminal.

    lines: elsewhere, print a line at each quarter of a named stage.
    """

    def __init__(
        self, title: str, total: int | None = None, *, quiet: bool = False, lines: bool = False
    ) -> None:
        self._bar: Progress | None = None
        self._lines = lines and not quiet
        self._printed = ""
        """The last line of a named stage."""
        if quiet or not sys.stderr.isatty():
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console(stderr=True), transient=True)
        self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> ProgressBar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, by: int = 1) -> None:
        if self._bar:
            self._bar.advance(self._task, by)

    def update(self, done: int, total: int) -> None:
        """Set the number done and the total; a total of 0 is unknown."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total or None)

    def show(self, stage: str, done: int, total: int) -> None:
        """`update` for a named stage."""
        if self._bar:
            self._bar.update(self._task, description=stage, completed=done, total=total or None)
        elif self._lines and total:
            line = f"{stage}: {done * 4 // total * 25} % of {total}"
            if line != self._printed:
                echo(line, err=True)
            self._printed = line
