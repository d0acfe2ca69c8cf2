"""`ajet dataset check`: what is in a dataset, and what is wrong with it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from typer import Option

from ajet_sdk.reporting.output import echo, style, visible
from ajet_sdk.tasks.json_rows import BadRows
from ajet_tools.cli.dataset.options import Map, Sources, counted, counting, mapping_of
from ajet_tools.cli.options import AsJson, pick, print_json
from ajet_tools.dataset.curation.fields import unknown_field
from ajet_tools.dataset.curation.stats import Lengths, Stats, gather
from ajet_tools.dataset.curation.validate import KINDS, Report, validate
from ajet_tools.dataset.files.rows import Rows
from ajet_tools.dataset.files.sources import files_of, splits_of
from ajet_tools.dataset.labels import ErrorEstimate, estimate_errors
from ajet_tools.text import tables as render

_BAR = 24


def check(
    sources: Sources,
    by: Annotated[
        str | None, Option(metavar="FIELD", help="Also summarize by this field: metadata.level.")
    ] = None,
    exact: Annotated[
        bool, Option("--exact", help="Also count the forms of every row of more than 10,000.")
    ] = False,
    similarity: Annotated[
        float | None,
        Option(
            min=0.5,
            max=1,
            help="Also find near duplicates across files, from this similarity, such as 0.8.",
        ),
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Treat warnings as errors.")] = False,
    map: Map = None,
    as_json: AsJson = False,
) -> None:
    """Say what is in a dataset, and find its errors before a run does. Exits with 1 if there are
    any.

    What is in it: rows, duplicates, lengths of what a row asks, languages, fields and their values.
    Duplicates are the same but for case and blanks. Forms (texts without their numbers and names)
    of more than 10,000 rows are those of the first 10,000 and every 101st of the others (the output
    says so); --exact looks at all. Everything else is counted in all rows.

    Errors: a row that is not readable or not a task, two tasks with one task_id, a question with
    two answers, a task in two of the files (or splits of a directory). Warnings: duplicates, rows
    of several shapes, answers that are missing here and there.

    \b
    ajet dataset check tasks.jsonl
    ajet dataset check data/:validation --by metadata.level
    ajet dataset check train.jsonl val.jsonl --similarity 0.8
    zcat big.jsonl.gz | ajet dataset check - --json | jq '.stats[].chars.p95'
    """
    mapping = mapping_of(map)
    stats_by_name: dict[str, Stats] = {}
    errors: dict[str, ErrorEstimate] = {}
    with _named_sources(sources) as named:
        for name, path in named.items():
            with counting("check") as passing:
                rows = Rows(path, mapping=mapping, bad=BadRows(skip=True))
                stats_by_name[name] = gather(passing(rows.blocks()), by=by, exact=exact)
            if (
                by
                and by not in stats_by_name[name].fields
                and stats_by_name[name].groups.keys() == {"null"}
            ):
                raise unknown_field(by, stats_by_name[name].fields)
            estimate = estimate_errors(Path(path)) if not mapping else None
            if estimate is not None:
                errors[name] = estimate
        report = validate(named, mapping=mapping, near=similarity)
    if as_json:
        _print_json(report, stats_by_name, errors)
    else:
        for name, stats in stats_by_name.items():
            if len(stats_by_name) > 1:
                echo(style(name, bold=True))
            _print_stats(stats)
            if name in errors:
                echo(f"\n{errors[name].as_text()}")
            echo()
        _print_report(report)
    raise typer.Exit(1 if report.errors or (strict and report.warnings) else 0)


def _print_json(
    report: Report, found: Mapping[str, Stats], errors: Mapping[str, ErrorEstimate]
) -> None:
    stats = {}
    for name, of_file in found.items():
        labels = {"errors": errors[name].as_json()} if name in errors else {}
        stats[name] = {**of_file.as_json(), **labels}
    problems = [pick(problem, "kind", "level", "where", "message") for problem in report.problems]
    print_json(
        {
            "rows": report.rows,
            "pictures": report.pictures,
            "different_pictures": report.different_pictures,
            "errors": report.errors,
            "warnings": report.warnings,
            "counts": dict(report.counts),
            "problems": problems,
            "stats": stats,
        }
    )


def _print_stats(result: Stats) -> None:
    out = render.console()
    parts = [
        counted(result.rows, "row"),
        f"{result.distinct:,} distinct",
        counted(result.duplicates, "duplicate"),
        counted(result.diversity.forms, "form"),
        f"{result.answered:,} with an answer",
    ]
    if result.empty:
        parts.append(f"{result.empty:,} without a question")
    out.print(", ".join(parts))
    if not result.rows:
        return
    if result.looked_at < result.rows:
        out.print(f"the forms are those of {result.looked_at:,} rows (--exact: all)")
    if result.diversity.is_low and 2 * result.diversity.forms <= result.distinct:
        out.print(result.diversity.as_text(), markup=False, highlight=False)
    lengths = [_length_row("characters", result.chars), _length_row("words", result.words)]
    if result.answered:
        lengths.append(_length_row("characters of the answer", result.answer_chars))
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


@contextmanager
def _named_sources(sources: Sequence[str]) -> Iterator[dict[str, str]]:
    """Maps names to paths; stdin, which is read twice, is copied to a file."""
    if "-" not in sources:
        yield _name_sources(sources)
        return
    with TemporaryDirectory(prefix="ajet-check-") as folder:
        copy = Path(folder) / "stdin.jsonl"
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        rest = _name_sources([source for source in sources if source != "-"])
        yield {"stdin": str(copy), **rest}


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
    if report.pictures:
        total = sum(report.pictures.values())
        different = report.different_pictures
        echo(f"{counted(total, 'picture')}, {different:,} different")
    echo(f"{rows}; {counted(report.errors, 'error')}, {counted(report.warnings, 'warning')}")
