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
from ajet_tools.dataset.curation.stats import Lengths, gather
from ajet_tools.dataset.files.blocks import Block, Row, blocks_of


def rows(*values: dict[str, Any]) -> list[Block]:
    return list(blocks_of((Row(f"rows line {i}", row) for i, row in enumerate(values, 1)), "rows"))


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


def test_what_is_counted_of_rows() -> None:
    found = gather(
        rows(
            {
                "main_query": "What is it?",
                "metadata": {"answer": "a", "level": 1},
                "provenance": {"source": "expand"},
            },
            {"main_query": "what  IS it?", "metadata": {"answer": 22, "level": 2}},
            {"main_query": " ", "metadata": {"level": None}},
            {
                "messages": [
                    {"role": "user", "content": "Wie viele?"},
                    {"role": "assistant", "content": "drei"},
                ]
            },
        ),
        by="metadata.level",
    ).as_json()
    assert (found["rows"], found["distinct"], found["duplicates"], found["empty"]) == (4, 3, 1, 1)
    assert found["answered"] == 3
    assert found["answer_chars"]["max"] == 4
    assert found["languages"] == {"en": 2, "de": 1, "und": 1}
    level = found["fields"]["metadata.level"]
    assert (level["present"], level["kinds"]) == (2, {"integer": 2, "null": 1})
    assert found["fields"]["metadata.answer"]["kinds"] == {"integer": 1, "text": 1}
    assert {name: group["rows"] for name, group in found["by"]["metadata.level"].items()} == {
        "1": 1,
        "2": 1,
        "null": 2,
    }


def test_fields_and_values_beyond_the_limit_are_counted_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ajet_tools.dataset.curation.stats._MOST_VALUES", 1000)
    some = ({"main_query": f"q{i}", "metadata": {f"k{i}": i, "n": i % 2000}} for i in range(3000))
    found = gather(rows(*some))
    assert len(found.fields) == 500
    values = found.fields["metadata.n"].as_json()
    assert values["distinct"] == ">1000"
    assert values["common"] == {}  # the most common value may be one that was not counted
    assert found.fields["metadata.n"].present == 3000


@pytest.mark.slow
def test_all_but_the_forms_of_many_rows_is_exact() -> None:
    values = [
        {"main_query": f"Question {i % 25_000}?", "source": f"d{i % 900}", "rare": i}
        for i in range(30_000)
    ]
    sampled = gather(rows(*values), exact=False, by="source")
    assert sampled.fields["source"].values['"d15"'] == 34
    assert sampled.looked_at == sampled.diversity.rows < 11_000
    found = sampled.as_json()
    every = gather(rows(*values), by="source").as_json()
    for name in every.keys() - {"looked_at", "diversity"}:
        assert found[name] == every[name], name
    few = gather(rows(*values[:5000]), exact=False)
    assert few.as_json() == gather(rows(*values[:5000])).as_json()


@pytest.mark.slow
def test_the_command_estimates_above_ten_thousand_rows_and_says_so(tmp_path: Path) -> None:
    def stats_of(count: int, *options: str) -> tuple[str, dict[str, Any]]:
        file = tmp_path / "a.jsonl"
        file.write_text(
            "".join(f'{{"main_query": "Question {n}?", "level": {n % 2}}}\n' for n in range(count))
        )
        shown, found = (
            CliRunner().invoke(app, ["dataset", "check", str(file), *options, *more])
            for more in ([], ["--json"])
        )
        assert shown.exit_code == found.exit_code == 0, shown.output + found.output
        stats = json.loads(found.stdout)["stats"][str(file)]
        return " ".join(shown.output.split()), stats  # a terminal of 80 columns wraps

    note = "the forms are those of 10,050 rows (--exact: all)"
    text, found = stats_of(15_000)
    assert note in text and (found["rows"], found["looked_at"]) == (15_000, 10_050)
    for count, options in ((10_000, []), (15_000, ["--exact"])):
        text, found = stats_of(count, *options)
        assert "the forms are those" not in text and found["rows"] == found["looked_at"] == count
        assert found["fields"]["level"]["present"] == count
