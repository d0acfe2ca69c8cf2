"""Writes the dataset card: a summary of a dataset in Markdown, by `card.md.jinja`."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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

NAME = "README.md"
OTHER_NAME = "CARD.md"
"""Where the user has a README of their own."""
MARK = "<!-- Written by ajet; rewritten with the dataset. -->"
_UNKNOWN = "not known"
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
        text = readable(text_of(values))
        answer = answer_of(values)
        self.questions.setdefault(split, array("I")).append(len(text))
        self.forms.add(text)
        if answer is not None:
            self.answers.append(len(as_text(answer)))
        rate = value_at(values, "metadata.pass_rate")
        if isinstance(rate, int | float) and 0 <= rate <= 1:
            self.rates.append(rate)
        named = (
            value_at(values, "provenance.source"),
            value_at(values, "provenance.parameters.strategy"),
            value_at(values, "provenance.verdict.reason"),
        )
        for counter, value in zip(self.counters.values(), named, strict=True):
            if isinstance(value, str):
                counter[value] += 1
        sources = " and ".join(sorted(splits_of(values))) or _UNKNOWN
        self.lineage.setdefault(split, Counter())[sources] += 1
        example = blake2b(text.encode("utf-8", "replace"), digest_size=6).digest(), text, answer
        self.examples = nsmallest(_EXAMPLES, [*self.examples, example], key=lambda entry: entry[0])


def write_card(
    directory: Path, rows: Mapping[str, Iterable[Mapping[str, Any]]], facts: Facts
) -> Path:
    """Writes the card of a dataset into `directory` and returns its path.

    Args:
        rows: by split; each is read once.
        facts: facts that the rows do not state.

    The file is `README.md`, or `CARD.md` if the user has a README.md. Reproducible. Raises
    TaskError if it cannot be written.
    """
    facts = replace(
        facts, parameters=masked(facts.parameters, "***"), notes=masked(facts.notes, "***")
    )
    seen = _Seen()
    for split, part in rows.items():
        for values in part:
            seen.add(split, values)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / NAME
        if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
            path = directory / OTHER_NAME
        write_whole(path, _text(seen, facts).encode("utf-8", "replace"))
    except OSError as error:
        raise TaskError(
            f"cannot write the card in {directory}: {error.strerror or error}"
        ) from error
    return path


def _text(seen: _Seen, facts: Facts) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        autoescape=False,  # Markdown
    )
    environment.filters["line"] = _one_line
    environment.filters["quoted"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["table"] = _table
    rows = [(f"rows in {split}", len(lengths)) for split, lengths in seen.questions.items()]
    if len(rows) != 1:
        rows.insert(0, ("rows", sum(map(len, seen.questions.values()))))
    rows += [("rows with an answer", len(seen.answers)), *facts.counts.items()]
    if facts.refused:
        rows.append(("refused", sum(facts.refused.values())))
    measured = {f"question, {split}": values for split, values in seen.questions.items()}
    if seen.answers:
        measured["answer"] = seen.answers
    lengths = []
    for name, values in measured.items():
        ranked = sorted(values)
        places = [min(len(ranked) - 1, len(ranked) * share // 100) for share in _QUANTILES]
        lengths.append((name, *(f"{ranked[place]:,}" for place in places)))
    text: str = environment.get_template("card.md.jinja").render(
        facts=facts,
        mark=MARK,
        counts=_counted(rows),
        origins={name: _counted(ordered(counts)[:20]) for name, counts in seen.counters.items()},
        refused=_counted(ordered(facts.refused)),
        lengths=lengths,
        diversity=seen.forms.diversity(),
        least=LEAST,
        rates=seen.rates,
        examples=[_example(text, answer) for _, text, answer in seen.examples],
        parameters=[
            (name, "" if value is None else f"`{as_text(value)}`")
            for name, value in facts.parameters.items()
        ],
        **_lineage(seen),
    )
    return text.rstrip() + "\n"


def _counted(rows: Iterable[tuple[str, int]]) -> list[tuple[str, str]]:
    return [(name, f"{count:,}") for name, count in rows]


def _lineage(seen: _Seen) -> dict[str, object]:
    """Returns the splits of the rows' sources, and how many training rows come from validation
    tasks."""
    lineage = []
    leaked = 0
    learnt = []
    for split, counts in seen.lineage.items():
        is_learnt = split_named(split) == "train"
        if is_learnt:
            learnt.append(counts)
        for sources, count in ordered(counts):
            lineage.append((split, sources, f"{count:,}"))
            if is_learnt and HELD_OUT in sources.split(" and "):
                leaked += count
    return {
        "lineage": lineage,
        "leaked": leaked,
        "sources_known": any(sources != _UNKNOWN for _, sources, _ in lineage),
        "training_known": bool(learnt) and not any(_UNKNOWN in counts for counts in learnt),
    }


def _example(text: str, answer: object) -> tuple[str, str]:
    """Returns an example with its answer, and a fence that it can't leave."""
    shown = _cut(text)
    if answer is not None:
        shown += f"\n→ {_cut(as_text(answer))}"
    longest = max(map(len, re.findall(r"`+", shown)), default=0)
    return shown, "`" * max(3, 1 + longest)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes a table of Markdown, with columns of numbers to the right."""
    lines = ["| " + " | ".join(header) + " |", "|"]
    for column in range(len(header)):
        is_numeric = all(_NUMERIC.fullmatch(row[column]) for row in rows)
        lines[1] += " ---: |" if is_numeric else " --- |"
    for row in rows:
        cells = [_one_line(cell).replace("|", "\\|") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return " ".join(str(text).split())


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
