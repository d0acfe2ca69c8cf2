"""What a workflow returns, and does to its process, is its own: the trace is written and the run
goes on."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Task


class Raises:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error("no")

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        raise self.error("no")

    __hash__ = None  # type: ignore[assignment]


class BrokenMapping(dict[str, Any]):
    def items(self) -> Any:
        raise KeyError("no")


class NoText:
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


def cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


OUTPUTS: list[Callable[[], Any]] = [
    lambda: Raises(ValueError), lambda: Raises(SystemExit), lambda: Raises(KeyboardInterrupt),
    lambda: {"a": [Raises(OSError)]},
    lambda: BrokenMapping(a=1), NoText, cycle, deep, lambda: {(1, 2): 3}, lambda: {"n": 10**5000}, lambda: float("nan"),
    lambda: {"a": [float("-inf"), 1.5]}, lambda: (i for i in range(3)), lambda: np.array([1, 2]), lambda: np.array([]),
    lambda: "\ud800", lambda: {"\ud800": b"\xff"}, lambda: {1: "x"}, lambda: type, lambda: {1, 2}, lambda: Raises, dict,
]  # fmt: skip


def run(outputs: list[Callable[[], Any]], path: Path, **rollout: Any) -> list[Episode]:
    """Episodes with these outputs, and what the trace has of them."""

    @ajet.workflow
    async def act(task: Task) -> Any:
        return outputs[int(task.main_query)]()

    @ajet.judge
    def judge(output: Any) -> float:
        return 1.0

    async def main() -> list[Episode]:
        config = load_config(
            values={"rollout": rollout, "trainer_common": {"save_trajectory_as_json_file": True}}
        )
        attempts = [
            Attempt(Task(main_query=str(number), task_id=str(number)))
            for number in range(len(outputs))
        ]
        engine = ScriptedEngine(lambda ask: "said")
        with Gateway() as gateway, TraceWriter(path) as writer:
            return await run_batch(
                act, judge, attempts, engine=engine, gateway=gateway, config=config, writer=writer
            )

    return asyncio.run(main())


def stored(path: Path) -> Mapping[str, tuple[str, Any]]:
    """Status and output by task."""
    with open_trace(path) as trace:
        table = trace.query(
            "SELECT task_id, status, output, json_valid(output) AS valid FROM episodes"
        )
    assert all(row["valid"] for row in table.to_pylist())
    return {row["task_id"]: (row["status"], json.loads(row["output"])) for row in table.to_pylist()}


def test_whatever_a_workflow_returns_is_recorded(tmp_path: Path) -> None:
    episodes = run([*OUTPUTS, lambda: "sound"], tmp_path / "trace.duckdb")
    assert all((episode.status, episode.reward) == ("succeeded", 1.0) for episode in episodes)
    rows = stored(tmp_path / "trace.duckdb")
    assert len(rows) == len(OUTPUTS) + 1 and all(
        status == "succeeded" for status, _ in rows.values()
    )
    outputs = [rows[str(number)][1] for number in range(len(rows))]
    assert outputs[0].startswith("<Raises, which cannot be stored: ValueError")
    assert (
        outputs[10] == "NaN" and outputs[11] == {"a": ["-Infinity", 1.5]} and outputs[-1] == "sound"
    )
    assert all(
        str(episode.output) is not None for episode in episodes
    )  # what is shown of it later cannot raise


@pytest.mark.slow
def test_a_text_that_never_comes_is_a_time_out(tmp_path: Path) -> None:
    class Hangs:
        def __str__(self) -> str:
            threading.Event().wait()
            return ""

    hanging, sound = run(
        [Hangs, lambda: "sound"], tmp_path / "trace.duckdb", judge_timeout=2
    )  # in which the other ends on a busy machine, too
    assert (hanging.status, hanging.rewards, hanging.output) == ("timeout", (), None)
    assert (sound.status, sound.reward) == ("succeeded", 1.0)
    assert stored(tmp_path / "trace.duckdb")["1"] == ("succeeded", "sound")


AGENT = """
import asyncio, os, sys
import ajet

def spoil():
    os.chdir("/")
    os.umask(0o777)
    sys.setrecursionlimit(max(80, 1))
    sys.stdout.close()

@ajet.workflow
def act(model: ajet.Model, task: ajet.Task) -> str:
    spoil()
    return "done"

@ajet.workflow
async def act_async(model: ajet.Model, task: ajet.Task) -> str:
    spoil()
    await asyncio.sleep(0)
    return "done"

@ajet.judge
def fair(output: str) -> float:
    return 1.0

def reply(ask):
    return "said"
"""


@pytest.mark.slow
@pytest.mark.parametrize("workflow", ["act", "act_async"])
def test_what_it_does_to_its_process_ends_no_run(tmp_path: Path, workflow: str) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text(
        "".join(f'{{"main_query": "{number}"}}\n' for number in range(6))
    )
    command = [
        sys.executable,
        "-m",
        "ajet",
        "run",
        f"agent.py:{workflow}",
        "--judge",
        "agent.py:fair",
    ]
    command += ["--tasks", "tasks.jsonl", "--model", "agent.py:reply", "--exp-dir", "out"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    [trace] = tmp_path.glob("out/**/trace.duckdb")
    rows = stored(trace)
    assert len(rows) == 6 and set(rows.values()) == {("succeeded", "done")}
    assert all(path.stat().st_mode & 0o400 for path in tmp_path.rglob("*"))
