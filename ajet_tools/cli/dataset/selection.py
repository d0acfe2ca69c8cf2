"""`ajet dataset filter`: writes selected rows of a dataset to another file."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ajet_sdk.errors import ConfigError, NoReward
from ajet_tools.cli.dataset.options import (
    Out,
    RowOptions,
    Source,
    check_apart,
    counted,
    counting,
    left_out_lines,
    print_summary,
    to_place,
)
from ajet_tools.dataset.curation.descent import marked
from ajet_tools.dataset.curation.keep import Keep
from ajet_tools.dataset.curation.sql import Where, select
from ajet_tools.dataset.files.tables import read_blocks
from ajet_tools.dataset.files.writer import Writer

if TYPE_CHECKING:
    from ajet_tools.dataset.verify.verdict import Verifier


def filter_(
    source: Source,
    expression: Annotated[str | None, Argument(metavar="[EXPR]")] = None,
    *,
    out: Out = "-",
    language: Annotated[list[str] | None, Option(metavar="CODE")] = None,
    sql: Annotated[str | None, Option(metavar="SELECT")] = None,
    judge: Annotated[str | None, Option(metavar="FILE:NAME")] = None,
    min_reward: Annotated[
        float | None, Option(help="With --judge: minimum reward, instead of full marks.")
    ] = None,
    rejected: Annotated[
        Path | None, Option(metavar="FILE", help="File for the rows that are left out.")
    ] = None,
    rows: RowOptions,
) -> None:
    """Keep rows that match an expression, a language or a judge.

    An expression is what SQL has after WHERE (DuckDB's): columns (main_query), fields of objects
    (metadata.answer), items of lists (messages[1].content), functions. text, chars, words and
    language are of what the row asks, and functions of a column; the language is told by script and
    common words. has('train') looks for a text in what the row asks, and so does an expression
    without any operator. --sql takes a whole SELECT.

    Rows that a judge fails on are left out, and the exit code is 1.

    Args:
        expression: Expression, such as 'metadata.level >= 3'.
        language: Only this language: en, zh, de, ...; und: unknown. Repeatable.
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
    if sql is not None and (source == "-" or rows.map):
        raise ConfigError("--sql reads a file twice; pass a file instead of stdin, and no --map")
    if sql is not None:
        if expression or judge or rejected or language:
            raise ConfigError(
                "--sql is a complete SELECT; remove the expression and the other conditions"
            )
        count = select(sql, source, out)
        lines = [f"{counted(count, 'row')}{to_place(out)}"]
        print_summary({"rows": count, "path": out}, lines, as_json=rows.as_json, out=out)
        return
    check_apart(out=out, rejected=rejected)
    tables = rows.tables(source)
    with ExitStack() as stack:
        path = source
        blocks = rows.blocks(source)
        if expression and (source == "-" or rows.map or rows.skip_bad_rows):
            # the types of all columns are needed before the first row
            folder = stack.enter_context(TemporaryDirectory(prefix="ajet-filter-"))
            path = str(Path(folder) / ("rows.parquet" if tables else "rows.jsonl"))
            with Writer(path, tables=tables) as copy:
                for block in blocks:
                    copy.write_block(block)
            blocks = read_blocks(path)
        keep = Keep(
            where=Where(expression, path) if expression else None,
            languages=tuple(language or ()),
            judge=_judge(judge) if judge else None,
            reward=min_reward,
        )
        writer = stack.enter_context(Writer(out, tables=tables))
        if rejected:
            others = stack.enter_context(Writer(rejected, tables=tables))
            keep.on_left_out = lambda row, reason: others.write(
                {**row.values, "left_out": reason}, row.stored
            )
        passing = stack.enter_context(counting("filter"))
        for block, indices in keep.of(passing(marked(blocks, source, out))):
            writer.write_block(block, indices)
    _report_filter(keep, writer.rows, rows, out)


def _judge(spec: str) -> Verifier:
    verify = importlib.import_module("ajet_tools.dataset.verify")  # slow to load, rarely needed
    verifier: Verifier = verify.open_verifier(f"judge:{spec}")
    return verifier


def _report_filter(keep: Keep, kept: int, rows: RowOptions, out: str) -> None:
    total = kept + keep.left_out.total()
    summary = {
        "rows": total,
        "kept": kept,
        "left_out": dict(keep.left_out.most_common()),
        "bad_rows": rows.bad.count,
        "failures": keep.failures,
        "path": out,
    }
    lines = [
        f"{counted(kept, 'row')} of {total:,} kept{to_place(out)}",
        *left_out_lines(keep.left_out),
    ]
    rows.report(summary, lines, out)
    if keep.failures:
        raise NoReward(
            "the judge failed on some rows, which were left out; the first failure:"
            f" {keep.failures[0]}"
        )
