"""Signs against a rising reward: only where it rises, and only what has really changed."""

from __future__ import annotations

import logging
import re
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.reporting.advice import Advice, installed_advice
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.reporting.metrics import episode_metrics, length_of_trained
from ajet_sdk.reporting.notices import STEPS, discarded, selective
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, LedgerEntry, Reward, Run
from ajet_tools.trace.compare.advice import warning_signs
from tests.tools.conftest import reply

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
N = 2 * STEPS


def history(**curves: Any) -> dict[str, dict[int, float]]:
    return {
        f"train/{name}": {i: float(v) for i, v in enumerate(values)}
        for name, values in curves.items()
    }


RISING = np.linspace(0.2, 0.8, N)


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        ({"held_out_exact": RISING[::-1]}, "that of judge exact (weight 0) fell from 0.66 to 0.34"),
        ({"answer_chars": 1000 * RISING}, "answers grew from 340 to 660 characters"),
        ({"answer_chars": 1000 * RISING[::-1]}, "answers shrank from 660 to 340"),
        ({"phrase_share": RISING}, "share of answers that contain one phrase rose from 34% to 66%"),
        (
            {
                "held_out_exact": RISING,
                "answer_chars": 100 + RISING,
                "phrase_share": 0.3 + RISING / 9,
            },
            None,
        ),
    ],
)
def test_what_speaks_against_a_rising_reward(curves: dict[str, Any], expected: str | None) -> None:
    found = list(warning_signs(history(reward=RISING, **curves)).values())
    assert [expected in text for text in found] == ([True] if expected else []), found
    assert not warning_signs(history(reward=RISING[::-1], **curves)), "the reward does not rise"
    assert not warning_signs(history(reward=RISING[1:], **curves)), "too few steps"


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        ({"held_out_exact": RISING[::-1]}, "judge exact (weight 0) fell from 0.66"),
        ({"answer_chars": 1000 * RISING}, "answers grew from 340"),
        ({"phrase_share": RISING}, "contain one phrase rose from 34%"),
    ],
)
@given(saturated=st.integers(0, 200))
def test_what_speaks_against_a_run_is_not_forgotten_as_it_goes_on(
    curves: dict[str, Any], expected: str, saturated: int
) -> None:
    longer = {
        name: np.append(v, np.full(saturated, v[-1]))
        for name, v in {"reward": RISING, **curves}.items()
    }
    [text] = warning_signs(history(**longer)).values()
    assert expected in text and f"(steps 0 to {N + saturated - 1})" in text


def test_answers_that_become_shorter_over_a_whole_run_are_no_sign() -> None:
    """A model that learns to answer leaves off what it said beside the answer."""
    gradual = {"reward": np.linspace(0.2, 0.8, 5 * N), "answer_chars": np.linspace(100, 40, 5 * N)}
    assert not warning_signs(history(**gradual))


@given(st.integers(0, 2**32 - 1))
def test_noise_is_no_rise(seed: int) -> None:
    """Beyond two standard errors by chance one time in twenty; both at once, hardly ever."""
    draw = np.random.default_rng(seed)
    signs = [
        warning_signs(history(reward=draw.normal(size=N), held_out_x=draw.normal(size=N)))
        for _ in range(20)
    ]
    assert sum(map(bool, signs)) <= 2


def episode(output: Any, value: float = 1.0, status: Any = "succeeded") -> Episode:
    watched = Reward(name="watcher", value=value, weight=0.0)
    return Episode(output=output, status=status, rewards=(Reward(value=1.0), watched))


def test_what_is_measured_of_answers() -> None:
    said = "I hope that this helps you"
    found = episode_metrics(
        "train",
        [
            episode(said, 0.0),
            episode(f"well, {said} today", 0.5),
            episode("no", 1.0),
            episode({"reward": None, "metadata": {"final_answer": "four"}}, 0.5),
            episode("x" * 99, 9.0, "failed"),
        ],
        None,
    )
    assert found["train/answer_chars"] == pytest.approx((26 + 38 + 2 + 4) / 4)
    assert found["train/phrase_share"] == 0.5 and found["train/held_out_watcher"] == 0.5
    assert found["train/reward"] == 1.0, "a weight of 0 counts nothing"


def test_a_refusal_of_a_few_words_is_a_phrase_and_an_outcome_of_one_word_is_none() -> None:
    refusals = [episode("I do not know.", 1.0)] * 3 + [episode("42", 0.0)]
    assert episode_metrics("train", refusals, None)["train/phrase_share"] == 0.75
    assert "train/phrase_share" not in episode_metrics("train", [episode("goal", 1.0)] * 4, None)


def test_a_run_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer, caplog.at_level(logging.WARNING, "ajet"):
        writer.put(Run(run_id="r"))
        loggers = Loggers([], directory=tmp_path, run_id="r", writer=writer, total_steps=N)
        assert isinstance(loggers.history, defaultdict)
        for step in range(N + STEPS):
            loggers.log(
                step, {"train/reward": 0.02 * step, "train/answer_chars": 100.0 + 40 * step}
            )
    said = [
        record.getMessage() for record in caplog.records if "answers grew" in record.getMessage()
    ]
    assert len(said) == 1 and said[0].startswith(f"step {N - 1}: the reward rose")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ({"trained": 95, "stale": 5}, ""),
        (
            {
                "trained": 50,
                "zero_advantage": 45,
                "stale": 5,
                "evaluation": 900,
                "untrainable": 900,
            },
            "",
        ),
        (
            {"trained": 50, "stale": 50},
            "50.0% of the sampled tokens were not trained: 50.0% stale .*max_staleness",
        ),
        (
            {"trained": 90, "failed": 4, "truncated": 6},
            "10.0% .*: 6.0% truncated .*max_response_length.*; 4.0% failed",
        ),
        ({"superseded": 10, "trained": 90}, "superseded .*save_freq"),
        ({"undelivered": 10}, "100.0% undelivered .*time limit"),
        ({}, ""),
    ],
)
def test_a_share_of_tokens_that_were_not_trained_is_told_with_its_cause(
    tokens: dict[str, int], expected: str
) -> None:
    assert re.search(expected, discarded(tokens)) if expected else discarded(tokens) == ""


def test_tokens_that_are_not_trained_are_told_while_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever backbone logs the step; again only when its steps are all new."""
    with TraceWriter(tmp_path / "trace.duckdb") as writer, caplog.at_level(logging.WARNING, "ajet"):
        writer.put(Run(run_id="r"))
        loggers = Loggers([], directory=tmp_path, run_id="r", writer=writer, total_steps=3 * N)
        for step in range(1, 2 * N + 3):
            loggers.log(
                step,
                {
                    "train/tokens_trained": 10.0 * (step % 2),
                    "train/tokens_stale": 10.0 * (step % 2 == 0),
                },
            )
            loggers.log(step, {"rollout/model_version": 1.0})
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in said] == [
        "step 2",
        f"step {2 + N}",
        f"step {2 + 2 * N}",
    ]
    assert "50.0% stale" in said[0]


def test_the_advice_of_the_tools_is_what_a_training_prints() -> None:
    """By the entry point of the package, with every function that a training calls."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module = import_module(declared["ajet.advice"]["training"])
    functions = {name for name in vars(Advice) if not name.startswith("_")}
    assert functions and all(callable(getattr(module, name)) for name in functions)
    assert installed_advice() is module, "install the package again: its entry points changed"


@pytest.mark.parametrize(
    ("ratio", "steps", "warns"),
    [(0.5, STEPS, True), (1.5, STEPS, True), (0.9, STEPS, False), (0.5, STEPS - 1, False)],
)
def test_training_on_short_or_long_episodes_alone_is_reported(
    ratio: float, steps: int, warns: bool
) -> None:
    before = dict.fromkeys(range(3), 1.0)
    newest = dict.fromkeys(range(3, 3 + steps), ratio)
    assert bool(selective(before | newest if steps == STEPS else newest)) == warns


def test_the_length_of_trained_episodes_is_a_ratio_of_means() -> None:
    lengths = {"a": 2, "b": 6, "c": 1}
    episodes = [
        Episode(episode_id=name, calls=(reply(f"{name}c", name, 0, [], "x" * size),))
        for name, size in lengths.items()
    ]
    sizes = {e.episode_id: len(e.calls[0].output_ids) for e in episodes}
    entries = [
        LedgerEntry(run_id="r", step=1, episode_id="a", call_id="ac", outcome="trained", tokens=1),
        LedgerEntry(
            run_id="r", step=1, episode_id="b", call_id="bc", outcome="zero_advantage", tokens=6
        ),
    ]
    ratio = length_of_trained(episodes, entries)["train/length_of_trained"]
    assert ratio == pytest.approx(sizes["a"] / np.mean([*sizes.values()]))
    assert length_of_trained(episodes, entries[1:]) == {}
