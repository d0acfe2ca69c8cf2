"""`ajet dataset filter`: writes selected rows of a dataset to another file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ajet_sdk.errors import ConfigError, NoReward
from ajet_sdk.tasks.json_rows import BadRows
from ajet_tools.cli.dataset.options import (
    Out,
    RowsResult,
    Source,
    check_apart,
    counted,
    counting,
    left_out_lines,
    to_place,
)
from ajet_tools.cli.result import HIDDEN, visible_fields
from ajet_tools.dataset.curation.descent import marker
from ajet_tools.dataset.curation.keep import Keep
from ajet_tools.dataset.curation.sql import Where, select
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.rows import Rows
from ajet_tools.dataset.files.writer import Writer

if TYPE_CHECKING:
    from ajet_tools.dataset.verify.verdict import Verifier


@dataclass(frozen=True, kw_only=True)
class SelectResult(RowsResult):
    bad: BadRows = field(metadata=HIDDEN)

    def document(self) -> dict[str, object]:
        return {**visible_fields(self), "bad_rows": self.bad.count}

    def lines(self) -> Iterator[str]:
        yield f"{counted(self.rows, 'row')}{to_place(self.path)}"
        yield from self.bad_row_lines()

    def bad_row_lines(self) -> Iterator[str]:
        if self.bad.count:
            yield f"  left out: {counted(self.bad.count, 'bad row')}, the first:"
            for problem in self.bad.first:
                yield f"    {problem}"


@dataclass(frozen=True, kw_only=True)
class FilterResult(SelectResult):
    kept: int
    left_out: Mapping[str, int]
    """Rows by the reason why they were left out."""
    failures: Sequence[str]
    """Errors of the judge."""

    def lines(self) -> Iterator[str]:
        yield f"{counted(self.kept, 'row')} of {self.rows:,} kept{to_place(self.path)}"
        yield from left_out_lines(self.left_out)
        yield from self.bad_row_lines()

    @property
    def failure(self) -> NoReward | None:
        if not self.failures:
            return None
        return NoReward(
            "the judge failed on some rows, which were left out; the first failure:"
            f" {self.failures[0]}"
        )


def filter_(
    source: Source,
    expression: Annotated[str | None, Argument(metavar="[EXPR]")] = None,
    *,
    out: Out = "-",
    sql: Annotated[str | None, Option(metavar="SELECT")] = None,
    judge: Annotated[str | None, Option(metavar="FILE:NAME")] = None,
    rejected: Annotated[
        Path | None, Option(metavar="FILE", help="File for the rows that are left out.")
    ] = None,
    map: Annotated[list[str] | None, Option(metavar="COLUMN=FIELD")] = None,
    skip_bad_rows: Annotated[
        bool, Option("--skip-bad-rows", help="Skip invalid rows, and those of unreadable pictures.")
    ] = False,
) -> FilterResult | SelectResult:
    """Keep rows that match an expression or a judge; rename columns, drop rows that can't be read.

    An expression is what SQL has after WHERE (DuckDB's): columns (main_query), fields of objects
    (metadata.answer), items of lists (messages[1].content), functions. text, chars, words and
    language are of what the row asks, and functions of a column; the language (en, zh, de, ...; und:
    unknown) is told by script and common words. has('train') looks for a text in what the row
    asks, and so does an expression without any operator. --sql takes a whole SELECT.

    Rows that a judge fails on are left out, and the exit code is 1. Without a condition all rows are
    kept: other commands read the result from a pipe (`-`).

    Args:
        expression: Expression, such as 'metadata.level >= 3'.
        sql: Write the result of this SELECT over the table `rows` instead.
        judge: Only rows whose own answer gets full marks from this judge.
        map: Rename a column to main_query, task_id, metadata.answer, ...; repeatable.

    \b
    ajet dataset filter tasks.jsonl "metadata.level >= 3 and not has('train')" -o hard.jsonl
    ajet dataset filter tasks.parquet "chars between 20 and 2000 and language = 'en'" -o en.jsonl
    ajet dataset filter tasks.jsonl "regexp_matches(metadata.answer, '^[0-9]+$')" -o - | wc -l
    ajet dataset filter tasks.jsonl train -o trains.jsonl
    ajet dataset filter tasks.parquet --sql "SELECT label, count(*) AS n FROM rows GROUP BY label"
    ajet dataset filter tasks.jsonl --judge agent.py:exact --rejected bad.jsonl -o good.jsonl
    ajet dataset filter qa.csv --map Frage=question | ajet dataset dedup - -o clean.jsonl
    """
    if sql is not None and (expression or judge or rejected):
        raise ConfigError(
            "--sql is a complete SELECT; remove the expression and the other conditions"
        )
    check_apart(out=out, rejected=rejected)
    bad = BadRows(skip=skip_bad_rows)
    reads_again = sql is not None or expression is not None
    rows = Rows(
        source,
        mapping=_mapping_of(map or ()),
        bad=bad,
        again=reads_again,
        pictures=skip_bad_rows,
    )
    if sql is not None:
        return SelectResult(rows=select(sql, rows, out), path=out, bad=bad)
    keep = Keep(
        where=Where(expression, rows) if expression else None,
        judge=_judge(judge) if judge else None,
    )
    mark = marker(source, out)
    with ExitStack() as stack:
        empty = mark(rows.empty())
        writer = stack.enter_context(Writer(out, schema=empty.data.schema))
        if rejected:
            schema = _with_reason(empty, "").data.schema
            others = stack.enter_context(Writer(rejected, schema=schema))
            keep.on_left_out = lambda block, reason: others.write_block(_with_reason(block, reason))
        passing = stack.enter_context(counting("filter"))
        marked = (mark(block) for block in passing(rows.blocks()))
        for block, indices in keep.of(marked):
            writer.write_block(block.take(indices))
    return FilterResult(
        rows=writer.rows + keep.left_out.total(),
        path=out,
        bad=bad,
        kept=writer.rows,
        left_out=dict(keep.left_out.most_common()),
        failures=keep.failures,
    )


def _mapping_of(pairs: Sequence[str]) -> dict[str, str]:
    """Parses `question=main_query` to column -> field."""
    mapping: dict[str, str] = {}
    for pair in pairs:
        column, equals, field = (part.strip() for part in pair.partition("="))
        if not (column and equals and field):
            raise ConfigError(
                f"--map {pair}: write COLUMN=FIELD, such as question=main_query or"
                " label=metadata.answer"
            )
        mapping[column] = field
    return mapping


def _with_reason(block: Block, reason: str) -> Block:
    rows = [{**values, "left_out": reason} for values in block.values()]
    return block.changed(rows, ("left_out",))


def _judge(spec: str) -> Verifier:
    verify = importlib.import_module("ajet_tools.dataset.verify")  # slow to load, rarely needed
    verifier: Verifier = verify.open_verifier(f"judge:{spec}")
    return verifier
