"""What commands share that read a file twice: once to decide which rows go, and once to write the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ajet_sdk import output
from ajet_sdk.errors import TaskError

if TYPE_CHECKING:
    from ajet_tools.dataset.tables import BadRows, Row

__all__ = ["reported", "rereadable", "shortened", "some", "stages", "to_place", "write_kept", "write_report"]

_WIDTH = 72


def rereadable(source: str, mapping: Mapping[str, str], bad: BadRows) -> Callable[[], Iterator[Row]]:
    """Reads the rows, as often as asked; of stdin they are kept. Bad rows are counted the first time."""
    from ajet_tools.dataset.tables import BadRows, read

    if source == "-":
        held = list(read(source, mapping=mapping, bad=bad))
        return lambda: iter(held)
    first = [bad]
    return lambda: read(source, mapping=mapping, bad=first.pop() if first else BadRows(skip=bad.skip))


def some(rows: Iterator[Row], source: str, told: Callable[[str, int, int], None]) -> Iterator[Row]:
    """The rows, at least one. Raises TaskError."""
    number = 0
    for number, row in enumerate(rows, 1):
        yield row
        if number % 1024 == 0:
            told("reading", number, 0)
    if not number:
        raise TaskError(f"{source} has no rows")


def write_kept(rows: Iterator[Row], gone: set[int], total: int, out: str) -> None:
    """Write all but those that go, by their numbers from 0."""
    from ajet_tools.dataset.tables import Writer

    with Writer(out) as writer:
        number = 0
        for number, row in enumerate(rows, 1):
            if number - 1 not in gone:
                writer.write(row.values, row.stored)
            elif row.stored is not None:
                writer.declare(row.stored)
        if number != total:
            raise TaskError(f"the file changed while it was read ({total:,} rows, then {number:,}); run it again")


def write_report(path: str, lines: Iterator[dict[str, Any]]) -> None:
    from ajet_tools.dataset.tables import Writer

    with Writer(path) as writer:
        for line in lines:
            writer.write(line)


def reported(report: str | None) -> list[str]:
    return [f"  the evidence is in {report}"] if report else []


def to_place(out: str) -> str:
    return "" if out == "-" else f", to {out}"


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr, where that is a terminal, for stages that come one after the other."""
    if not sys.stderr.isatty():
        yield lambda stage, done, of: None
        return
    from rich.progress import Progress

    with Progress(console=output.console(stderr=True), transient=True) as progress:
        bar = progress.add_task("reading", total=None)
        yield lambda stage, done, of: progress.update(bar, description=stage, completed=done, total=of or None)
