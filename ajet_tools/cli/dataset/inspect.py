"""`ajet dataset stats` and `validate`: summarize and check a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ajet_sdk.reporting.output import echo, style, visible
from ajet_tools.cli.dataset.options import (
    Map,
    RowOptions,
    Source,
    Sources,
    counted,
    counting,
    mapping_of,
)
from ajet_tools.cli.options import AsJson, pick, print_json
from ajet_tools.dataset.curation.filter import unknown_field
from ajet_tools.dataset.curation.stats import Lengths, Stats, gather
from ajet_tools.dataset.curation.validate import KINDS, Report
from ajet_tools.dataset.curation.validate import validate as run_validate
from ajet_tools.dataset.files.sources import files_of, splits_of
from ajet_tools.dataset.labels import estimate_errors
from ajet_tools.text import tables as render

_BAR = 24


def stats(
    source: Source,
    *,
    by: Annotated[
        str | None, Option(metavar="FIELD", help="Also summarize by this field: metadata.level.")
    ] = None,
    exact: Annotated[
        bool, Option("--exact", help="Examine every row, also of more than 10,000 rows.")
    ] = False,
    rows: RowOptions,
) -> None:
    """Summarize a dataset: rows, duplicates, lengths, languages, fields and their values.

    Lengths are of what a row asks. Duplicates are the same but for case and blanks. Fields,
    languages, forms and answers of more than 10,000 rows are estimated from the first 10,000 and
    every 101st of the others (the output says so); --exact looks at all, which takes ten times as
    long.

    \b
    ajet dataset stats tasks.jsonl
    ajet dataset stats data/:validation --by metadata.level
    zcat big.jsonl.gz | ajet dataset stats - --json | jq .chars.p95
    """
    with counting("stats") as passing:
        result = gather(passing(rows.blocks(source)), by=by, exact=exact)
    if by and by not in result.fields and result.groups.keys() == {"null"}:
        raise unknown_field(by, result.fields)
    errors = estimate_errors(Path(source)) if not rows.map else None
    if rows.as_json:
        labels = {"errors": errors.as_json()} if errors is not None else {}
        print_json({**result.as_json(), **labels, "bad_rows": rows.bad.count})
        return
    _print_stats(result)
    if errors is not None:
        echo(f"\n{errors.as_text()}")
    for line in rows.bad_row_lines():
        echo(line, err=True)


def _print_stats(result: Stats) -> None:
    out = render.console()
    parts = [
        counted(result.rows, "row"),
        f"{result.distinct:,} distinct",
        counted(result.duplicates, "duplicate"),
    ]
    parts += [f"{result.diversity.forms:,} {'form' if result.diversity.forms == 1 else 'forms'}"]
    parts += [f"{result.answered:,} with an answer"]
    parts += [f"{result.empty:,} without a question"] if result.empty else []
    out.print(", ".join(parts))
    if not result.rows:
        return
    if result.looked_at < result.rows:
        out.print(
            f"fields, languages, forms and answers are estimated from {result.looked_at:,} rows"
            " (--exact: all)"
        )
    if result.diversity.is_low and 2 * result.diversity.forms <= result.distinct:
        out.print(result.diversity.as_text(), markup=False, highlight=False)
    lengths = [_length_row("characters", result.chars), _length_row("words", result.words)]
    lengths += (
        [_length_row("characters of the answer", result.answer_chars)] if result.answered else []
    )
    out.print(render.table(lengths, out.width, title="\nlengths"))
    if result.languages:
        out.print(
            render.table(
                _shares(result.languages, result.rows, "language"), out.width, title="\nlanguages"
            )
        )
    if result.by:
        groups = [
            _length_row(name, lengths_of, rows=True) for name, lengths_of in result.top_groups(20)
        ]
        out.print(render.table(groups, out.width, title=f"\ncharacters by {result.by}"))
    out.print(render.table(_field_rows(result), out.width, title="\nfields"))


def _length_row(name: str, lengths: Lengths, *, rows: bool = False) -> dict[str, object]:
    return {"of": name, **({"rows": lengths.total()} if rows else {}), **lengths.as_json()}


def _shares(counts: Mapping[str, int], rows: int, name: str) -> list[dict[str, object]]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:15]
    return [
        {
            name: value,
            "rows": n,
            "share": f"{n / rows:6.1%}",
            "": "█" * max(1, round(_BAR * n / rows)),
        }
        for value, n in ordered
    ]


def _field_rows(result: Stats) -> list[dict[str, str]]:
    rows = []
    for name, field in result.fields.items():
        common = ", ".join(f"{text} ({number:,})" for text, number in field.common(3))
        distinct = f"{len(field.values):,}" if not field.others else "many"
        rows.append(
            {
                "field": name,
                "in": f"{field.present / result.rows:.0%}",
                "kind": "/".join(kind for kind, _ in field.kinds.most_common()),
                "distinct": "" if "object" in field.kinds else distinct,
                "most common": common,
            }
        )
    return rows


def validate(
    sources: Sources,
    similarity: Annotated[
        float | None,
        Option(
            min=0.5,
            max=1,
            help="Also find near duplicates across files, from this similarity, such as 0.8.",
        ),
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Treat warnings as errors.")] = False,
    mapping: Map = None,
    as_json: AsJson = False,
) -> None:
    """Find errors in datasets before a run does. Exits with 1 if there are any.

    Errors: a row that is not readable or not a task, two tasks with one task_id, a question with
    two answers, a task in two of the files (or splits of a directory). Warnings: duplicates, rows
    of several shapes, answers that are missing here and there.

    \b
    ajet dataset validate tasks.jsonl
    ajet dataset validate train.jsonl val.jsonl --similarity 0.8
    ajet dataset validate data/ --strict --json
    """
    report = run_validate(_name_sources(sources), mapping=mapping_of(mapping), near=similarity)
    if as_json:
        problems = [
            pick(problem, "kind", "level", "where", "message") for problem in report.problems
        ]
        counts = dict(report.counts)
        summary = {
            "rows": report.rows,
            "errors": report.errors,
            "warnings": report.warnings,
            "counts": counts,
        }
        print_json({**summary, "problems": problems})
    else:
        _print_report(report)
    raise typer.Exit(1 if report.errors or (strict and report.warnings) else 0)


def _name_sources(sources: Sequence[str]) -> dict[str, str]:
    """Maps names to paths; a directory gives each of its splits."""
    named: dict[str, str] = {}
    for source in sources:
        if Path(source).is_dir():
            names = [
                name for name in splits_of(Path(source)) if name not in ("rejected", "quarantine")
            ]
            named |= {f"{Path(source).as_posix()}:{name}": f"{source}:{name}" for name in names}
            if names:
                continue
        files_of(source)  # raises if there is none
        named[source] = source
    return named


def _print_report(report: Report) -> None:
    for kind, number in sorted(
        report.counts.items(), key=lambda item: (KINDS[item[0]][0], -item[1])
    ):
        level, meaning = KINDS[kind]
        color = "red" if level == "error" else "yellow"
        echo(f"{style(level, fg=color, bold=True)}: {meaning} ({number:,})")
        shown = [problem for problem in report.problems if problem.kind == kind]
        for problem in shown:
            echo(f"  {visible(problem.where)}: {visible(problem.message)}")
        if number > len(shown):
            echo(f"  and {number - len(shown):,} more")
    rows = ", ".join(f"{name}: {counted(number, 'row')}" for name, number in report.rows.items())
    echo(f"{rows}; {counted(report.errors, 'error')}, {counted(report.warnings, 'warning')}")
