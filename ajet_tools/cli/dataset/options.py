"""Options shared by `ajet dataset` commands: input and output of rows, JSON, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

from typer import Argument, Option

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.tasks.json_rows import BadRows
from ajet_tools.cli.result import HIDDEN, TextResult, visible_fields
from ajet_tools.dataset.curation.descent import marker
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.rows import Rows
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


@dataclass(frozen=True)
class RowOptions:
    """Options for reading rows and reporting."""

    map: Map = None
    skip_bad_rows: SkipBad = False

    @cached_property
    def columns(self) -> dict[str, str]:
        return mapping_of(self.map)

    @cached_property
    def bad(self) -> BadRows:
        """Collects the rows that cannot be read."""
        return BadRows(skip=self.skip_bad_rows)

    def rows(self, source: str, *, again: bool = False, pictures: bool = False) -> Rows:
        """Returns the rows of a source; with `again`, also those of stdin for several passes, with
        `pictures` to compare them by their pictures."""
        return Rows(source, mapping=self.columns, bad=self.bad, again=again, pictures=pictures)


@dataclass(frozen=True, kw_only=True)
class RowsResult(TextResult):
    """What became of rows. The rows are what the command writes, so this goes to stderr."""

    beside_rows: ClassVar[bool] = True
    rows: int
    path: str
    bad: BadRows = field(metadata=HIDDEN)

    @property
    def compact(self) -> bool:
        return self.path == "-"

    def document(self) -> dict[str, object]:
        return {**visible_fields(self), "bad_rows": self.bad.count}

    def bad_row_lines(self) -> Iterator[str]:
        if self.bad.count:
            yield f"  left out: {counted(self.bad.count, 'bad row')}, the first:"
            for problem in self.bad.first:
                yield f"    {problem}"


@dataclass(frozen=True, kw_only=True)
class KeptRows(RowsResult):
    """What became of rows of which some were dropped as copies of others."""

    labels: ClassVar[Mapping[str, str]]
    """What each kind of copy is called."""
    kinds: Mapping[str, int] = field(metadata=HIDDEN)
    report: str | None
    examples: Sequence[str] = field(metadata=HIDDEN)

    def document(self) -> dict[str, object]:
        dropped = sum(self.kinds.values())
        kept = self.rows - dropped
        return {**super().document(), "kept": kept, "dropped": dropped, **self.kinds}

    def lines(self) -> Iterator[str]:
        kept = self.rows - sum(self.kinds.values())
        yield f"{counted(kept, 'row')} of {self.rows:,} kept{to_place(self.path)}"
        yield from self.dropped_lines()
        for example in self.examples:
            yield f"  {example}"
        if self.report:
            yield f"  evidence is in {self.report}"
        yield from self.bad_row_lines()

    def dropped_lines(self) -> Iterator[str]:
        for kind, number in self.kinds.items():
            if number:
                yield f"  dropped: {counted(number, 'row')} {self.labels[kind]}"


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


def write_kept(rows: Rows, gone: set[int], total: int, out: str) -> None:
    """Writes all rows except those with the given indices."""
    mark = marker(rows.path, out)
    number = 0
    with Writer(out, schema=mark(rows.empty()).data.schema) as writer:
        for block in rows.blocks():
            kept = [index for index in range(len(block)) if number + index not in gone]
            writer.write_block(mark(block.take(kept)))
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
