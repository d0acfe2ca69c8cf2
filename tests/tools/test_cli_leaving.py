"""The end of a command whose user's code left processes or threads: it ends in good order, with its
own exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

AGENT = """
import atexit, multiprocessing, pathlib, threading, time
import ajet

atexit.register(pathlib.Path("registered").touch)


@ajet.workflow
async def spawns(question: str) -> str:
    multiprocessing.Process(target=time.sleep, args=(600,), name="helper", daemon=False).start()
    return "4"


@ajet.judge
def plain(output: str, answer: str) -> float:
    return float(output == answer)


@ajet.judge
def polls(output: str, answer: str) -> float:
    threading.Thread(target=threading.Event().wait, name="judging", daemon=False).start()
    return float(output == answer)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(AGENT)


def ajet(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ajet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_process_that_is_left_is_ended_and_named() -> None:
    Path("replies.py").write_text("def reply(ask):\n    return '4'\n")
    Path("tasks.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    more = ("--judge", "agent.py:plain", "--tasks", "tasks.jsonl", "--model", "replies.py:reply")
    done = ajet("run", "agent.py:spawns", *more)
    assert done.returncode == 0 and "killed the process helper (pid " in done.stderr, done.stderr
    assert Path("registered").exists()


def test_a_thread_of_a_judge_does_not_keep_a_dataset_command_and_what_is_registered_for_the_end_is_done() -> (
    None
):
    sums = (("1 + 1?", "2"), ("4 + 3?", "7"))
    rows = [{"main_query": question, "metadata": {"answer": answer}} for question, answer in sums]
    Path("seeds.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = [{"main_query": "Add five and six.", "metadata": {"answer": "11"}}]
    Path("replies.py").write_text(
        f"import json\ndef reply(ask):\n    return json.dumps({made!r})\n"
    )
    more = (
        "--count",
        "1",
        "--verify",
        "judge:agent.py:polls",
        "--model",
        "replies.py:reply",
        "--out",
        "data",
    )
    done = ajet("dataset", "expand", "seeds.jsonl", *more)
    assert done.returncode == 0 and "still running: judging" in done.stderr, done.stderr
    assert Path("registered").exists()
