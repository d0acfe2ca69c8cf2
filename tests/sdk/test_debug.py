"""The `debug` backbone: a few episodes, a readable account, and breakpoints that stop only when
asked to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import TrainingError
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Reward


@ajet.workflow
async def solve(question: str, model: Any) -> str:
    first = await model.chat([{"role": "user", "content": question}])
    again = [{"role": "user", "content": question}, first, {"role": "user", "content": "sure?"}]
    return str((await model.chat(again)).content)


@ajet.judge
def exact(output: str, answer: str) -> float:
    return float(output == answer)


def reply(ask: Any) -> str:
    return "42"


def config(tmp_path: Path, **sections: Any) -> Config:
    rows = (
        {"question": "6 x 7", "answer": "42"},
        {"question": "6 x 8", "answer": "48"},
        {"question": "1"},
    )
    (tmp_path / "tasks.jsonl").write_text(
        "".join(json.dumps({"answer": "", **row}) + "\n" for row in rows)
    )
    return load_config(
        values={
            "backbone": "debug",
            "experiment_dir": str(tmp_path / "experiment"),
            "model": {"scripted": f"{__file__}->reply"},
            "task_reader": {
                "type": "jsonl_dataset_file",
                "jsonl_dataset_file": {"training": {"file_path": str(tmp_path / "tasks.jsonl")}},
            },
            **sections,
        }
    )


@pytest.mark.slow
def test_the_first_tasks_are_run_and_told_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = train(config(tmp_path), workflow=solve, judge=exact)
    assert tuned.path is None and tuned.metrics == {"debug/reward": 0.5}
    assert [e.task.main_query for e in tuned.episodes] == ["6 x 7", "6 x 8"]
    out = capsys.readouterr().out
    assert "6 x 7" in out and "succeeded" in out
    with open_trace(tmp_path / "experiment") as reader:
        [row] = reader.query("SELECT status, backbone FROM runs").to_pylist()
        assert row == {"status": "finished", "backbone": "debug"}
        [row] = reader.query(
            "SELECT count(*) AS n, sum(tokens) AS tokens FROM ledger WHERE outcome = 'evaluation'"
        ).to_pylist()
        assert (row["n"], row["tokens"]) == (4, 12)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_seeds_to_calls(tmp_path: Path) -> None:
    seeds = [
        [
            c.sampling["seed"]
            for e in train(config(tmp_path, **more), workflow=solve, judge=exact).episodes
            for c in e.calls
        ]
        for more in ({}, {}, {"debug": {"debug_vllm_seed": 1}})
    ]
    assert seeds[0] == seeds[1] != seeds[2] and len(set(seeds[0])) == 4


def test_failures_are_shown_with_their_place_and_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @ajet.workflow
    def broken(question: str) -> Reward:
        raise KeyError("pot")

    with pytest.raises(TrainingError, match="only 0 of 2 episodes succeeded"):
        train(config(tmp_path), workflow=broken)
    out = capsys.readouterr().out
    assert "KeyError" in out and "test_debug.py" in out
    with open_trace(tmp_path / "experiment") as reader:
        [row] = reader.query("SELECT status, error FROM runs").to_pylist()
        assert row["status"] == "failed" and "KeyError" in row["error"]


def test_parallelism_is_bounded(tmp_path: Path) -> None:
    now, most = [0], [0]
    lock = threading.Lock()

    @ajet.workflow
    def slow(question: str) -> Reward:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.05)
        with lock:
            now[0] -= 1
        return Reward(value=1)

    settings = {"debug": {"debug_max_parallel": 1, "debug_first_n_tasks": 3}}
    assert len(train(config(tmp_path, **settings), workflow=slow).episodes) == 3 and most == [1]


PROGRAM = """
import ajet, sys
sys.path.insert(0, {here!r})
from test_debug import config
from ajet_sdk.run import train
from ajet_sdk.types import Reward
from pathlib import Path

@ajet.workflow
def solve(question: str) -> Reward:
    secret = question
    ajet.bp("HERE")
    return Reward(value=1)

if __name__ == "__main__":
    for number, tags in enumerate({tags}):
        place = Path({tmp!r}, str(number))
        place.mkdir()
        asked = config(place, debug={{"debug_first_n_tasks": 1}})
        tuned = train(asked, workflow=solve, debug_tags=tags)
        print(tags, "reward", tuned.metrics["debug/reward"])
"""


@pytest.mark.slow
def test_bp_stops_only_where_the_run_names_the_tag(tmp_path: Path) -> None:
    tags = (("ELSE",), (), ("HERE", "ELSE"))
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM.format(here=str(Path(__file__).parent), tmp=str(tmp_path), tags=tags)
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        input="p 'seen ' + secret\nc\n",
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.count("reward 1.0") == 3, done.stderr
    assert (
        done.stdout.count("seen 6 x 7") == 1
        and "seen" not in done.stdout.partition("() reward 1.0")[0]
    )


def test_bp_does_nothing_outside_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[object] = []
    monkeypatch.setattr("sys.breakpointhook", lambda *args, **kwargs: stops.append(args))
    ajet.bp("HERE")
    assert stops == []


@pytest.mark.slow
def test_nothing_loads_torch(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_debug import"
        " config, solve, exact\nfrom ajet_sdk.run import train\nfrom pathlib import"
        f" Path\ntrain(config(Path({str(tmp_path)!r})), workflow=solve, judge=exact)\nassert not"
        " {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
