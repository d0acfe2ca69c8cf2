"""How often verdicts are wrong, from the rows that a person labelled in `ajet dataset label`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.agreement import wilson
from ajet_tools.cli.app import app
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.labels import (
    ErrorEstimate,
    Label,
    Labels,
    draw,
    estimate_errors,
    labels_beside,
)


def written(path: Path, count: int, ok: bool = True) -> Path:
    verdict = {"verifier": "agreement:3", "ok": ok, "reason": "", "details": {}}
    rows = [
        {
            "main_query": f"What is {n} + 1?",
            "answer": str(n + 1),
            "provenance": {"verdict": verdict},
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def label(path: Path, right: range = range(0), wrong: range = range(0), **more: Label) -> Labels:
    """Label rows by their numbers."""
    labels = Labels(labels_beside(path))
    rows = list(read(path))
    for number in right:
        labels.set(rows[number].values, "accepted")
    for number in wrong:
        labels.set(rows[number].values, "rejected")
    for number, other in more.items():
        labels.set(rows[int(number.removeprefix("row"))].values, other)
    return labels


def test_the_interval_is_wilsons() -> None:
    low, high = wilson(2 / 30, 30)  # Brown, Cai, DasGupta 2001 (section 3.1.1) give the formula
    assert (low, high) == (pytest.approx(0.0185, abs=5e-4), pytest.approx(0.2132, abs=5e-4))
    assert wilson(0.0, 20)[0] == 0.0 and wilson(0.0, 20)[1] == pytest.approx(0.1611, abs=5e-4)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 3000))
def test_more_labels_never_make_it_wider_and_the_number_named_is_enough(
    labelled: int, wrong: int, more: int
) -> None:
    assume(wrong <= labelled)
    one = ErrorEstimate(True, labelled + more, labelled, wrong)
    low, high = one.interval
    assert low - 1e-9 <= wrong / labelled <= high + 1e-9
    enough = one.labels_for((high - low) / 2)
    assert labelled <= enough <= one.rows
    if wrong > 0 and enough < one.rows:
        a, b = wilson(wrong / labelled, enough)
        assert b - a <= (high - low) / 2 + 1e-9


def test_labels_of_accepted_and_of_refused_rows_say_how_often_a_verdict_is_wrong(
    tmp_path: Path,
) -> None:
    train = written(tmp_path / "train.jsonl", 200)
    rejected = written(tmp_path / "rejected.jsonl", 40, ok=False)
    assert estimate_errors(train) is None
    label(train, range(28), range(28, 30), row30="skipped")
    label(rejected, range(5), range(5, 20))
    passed, refused = estimate_errors(train), estimate_errors(rejected)
    assert passed == ErrorEstimate(True, 200, 30, 2, 1)
    assert refused == ErrorEstimate(False, 40, 20, 5)
    done = CliRunner().invoke(app, ["dataset", "check", str(train)])
    assert "6.7% of the accepted rows have a wrong answer (1.8% to 21.3% at 95 %)" in done.output
    done = CliRunner().invoke(app, ["dataset", "check", str(train), "--json"])
    assert json.loads(done.stdout)["stats"][str(train)]["errors"]["wrong"] == 2


def test_rows_without_a_verdict_are_right_or_wrong_themselves(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"main_query": f"{n}?"}) + "\n" for n in range(10)))
    label(path, range(3), range(3, 4))
    found = estimate_errors(path)
    assert found == ErrorEstimate(None, 10, 4, 1) and found.as_json()["of"] == "all"
    every = ErrorEstimate(True, 50, 50, 5)
    assert every.interval == (0.1, 0.1) and "half as wide" not in every.as_text()


def drawn(path: Path, size: int) -> list[str]:
    return [row.values["main_query"] for row in draw(read(path), size)]


def test_a_sample_is_of_the_rows_alone(tmp_path: Path) -> None:
    """Not of their order in the file; a larger one begins with it."""
    train = written(tmp_path / "train.jsonl", 60)
    first = drawn(train, 10)
    assert first == drawn(train, 10) == drawn(train, 30)[:10] and len(set(first)) == 10
    assert first != sorted(first, key=lambda text: int(text.split()[2]))
    lines = train.read_text().splitlines(keepends=True)
    train.write_text("".join(reversed(lines)))
    assert drawn(train, 10) == first
    assert len(set(drawn(train, 1000))) == 60


def test_labels_outlive_a_kill_and_another_order_and_are_taken_back(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", 10)
    values = [row.values for row in read(train)]
    labels = label(train, range(2), range(2, 3))
    labels.path.write_bytes(labels.path.read_bytes() + b'{"row": "cut')
    train.write_text("".join(reversed(train.read_text().splitlines(keepends=True))))
    again = Labels(labels.path)
    assert [again.of(row) for row in values[:4]] == ["accepted", "accepted", "rejected", None]
    again.set(values[0], None)
    again.set(values[3], "skipped")
    again = Labels(labels.path)
    assert [again.of(row) for row in values[:4]] == [None, "accepted", "rejected", "skipped"]
    labels.path.write_text("something else\n")
    with pytest.raises(ConfigError):
        Labels(labels.path)


def test_a_label_that_cannot_be_stored_is_an_error_and_no_label(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", 1)
    labels = Labels(labels_beside(train))
    labels.path.mkdir()
    [row] = read(train)
    with pytest.raises(ConfigError):
        labels.set(row.values, "accepted")
    assert labels.of(row.values) is None
