"""Judges that parse what a policy wrote: limited in processor time, killable, and never the end of
a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.judges.code import longest_block
from ajet_sdk.judges.load import load_judge
from ajet_sdk.run import run
from ajet_sdk.sandbox.limited import TooExpensive, call
from ajet_sdk.types import Task

ENDLESS = r"^(\w+\s?)+$"
TASK = Task(main_query="q", metadata={"answer": "a"})


@ajet.workflow
async def solve(question: str, model: Any) -> str:
    return str((await model.chat([{"role": "user", "content": question}])).content)


def regex(pattern: str) -> Any:
    return load_judge(
        load_config(values={"task_judge": {"judge_type": "regex", "pattern": pattern}})
    )


@pytest.mark.slow
def test_a_pattern_that_takes_for_ever_is_a_wrong_answer() -> None:
    judge = regex(ENDLESS)
    assert judge("a" * 40 + "!", TASK) is False
    assert judge("a", TASK) is True
    assert regex(r"^(?:(\w+)\s?)+$")("a" * 40 + "!", TASK) is False


@pytest.mark.slow
def test_a_process_that_waits_for_a_pattern_ends_at_a_signal() -> None:
    code = (
        "from ajet_sdk.sandbox.limited import call\n"
        "print('begun', flush=True)\n"
        f"call('ajet_sdk.judges.text:last_match', [{ENDLESS!r}, 'a' * 60 + '!'], seconds=100)\n"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        process.communicate(timeout=20)
        assert process.returncode != 0


@pytest.mark.slow
def test_limits_of_a_call() -> None:
    with pytest.raises(TooExpensive):
        call("ajet_sdk.judges.text:last_match", [ENDLESS, "a" * 40 + "!"], seconds=0.2)
    with pytest.raises(TooExpensive):
        call("builtins:bytes", [8 << 30])
    with pytest.raises(ValueError, match="invalid literal"):
        call("builtins:int", ["x"])
    assert call("builtins:int", ["12"]) == 12


@pytest.mark.slow
def test_calls_of_threads_and_after_a_fork_do_not_mix() -> None:
    results: dict[int, int] = {}

    def count(number: int) -> None:
        results[number] = call("builtins:int", [str(number)])

    threads = [threading.Thread(target=count, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: number for number in range(40)}
    pid = os.fork()
    if pid == 0:
        os._exit(0 if call("builtins:int", ["7"]) == 7 else 1)
    assert call("builtins:int", ["8"]) == 8
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
def test_a_process_that_something_else_ends_is_started_anew() -> None:
    for _ in range(3):
        pid = call("os:getppid", [])
        os.kill(pid, signal.SIGKILL)
        assert call("builtins:int", ["3"]) == 3


BLOCK = re.compile(r"```[ \t]*(?P<language>\w*)[^\n]*\n(?P<code>.*?)(?:```|\Z)", re.DOTALL)


@pytest.mark.parametrize(
    "reply",
    [
        "a\n```\nx = 1\n```\nb\n```py\nx = 22\ny = 3\n```",
        "```python\nprint(1)",
        "no block",
        "``` \n```\n```\nx\n```",
        "```PYTHON title\nx = 1\n```",
        "```js\nlong = 'longer than the other'\n```\n```python\nx\n```",
        "```",
        "``````",
        "```python\n```",
        "text ```python\nx\n``` ```python\nyy\n```",
    ],
)
def test_the_longest_block(reply: str) -> None:
    languages = ("", "python", "py", "python3")
    blocks = [
        match["code"] for match in BLOCK.finditer(reply) if match["language"].lower() in languages
    ]
    assert longest_block(reply) == (max(blocks, key=len) if blocks else None)


@pytest.mark.parametrize(
    "reply", ["```" + "a" * 400_000, "```" + " " * 400_000, "``` a" * 100_000, "```\n" * 100_000]
)
def test_a_program_is_found_in_time_in_proportion_to_the_reply(reply: str) -> None:
    began = time.process_time()
    longest_block(reply)
    assert time.process_time() - began < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("judge", "reply"),
    [
        ({"judge_type": "math"}, r"\boxed{(1+x)^{999}(1+y)^{999}}"),
        ({"judge_type": "regex", "pattern": ENDLESS}, "a" * 40 + "!"),
        ({"judge_type": "math"}, r"\boxed{" * 8000),
    ],
)
def test_hostile_replies_get_0_and_the_run_goes_on(
    judge: dict[str, str], reply: str, tmp_path: Path
) -> None:
    if judge["judge_type"] == "math":
        pytest.importorskip("math_verify")
    (tmp_path / "replies.py").write_text(f"def reply(ask): return {reply!r}\n")
    rows = "".join(
        json.dumps({"question": f"q{n}", "answer": r"\sqrt{2}"}) + "\n" for n in range(4)
    )
    (tmp_path / "tasks.jsonl").write_text(rows)
    values = {
        "backbone": "debug",
        "experiment_dir": str(tmp_path / "experiment"),
        "model": {"scripted": f"{tmp_path / 'replies.py'}->reply"},
        "task_judge": judge,
        "rollout": {"judge_timeout": 60},
        "task_reader": {
            "type": "jsonl_dataset_file",
            "jsonl_dataset_file": {"training": {"file_path": str(tmp_path / "tasks.jsonl")}},
        },
    }
    report = run(load_config(values=values), workflow=solve)
    assert [episode.reward for episode in report.episodes] == [0.0] * 4
