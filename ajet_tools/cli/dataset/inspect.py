"""`ajet dataset check`: what is in a dataset, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ajet_sdk.reporting.output import ProgressBar
from ajet_tools.cli.dataset.options import Sources, counted
from ajet_tools.cli.options import pick
from ajet_tools.cli.result import Result
from ajet_tools.dataset.curation.stats import Lengths, Stats, ordered
from ajet_tools.dataset.curation.validate import KINDS, Report, validate
from ajet_tools.dataset.files.sources import NOT_DATA, files_of, splits_of
from ajet_tools.dataset.labels import ErrorEstimate, estimate_errors
from ajet_tools.text import tables as render

_BAR = 24
_LANGUAGES = 15


def check(sources: Sources) -> DatasetCheck:
    """Say what is in a dataset, and find its errors before a run does. Exits with 1 if there are
    any.

    What is in it: rows, duplicates, lengths of what a row asks, languages, fields and their values.
    Duplicates are the same but for case and blanks. Forms (texts without their numbers and names)
    of more than 10,000 rows are those of the first 10,000 and every 101st of the others (the output
    says so). Everything else is counted in all rows.

    Errors: a row that is not readable or not a task, two tasks with one task_id, a question with
    two answers, a task in two of the files (or splits of a directory); `dedup --against` finds near
    copies, too. Warnings: duplicates, rows of several shapes, answers that are missing here and
    there.

    \b
    ajet dataset check tasks.jsonl
    ajet dataset check data/:validation
    ajet dataset check train.jsonl val.jsonl --json | jq -e '.warnings == 0'
    zcat big.jsonl.gz | ajet dataset check - --json | jq '.stats[].chars.p95'
    """
    paths = _paths_by_name(sources)
    with ProgressBar("check rows") as bar:
        report = validate(paths, bar.advance)
    estimates = {}
    for name, path in paths.items():
        estimate = estimate_errors(Path(path))
        if estimate is not None:
            estimates[name] = estimate
    return DatasetCheck(report, estimates)


@dataclass(frozen=True)
class DatasetCheck(Result):
    report: Report
    estimates: Mapping[str, ErrorEstimate]
    """How often rows are wrong, by labels, of the files that have some."""

    @property
    def exit_code(self) -> int:
        return 1 if self.report.errors else 0

    def document(self) -> object:
        stats = {name: of_file.as_json() for name, of_file in self.report.stats.items()}
        for name, estimate in self.estimates.items():
            stats[name]["errors"] = estimate.as_json()
        problems = []
        for problem in self.report.problems:
            problems.append(pick(problem, "kind", "level", "where", "message"))
        names = ("rows", "pictures", "different_pictures", "counts", "errors", "warnings")
        return {**pick(self.report, *names), "problems": problems, "stats": stats}

    def show(self, out: Console) -> None:
        for name, stats in self.report.stats.items():
            if len(self.report.stats) > 1:
                out.print(name, style="bold", soft_wrap=True)
            _print_stats(stats, out)
            if name in self.estimates:
                out.print(f"\n{self.estimates[name].as_text()}", soft_wrap=True)
            out.print()
        _print_report(self.report, out)


def _print_stats(stats: Stats, out: Console) -> None:
    diversity = stats.forms.diversity()
    parts = [
        counted(stats.rows, "row"),
        f"{stats.distinct:,} distinct",
        counted(stats.duplicates, "duplicate"),
        counted(diversity.forms, "form"),
        f"{stats.answered:,} with an answer",
    ]
    if stats.empty:
        parts.append(f"{stats.empty:,} without a question")
    out.print(", ".join(parts))
    if not stats.rows:
        return
    if diversity.rows < stats.rows:
        out.print(f"the forms are those of {diversity.rows:,} rows")
    if diversity.is_low and 2 * diversity.forms <= stats.distinct:
        out.print(diversity.as_text())
    lengths = [_length_row("characters", stats.chars), _length_row("words", stats.words)]
    if stats.answered:
        lengths.append(_length_row("characters of the answer", stats.answer_chars))
    out.print(render.table(lengths, out.width, title="\nlengths"))
    languages = []
    for language, count in ordered(stats.languages)[:_LANGUAGES]:
        share = count / stats.rows
        bar = "█" * max(1, round(_BAR * share))
        languages.append({"language": language, "rows": count, "share": f"{share:6.1%}", "": bar})
    out.print(render.table(languages, out.width, title="\nlanguages"))
    out.print(render.table(_field_rows(stats), out.width, title="\nfields"))


def _length_row(name: str, lengths: Lengths) -> dict[str, object]:
    return {"of": name, **lengths.as_json()}


def _field_rows(stats: Stats) -> list[dict[str, str]]:
    rows = []
    for name, field in stats.fields.items():
        distinct = f"{len(field.values):,}"
        if "object" in field.kinds:
            distinct = ""
        elif field.others:
            distinct = "many"
        row = {
            "field": name,
            "in": f"{field.present / stats.rows:.0%}",
            "kind": "/".join(kind for kind, _ in field.kinds.most_common()),
            "distinct": distinct,
            "most common": ", ".join(f"{text} ({number:,})" for text, number in field.common(3)),
        }
        rows.append(row)
    return rows


def _paths_by_name(sources: Sequence[str]) -> dict[str, str]:
    """Maps names to paths; a directory gives each of its splits."""
    named: dict[str, str] = {}
    for source in sources:
        splits = splits_of(Path(source)) if Path(source).is_dir() else ()
        data = [name for name in splits if name not in NOT_DATA]
        for name in data:
            named[f"{Path(source).as_posix()}:{name}"] = f"{source}:{name}"
        if not data:
            files_of(source)  # raises if there is none
            named["stdin" if source == "-" else source] = source
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
