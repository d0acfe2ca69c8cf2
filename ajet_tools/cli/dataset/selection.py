"""`ajet dataset filter`: writes selected rows of a dataset to another file."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ajet_sdk.errors import ConfigError, NoReward
from ajet_tools.cli.dataset.options import (
    Out,
    RowOptions,
    RowsResult,
    Source,
    check_apart,
    counted,
    counting,
    left_out_lines,
    to_place,
)
from ajet_tools.dataset.curation.descent import marker
from ajet_tools.dataset.curation.keep import Keep
from ajet_tools.dataset.curation.sql import Where, select
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.writer import Writer

if TYPE_CHECKING:
    from ajet_tools.dataset.verify.verdict import Verifier


@dataclass(frozen=True, kw_only=True)
class SelectResult(RowsResult):
    def lines(self) -> Iterator[str]:
        yield f"{counted(self.rows, 'row')}{to_place(self.path)}"
        yield from self.bad_row_lines()


@dataclass(frozen=True, kw_only=True)
class FilterResult(RowsResult):
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
    min_reward: Annotated[
        float | None, Option(help="With --judge: minimum reward, instead of full marks.")
    ] = None,
    rejected: Annotated[
        Path | None, Option(metavar="FILE", help="File for the rows that are left out.")
    ] = None,
    rows: RowOptions,
) -> FilterResult | SelectResult:
    """Keep rows that match an expression or a judge.

    An expression is what SQL has after WHERE (DuckDB's): columns (main_query), fields of objects
    (metadata.answer), items of lists (messages[1].content), functions. text, chars, words and
    language are of what the row asks, and functions of a column; the language (en, zh, de, ...; und:
    unknown) is told by script and common words. has('train') looks for a text in what the row
    asks, and so does an expression without any operator. --sql takes a whole SELECT.

    Rows that a judge fails on are left out, and the exit code is 1.

    Args:
        expression: Expression, such as 'metadata.level >= 3'.
        sql: Write the result of this SELECT over the table `rows` instead.
        judge: Only rows whose own answer gets full marks from this judge.

    \b
    ajet dataset filter tasks.jsonl "metadata.level >= 3 and not has('train')" -o hard.jsonl
    ajet dataset filter tasks.parquet "chars between 20 and 2000 and language = 'en'" -o en.jsonl
    ajet dataset filter tasks.jsonl "regexp_matches(metadata.answer, '^[0-9]+$')" -o - | wc -l
    ajet dataset filter tasks.jsonl train -o trains.jsonl
    ajet dataset filter tasks.parquet --sql "SELECT label, count(*) AS n FROM rows GROUP BY label"
    ajet dataset filter tasks.jsonl --judge agent.py:exact --rejected bad.jsonl -o good.jsonl
    """
    if min_reward is not None and judge is None:
        raise ConfigError("--min-reward needs a judge; pass --judge FILE:NAME")
    if sql is not None:
        if expression or judge or rejected:
            raise ConfigError(
                "--sql is a complete SELECT; remove the expression and the other conditions"
            )
        count = select(sql, rows.rows(source, again=True), out)
        return SelectResult(rows=count, path=out, bad=rows.bad)
    check_apart(out=out, rejected=rejected)
    read = rows.rows(source, again=expression is not None)
    keep = Keep(
        where=Where(expression, read) if expression else None,
        judge=_judge(judge) if judge else None,
        reward=min_reward,
    )
    mark = marker(source, out)
    with ExitStack() as stack:
        empty = mark(read.empty())
        writer = stack.enter_context(Writer(out, schema=empty.data.schema))
        if rejected:
            schema = _with_reason(empty, "").data.schema
            others = stack.enter_context(Writer(rejected, schema=schema))
            keep.on_left_out = lambda block, reason: others.write_block(_with_reason(block, reason))
        passing = stack.enter_context(counting("filter"))
        for block, indices in keep.of(map(mark, passing(read.blocks()))):
            writer.write_block(block.take(indices))
    left_out = dict(keep.left_out.most_common())
    return FilterResult(
        rows=writer.rows + keep.left_out.total(),
        path=out,
        bad=rows.bad,
        kept=writer.rows,
        left_out=left_out,
        failures=keep.failures,
    )


def _with_reason(block: Block, reason: str) -> Block:
    rows = [{**values, "left_out": reason} for values in block.values()]
    return block.changed(rows, ("left_out",))


def _judge(spec: str) -> Verifier:
    verify = importlib.import_module("ajet_tools.dataset.verify")  # slow to load, rarely needed
    verifier: Verifier = verify.open_verifier(f"judge:{spec}")
    return verifier
