"""`ajet run --advise`: scores of both sets, and the training that fits them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ajet_sdk.reporting.results import Report, TaskScore
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.schema import OF_VALIDATION
from ajet_sdk.types import Episode, Reward, Task
from ajet_tools.cli.app import app
from ajet_tools.cli.run import advice

AGENT = """
import ajet
import openai

@ajet.workflow
def solve(question: str) -> str:
    client = openai.OpenAI()
    reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content or ""
"""

REPLIES = """
from collections import Counter

turns = Counter()

def reply(ask):
    question = ask.body["messages"][-1]["content"]
    turns[question] += 1
    return "yes" if question.startswith("easy") or (question.startswith("even") and turns[question] % 2) else "no"
"""


def report(*rewards: list[float | None]) -> Report:
    tasks = [Task(main_query=str(number)) for number in range(len(rewards))]
    scores = (
        TaskScore(task, tuple(_episode(task, value) for value in values))
        for task, values in zip(tasks, rewards, strict=True)
    )
    return Report("r", Path(), tuple(scores), max(map(len, rewards)))


def _episode(task: Task, reward: float | None) -> Episode:
    return (
        Episode(task=task, status="failed")
        if reward is None
        else Episode(task=task, rewards=(Reward(value=reward),))
    )


HALF, NEVER, ALWAYS = [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]


@pytest.mark.parametrize(
    ("train", "held_out", "words"),
    [
        (
            report(HALF, HALF, NEVER),
            report(HALF),
            "reinforcement learning (`ajet train`): 2 of 3 tasks have signal",
        ),
        (report(HALF, HALF, NEVER), report(NEVER), "the held-out tasks are never solved"),
        (report(HALF, HALF, NEVER), None, "pass --val-tasks"),
        (
            report(*[NEVER] * 40),
            None,
            "so reinforcement learning has nothing to learn from. Train on demonstrations",
        ),
        (report(NEVER), None, "(2 attempts are few: confirm it with a larger -k)"),
        (
            report([0.1, 0.2]),
            None,
            "reinforcement learning (`ajet train`): 1 of 1 tasks have signal",
        ),
        (report(ALWAYS, NEVER), None, "no task has signal (1 always solved, 1 never)"),
        (report(*[ALWAYS] * 9), None, "harder tasks: 100% of attempts"),
        (
            report(HALF, *[NEVER] * 9),
            None,
            "(`ajet run --out`, `ajet dataset filter`): 1 of 10 have signal (0 always solved, 9 never)",
        ),
        (report([None, None]), None, "make the agent run: no attempt has a reward"),
    ],
)
def test_the_advice_fits_the_scores(train: Report, held_out: Report | None, words: str) -> None:
    reports = {"training": train} | ({} if held_out is None else {"held-out": held_out})
    assert words in " ".join(advice(reports))


@pytest.mark.slow
def test_both_sets_are_scored_and_held_out_tasks_stay_held_out(tmp_path: Path) -> None:
    for name, content in {"agent.py": AGENT, "replies.py": REPLIES}.items():
        (tmp_path / name).write_text(content)
    for name, kinds in {"tasks": ("even", "hard"), "val": ("easy",)}.items():
        rows = [
            {"question": f"{kind} {name} {i}", "answer": "yes"} for kind in kinds for i in range(2)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [
        "--tasks",
        f"{tmp_path}/tasks.jsonl",
        "--val-tasks",
        f"{tmp_path}/val.jsonl",
        "--exp-dir",
        str(tmp_path),
    ]
    command = ["run", f"{tmp_path}/agent.py:solve", "--judge", "exact", *files, "-k", "4"]
    command += ["--model", f"{tmp_path}/replies.py:reply"]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["training"]["tasks"] == 4 and result["training"]["with_signal"] == 2
    assert result["training"]["pass_at"]["1"] == 0.25 and result["held-out"]["reward"] == 1.0
    assert result["next"][0].startswith("reinforcement learning")
    [directory] = tmp_path.glob("agent-*")
    with open_trace(directory) as trace:
        sql = (
            "SELECT json_extract_string(task, '$.main_query') AS asked FROM episodes e WHERE"
            f" {OF_VALIDATION}"
        )
        assert {row["asked"] for row in trace.query(sql).to_pylist()} == {
            "easy val 0",
            "easy val 1",
        }
    done = CliRunner().invoke(app, command)
    assert (
        "training  4" in done.output
        and "2 of 4" in done.output
        and "Next: reinforcement learning" in done.output
    )


def test_an_old_name_leads_to_the_new_one() -> None:
    done = CliRunner().invoke(app, ["baseline"])
    assert done.exit_code == 2 and "ajet run --advise" in done.output
