"""Options shared by `ajet dataset` commands: input and output of rows, JSON, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

from typer import Argument, Option

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.reporting.output import ProgressBar, echo
from ajet_sdk.tasks.json_rows import BadRows
from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.columns import Columns
from ajet_tools.dataset.files.tables import read_blocks, tables_of
from ajet_tools.dataset.files.writer import Writer
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

Map = Annotated[
    list[str] | None,
    Option(
        "--map",
        metavar="COLUMN=FIELD",
        help="Rename a column to main_query, task_id, metadata.answer, ...",
    ),
]

SkipBad = Annotated[bool, Option("--skip-bad-rows", help="Skip invalid rows and report how many.")]

Embed = Annotated[
    str | None,
    Option(
        metavar="MODEL",
        help=(
            "Also compare meanings, by the embeddings of NAME@URL or of a model's directory;"
            " after a comma meaning=COSINE from which rows are alike."
        ),
    ),
]
SizedItem = TypeVar("SizedItem", bound=Sized)


def mapping_of(pairs: Iterable[str] | None) -> dict[str, str]:
    """Parses `question=main_query` to column -> field."""
    mapping: dict[str, str] = {}
    for pair in pairs or ():
        column, equals, field = (part.strip() for part in pair.partition("="))
        if not (column and equals and field):
            raise ConfigError(
                f"--map {pair}: write COLUMN=FIELD, such as question=main_query or"
                " label=metadata.answer"
            )
        mapping[column] = field
    return mapping


@contextmanager
def counting(verb: str) -> Iterator[Callable[[Iterable[SizedItem]], Iterator[SizedItem]]]:
    """Passes blocks of rows through, with a progress bar on a terminal."""
    with ProgressBar(f"{verb} rows") as bar:

        def count(blocks: Iterable[SizedItem]) -> Iterator[SizedItem]:
            for block in blocks:
                yield block
                bar.advance(len(block))

        yield count


def print_summary(
    summary: Mapping[str, object], lines: Iterable[str], *, as_json: bool, out: str = ""
) -> None:
    """Prints a command's result: as JSON to stdout (stderr if the rows go to stdout), else as lines
    to stderr."""
    if as_json:
        print_json(summary, indent=None if out == "-" else 2, err=out == "-")
    else:
        for line in lines:
            echo(line, err=True)


@dataclass(frozen=True)
class RowOptions:
    """Options for reading rows and reporting."""

    map: Map = None
    skip_bad_rows: SkipBad = False
    as_json: AsJson = False

    @cached_property
    def columns(self) -> dict[str, str]:
        return mapping_of(self.map)

    @cached_property
    def bad(self) -> BadRows:
        """Collects the rows that cannot be read."""
        return BadRows(skip=self.skip_bad_rows)

    def blocks(self, source: str) -> Iterator[Block]:
        return read_blocks(source, mapping=self.columns, bad=self.bad)

    def tables(self, source: str) -> list[Columns]:
        return tables_of(source, self.columns)

    def rereadable(self, source: str) -> Callable[[], Iterator[Block]]:
        """Returns a function that reads the rows each time; those of stdin are kept in memory."""
        stored: list[Block] = []
        blocks = self.blocks(source)

        def read() -> Iterator[Block]:
            self.bad.count = 0
            self.bad.first = []
            return self.blocks(source)

        def read_stored() -> Iterator[Block]:
            yield from stored
            for block in blocks:
                stored.append(block)
                yield block

        return read_stored if source == "-" else read

    def bad_row_lines(self) -> list[str]:
        """Returns lines about unreadable rows."""
        if not self.bad.count:
            return []
        problems = (f"    {problem}" for problem in self.bad.first)
        return [f"  left out: {counted(self.bad.count, 'bad row')}, the first:", *problems]

    def report(self, summary: Mapping[str, object], lines: Iterable[str], out: str = "") -> None:
        """Prints the result as `print_summary` does, with the unreadable rows."""
        print_summary(summary, [*lines, *self.bad_row_lines()], as_json=self.as_json, out=out)


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


def write_kept(
    blocks: Iterator[Block], gone: set[int], total: int, out: str, tables: Iterable[Columns]
) -> None:
    """Writes all rows except those with the given indices."""
    number = 0
    with Writer(out, tables=tables) as writer:
        for block in blocks:
            kept = [index for index in range(len(block)) if number + index not in gone]
            writer.write_block(block, kept)
            number += len(block)
        if number != total:
            raise TaskError(
                f"the file changed between reads ({total:,} rows, then {number:,}); run the command"
                " again"
            )


def write_report(path: str, lines: Iterator[dict[str, object]]) -> None:
    with Writer(path) as writer:
        for line in lines:
            writer.write(line)


def report_kept(
    rows: RowOptions,
    total: int,
    kinds: Mapping[str, int],
    more: Mapping[str, object],
    lines: Iterable[str],
    out: str,
    report: str | None,
) -> None:
    """Prints how many rows were kept; `kinds` counts the others, `more` extends the JSON, `lines`
    the text."""
    kept = total - sum(kinds.values())
    places = {"bad_rows": rows.bad.count, "path": out, "report": report}
    summary = {"rows": total, "kept": kept, "dropped": total - kept, **kinds, **more, **places}
    evidence = [f"  evidence is in {report}"] if report else []
    rows.report(
        summary,
        [f"{counted(kept, 'row')} of {total:,} kept{to_place(out)}", *lines, *evidence],
        out,
    )


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
