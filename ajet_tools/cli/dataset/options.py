"""Options shared by `ajet dataset` commands: input and output of rows, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

from typer import Argument, Option

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.reporting.output import ProgressBar
from ajet_tools.cli.result import TextResult
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.text.clean import counted as counted

SOURCE_HELP = (
    "JSONL, Parquet, CSV, a Hugging Face directory (DIR:SPLIT for another split than train), or -"
    " for stdin."
)
Source = Annotated[str, Argument(metavar="FILE", help=SOURCE_HELP, show_default=False)]
Sources = Annotated[list[str], Argument(metavar="FILE...", help=SOURCE_HELP, show_default=False)]

Out = Annotated[
    str,
    Option(
        "--out",
        "-o",
        metavar="FILE|DIR|-",
        help=(
            ".jsonl, .jsonl.gz, .parquet or .csv; no suffix makes a Hugging Face directory; - is"
            " stdout."
        ),
    ),
]

SizedItem = TypeVar("SizedItem", bound=Sized)


@contextmanager
def counting(verb: str) -> Iterator[Callable[[Iterable[SizedItem]], Iterator[SizedItem]]]:
    """Passes blocks of rows through, with a progress bar on a terminal."""
    with ProgressBar(f"{verb} rows") as bar:

        def count(blocks: Iterable[SizedItem]) -> Iterator[SizedItem]:
            for block in blocks:
                yield block
                bar.advance(len(block))

        yield count


@dataclass(frozen=True, kw_only=True)
class RowsResult(TextResult):
    """What became of rows. The rows are what the command writes, so this goes to stderr."""

    beside_rows: ClassVar[bool] = True
    rows: int
    path: str

    @property
    def compact(self) -> bool:
        return self.path == "-"


def left_out_lines(reasons: Mapping[str, int]) -> list[str]:
    ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
    return [f"  left out: {counted(number, 'row')} {reason}" for reason, number in ordered]


def read_some(blocks: Iterator[Block], source: str, bar: ProgressBar) -> Iterator[Block]:
    """Yields the blocks. Raises TaskError if there are no rows."""
    number = 0
    for block in blocks:
        yield block
        number += len(block)
        bar.update(number, 0)
    if not number:
        raise TaskError(f"{source} has no rows")


def check_apart(**files: str | Path | None) -> None:
    """Raises ConfigError if two of these options name the same file."""
    known: dict[Path, str] = {}
    for option, path in files.items():
        if path is None or str(path) == "-":
            continue
        if (earlier := known.setdefault(Path(path).resolve(), option)) != option:
            raise ConfigError(f"--{earlier} and --{option} are the same file, {path}; name two")


def to_place(out: str) -> str:
    return "" if out == "-" else f", to {out}"
