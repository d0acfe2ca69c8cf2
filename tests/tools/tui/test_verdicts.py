"""Which run is best, which collapsed and which games its judge: in the list, and why, without a
filter."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.widgets import Static

from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, LedgerEntry, Metric, Reward, Run, now
from ajet_tools.trace.compare.reasons import reasons
from ajet_tools.trace.compare.verdict import verdicts
from ajet_tools.trace.queries.runs import overview
from ajet_tools.tui.trace.episode import EpisodeScreen
from ajet_tools.tui.trace.episodes import EpisodesScreen
from ajet_tools.tui.trace.run import RunScreen
from ajet_tools.tui.widgets.long_text import LongText
from tests.tools.tui.palette import cells

pytestmark = pytest.mark.anyio
ATTEMPTS = 16


def rewarded(share: float) -> list[float]:
    """As many of 16 attempts as that are right."""
    return [float(i < round(share * ATTEMPTS)) for i in range(ATTEMPTS)]


def put(
    writer: TraceWriter,
    name: str,
    validations: Sequence[Sequence[float]],
    *,
    backbone: str = "local",
    outcomes: Sequence[str] = ("trained",),
    metrics: Sequence[dict[str, float]] = (),
    status: Any = "finished",
) -> None:
    """A run with a validation at each step, from 0, and an outcome of its tokens at each later
    one."""
    run = Run(
        run_id=f"{name}-id",
        name=name,
        backbone=backbone,
        started_at=now() - timedelta(hours=len(name)),
    )
    writer.put(run)
    for step, rewards in enumerate(validations):
        for attempt, reward in enumerate(rewards):
            writer.put(Episode(episode_id=f"{name}{step}-{attempt}", run_id=run.run_id, step=step, split="val",
                               attempt=attempt, decoding="sampled", rewards=(Reward(value=reward),)))  # fmt: skip
    for step, outcome in enumerate(outcomes, 1):
        of: Any = outcome
        writer.put(
            LedgerEntry(
                run_id=run.run_id,
                step=step,
                episode_id=f"{name}{step}",
                call_id=f"c{step}",
                outcome=of,
                tokens=9,
            )
        )
    for step, values in enumerate(metrics, 1):
        writer.put(
            *(
                Metric(run_id=run.run_id, step=step, name=key, value=value)
                for key, value in values.items()
            )
        )
    writer.put(run.model_copy(update={"status": status, "ended_at": now()}))


@pytest.fixture
def five_runs(tmp_path: Path) -> Path:
    file = tmp_path / "trace.duckdb"
    rng = np.random.default_rng(0)
    gaming = [
        {
            "train/reward": (0.3 if step < 8 else 0.9) + 0.01 * rng.random(),
            "train/phrase_share": 0.1 if step < 8 else 0.95,
        }
        for step in range(24)  # the last 16 of which say nothing
    ]
    with TraceWriter(file) as writer:
        put(writer, "good", [rewarded(0.4), rewarded(0.7), rewarded(0.95)])
        put(
            writer,
            "hot",
            [rewarded(0.5), rewarded(0), rewarded(0)],
            outcomes=("trained", "zero_advantage", "zero_advantage"),
        )
        put(
            writer,
            "gamer",
            [rewarded(0.3), rewarded(1)],
            metrics=gaming,
            outcomes=("trained", "zero_advantage"),
        )
        put(writer, "flat", [rewarded(0.5), rewarded(0.5)])
        put(writer, "scored", [rewarded(0.75)], backbone="run", outcomes=())
    return file


async def test_a_single_validation_stands_under_validation(
    tmp_path: Path, viewing: Any, until: Any
) -> None:
    file = tmp_path / "trace.duckdb"
    with TraceWriter(file) as writer:
        put(writer, "taught", [rewarded(0.75)], metrics=[{"train/reward": 1.0}])
        put(writer, "rewarded", [], metrics=[{"train/reward": 0.5}])
    async with viewing(file) as pilot:
        screen = pilot.app.screen
        await until(pilot, lambda: len(cells(screen)) == 2 and "trained" in cells(screen)[0][1])
        assert [row[2] for row in cells(screen)] == ["0.750", "0.500 train"]


async def test_a_scored_run_opens_on_its_episodes_and_none_of_them_failed(
    five_runs: Path, viewing: Any, until: Any
) -> None:
    async with viewing(five_runs, run_id="scored-id") as pilot:
        await until(
            pilot, lambda: isinstance(pilot.app.screen, EpisodesScreen) and pilot.app.screen.listing
        )
        assert pilot.app.screen.listing.count == ATTEMPTS
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await pilot.press("F")
        await until(
            pilot,
            lambda: any(
                notice.message == "no episode failed" for notice in pilot.app._notifications
            ),
        )
        assert isinstance(pilot.app.screen, RunScreen), "and it stays where it is"


def test_what_speaks_against_a_gain_comes_before_steps_that_trained_nothing(
    five_runs: Path,
) -> None:
    """A judge that is gamed soon gives every attempt the same reward."""
    with open_trace(five_runs) as reader:
        runs = overview(reader)
        [gamer] = [run for run in runs if run["name"] == "gamer"]
        first, second, *_ = reasons(reader, gamer, verdicts(reader, runs)["gamer-id"])
    assert "contain one phrase" in first and "nothing was trained" in second


async def test_the_viewer_shows_the_words_that_the_command_lists(
    tmp_path: Path, viewing: Any, until: Any
) -> None:
    """Of a run that goes on or was cut off, its status, unless it already got better or worse."""
    file = tmp_path / "trace.duckdb"
    with TraceWriter(file) as writer:
        put(writer, "begun", [rewarded(0.5)], status="failed", outcomes=())
        put(writer, "flat", [rewarded(0.5), rewarded(0.5)], status="interrupted")
        put(writer, "rising", [rewarded(0.4), rewarded(0.95)], status="running")
        put(writer, "over", [rewarded(0.5), rewarded(0.5)])
    with open_trace(file) as reader:
        runs = overview(reader)
        words = {run["name"]: verdicts(reader, runs)[run["run_id"]].word for run in runs}
    assert words == {
        "begun": "failed",
        "flat": "interrupted",
        "rising": "learned",
        "over": "no change",
    }
    async with viewing(file) as pilot:
        screen = pilot.app.screen
        await until(pilot, lambda: len(cells(screen)) == 4 and "no change" in cells(screen)[0][1])
        for name, verdict, *_ in cells(screen):
            assert words[name] in verdict and "·" not in verdict.replace("· no change", "")


async def test_episodes_of_an_explanation_are_opened_from_it(
    tmp_path: Path, viewing: Any, until: Any
) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        put(writer, "hot", [rewarded(0.9), rewarded(0)], outcomes=("trained",))
    async with viewing(tmp_path / "trace.duckdb") as pilot:
        await until(pilot, lambda: pilot.app.screen.runs)
        await pilot.press("w")
        await until(
            pilot,
            lambda: (
                pilot.app.screen.query(LongText) and pilot.app.screen.query_one(LongText).current
            ),
        )
        screen = pilot.app.screen
        assert all(
            len(line) <= 70 and not line.endswith(" ") for line in screen.text.splitlines()
        ), screen.text
        first = screen.query_one(LongText).current
        await pilot.press("n")
        second = screen.query_one(LongText).current
        assert first != second and {first, second} <= {id[:12] for id in screen.episodes}
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, EpisodeScreen))
        assert pilot.app.screen.episode_id.startswith(second)
        await pilot.press("escape")
        await until(pilot, lambda: pilot.app.screen is screen)
        lines = screen.text.splitlines()
        row = next(i for i, line in enumerate(lines) if first in line)
        await pilot.click(LongText, offset=(lines[row].index(first) + 2, row))
        await until(pilot, lambda: isinstance(pilot.app.screen, EpisodeScreen))
        assert pilot.app.screen.episode_id.startswith(first)


async def test_a_newcomer_finds_the_collapsed_run_and_the_one_that_games_its_judge(
    five_runs: Path, viewing: Any, until: Any
) -> None:
    async with viewing(five_runs) as pilot:
        screen = pilot.app.screen

        def row(name: str) -> str:
            return " ".join(next((row for row in cells(screen) if row[0] == name), []))

        await until(pilot, lambda: "learned" in row("good"))
        assert "0.375 → 0.938" in row("good") and "+0.562" in row("good")
        assert "▼ collapsed" in row("hot") and "0.500 → 0.000" in row("hot")
        assert "learned?" in row("gamer")
        assert "no change" in row("flat")
        assert "scored" in row("scored") and "0.750" in row("scored")

        def why() -> str:
            return str(pilot.app.screen.query_one("#run", Static).render())

        def below() -> str:
            return "\n".join(strip.text for strip in pilot.app.screen._compositor.render_strips())

        names = [row[0] for row in cells(screen)]
        for name, cause in (
            ("hot", "steps 2 to 3: all attempts at a task had the same"),
            ("gamer", "contain one phrase"),
        ):
            while screen.table.cursor != names.index(name):
                await pilot.press("down" if screen.table.cursor < names.index(name) else "up")
            await until(pilot, lambda cause=cause: cause in " ".join(below().split()))
        await pilot.press("enter")
        await until(pilot, lambda: "contain one phrase" in " ".join(below().split()))
        assert "validation 0.312 → 1.000 (step 0 to 1; best at 1)" in below()


@pytest.mark.slow
@given(
    first=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=12),
    last=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=12),
)
def test_a_verdict_needs_more_than_chance_and_turns_with_the_sign(
    tmp_path_factory: pytest.TempPathFactory, first: list[float], last: list[float]
) -> None:
    words = []
    for sides in ((first, last), (last, first)):
        file = tmp_path_factory.mktemp("verdict") / "trace.duckdb"
        with TraceWriter(file) as writer:
            put(writer, "run", sides)
        with open_trace(file) as reader:
            words.append(verdicts(reader, overview(reader))["run-id"].word)
    errors = [np.var(side, ddof=1) / len(side) for side in (first, last)]
    sure = abs(np.mean(first) - np.mean(last)) > 2 * np.sqrt(sum(errors)) + 1e-12
    if sure:
        assert {word in ("worse", "collapsed") for word in words} == {True, False}
        assert words[0] == "learned" if np.mean(last) > np.mean(first) else words[1] == "learned"
    elif abs(np.mean(first) - np.mean(last)) < 2 * np.sqrt(sum(errors)) - 1e-12:
        assert words == ["no change", "no change"]


def test_a_drop_has_its_likely_causes_as_the_first_reason(five_runs: Path) -> None:
    with open_trace(five_runs) as reader:
        runs = {run["name"]: run for run in overview(reader, None)}
        known = verdicts(reader, list(runs.values()))
        why = {
            name: reasons(reader, runs[name], known[runs[name]["run_id"]])
            for name in ("hot", "good")
        }
    assert why["hot"][0].startswith("step 1, most likely: ")
    assert not any("most likely" in text for text in why["good"])


def test_what_was_not_trained_or_not_finished_is_not_told_as_learned(tmp_path: Path) -> None:
    file = tmp_path / "trace.duckdb"
    with TraceWriter(file) as writer:
        put(writer, "idle", [rewarded(0.1), rewarded(0.9)], outcomes=("zero_advantage",))
        put(
            writer,
            "cut",
            [rewarded(0.1), rewarded(0.9), rewarded(0.1)],
            metrics=[{"val/reward": 0.9}],
            status="running",
        )
        put(writer, "down", [rewarded(0.5), rewarded(0.95), rewarded(0.4)])
        put(writer, "once", [rewarded(0.5)])
        put(writer, "single", [[0.0], [1.0]])
        put(writer, "broken", [], backbone="run", outcomes=())
        writer.put(
            *(Episode(run_id="broken-id", status="failed", cause="KeyError") for _ in range(3))
        )
    with open_trace(file) as reader:
        runs = overview(reader)
        told = verdicts(reader, runs)
        assert told["idle-id"].word == "not trained"
        last = told["cut-id"].last
        assert told["cut-id"].word == "learned" and last is not None and last["step"] == 1, (
            "step 2 is not complete"
        )
        assert told["once-id"].word == "trained", "there is nothing to compare with"
        assert told["single-id"].word == "unclear", "one episode says nothing of chance"
        assert told["broken-id"].word == "all failed"
        [down] = [run for run in runs if run["name"] == "down"]
        assert any(
            "best at step 1: 0.938" in reason for reason in reasons(reader, down, told["down-id"])
        )
