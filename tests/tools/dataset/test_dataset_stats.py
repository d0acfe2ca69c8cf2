"""Figures of a dataset, compared with figures computed plainly."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_tools.cli.app import app
from ajet_tools.dataset.curation.stats import Lengths, Stats
from ajet_tools.dataset.curation.validate import validate
from tests.tools.dataset.written import write_rows


def stats_of(path: Path, *values: dict[str, Any]) -> Stats:
    write_rows(path / "rows.jsonl", values)
    return validate({"rows": str(path / "rows.jsonl")}).stats["rows"]


def test_lengths_are_those_of_the_sorted_list() -> None:
    chance = random.Random(0)
    known = [int(10 ** chance.uniform(0, 5)) for _ in range(5000)]
    lengths = Lengths(known)
    figures = lengths.as_json()
    assert (figures["min"], figures["max"], lengths.total()) == (min(known), max(known), 5000)
    assert figures["mean"] == pytest.approx(statistics.fmean(known), abs=0.01)
    known.sort()
    for share in (0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0):
        assert lengths.quantile(share) == known[round(share * 5000) - 1]


def test_what_is_counted_of_rows(tmp_path: Path) -> None:
    answered = {"answer": "a", "level": 1}
    talk = [{"role": "user", "content": "Wie viele?"}, {"role": "assistant", "content": "drei"}]
    found = stats_of(
        tmp_path,
        {"main_query": "What is it?", "metadata": answered, "provenance": {"source": "expand"}},
        {"main_query": "what  IS it?", "metadata": {"answer": 22, "level": 2}},
        {"main_query": " ", "metadata": {"level": None}},
        {"messages": talk},
    ).as_json()
    assert (found["rows"], found["distinct"], found["duplicates"], found["empty"]) == (4, 3, 1, 1)
    assert found["answered"] == 3
    assert found["answer_chars"]["max"] == 4
    assert found["languages"] == {"en": 2, "de": 1, "und": 1}
    level = found["fields"]["metadata.level"]
    assert (level["present"], level["kinds"]) == (2, {"integer": 2, "null": 1})
    assert found["fields"]["metadata.answer"]["kinds"] == {"integer": 1, "text": 1}


def test_fields_and_values_beyond_the_limit_are_counted_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("ajet_tools.dataset.curation.stats._MOST_VALUES", 1000)
    some = ({"main_query": f"q{i}", "metadata": {f"k{i}": i, "n": i % 2000}} for i in range(3000))
    found = stats_of(tmp_path, *some)
    assert len(found.fields) == 500
    values = found.fields["metadata.n"].as_json()
    assert values["distinct"] == ">1000"
    assert values["common"] == {}  # the most common value may be one that was not counted
    assert found.fields["metadata.n"].present == 3000


@pytest.mark.slow
def test_all_but_the_forms_of_many_rows_is_exact(tmp_path: Path) -> None:
    values = [
        {"main_query": f"Question {i % 25_000}?", "source": f"d{i % 900}", "rare": i}
        for i in range(30_000)
    ]
    found = stats_of(tmp_path, *values)
    assert (found.rows, found.distinct, found.chars.total()) == (30_000, 25_000, 30_000)
    assert found.fields["source"].values['"d15"'] == 34
    assert found.forms.diversity().rows == found.as_json()["looked_at"] == 10_000 + 199


@pytest.mark.slow
def test_the_command_says_of_how_many_rows_the_forms_are(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for count, looked_at in ((10_000, 10_000), (15_000, 10_050)):
        write_rows(file, ({"main_query": f"Question {n}?", "level": n % 2} for n in range(count)))
        shown, found = (
            CliRunner().invoke(app, ["dataset", "check", str(file), *more])
            for more in ([], ["--json"])
        )
        assert shown.exit_code == found.exit_code == 0, shown.output + found.output
        stats = json.loads(found.stdout)["stats"][str(file)]
        assert (stats["rows"], stats["looked_at"]) == (count, looked_at)
        assert ("the forms are those of 10,050 rows" in shown.output) == (looked_at < count)
