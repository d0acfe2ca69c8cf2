"""The descent of rows in files: which were grown from which, and the marks of held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow.compute as pc

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.lineage import HELD_OUT, Descent, descended, split_named, splits_of
from ajet_sdk.tasks.task_rows import Row as TaskRow
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.files.blocks import Block, Row
from ajet_tools.dataset.files.columns import LINE
from ajet_tools.dataset.files.rows import Rows

_PROVENANCE = ("provenance",)


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
    descents = [descent_of(row.values) for row in rows]
    sources = [descent_of(row.values) for row in held_out]
    for place, source in descended(descents, sources):
        yield rows[place], held_out[source]


def has_lineage(block: Block) -> bool:
    """Whether a row of a block may have been grown from another."""
    names = block.data.schema.names
    if "provenance" in names or LINE not in names:
        return "provenance" in names
    has_name = pc.match_substring(block.data.column(LINE), '"provenance"')
    return bool(pc.any(has_name).as_py())


def marker(source: str, out: str) -> Callable[[Block], Block]:
    """Returns what marks the rows of a file whose name says that they are held out, if the name
    they get doesn't say so."""
    return held_out_block if hides_held_out(source, out) else lambda block: block


def marked_rows(rows: Rows, out: str) -> Iterator[Row]:
    """Yields the rows, marked for the name that they get."""
    mark = marker(rows.path, out)
    for block in rows.blocks():
        yield from mark(block).rows()


def hides_held_out(source: str, out: str) -> bool:
    """Whether a file that is held out by its name gets a name that doesn't say so."""
    return split_named(source) == HELD_OUT and split_named(out) != HELD_OUT


def held_out_block(block: Block) -> Block:
    """Adds `val` to `provenance.splits` of the rows of a block; a table gets this column."""
    rows = [held_out_row(values) for values in block.values()]
    return block.changed(rows, _PROVENANCE)


def training_block(block: Block) -> Block:
    """The training side of a split, with the columns that `held_out_block` gives the other sides:
    loaders expect one schema of all."""
    if block.is_text:
        return block
    rows = [{"provenance": {"splits": ["train"]}, **values} for values in block.values()]
    return block.changed(rows, _PROVENANCE)


def held_out_row(values: Mapping[str, object]) -> dict[str, object]:
    """Returns a row with `val` in `provenance.splits`."""
    known = values.get("provenance")
    provenance = dict(known) if isinstance(known, Mapping) else {}
    provenance["splits"] = sorted({*splits_of(values), HELD_OUT})
    return {**values, "provenance": provenance}
