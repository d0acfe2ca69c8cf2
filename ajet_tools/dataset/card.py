"""Writes the dataset card: a summary of a dataset in Markdown."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from heapq import nsmallest
from pathlib import Path
from typing import Any

from ajet_sdk.errors import TaskError
from ajet_sdk.secret_keys import masked
from ajet_sdk.tasks.lineage import HELD_OUT, split_named, splits_of
from ajet_sdk.tasks.questions import answer_of, readable, text_of
from ajet_sdk.whole_file import write_whole
from ajet_tools.dataset.curation.forms import LEAST, Forms
from ajet_tools.dataset.curation.stats import ordered
from ajet_tools.dataset.files.values import as_text, value_at

NAME, OTHER_NAME = "README.md", "CARD.md"
MARK = "<!-- Written by ajet; rewritten with the dataset. -->"
_EXAMPLES = 6
_LONGEST = 600
_NUMERIC = re.compile(r"[\d,.]+")
_QUANTILES = (0, 5, 50, 95, 100)


@dataclass(frozen=True)
class Facts:
    """Facts of a card that its rows do not state. All are optional."""

    title: str = "Dataset"
    made_by: str = ""
    """The command, without secrets."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Further counts, such as `seeds`, `generated`, `calls`."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Rows refused, by reason."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """How it was made: model, strategies, prompt versions, verifier, seed."""
    coverage: Mapping[str, Any] = field(default_factory=dict)
    """The result of `Coverage.as_json`."""
    notes: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Data file by split, relative to the card, for the metadata that the Hugging Face hub
    reads."""


@dataclass
class _Seen:
    """Statistics and a few examples of streamed rows."""

    questions: dict[str, array[int]] = field(default_factory=dict)
    """Lengths in characters, by split."""
    answers: array[int] = field(default_factory=lambda: array("I"))
    rates: list[float] = field(default_factory=list)
    counters: dict[str, Counter[str]] = field(
        default_factory=lambda: {name: Counter() for name in ("Sources", "Strategies", "Verified")}
    )
    lineage: dict[str, Counter[str]] = field(default_factory=dict)
    """Rows of each split by the splits of their sources."""
    forms: Forms = field(default_factory=Forms)
    examples: list[tuple[bytes, str, Any]] = field(default_factory=list)
    """The rows with the smallest hash of their text: hash, text and answer."""

    def add(self, split: str, values: Mapping[str, Any]) -> None:
        text, answer = readable(text_of(values)), answer_of(values)
        self.questions.setdefault(split, array("I")).append(len(text))
        self.forms.add(text)
        if answer is not None:
            self.answers.append(len(as_text(answer)))
        rate = value_at(values, "metadata.pass_rate")
        if isinstance(rate, int | float) and 0 <= rate <= 1:
            self.rates.append(rate)
        named = (
            value_at(values, "provenance.source"),
            value_at(values, "provenance.strategy")
            or value_at(values, "provenance.parameters.strategy"),
            value_at(values, "provenance.verdict.reason"),
        )
        for counter, value in zip(self.counters.values(), named, strict=True):
            counter.update([value] if isinstance(value, str) else [])
        sources = " and ".join(sorted(splits_of(values))) or "not known"
        self.lineage.setdefault(split, Counter())[sources] += 1
        example = blake2b(text.encode("utf-8", "replace"), digest_size=6).digest(), text, answer
        self.examples = nsmallest(_EXAMPLES, [*self.examples, example], key=lambda entry: entry[0])


def write_card(
    directory: Path,
    rows: Mapping[str, Iterable[Mapping[str, Any]]] | Iterable[Mapping[str, Any]],
    facts: Facts,
) -> Path:
    """Writes the card of a dataset into `directory` and returns its path.

    Args:
        rows: by split, or of a single split; each is read once.
        facts: facts that the rows do not state.

    The file is `README.md`, or `CARD.md` if the user has a README.md. Reproducible. Raises
    TaskError if it cannot be written.
    """
    facts = replace(
        facts, parameters=masked(facts.parameters, "***"), notes=masked(facts.notes, "***")
    )
    seen = _Seen()
    for split, part in (rows if isinstance(rows, Mapping) else {"train": rows}).items():
        for values in part:
            seen.add(split, values)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / NAME
        if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
            path = directory / OTHER_NAME
        text = "\n".join(_card(seen, facts)).rstrip() + "\n"
        write_whole(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise TaskError(
            f"cannot write the card in {directory}: {error.strerror or error}"
        ) from error
    return path


def _card(seen: _Seen, facts: Facts) -> Iterator[str]:
    if facts.files:
        yield from ("---", "configs:", "- config_name: default", "  data_files:")
        for split, file in facts.files.items():
            yield from (f"  - split: {split}", f"    path: {json.dumps(file, ensure_ascii=False)}")
        yield from ("---", "")
    yield from (MARK, "", f"# {_one_line(facts.title)}", "")
    if facts.made_by:
        yield from (f"Made by `{_one_line(facts.made_by)}`.", "")
    for note in facts.notes:
        yield from (f"> {_one_line(note)}", "")
    yield from _counts(seen, facts)
    yield from _table(
        "Refused", ("reason", "rows"), [(r, f"{n:,}") for r, n in ordered(facts.refused)]
    )
    yield from _lineage(seen)
    yield from _lengths(seen)
    yield from _diversity(seen, facts)
    if seen.rates:
        mean = (
            f"The mean pass rate of {len(seen.rates):,} measured rows is"
            f" {sum(seen.rates) / len(seen.rates):.2f}"
        )
        ends = f"{seen.rates.count(0.0):,} were never solved and {seen.rates.count(1.0):,} always."
        yield from ("## Difficulty", "", f"{mean}; {ends}", "")
    yield from _examples(seen)
    rows = [
        (name, "" if value is None else f"`{as_text(value)}`")
        for name, value in facts.parameters.items()
    ]
    yield from _table("How it was made", ("", ""), rows)


def _counts(seen: _Seen, facts: Facts) -> Iterator[str]:
    rows = [(f"rows in {split}", f"{len(lengths):,}") for split, lengths in seen.questions.items()]
    if len(rows) != 1:
        rows.insert(0, ("rows", f"{sum(map(len, seen.questions.values())):,}"))
    rows.append(("rows with an answer", f"{len(seen.answers):,}"))
    rows += [(name, f"{count:,}") for name, count in facts.counts.items()]
    if facts.refused:
        rows.append(("refused", f"{sum(facts.refused.values()):,}"))
    yield from _table("Counts", ("", ""), rows)
    for title, counter in seen.counters.items():
        yield from _table(
            title, ("", "rows"), [(name, f"{n:,}") for name, n in ordered(counter)[:20]]
        )


def _lineage(seen: _Seen) -> Iterator[str]:
    """Shows the splits of the rows' sources, and whether training rows come from validation
    tasks."""
    rows = [
        (name, of, f"{n:,}") for name, counts in seen.lineage.items() for of, n in ordered(counts)
    ]
    if all(of == "not known" for _, of, _ in rows):
        return
    yield from _table("Lineage", ("rows in", "made of tasks in", "rows"), rows)
    learnt = {name: counts for name, counts in seen.lineage.items() if split_named(name) == "train"}
    leaked = sum(
        n for counts in learnt.values() for of, n in counts.items() if HELD_OUT in of.split(" and ")
    )
    if learnt and leaked:
        yield from (f"> {leaked:,} rows to learn were made of validation tasks.", "")
    elif learnt and not any("not known" in counts for counts in learnt.values()):
        yield from ("No row to learn was made of a validation task.", "")


def _lengths(seen: _Seen) -> Iterator[str]:
    kinds = [(f"question, {split}", lengths) for split, lengths in seen.questions.items()]
    if seen.answers:
        kinds.append(("answer", seen.answers))
    header = ("characters", "shortest", "5 %", "median", "95 %", "longest")
    yield from _table("Length", header, [(name, *_quantiles(values)) for name, values in kinds])


def _quantiles(values: array[int]) -> list[str]:
    ordered = sorted(values)
    return [
        f"{ordered[min(len(ordered) - 1, len(ordered) * share // 100)]:,}" for share in _QUANTILES
    ]


def _diversity(seen: _Seen, facts: Facts) -> Iterator[str]:
    """Shows forms and, of a steered run, cells."""
    diversity, cells = seen.forms.diversity(), facts.coverage.get("cells")
    if diversity.rows < LEAST and cells is None:
        return
    forms = "1 form" if diversity.forms == 1 else f"{diversity.forms:,} forms"
    yield from (
        "## Diversity",
        "",
        f"Without their numbers and names the questions of {diversity.rows:,} rows have {forms}.",
        "",
    )
    if diversity.is_low:
        yield from (f"> {_one_line(diversity.as_text())}", "")
    if cells is not None:
        yield from (
            (
                f"{cells['covered']:,} of {cells['of']:,} cells have a form of their own; forms by"
                " axis:"
            ),
            "",
        )
        rows = [
            (axis, value, f"{n:,}")
            for axis, values in cells["forms"].items()
            for value, n in values.items()
        ]
        yield from _rows(("axis", "value", "forms"), rows)


def _examples(seen: _Seen) -> Iterator[str]:
    if not seen.examples:
        return
    yield from ("## Examples", "")
    for _, text, answer in seen.examples:
        shown = _cut(text) + (f"\n→ {_cut(as_text(answer))}" if answer is not None else "")
        fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall(r"`+", shown)), default=0))
        yield from (f"{fence}text", shown, fence, "")


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if rows:
        yield from (f"## {title}", "")
        yield from _rows(header, rows)


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    numeric = [
        all(_NUMERIC.fullmatch(row[column]) for row in rows) for column in range(len(header))
    ]
    yield "|" + "|".join(" ---: " if right else " --- " for right in numeric) + "|"
    for row in rows:
        yield "| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in row) + " |"
    yield ""


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
