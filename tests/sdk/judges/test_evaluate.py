"""A judge beside labels: agreement, variance, order, length, cost; and the command that prints
it."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime, timedelta, timezone
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import ajet
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.agreement import bootstrap, concordance, kappa, rank_correlation
from ajet_sdk.judges.evaluate import evaluate, labelled_row
from ajet_sdk.judges.llm import read_examples
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Feedback, Reward, Run
from ajet_tools.cli.app import app
from tests.sdk.judges.test_llm_judge import answers, judging, verdict

AT = datetime(2026, 1, 1, tzinfo=timezone.utc)
FLOATS = st.lists(st.integers(0, 4).map(float), min_size=2, max_size=12)


@given(labels=FLOATS, data=st.data())
def test_laws_of_agreement(labels: list[float], data: Any) -> None:
    scores = data.draw(
        st.lists(st.integers(0, 4).map(float), min_size=len(labels), max_size=len(labels))
    )
    found = concordance(scores, labels)
    if len(set(labels)) < 2:
        assert found is None
        return
    assert concordance(labels, labels) == 1 and concordance([-one for one in labels], labels) == 0
    assert concordance([1.0] * len(labels), labels) == 0.5
    reverse = concordance([-one for one in scores], labels)
    assert found is not None and reverse is not None and found + reverse == pytest.approx(1)
    scaled = concordance([2 * one + 1 for one in scores], labels)
    assert scaled == pytest.approx(found)


def test_statistics_beside_their_definitions() -> None:
    draw = np.random.default_rng(0)
    first, second = draw.permutation(30).astype(float), draw.normal(size=30)
    ranks = second.argsort().argsort()
    by_distances = 1 - 6 * float(((first - ranks) ** 2).sum()) / (30 * (30**2 - 1))
    assert rank_correlation(list(first), list(second)) == pytest.approx(by_distances)
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(0.75**0.5), (
        "ties share their mean rank"
    )
    assert kappa([True, True, False, False], [True, False, False, False]) == pytest.approx(0.5)
    found = bootstrap(lambda at: float(np.mean([second[i] for i in at])), 30)
    error = second.std() / 30**0.5
    assert found is not None and found.low == pytest.approx(found.value - 1.96 * error, abs=0.1)
    assert found.high == pytest.approx(found.value + 1.96 * error, abs=0.1)


ROWS = [
    {"query": f"q{i // 2}", "output": "x" * (1 + i % 2 * 5 + i), "score": float(i % 2)}
    for i in range(8)
]
LABELLED = [labelled_row(row, place) for place, row in enumerate(ROWS)]


@pytest.mark.slow
def test_a_judge_that_is_right_and_one_that_counts_letters() -> None:
    right = asyncio.run(
        evaluate(lambda output, episode: ROWS[episode.attempt]["score"], LABELLED, repeats=2)
    )
    assert right.agreement is not None and (right.agreement.value, right.agreement.low) == (
        1.0,
        1.0,
    )
    assert right.accuracy is not None and right.accuracy.value == 1 and right.kappa == 1
    assert (right.spread, right.flipped, right.order, right.calls) == (0, 0, None, 0)
    assert right.length_beyond_labels is None, "the labels say it all"
    letters = asyncio.run(evaluate(lambda output: len(output), LABELLED, repeats=1))
    assert letters.length == pytest.approx(1.0) and letters.spread is None
    assert letters.length_beyond_labels == pytest.approx(1.0)
    assert letters.agreement is not None and 0.5 < letters.agreement.value < 1


def test_a_judge_that_wavers_is_asked_anew_and_its_cost_counted() -> None:
    said = count()
    with judging(lambda request: verdict(next(said) // 8 % 2), price="1,1") as (judge, asked):
        found = asyncio.run(evaluate(judge, LABELLED, repeats=4))
    assert len(asked) == 4 * 8
    assert (found.spread, found.flipped) == (0.5, 1.0)
    assert (found.calls, found.tokens, found.cost) == (1.0, 110.0, pytest.approx(110e-6))


def first_is_best(request: dict[str, Any]) -> str:
    rows = [
        {"answer": i, "reason": "r", "score": 1 / i} for i in range(1, len(answers(request)) + 1)
    ]
    return json.dumps({"verdicts": rows})


@pytest.mark.slow
def test_a_group_judge_that_favours_a_place_is_found_out() -> None:
    group = [labelled_row({**ROWS[i], "query": "q"}, i) for i in range(8)]

    @ajet.judge(group=True)
    def by_place(episodes: list[Episode]) -> list[float]:
        return [float(place) for place in range(len(episodes))]

    assert asyncio.run(evaluate(by_place, group)).order == 1.0
    with judging(first_is_best, mode="listwise") as (judge, _):
        shuffled = asyncio.run(evaluate(judge, group, repeats=3))
    assert shuffled.order is not None and shuffled.order > 0.2 and (shuffled.spread or 0) > 0.05


def test_verdicts_that_cannot_be_had_are_counted_and_left_out() -> None:
    def shaky(output: str) -> float:
        if len(output) > 8:
            raise ValueError("too long")
        return 1.0

    found = asyncio.run(evaluate(shaky, LABELLED, repeats=1))
    failed = [one for one in found.scores if one[2] is None]
    assert found.failures == {"ValueError: too long": len(failed)} and failed
    assert found.agreement is not None and found.agreement.value == 0.5
    with pytest.raises(ConfigError, match="needs an output"):
        labelled_row({"query": "q"}, 0)
    with pytest.raises(ConfigError, match="row 2 of the labels is not an object"):
        labelled_row(["q", "a", 1], 1)
    with pytest.raises(ConfigError, match="a number as its label"):
        labelled_row({"query": "q", "output": "a", "score": float("nan")}, 0)


def test_line_separators_within_a_text_end_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"query": "q\u2028", "output": "a\x85b", "score": 1.0}, {"query": "é", "score": 0.0}]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows))
    assert read_examples(path) == rows


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    rows = [{**row, "answer": "x" * 7, "note": "one\u2028two"} for row in ROWS]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    printed = CliRunner().invoke(
        app, ["judge", "eval", "exact", "--labels", str(path), "--repeats", "1"]
    )
    assert "agreement" in printed.output and "8 labelled outputs" in printed.output
    found = json.loads(
        CliRunner().invoke(app, ["judge", "eval", "exact", "--labels", str(path), "--json"]).output
    )
    assert found["count"] == 8 and 0 <= found["agreement"]["low"] <= found["agreement"]["high"] <= 1
    assert len(found["scores"]) == 8
    (tmp_path / "own.py").write_text("def broken(output): raise KeyError('x')\n")
    failed = CliRunner().invoke(
        app, ["judge", "eval", f"{tmp_path / 'own.py'}:broken", "--labels", str(path)]
    )
    assert failed.exit_code == 1 and "No verdict" in failed.output


def test_labels_of_a_trace_are_scores_of_people_or_else_rewards(tmp_path: Path) -> None:
    def labelled_by() -> tuple[str, list[float]]:
        arguments = ["judge", "eval", "regex:yes", "--labels", str(tmp_path), "--repeats", "1"]
        found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
        return found["labels"], [label for _, label, _ in found["scores"]]

    outcomes = {"right": (1.0, "succeeded"), "wrong": (0.0, "succeeded"), "broken": (0.5, "failed")}
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="r", status="finished"))
        for at, (episode_id, (reward, status)) in enumerate(outcomes.items()):
            episode = Episode(episode_id=episode_id, run_id="r", output="yes", status=status)  # type: ignore[arg-type]
            times = {"started_at": AT + timedelta(minutes=at), "rewards": (Reward(value=reward),)}
            writer.put(episode.model_copy(update=times))
    assert labelled_by() == ("reward", [1.0, 0.0]), "a failed episode has no reward that counts"
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Feedback(episode_id="wrong", score=0.75))
    assert labelled_by() == ("feedback", [0.75])


def test_calls_of_verdicts_that_failed_are_counted() -> None:
    said = count()
    with judging(lambda request: verdict(1) if next(said) < 4 else "no verdict") as (judge, asked):
        found = asyncio.run(evaluate(judge, LABELLED, repeats=1, parallel=1))
    assert sum(found.failures.values()) == 4
    assert found.calls * found.count == len(
        asked
    ) == 4 + 4 * 3 and found.tokens * found.count == 110 * len(asked)
