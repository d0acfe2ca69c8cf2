"""How often verdicts are wrong, from the rows that a person marked in `ajet dataset view`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ajet_sdk.judges.agreement import wilson
from ajet_tools.cli.app import app
from ajet_tools.dataset.review.estimate import ErrorEstimate, estimate_errors
from ajet_tools.dataset.review.review import Review
from ajet_tools.dataset.review.save import save


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


def marked(path: Path, right: range, wrong: range) -> Review:
    review = Review(str(path))
    review.load()
    review.mark(right, "accepted")
    review.mark(wrong, "rejected")
    return review


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


def test_marks_on_accepted_and_on_refused_rows_say_how_often_a_verdict_is_wrong(
    tmp_path: Path,
) -> None:
    train, rejected = (
        written(tmp_path / "train.jsonl", 200),
        written(tmp_path / "rejected.jsonl", 40, ok=False),
    )
    assert estimate_errors(train) is None
    marked(train, range(28), range(28, 30)).close()
    marked(rejected, range(5), range(5, 20)).close()
    passed, refused = estimate_errors(train), estimate_errors(rejected)
    assert passed is not None and (passed.rows, passed.labelled, passed.wrong) == (200, 30, 2)
    said = (
        "6.7% of the accepted rows have a wrong answer (1.8% to 21.3% at 95 %), by 30 labels of 200"
        " rows; "
    )
    assert (
        passed.as_text().startswith(said)
        and " labels make that half as wide. These rows were chosen, not drawn" in passed.as_text()
    )
    assert refused is not None and (refused.labelled, refused.wrong) == (20, 5)
    assert refused.as_text().startswith("25.0% of the refused rows have a right answer")
    done = CliRunner().invoke(app, ["dataset", "stats", str(train)])
    assert "6.7% of the accepted rows have a wrong answer" in done.output
    assert (
        json.loads(CliRunner().invoke(app, ["dataset", "stats", str(train), "--json"]).stdout)[
            "errors"
        ]["wrong"]
        == 2
    )


def test_rows_that_were_saved_away_still_count(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", 50)
    review = marked(train, range(9), range(9, 10))
    save(review, train)
    review.close()
    estimate = estimate_errors(train)
    assert estimate is not None and (estimate.rows, estimate.labelled, estimate.wrong) == (
        50,
        10,
        1,
    )
    every = ErrorEstimate(True, 50, 50, 5)
    assert every.interval == (0.1, 0.1) and "half as wide" not in every.as_text()


def drawn(path: Path, count: int, seed: int | None = None) -> Review:
    review = Review(str(path), sample=count, seed=seed)
    review.load()
    return review


def questions(review: Review) -> list[str]:
    assert review.sampled is not None
    return [row.values["main_query"] for row in review.rows(review.sampled)]


def test_a_sample_is_of_the_rows_and_the_seed_alone(tmp_path: Path) -> None:
    """Not of their order in the file; a larger one begins with it, and every row comes into
    some."""
    train = written(tmp_path / "train.jsonl", 60)
    first = questions(drawn(train, 10))
    assert (
        first == questions(drawn(train, 10)) == questions(drawn(train, 30))[:10]
        and len(set(first)) == 10
    )
    assert first != sorted(first, key=lambda text: int(text.split()[2]))
    lines = train.read_text().splitlines(keepends=True)
    train.write_text("".join(reversed(lines)))
    assert questions(drawn(train, 10)) == first
    every = [questions(drawn(train, 10, seed)) for seed in range(60)]
    assert {text for one in every for text in one} == set(questions(drawn(train, 1000))) and len(
        set(map(str, every))
    ) == 60


def test_only_the_labels_of_the_random_sample_are_counted_and_so_they_are_once_saved(
    tmp_path: Path,
) -> None:
    train = written(tmp_path / "train.jsonl", 100)
    marked(train, range(0), range(50)).close()
    chosen = estimate_errors(train)
    assert chosen is not None and not chosen.at_random and chosen.as_json()["sample"] == "chosen"
    review = drawn(train, 20)
    assert review.sampled is not None
    for number in review.sampled:
        if review.mark_of(number) == "rejected":
            review.mark([number], "rejected")
    assert not any(map(review.mark_of, review.sampled))
    review.mark(review.sampled[:1], "rejected")
    review.mark([review.sampled[1], *review.sampled[4:16]], "accepted")
    review.close()
    estimate = estimate_errors(train)
    assert estimate is not None and (estimate.labelled, estimate.wrong, estimate.skipped) == (
        14,
        1,
        2,
    )
    assert estimate.at_random and "by 14 random labels of 100 rows" in estimate.as_text()
    assert estimate.as_text().endswith("2 rows of the sample were skipped: label them too")
    review = drawn(train, 20)
    assert review.sampled is not None
    save(review, train)
    review.close()
    assert estimate_errors(train) == estimate
