"""SIGINT and SIGTERM to a process that trains: the first ends it in order, the second at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pytest

from ajet_sdk.trace.reader import open_trace
from tests.waiting import until

ROOT = Path(__file__).parents[2]

AGENT = """
import asyncio
import time

import ajet


@ajet.workflow
async def talk(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
    reply = await model.chat([{"role": "user", "content": question}])
    if episode.step == 2:
        print("hanging", flush=True)
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if episode.task.metadata["ends"]:
                    raise
                time.sleep(3600)
    return reply["content"] or ""


@ajet.judge
def length(output: str) -> float:
    return float(len(output) % 3)
"""
"""The second step hangs."""


@contextmanager
def training(
    directory: Path, model: Path, *, ends: bool = True, background: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """`ajet train` in its second step, whose episodes end when they are cancelled, or block its
    event loop then.

    In the background of a shell it starts with Ctrl-C ignored.
    """
    (directory / "agent.py").write_text(AGENT)
    (directory / "tasks.jsonl").write_text(
        json.dumps({"question": "Say yes.", "ends": ends}) + "\n"
    )
    command = [
        sys.executable, "-m", "ajet", "train", "agent.py:talk", "--judge", "agent.py:length", "--tasks", "tasks.jsonl",
        "--model", str(model), "ajet.experiment_dir=run", "ajet.trainer_common.total_steps=3",
        "ajet.trainer_common.save_freq=100", "ajet.rollout.num_repeat=4", "ajet.data.train_batch_size=1",
        "ajet.rollout.max_model_len=64", "ajet.rollout.max_response_length_in_one_turn=4",
    ]  # fmt: skip
    shell = f"trap '' INT; exec {subprocess.list2cmdline(command)}" if background else ""
    child = subprocess.Popen(
        ["sh", "-c", shell] if background else command,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with child:
        try:
            assert child.stdout is not None
            while "hanging" not in (line := child.stdout.readline()):
                assert line, child.communicate()
            yield child
        finally:
            child.kill()


def assert_ended_in_order(
    directory: Path, child: subprocess.Popen[str], number: signal.Signals
) -> None:
    out, errors = child.communicate(timeout=300)
    assert child.returncode == 128 + number, errors
    assert "stopped after step 1; continue with --resume" in out
    assert f"{number.name}: stopping" in errors and "Traceback" not in errors
    assert "`ajet train … --resume` continues" in errors
    assert list(directory.glob("run/checkpoint/*/step_000001/state.json"))
    by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert stored_runs(directory) == [("interrupted", f"stopped by {by}", True)]


def stored_runs(directory: Path) -> list[tuple[str, str, bool]]:
    """Status, error and whether it has ended, as the file has it: a reader of ours takes no dead
    run for running."""
    with duckdb.connect(str(directory / "run" / "trace.duckdb"), read_only=True) as file:
        return file.execute("SELECT status, error, ended_at IS NOT NULL FROM runs").fetchall()


@pytest.mark.slow
def test_sigterm_ends_a_training_in_order(tmp_path: Path, tiny_model: Path) -> None:
    """As Ctrl-C does, also where a shell started the process with Ctrl-C ignored."""
    with training(tmp_path, tiny_model, background=True) as child:
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGTERM)
        assert_ended_in_order(tmp_path, child, signal.SIGTERM)


@pytest.mark.slow
def test_ctrl_c_ends_a_training_in_order(tmp_path: Path, tiny_model: Path) -> None:
    with training(tmp_path, tiny_model) as child:
        child.send_signal(signal.SIGINT)
        assert_ended_in_order(tmp_path, child, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(
    tmp_path: Path, tiny_model: Path, number: signal.Signals
) -> None:
    """And the run is not left as running: the first signal marked it."""

    def is_marked() -> bool:
        with open_trace(tmp_path / "run") as trace:
            return trace.query("SELECT status FROM runs").to_pylist() == [{"status": "interrupted"}]

    with training(tmp_path, tiny_model, ends=False) as child:
        child.send_signal(number)
        until(is_marked)
        child.send_signal(number)
        assert child.wait(300) == -number
    by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert stored_runs(tmp_path) == [("interrupted", f"stopped by {by}", False)]
