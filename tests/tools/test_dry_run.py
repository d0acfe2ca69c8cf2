"""`ajet train --dry-run`: the counts of a run, and its cost by recorded episodes of its agent."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ajet_tools.cli.app import app
from tests.serving import completing

AGENT = """
import ajet
import openai

@ajet.workflow
def solve(question: str) -> str:
    client = openai.OpenAI()
    for _ in range(3):
        reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content or ""

@ajet.judge
def right(output: str) -> float:
    return float(output == "yes")
"""
JOB = """
ajet:
  backbone: tinker
  experiment_name: job
  model: {path: some-model}
  rollout: {user_workflow: agent.py->solve, num_repeat: 4, temperature: 1.0}
  task_judge: {judge_protocol: agent.py->right}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file: {training: {file_path: tasks.jsonl}, validation: {file_path: val.jsonl}}
  data: {train_batch_size: 2}
  trainer_common: {total_steps: 5, test_freq: 0, val_before_train: true, val_pass_n: 2, use_kl_loss: KL}
  tinker: {base_url: "http://127.0.0.1:9", prices: {prefill: 1.0, sample: 10.0, train: 100.0}}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text(
        "".join(f'{{"main_query": "task {n}"}}\n' for n in range(7))
    )
    (tmp_path / "val.jsonl").write_text("".join(f'{{"main_query": "val {n}"}}\n' for n in range(3)))
    return tmp_path / "job.yaml"


def dry_run(job: Path, *, kl: bool) -> str:
    job.write_text(JOB.replace("KL", str(kl).lower()))
    done = CliRunner().invoke(app, ["train", "--conf", str(job), "--dry-run"])
    assert done.exit_code == 0, done.output
    return done.output


def test_without_recorded_episodes_it_counts_and_says_how_to_record_some(job: Path) -> None:
    output = dry_run(job, kl=False)
    # 5 steps of 2 x 4; two validations of 3 tasks, sampled twice and once greedily
    assert "5 steps of 2 tasks x 4 attempts, 18 episodes of validation: 58 episodes" in output
    assert "ajet run" in output
    assert "$" not in output
    assert not (job.parent / "launcher_record").exists(), "nothing is begun"


@pytest.mark.parametrize("kl", [False, True])
def test_tokens_and_cost_are_those_of_recorded_episodes_of_the_agent(job: Path, kl: bool) -> None:
    with completing(lambda body: "yes", usage=(1000, 100)) as (url, _):
        shared = [
            "run",
            "--judge",
            "agent.py:right",
            "--tasks",
            "tasks.jsonl",
            "--model",
            f"m@{url}",
        ]
        assert CliRunner().invoke(app, [*shared, "agent.py:solve"]).exit_code == 0
    (job.parent / "replies.py").write_text("def reply(ask):\n    return 'no'\n")
    scripted = ["run", "agent.py:solve", "--judge", "agent.py:right", "--tasks", "tasks.jsonl"]
    assert CliRunner().invoke(app, [*scripted, "--model", "replies.py:reply"]).exit_code == 0
    output = dry_run(job, kl=kl)
    assert (
        "3.0 calls, 3,000 prompt and 300 sampled tokens, 1,100 to train on (mean of 7 recorded)"
        in output
    )
    sampled, trained = 58 * 300, 40 * 1100
    prefilled = (
        58 * 3000 + 2 * kl * trained
    )  # the loss is computed here, and the reference is asked
    assert f"at most about ${(prefilled + 10 * sampled + 100 * trained) / 1e6:,.2f}" in output


def test_episodes_of_another_agent_do_not_count(job: Path) -> None:
    (job.parent / "other.py").write_text(AGENT)
    with completing(lambda body: "yes") as (url, _):
        shared = [
            "run",
            "--judge",
            "other.py:right",
            "--tasks",
            "tasks.jsonl",
            "--model",
            f"m@{url}",
        ]
        assert CliRunner().invoke(app, [*shared, "other.py:solve"]).exit_code == 0
    assert "no episode of this agent" in dry_run(job, kl=False)
