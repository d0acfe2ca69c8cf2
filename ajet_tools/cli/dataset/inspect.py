"""`ajet dataset check`: what is in a dataset, and what is wrong with it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from rich.console import Console
from rich.text import Text
from typer import Option

from ajet_sdk.tasks.json_rows import BadRows
from ajet_tools.cli.dataset.options import Map, Sources, counted, counting, mapping_of
from ajet_tools.cli.options import pick
from ajet_tools.cli.result import Result, visible_fields
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
) -> DatasetCheck:
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
            if not mapping:
                estimate = estimate_errors(Path(path))
            else:
                estimate = None
            if estimate is not None:
                errors[name] = estimate
        report = validate(named, mapping=mapping, near=similarity)
    return DatasetCheck(report, stats_by_name, errors, is_strict=strict)


@dataclass(frozen=True)
class DatasetCheck(Result):
    report: Report
    stats: Mapping[str, Stats]
    estimates: Mapping[str, ErrorEstimate]
    """How often rows are wrong, by labels, of the files that have some."""
    is_strict: bool

    @property
    def exit_code(self) -> int:
        is_wrong = self.report.errors or (self.is_strict and self.report.warnings)
        return 1 if is_wrong else 0

    def document(self) -> object:
        stats = {name: of_file.as_json() for name, of_file in self.stats.items()}
        for name, estimate in self.estimates.items():
            stats[name]["errors"] = estimate.as_json()
        return {
            **visible_fields(self.report),
            **pick(self.report, "errors", "warnings"),
            "problems": [
                pick(problem, "kind", "level", "where", "message")
                for problem in self.report.problems
            ],
            "stats": stats,
        }

    def show(self, out: Console) -> None:
        for name, stats in self.stats.items():
            if len(self.stats) > 1:
                out.print(name, style="bold", soft_wrap=True)
            _print_stats(stats, out)
            if name in self.estimates:
                out.print(f"\n{self.estimates[name].as_text()}", soft_wrap=True)
            out.print()
        _print_report(self.report, out)


def _print_stats(result: Stats, out: Console) -> None:
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
        out.print(result.diversity.as_text())
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
        if not field.others:
            distinct = f"{len(field.values):,}"
        else:
            distinct = "many"
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


def _print_report(report: Report, out: Console) -> None:
    for kind, number in sorted(
        report.counts.items(), key=lambda item: (KINDS[item[0]][0], -item[1])
    ):
        level, meaning = KINDS[kind]
        color = "red" if level == "error" else "yellow"
        title = Text.assemble((level, f"bold {color}"), f": {meaning} ({number:,})")
        out.print(title, soft_wrap=True)
        shown = [problem for problem in report.problems if problem.kind == kind]
        for problem in shown:
            out.print(f"  {problem.where}: {problem.message}", soft_wrap=True)
        if number > len(shown):
            out.print(f"  and {number - len(shown):,} more")
    rows = ", ".join(f"{name}: {counted(number, 'row')}" for name, number in report.rows.items())
    if report.pictures:
        total = sum(report.pictures.values())
        different = report.different_pictures
        out.print(f"{counted(total, 'picture')}, {different:,} different")
    problems = f"{counted(report.errors, 'error')}, {counted(report.warnings, 'warning')}"
    out.print(f"{rows}; {problems}", soft_wrap=True)
