"""Tables, fields, numbers and diffs for terminals. Model text is never parsed as markup."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ajet_sdk.reporting import output
from ajet_sdk.reporting.output import visible
from ajet_tools.text.clean import counted as counted
from ajet_tools.text.clean import one_line

_PIPE_WIDTH = 160
"""Columns of output that is piped; wide enough for the tables of `ajet trace ls`."""
_NARROW = 12
"""Text columns are never cut below this width."""
_STATUS = dict.fromkeys(
    ("timeout", "aborted", "interrupted", "cancelled", "undelivered", "abandoned"), "yellow"
)
_STATUS |= {"trained": "green", "running": "cyan", "failed": "red", "superseded": "dim"}


def console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, without highlighting or markup."""
    result: Console = output.console(highlight=False, markup=False, emoji=False, stderr=stderr)
    if not result.is_terminal and "COLUMNS" not in os.environ:
        result.width = _PIPE_WIDTH
    return result


@contextmanager
def paged() -> Iterator[Console]:
    """Yield a console whose output goes through $PAGER, or `less`, if it is longer than the
    terminal.

    Piped output is printed directly, as is all output with an empty $PAGER.
    """
    out = console()
    if not (out.is_terminal and sys.stdin.isatty()):
        command = None
    else:
        command = _command()
    if command is None:
        yield out
        return
    with out.capture() as captured:
        yield out
    text = captured.get()
    process = None
    if text.count("\n") >= out.height:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
        )
        try:
            process.communicate(text)
        except (
            BrokenPipeError,
            KeyboardInterrupt,
        ):  # the pager was closed early, or handles Ctrl-C itself
            process.wait()
    if process is None or process.returncode == 127:
        out.file.write(text)


def _command() -> list[str] | None:
    named = shlex.split(os.environ.get("PAGER", "less"))
    if not named or not shutil.which(named[0]):
        return None
    return [*named, "-R"] if Path(named[0]).name == "less" else named  # colours as colours


def number(value: float | None) -> str:
    """Format a number with four significant digits or thousands separators; empty for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}"


def table(
    rows: Sequence[Mapping[str, object]], width: int, *, title: str = "", right: Iterable[str] = ()
) -> RenderableType:
    """Format rows as a table of at most `width` characters, one line each; omitted columns are
    named below it.

    Text columns shrink first; numbers and the columns in `right` are right-aligned and never cut.
    The table has the columns of all rows; missing values are empty cells.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = {name: [cell(row.get(name)) for row in rows] for name in names}
    numeric = {
        n for n in names if n in right or any(isinstance(r.get(n), int | float) for r in rows)
    }
    needed = {n: max(len(n), *(c.cell_len for c in cells[n])) for n in names}
    free = width
    shown = list[str]()
    for name in names:
        free -= (needed[name] if name in numeric else min(needed[name], _NARROW)) + 2
        if free < -2 and shown:
            break
        shown.append(name)
    grid = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in shown:
        rigid = name in numeric or needed[name] <= _NARROW
        grid.add_column(
            Text(name, no_wrap=True), justify="right" if name in numeric else "left", no_wrap=rigid
        )
    for i in range(len(rows)):
        grid.add_row(*(cells[name][i] for name in shown))
    parts: list[RenderableType] = [Text(title, style="italic")] if title else []
    left = names[len(shown) :]
    more = [
        Text(
            one_line(f"no room for {', '.join(left)}; use a wider terminal or --json", width),
            style="dim",
        )
    ]
    return Group(*parts, grid, *(more if left else []))


def cell(value: object) -> Text:
    """Format a value as one line; status words are coloured."""
    if value is None:
        return Text("")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, int | float):
        return Text(number(value))
    if isinstance(value, datetime):
        return Text(value.strftime("%Y-%m-%d %H:%M:%S"), no_wrap=True, overflow="ellipsis")
    text = one_line(value, 400)
    return Text(text, style=_STATUS.get(text, ""), no_wrap=True, overflow="ellipsis")


def fields(pairs: Iterable[tuple[str, object]]) -> Table:
    """Format names and values, one per line, without empty values."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None and value != "" and value != [] and value != {}:
            grid.add_row(
                Text(name), Text(visible(value)) if isinstance(value, str) else cell(value)
            )
    return grid


_STYLES = {"-": "red", "+": "green"}
_DIFF_LINES = 60


def diff_text(lines: Sequence[str]) -> Text:
    """Colour the first lines of a diff, which begin with `-`, `+` or a blank."""
    shown = Text("\n").join(
        Text(visible(line), style=_STYLES.get(line[:1], "dim")) for line in lines[:_DIFF_LINES]
    )
    if len(lines) > _DIFF_LINES:
        shown.append(
            f"\n… and {len(lines) - _DIFF_LINES} more lines (--json has more)", style="dim"
        )
    return shown


_THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def compact(count: float | None) -> str:
    """Format a count in at most five characters: 950, 12.3k, 4.56M."""
    if count is None:
        return ""
    for size, unit in _THOUSANDS:
        if abs(count) >= size:
            if count / size < 999.5:
                return f"{count / size:.3g}{unit}"
            return f"{count / size:.0f}{unit}"
    return f"{count:.0f}"


def lasting(seconds: float | None) -> str:
    """Format a duration in at most two units: 42 s, 3m 05s, 2h 10m."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    whole = round(seconds)
    days = whole // 86_400
    hours = whole // 3_600 % 24
    minutes = whole // 60 % 60
    rest = whole % 60
    if days:
        return f"{days}d {hours:02d}h"
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"
