"""Several runs in the viewer: side by side, tasks by runs and by steps, seeds as one row."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App
from typer.testing import CliRunner

from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Reward, Run, Task, now
from ajet_tools.cli.app import app
from ajet_tools.trace.compare.runs import step_rows
from ajet_tools.trace.queries.experiments import TaskReward, by_task
from ajet_tools.tui.trace.dialogs import TextScreen
from ajet_tools.tui.trace.episodes import EpisodesScreen
from ajet_tools.tui.trace.run import RunScreen
from ajet_tools.tui.trace.runs import RunsScreen
from ajet_tools.tui.widgets.long_text import LongText
from tests.tools.tui.palette import cells, choose
from tests.waiting import settled

pytestmark = pytest.mark.anyio
LAST = {"1e-4": (0.25, 0.5), "3e-4": (0.75, 1.0)}
"""Learning rate -> the last validation of seed 0 and 1."""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    file = tmp_path / "trace.duckdb"
    with TraceWriter(file) as writer:
        for place, (lr, seed) in enumerate([(lr, seed) for lr in LAST for seed in (0, 1)]):
            trainer = {"seed": seed, "optim": {"lr": float(lr)}}
            name = f"lr={lr},seed={seed}"
            run = Run(
                run_id=f"{place}abc",
                name=name,
                backbone="local",
                started_at=now() + timedelta(hours=place),
                config={"ajet": {"trainer_common": trainer}},
            )
            writer.put(run)
            for step, mean in ((0, 0.0), (4, LAST[lr][seed])):
                for task, attempt in ((task, attempt) for task in range(2) for attempt in range(4)):
                    right = attempt < round(4 * mean) and not (task and step and lr == "1e-4")
                    of = Task(task_id=f"t{task}", main_query=f"question {task}")
                    rewards = (Reward(value=float(right)),)
                    where: dict[str, Any] = {
                        "run_id": run.run_id,
                        "step": step,
                        "split": "val",
                        "decoding": "sampled",
                    }
                    writer.put(
                        Episode(
                            episode_id=f"{place}-{step}-{task}-{attempt}",
                            task=of,
                            attempt=attempt,
                            rewards=rewards,
                            **where,
                        )
                    )
            writer.put(run.model_copy(update={"status": "finished"}))
    return file


@pytest.mark.slow
async def test_marked_runs_over_each_other(sweep: Path, viewing: Any, until: Any) -> None:
    async with viewing(sweep, size=(120, 30)) as pilot:
        await until(pilot, lambda: len(cells(pilot.app.screen)) == 4)
        await pilot.press("space", "down", "down", "space")
        assert [row[0] for row in cells(pilot.app.screen)] == [
            "lr=3e-4,seed=1",
            "lr=3e-4,seed=0",
            "lr=1e-4,seed=1",
            "lr=1e-4,seed=0",
        ]
        await pilot.press("c")
        await until(
            pilot, lambda: isinstance(pilot.app.screen, TextScreen) and pilot.app.screen.text
        )
        lines = [line.split() for line in pilot.app.screen.text.splitlines()]
        assert ["0", "0", "0"] in lines and ["4", "1", "0.25"] in lines, "mean rewards by step"
        tasks = [line for line in lines if line[:1] == ["question"]]
        assert tasks == [["question", "1", "1", "0"], ["question", "0", "1", "0.5"]], (
            "where they differ most first"
        )


@pytest.mark.slow
async def test_runs_that_differ_by_their_seed_are_one_row(
    sweep: Path, viewing: Any, until: Any
) -> None:
    async with viewing(sweep, size=(120, 30)) as pilot:
        await until(pilot, lambda: len(cells(pilot.app.screen)) == 4)
        await pilot.press("g")
        assert [row[:3] for row in cells(pilot.app.screen)] == [
            ["lr=3e-4", "2 seeds", "0.875 (0.750 to 1.000)"],
            ["lr=1e-4", "2 seeds", "0.188 (0.125 to 0.250)"],
        ]
        await pilot.press("down", "c")
        await until(
            pilot, lambda: isinstance(pilot.app.screen, TextScreen) and pilot.app.screen.text
        )
        text = pilot.app.screen.text
        assert "lr=1e-4,seed=1" in text and "lr=1e-4,seed=0" in text and "lr=3e-4" not in text
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunsScreen))
        await pilot.press("g")
        assert len(cells(pilot.app.screen)) == 4


@pytest.mark.slow
async def test_tasks_by_steps_of_one_run(sweep: Path, viewing: Any, until: Any) -> None:
    async with viewing(sweep, run_id="3abc") as pilot:
        await until(
            pilot, lambda: isinstance(pilot.app.screen, EpisodesScreen) and pilot.app.screen.listing
        )
        await pilot.press("escape")  # a run without metrics opens on its episodes
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await choose(pilot, "Tasks by steps")
        await until(
            pilot, lambda: isinstance(pilot.app.screen, TextScreen) and pilot.app.screen.text
        )
        lines = [line.split() for line in pilot.app.screen.text.splitlines() if line.strip()]
        assert ["task", "step", "0", "step", "4"] in lines
        assert sorted(lines[-2:]) == [["question", "0", "0", "1"], ["question", "1", "0", "1"]]


@pytest.mark.slow
def test_ls_lists_groups_over_seeds(sweep: Path) -> None:
    said = CliRunner().invoke(app, ["trace", "ls", str(sweep)], env={"COLUMNS": "120"}).output
    assert "over seeds" in said
    lines = [line.split() for line in said.splitlines() if line.startswith("lr=")]
    assert lines == [
        ["lr=3e-4", "2", "0.875", "0.75", "1"],
        ["lr=1e-4", "2", "0.1875", "0.125", "0.25"],
    ]
    groups = json.loads(CliRunner().invoke(app, ["trace", "ls", str(sweep), "--json"]).output)[
        "groups"
    ]
    assert [(group["name"], group["runs"], group["mean"]) for group in groups] == [
        ("lr=3e-4", ["3abc", "2abc"], 0.875),
        ("lr=1e-4", ["1abc", "0abc"], 0.1875),
    ]


@pytest.mark.slow
def test_groups_by_other_rewards_are_listed_beside_each_other(sweep: Path) -> None:
    """Runs that were validated, and two seeds that only trained."""
    for seed in (0, 1):
        with TraceWriter(sweep.with_name(f"{seed}.duckdb")) as writer:
            config = {"ajet": {"trainer_common": {"seed": seed, "optim": {"lr": 1.0}}}}
            run = Run(
                run_id=f"t{seed}",
                name=f"lr=1,seed={seed}",
                backbone="local",
                config=config,
                status="finished",
            )
            writer.put(run)
            writer.put(
                Episode(run_id=run.run_id, step=1, split="train", rewards=(Reward(value=0.625),))
            )
    for command in ("ls", "compare"):
        shown = CliRunner().invoke(
            app, ["trace", command, str(sweep.parent)], env={"COLUMNS": "200"}
        )
        assert shown.exit_code == 0, shown.output
        assert "0.625" in shown.output.partition("over seeds")[2] and "0.875" in shown.output


LEADERS = [
    ("lr=3e-4,seed=1", 1.0, 0.0, 1.0, 4),
    ("lr=3e-4,seed=0", 0.75, 0.0, 0.75, 4),
    ("lr=1e-4,seed=1", 0.0, 0.0, 0.0, 0),
    ("lr=1e-4,seed=0", 0.0, 0.0, 0.0, 0),
]
"""Who solves `question 1`: the run, its reward at the last and the first step, the best and its
step."""


def test_the_leaderboard_of_a_task(sweep: Path) -> None:
    asked = ["trace", "compare", str(sweep), "--task", "question 1"]
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    told_as = [
        tuple(row[key] for key in ("run", "reward", "first", "best", "at"))
        for row in told["leaderboard"]
    ]
    assert told["task_id"] == "t1" and told_as == LEADERS
    assert {(row["attempts"], row["step"], row["of"]) for row in told["leaderboard"]} == {
        (4, 4, "val sampled")
    }
    lines = CliRunner().invoke(app, asked, env={"COLUMNS": "160"}).output.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [name for name, *_ in LEADERS]
    assert lines[0] == "question 1" and lines[-1].split() == ["4", "1", "0.75", "0", "0"]


@pytest.mark.parametrize(("letter", "rows"), [("a", 2), ("é", 2), ("…", 2), ("─", 2), ("你", 4)])
async def test_a_long_line_is_folded_where_the_window_ends(letter: str, rows: int) -> None:
    """Two windows' widths of letters; wide ones take two cells."""
    app, width = App[None](), 36
    text = LongText(letter * 2 * width)
    async with app.run_test(size=(width + 2, 10)) as pilot:  # with the scroll bar
        await app.mount(text)
        await settled(pilot)
        assert text.scrollable_content_region.width == width
        shown = [text.render_line(y).text.strip() for y in range(10)]
        assert [len(row) for row in shown if row] == [2 * width // rows] * rows


async def test_one_wide_letter_narrows_no_line() -> None:
    app, width = App[None](), 36
    text = LongText("a" * 2 * width + "\n" + "你" + "b" * 2 * width)
    async with app.run_test(size=(width + 2, 10)) as pilot:  # with the scroll bar
        await app.mount(text)
        await settled(pilot)
        shown = [text.render_line(y).text.strip() for y in range(10)]
        assert [row for row in shown if row] == [
            "a" * width, "a" * width, "你" + "b" * (width - 2), "b" * width, "bb",
        ]  # fmt: skip


def row_of(task: int, run: str, step: int, reward: float, attempts: int) -> TaskReward:
    return {"task_id": f"t{task}", "task": f"task {task}", "run_id": run, "step": step, "split": "val",
            "decoding": "sampled", "reward": reward, "attempts": attempts}  # fmt: skip


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(0, 3)),
        st.tuples(st.floats(-1, 1), st.integers(1, 5)),
        max_size=20,
    )
)
def test_rewards_by_step_are_the_means_over_all_attempts(
    values: dict[tuple[int, str, int], tuple[float, int]],
) -> None:
    def listed() -> Iterable[TaskReward]:
        for (task, run, step), of in sorted(values.items(), key=lambda item: item[0][2]):
            yield row_of(task, run, step, *of)

    rewards = list(listed())
    for line in step_rows(rewards, {"a": "a", "b": "b"}):
        for name in "ab":
            where = (name, line["step"])
            of = [pair for (_, run, at), pair in values.items() if (run, at) == where]
            mean = sum(r * n for r, n in of) / sum(n for _, n in of) if of else None
            assert line[name] == (None if mean is None else pytest.approx(mean))
    for row in by_task(rewards, "run_id"):
        for run, reward in row.rewards.items():
            steps = {
                at: pair[0]
                for (task, of_run, at), pair in values.items()
                if (f"t{task}", of_run) == (row.task_id, run)
            }
            assert reward == steps[max(steps)]
