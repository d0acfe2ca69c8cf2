"""The descent of rows in files: which were grown from which, and the marks of held-out rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.lineage import HELD_OUT, Descent, descended, split_named, splits_of
from ajet_sdk.tasks.task_rows import Row as TaskRow
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.files.blocks import Block, LineBlock, Row, blocks_of


def descent_of(values: Mapping[str, object]) -> Descent:
    """Returns the ids of a row and of its sources; a row that is no task has none."""
    try:
        task = to_task(TaskRow("the row", values), {})
    except TaskError:
        return Descent(frozenset())
    descent = Descent.of(task)
    return Descent.named(values, *descent.ids)


def descended_rows(rows: Sequence[Row], held_out: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yields the rows grown from held-out rows, each with the held-out row."""
    pairs = descended(
        [descent_of(row.values) for row in rows], [descent_of(row.values) for row in held_out]
    )
    for place, held_out_place in pairs:
        yield rows[place], held_out[held_out_place]


def has_lineage(block: Block) -> bool:
    """Whether a row of a block may have been grown from another."""
    if isinstance(block, LineBlock):
        return bool(block.lines.str.contains('"provenance"', literal=True).any())
    return "provenance" in block.table.shapes


def marked(blocks: Iterable[Block], source: str, out: str) -> Iterator[Block]:
    """Marks the rows of a file whose name says that it is held out, if the name they get doesn't
    say so."""
    hides = hides_held_out(source, out)
    for block in blocks:
        yield held_out_block(block) if hides else block


def marked_rows(rows: Iterable[Row], source: str, out: str) -> Iterator[Row]:
    """As `marked`, for rows."""
    hides = hides_held_out(source, out)
    for row in rows:
        yield Row(row.where, held_out_row(row.values), row.stored) if hides else row


def hides_held_out(source: str, out: str) -> bool:
    """Whether a file that is held out by its name gets a name that doesn't say so."""
    return split_named(source) == HELD_OUT and split_named(out) != HELD_OUT


def held_out_block(block: Block) -> Block:
    """Adds `val` to `provenance.splits` of the rows of a block; a table without provenance gets
    this column."""
    if not isinstance(block, LineBlock) and "provenance" not in block.table.shapes:
        return block.with_columns({"provenance": {"splits": [HELD_OUT]}})
    rows = [Row(row.where, held_out_row(row.values), row.stored) for row in block.rows()]
    if isinstance(block, LineBlock):
        [changed] = blocks_of(rows, block.name)
        return changed
    return block.changed([row.values for row in rows])


def with_same_columns(block: Block) -> Block:
    """The training side of a split, with the columns that `held_out_block` gives the other sides:
    loaders expect one schema of all."""
    if isinstance(block, LineBlock) or "provenance" in block.table.shapes:
        return block
    return block.with_columns({"provenance": {"splits": ["train"]}})


def held_out_row(values: Mapping[str, object]) -> dict[str, object]:
    provenance = values.get("provenance")
    known = dict(provenance) if isinstance(provenance, Mapping) else {}
    return {**values, "provenance": {**known, "splits": sorted({*splits_of(values), HELD_OUT})}}
