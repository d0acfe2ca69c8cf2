"""Sampled and greedy attempts are never one mean: the mode stands on each episode, and every mean
says of what."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pytest
from typer.testing import CliRunner

from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Reward, Run, Task
from ajet_tools.cli.app import app
from ajet_tools.trace import queries

ASK = {"role": "user", "content": "2+2"}
SAID = {"choices": [{"message": {"role": "assistant", "content": "4"}}]}
KINDS: tuple[tuple[str, str, float], ...] = (
    ("train", "sampled", 0.25),
    ("val", "sampled", 0.5),
    ("val", "greedy", 1.0),
    ("trial", "sampled", 0.75),
)


def write(path: Path, run: str, known: bool = True) -> None:
    with TraceWriter(path) as writer:
        writer.put(Run(run_id=run, name=run, status="running"))
        for split, decoding, value in KINDS:
            for i in range(6):
                task = Task(task_id=f"t{i}")
                mode: dict[str, Any] = {"split": split, "decoding": decoding if known else None}
                episode_id = f"{run}{split}{decoding}{i}"
                writer.put(Call(episode_id=episode_id, request={"messages": [ASK]}, response=SAID))
                writer.put(Episode(episode_id=episode_id, run_id=run, task=task, step=3, rewards=(Reward(value=value),),
                                   **mode))  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write(tmp_path / "trace.duckdb", "one")
    write(tmp_path / "trace.duckdb", "two")
    return tmp_path / "trace.duckdb"


def trace(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["trace", *arguments, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if code == 0 else done.stderr


@pytest.mark.slow
def test_each_mean_is_of_one_kind(runs: Path) -> None:
    [_, run] = trace("ls", str(runs))["runs"]
    means = {name: run[name] for name in ("last_train", "last_val", "last_greedy", "run_mean")}
    assert list(means.values()) == [0.25, 0.5, 1.0, None]
    assert trace("show", "one", str(runs))["last_greedy"] == 1.0 and "reward" not in run
    with open_trace(runs) as reader:
        [two, _] = queries.overview(reader)
    assert (two["reward_of"], two["last_train"], two["rewards"]) == ("train", 0.25, [0.25])


@pytest.mark.slow
def test_runs_are_compared_by_one_kind(runs: Path) -> None:
    for options, decoding, mean in (([], "sampled", 0.5), (["--decoding", "greedy"], "greedy", 1.0),
                                    (["--split", "train"], "sampled", 0.25)):  # fmt: skip
        found = trace("compare", "one", "two", str(runs), *options)
        assert [found[side][name] for side in "ab" for name in ("decoding", "reward", "episodes")] == [
            decoding, mean, 6, decoding, mean, 6,
        ]  # fmt: skip
    shown = CliRunner().invoke(app, ["trace", "compare", "one", "two", str(runs)]).stdout
    assert "mean reward (val sampled)" in shown
    assert trace("compare", "one@3", "two@last", str(runs))["b"]["decoding"] == "sampled"


@pytest.mark.slow
def test_it_is_a_field_of_the_filter_and_of_exports(runs: Path) -> None:
    assert trace("ls", str(runs), "-f", "split='val' and decoding='greedy'")["count"] == 6
    assert trace("ls", str(runs), "--sort", "decoding")["episodes"][0]["decoding"] == "greedy"
    arguments = [
        "trace",
        "export",
        str(runs),
        "two",
        "--include-validation",
        "--filter",
        "decoding='greedy'",
    ]
    lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    assert [json.loads(line)["decoding"] for line in lines] == ["greedy"] * 6
    assert (
        "step 3 val greedy"
        in CliRunner().invoke(app, ["trace", "show", "onevalgreedy0", str(runs)]).stdout
    )


@pytest.mark.slow
def test_trials_stand_apart_from_training_and_validation(runs: Path) -> None:
    assert trace("ls", str(runs), "-f", "split='trial'")["count"] == 6
    [_, run] = trace("ls", str(runs))["runs"]
    assert (run["last_trial"], run["last_train"], run["last_val"]) == (0.75, 0.25, 0.5)
    assert (
        "step 3 trial ·"
        in CliRunner().invoke(app, ["trace", "show", "onetrialsampled0", str(runs)]).stdout
    )

    def splits(*options: str) -> Counter[str]:
        arguments = ["trace", "export", str(runs), "one", "--include-validation", *options]
        lines = CliRunner().invoke(app, arguments).stdout.splitlines()
        return Counter(json.loads(line)["split"] for line in lines)

    assert splits() == {"train": 6, "val": 12} and splits("--split", "trial") == {"trial": 6}
    whole = CliRunner().invoke(
        app, ["trace", "export", str(runs), "--format", "native", "--no-redact"]
    )
    assert whole.stdout.count('"trial"') >= 12
    with duckdb.connect(str(runs)) as connection:
        connection.execute("DELETE FROM episodes WHERE split = 'train'")
    with open_trace(runs) as reader:
        assert [(one["reward_of"], one["last_val"]) for one in queries.overview(reader)] == [
            ("val", 0.5)
        ] * 2


def test_a_resume_rolls_no_trial_back_and_books_those_that_a_kill_left(runs: Path) -> None:
    with TraceWriter(runs) as writer:
        for split in ("train", "trial"):
            sampled = Call(
                episode_id=f"late {split}",
                call_id=split,
                trainable=True,
                prompt_ids=[1],
                output_ids=[2, 3],
            )
            writer.put(
                sampled, Episode(episode_id=f"late {split}", run_id="one", step=4, split=split)
            )
        writer.put(
            LedgerEntry(
                run_id="one",
                step=4,
                episode_id="booked",
                call_id="booked",
                outcome="trained",
                tokens=1,
            )
        )
        writer.supersede("one", 3)
        writer.flush()
        left = writer.query(
            "SELECT call_id, outcome, tokens FROM ledger WHERE run_id = 'one' ORDER BY ALL"
        ).to_pylist()
        gone = writer.query("SELECT episode_id FROM episodes WHERE superseded").to_pylist()
    assert [tuple(row.values()) for row in left] == [
        ("booked", "superseded", 1), ("train", "superseded", 2), ("trial", "evaluation", 2),
    ]  # fmt: skip
    assert gone == [{"episode_id": "late train"}]
