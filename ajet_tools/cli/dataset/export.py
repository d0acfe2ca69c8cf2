"""`ajet dataset export`: converts rows to the format of a training library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pyarrow as pa
from typer import Option

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.tasks.task_rows import SHARD, SPLITS
from ajet_tools.cli.dataset.options import (
    Out,
    RowsResult,
    Sources,
    counted,
    counting,
    left_out_lines,
    to_place,
)
from ajet_tools.dataset.card import Facts, write_card
from ajet_tools.dataset.curation.descent import marker
from ajet_tools.dataset.curation.formats import NEW_COLUMNS, Format, Unfit, converter
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.columns import LINES, common
from ajet_tools.dataset.files.rows import Rows, read
from ajet_tools.dataset.files.sources import NOT_DATA, splits_of
from ajet_tools.dataset.files.writer import Writer


@dataclass(frozen=True, kw_only=True)
class ExportResult(RowsResult):
    format: Format
    splits: Mapping[str, int]
    left_out: Mapping[str, int]
    """Rows by the reason why they were left out."""

    def lines(self) -> Iterator[str]:
        yield f"{counted(self.rows, 'row')} of {self.format}{to_place(self.path)}"
        if len(self.splits) > 1:
            for name, number in self.splits.items():
                yield f"  {name}: {counted(number, 'row')}"
        yield from left_out_lines(self.left_out)


def export(
    sources: Sources,
    *,
    out: Out = "-",
    format: Annotated[Format, Option(help="What is written; tasks: rows as they are.")] = "tasks",
) -> ExportResult:
    """Convert a dataset to the format of a training library.

    `messages` and `sharegpt` end in the row's reply or answer, `trl-prompt` has the metadata as
    columns (for reward functions), `trl-preference` takes rows with `chosen` and `rejected`. Other
    columns are kept. Rows that have not what a form needs are left out and counted. A name without
    a suffix is a directory in the Hugging Face layout: each split as
    data/SPLIT-00000-of-0000N.parquet, and a card, README.md. All splits of a directory are
    exported; validation.jsonl is the split validation, tasks.jsonl train.

    \b
    ajet dataset export data/ -o hub/my-tasks
    ajet dataset export train.jsonl --format messages -o sft.jsonl
    ajet dataset export pairs.jsonl --format trl-preference -o pairs.parquet
    ajet dataset export tasks.jsonl --format trl-prompt -o hub/prompts
    """
    left_out = Counter[str]()
    parts = _parts(sources, to_directory=_is_directory(out))
    read: dict[str, list[_Source]] = {}
    schemas = []
    for name, paths in parts.items():
        read[name] = [_Source(Rows(path), name, out, format, left_out) for path in paths]
        schemas += [source.schema() for source in read[name]]
    schema = common(schemas)
    siblings: list[Writer] = []
    written: dict[str, int] = {}
    with ExitStack() as stack, counting("export") as passing:
        for name, some in read.items():
            writer = Writer(out, split=name, schema=schema, siblings=siblings)
            stack.enter_context(writer)
            for source in some:
                for block in source.blocks(passing):
                    writer.write_block(block)
            if not writer.rows:
                raise TaskError(_nothing(parts[name], format, left_out))
            written[name] = writer.rows
    if _is_directory(out):
        _write_card(Path(out), written, format, left_out)
    return ExportResult(
        rows=sum(written.values()),
        path=out,
        format=format,
        splits=written,
        left_out=left_out,
    )


def _is_directory(out: str) -> bool:
    return out != "-" and (Path(out).is_dir() or not Path(out).suffix)


def _parts(sources: list[str], *, to_directory: bool) -> dict[str, list[str]]:
    """Returns the sources of each split. For a directory as output, a directory as source gives all
    its splits."""
    parts: dict[str, list[str]] = {}
    for source in sources:
        path = Path(source)
        folder, _, name = source.rpartition(":")
        if not to_directory:
            parts.setdefault("train", []).append(source)
        elif path.is_dir():
            for name in splits_of(path):
                if name not in NOT_DATA:
                    parts.setdefault(name.replace("/", "-"), []).append(f"{source}:{name}")
        elif folder and Path(folder).is_dir():
            parts.setdefault(name.replace("/", "-"), []).append(source)
        else:
            name = SHARD.sub("", path.name.partition(".")[0])
            parts.setdefault(name if name in SPLITS else "train", []).append(source)
    if not parts:
        raise ConfigError(f"there are no data files in {', '.join(sources)}")
    return parts


class _Source:
    """The rows of one source, in another format."""

    def __init__(
        self, rows: Rows, split: str, out: str, format: Format, left_out: Counter[str]
    ) -> None:
        self._rows = rows
        self._mark = marker(rows.path, f"{out}:{split}" if _is_directory(out) else out)
        self._format = format
        self._left_out = left_out
        self._new = self._new_columns()

    def _new_columns(self) -> set[str]:
        """Returns the columns of a table that the format makes anew, or uses up in its first
        rows."""
        if self._format == "tasks" or self._rows.schema == LINES:
            return set()
        first = next(self._rows.blocks(), self._rows.empty())
        kept: set[str] = set()
        for values in self._converted_values(first, Counter())[0]:
            kept.update(values)
        return {*first.data.schema.names, *NEW_COLUMNS} - (kept - {*NEW_COLUMNS})

    def schema(self) -> pa.Schema:
        return self._converted(self._mark(self._rows.empty())).data.schema

    def blocks(self, passing: Callable[[Iterable[Block]], Iterator[Block]]) -> Iterator[Block]:
        for block in passing(self._rows.blocks()):
            yield self._converted(self._mark(block))

    def _converted(self, block: Block) -> Block:
        if self._format == "tasks":
            return block
        rows, indices = self._converted_values(block, self._left_out)
        return block.take(indices).changed(rows, self._new)

    def _converted_values(
        self, block: Block, left_out: Counter[str]
    ) -> tuple[list[dict[str, object]], list[int]]:
        """Returns the rows in the format, and the indices of those that have one."""
        convert = converter(self._format)
        rows = []
        indices = []
        for index, values in enumerate(block.values()):
            try:
                rows.append(convert(values))
                indices.append(index)
            except Unfit as reason:
                left_out[str(reason)] += 1
        return rows, indices


def _nothing(paths: list[str], format: str, left_out: Counter[str]) -> str:
    if not left_out:
        return f"{', '.join(paths)} has no rows; nothing to export"
    reasons = ", ".join(
        f"{counted(number, 'row')} {reason}" for reason, number in left_out.most_common()
    )
    return f"no row of {', '.join(paths)} can be exported as {format}: {reasons}"


def _write_card(
    folder: Path, written: Mapping[str, int], format: str, left_out: Mapping[str, int]
) -> None:
    facts = Facts(
        title=folder.resolve().name,
        made_by=f"ajet dataset export --format {format}",
        refused=dict(left_out),
        files={name: f"data/{name}-*.parquet" for name in written},
    )

    def rows_of(split: str) -> Iterator[Mapping[str, object]]:
        for row in read(f"{folder}:{split}"):
            yield row.values

    write_card(folder, {name: rows_of(name) for name in written}, facts)
