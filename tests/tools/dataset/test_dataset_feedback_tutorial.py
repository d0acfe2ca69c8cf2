"""`tutorial/example_feedback_tracing`: an agent in service, simulated users, and the tasks that
come of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.config.config import load_config
from ajet_sdk.learn.recipe import wants_recipe
from ajet_sdk.tasks.load import load_tasks
from ajet_tools.cli.app import app

ROOT = Path(__file__).parents[3]
TUTORIAL = ROOT / "tutorial" / "example_feedback_tracing"


def calculate(body: dict[str, Any], number: int) -> str:
    """A model that gives up where the first number is odd."""
    a, operator, b = re.findall(r"\d+|[-+*]", body["messages"][1]["content"])
    if int(a) % 2:
        return "I do not know."
    return str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator])


def program(name: str, *arguments: Any, url: str = "") -> str:
    env = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "PYTHONPATH": str(ROOT)}
    if not url:  # who asks nobody needs no key
        del env["OPENAI_API_KEY"], env["OPENAI_BASE_URL"]
    done = subprocess.run(
        [sys.executable, TUTORIAL / name, *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_loop_from_a_served_agent_to_tasks(tmp_path: Path, model_server: Any) -> None:
    server = model_server(calculate)
    traces, tasks = tmp_path / "traces", tmp_path / "tasks.jsonl"
    assert "answered 60 questions" in program(
        "service.py", traces, "--questions", 60, url=server.url
    )
    assert "simulated users on 60 answers" in program("users.py", traces)
    more = ["--accept-outputs", "--need-answer", "--out", str(tasks)]
    done = CliRunner().invoke(app, ["trace", "export", str(traces), "--format", "tasks", *more])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in tasks.read_text().splitlines()]
    assert len(rows) > 15 and len({row["main_query"] for row in rows}) == len(rows)
    right = 0
    for row in rows:
        a, operator, b = re.findall(r"\d+|[-+*]", row["main_query"])
        truth = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator]
        right += row["metadata"]["answer"] == str(truth)
        assert row["init_messages"][0] == {"role": "system", "content": "Answer with a number."}
    assert right / len(rows) > 0.85  # one user in fifty is mistaken
    held_out = {
        json.loads(line)["question"]
        for line in (TUTORIAL / "../example_math_agent/val.jsonl").open()
    }
    assert held_out.isdisjoint(row["main_query"] for row in rows)


def test_the_config_reads_the_tasks_and_makes_the_model_of_the_math_agent(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"main_query": "What is 1+1?", "metadata": {"answer": "2"}}) + "\n")
    where = {"task_reader": {"jsonl_dataset_file": {"training": {"file_path": str(tasks)}}}}
    config = load_config(TUTORIAL / "feedback.yaml", [], where)
    found = load_tasks(config)
    assert wants_recipe(config) and len(found.train) == 1 and len(found.val) == 256
