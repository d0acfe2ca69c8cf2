"""A real training at a server, with workers in processes of their own."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import httpx
import pytest

import ajet
from ajet_sdk.errors import HeldOutTask, SwarmOffline
from ajet_sdk.swarm.messages import SwarmStatus
from ajet_sdk.trace.reader import ledger_balance, open_trace
from ajet_sdk.types import Task
from tests.programs import running
from tests.tiny_models import save_tiny
from tests.waiting import until

AGENT = """
import ajet
import openai


@ajet.workflow
async def solve(question: str) -> str:
    client = openai.AsyncOpenAI()
    messages = [{"role": "user", "content": question}]
    reply = await client.chat.completions.create(model="gpt-4o", messages=messages, max_tokens=8)
    return reply.choices[0].message.content or ""


@ajet.judge
def length(output: str) -> float:
    return len(output) / 10
"""
RELAY = """
import ajet


@ajet.workflow(trainable_targets=["planner", "executor"])
async def solve(question: str, model: ajet.Model) -> str:
    said = question
    for target in ("planner", "executor"):
        agent = model.agent(f"the {target}", target_tag=target)
        reply = await agent.chat([{"role": "user", "content": said}], max_tokens=8)
        said = reply["content"] or "?"
    return said


@ajet.judge
def length(output: str) -> float:
    return len(output) / 10
"""
CONFIG = """
ajet:
  backbone: local
  experiment_name: swarm
  experiment_dir: {directory}/run
  model: {{path: {directory}/model}}
  data: {{train_batch_size: 2}}
  rollout: {{user_workflow: agent.py->solve, num_repeat: 2, max_response_length_in_one_turn: 8}}
  task_judge: {{judge_type: customized_protocol, judge_protocol: agent.py->length}}
  task_reader:
    type: jsonl_dataset_file
    jsonl_dataset_file:
      training: {{file_path: tasks.jsonl}}
      validation: {{file_path: val.jsonl}}
  trainer_common: {{total_steps: {steps}, test_freq: 2, val_pass_n: 1, logger: []}}
"""


def prepare(directory: Path, steps: int) -> None:
    save_tiny(directory / "model")
    (directory / "agent.py").write_text(AGENT)
    for name, count in (("tasks", 6), ("val", 2)):
        rows = [{"question": f"Say {name} {n}.", "task_id": f"{name}{n}"} for n in range(count)]
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (directory / "job.yaml").write_text(CONFIG.format(directory=directory, steps=steps))


def status_of(url: str) -> SwarmStatus | None:
    try:
        return ajet.SwarmClient(url, patience=0).status()
    except Exception:  # noqa: BLE001  # not there yet
        return None


@pytest.mark.slow
def test_a_server_without_a_config_gets_one_and_others_join(tmp_path: Path) -> None:
    prepare(tmp_path, steps=6)
    with running(tmp_path) as start:
        server = start("swarm", "start", "--port", "0")
        url = server.url()
        owner = start("train", "--conf", "job.yaml", "--swarm", url)
        until(lambda: (status := status_of(url)) and status.state == "collecting")
        joined = start("train", "job.yaml", "--swarm", url)
        assert owner.wait() == 0, owner.output
        assert joined.wait() == 0, joined.output
        assert "validation after step" in owner.output + joined.output
        status = status_of(url)
        assert status is not None and status.policy_version == 6
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 130
    with open_trace(tmp_path / "launcher_record/swarm") as trace:
        [row] = trace.query("SELECT run_id, config FROM runs").to_pylist()
        assert ledger_balance(trace, row["run_id"]) == []
        rows = trace.query(
            "SELECT DISTINCT split, step, decoding FROM episodes WHERE status = 'succeeded'"
            " AND split = 'val' ORDER BY ALL"
        ).to_pylist()
    steps = sorted({row["step"] for row in rows})
    # the client that validates may get no place in a step, if the other one is faster
    assert steps[0] >= 2 and steps[-1] == 6
    assert len(rows) == 2 * len(steps), "sampled and greedy"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["absent", "model"])
def test_the_server_needs_no_recipe_and_says_why_it_cannot_start(path: str, tmp_path: Path) -> None:
    """A recipe is code beside the agent: the server has neither."""
    prepare(tmp_path, steps=1)
    change = [f"ajet.model.path={tmp_path / path}", "ajet.model.recipe=recipe.py->make"]
    with running(tmp_path) as start:
        server = start("swarm", "start", "--port", "0")
        client = start("train", "job.yaml", "--swarm", server.url(), *change)
        code = client.wait()
        assert (code == 0) == (path == "model")
        if path == "absent":
            assert str(tmp_path / path) in client.output
            assert server.process.poll() is None


@pytest.mark.slow
def test_a_training_that_fails_ends_neither_its_server_nor_the_next_one(tmp_path: Path) -> None:
    prepare(tmp_path, steps=1)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, where checkpoints were to be written")
    with running(tmp_path) as start:
        server = start("swarm", "start", "--port", "0")
        url = server.url()
        key = f"ajet.trainer_common.checkpoint_base_dir={blocked}"
        first = start("train", "job.yaml", "--swarm", url, key)
        until(lambda: (status := status_of(url)) and str(blocked) in status.failure)
        first.process.kill()
        with pytest.raises(SwarmOffline, match=re.escape(str(blocked))):
            ajet.SwarmClient(url, patience=0).episode().__enter__()
        second = start("train", "job.yaml", "--swarm", url)
        assert second.wait_beside(server) == 0, second.output + server.output


@pytest.mark.slow
def test_a_server_trains_a_model_for_each_target_that_its_client_names(tmp_path: Path) -> None:
    prepare(tmp_path, steps=2)
    (tmp_path / "agent.py").write_text(RELAY)
    with running(tmp_path) as start:
        server = start("swarm", "start", "--port", "0")
        client = start(
            "train", "job.yaml", "--swarm", server.url(), "ajet.rollout.trained_models=separate"
        )
        assert client.wait() == 0, client.output
        models = until(lambda: [*tmp_path.glob("launcher_record/swarm/checkpoint/*/models")])[0]
        server.process.send_signal(signal.SIGINT)
        server.wait()
    with open_trace(tmp_path / "launcher_record/swarm") as trace:
        [run] = trace.query("SELECT run_id FROM runs").to_pylist()
        assert ledger_balance(trace, run["run_id"]) == []
        rows = trace.query(
            "SELECT DISTINCT target_tag, model FROM calls WHERE trainable AND error IS NULL"
        ).to_pylist()
        [gap] = trace.query(
            "SELECT max(value) AS most FROM metrics WHERE name = 'train/logprob_gap_max'"
        ).to_pylist()
    assert {row["model"].rpartition("/")[2] for row in rows} == {"planner", "executor"}
    assert all(row["model"].endswith("/" + row["target_tag"]) for row in rows)
    assert gap["most"] < 1e-4
    assert all((models / target / "config.json").is_file() for target in ("planner", "executor"))


@pytest.mark.slow
def test_a_server_whose_training_made_no_update_says_so_by_its_exit_code(tmp_path: Path) -> None:
    prepare(tmp_path, steps=1)
    (tmp_path / "judge.py").write_text("def zero(output): return 0.0\n")
    with running(tmp_path) as start:
        server = start("swarm", "start", "job.yaml", "--port", "0")
        worker = start(
            *("work", server.url(), "agent.py:solve", "--judge", "judge.py:zero"),
            *("--tasks", "tasks.jsonl"),
        )
        assert worker.wait() == 0, worker.output
        assert server.wait() == 3, server.output


@pytest.mark.slow
def test_an_episode_that_a_kill_left_open_is_booked_for_its_client(tmp_path: Path) -> None:
    prepare(tmp_path, steps=1)
    with running(tmp_path) as start:
        server = start("swarm", "start", "job.yaml", "--port", "0")
        url = server.url()
        until(lambda: (status := status_of(url)) and status.state == "collecting")
        task = Task(task_id="t", main_query="Say something.")
        episode = ajet.SwarmClient(url, name="ada").episode(task, split="val").__enter__()
        reply = httpx.post(
            f"{episode.base_url}/chat/completions",
            json={"model": episode.model, "messages": [{"role": "user", "content": "hello"}]},
            headers={"authorization": f"Bearer {episode.api_key}"},
            timeout=60,
        )
        reply.raise_for_status()
        held_out = Task(task_id="v", main_query="What is held out?")
        ajet.SwarmClient(url).episode(held_out, split="val").__enter__()  # without a call
        server.process.kill()
        server.process.wait()
        port = str(httpx.URL(url).port)
        again = start("swarm", "start", "job.yaml", "--port", port, "--resume")
        until(lambda: (status := status_of(url)) and status.state == "collecting")
        with pytest.raises(HeldOutTask):
            ajet.SwarmClient(url).episode(held_out).__enter__()
        worker = start("work", url, "agent.py:solve", "--judge", "agent.py:length")
        assert worker.wait_beside(again) == 0, worker.output + again.output
    with open_trace(tmp_path / "run") as trace:
        [row] = trace.query(
            "SELECT e.client, e.task_id, e.split, l.outcome, l.tokens > 0 AS counted"
            " FROM episodes e JOIN ledger l USING (episode_id) WHERE e.status = 'aborted'"
        ).to_pylist()
    assert row == {
        "client": "ada",
        "task_id": "t",
        "split": "val",
        "outcome": "abandoned",
        "counted": True,
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "stopped"])
def test_a_worker_goes_on_when_its_server_is_back(tmp_path: Path, how: signal.Signals) -> None:
    prepare(tmp_path, steps=6)
    with running(tmp_path) as start:
        server = start("swarm", "start", "job.yaml", "--port", "0")
        url = server.url()
        port = str(httpx.URL(url).port)
        worker = start(
            *("work", url, "agent.py:solve", "--judge", "agent.py:length"),
            *("--tasks", "tasks.jsonl", "--json"),
        )
        until(lambda: (status := status_of(url)) and status.policy_version >= 2)
        server.process.send_signal(how)
        server.process.wait()
        again = start("swarm", "start", "job.yaml", "--port", port, "--resume")
        assert worker.wait() == 0, worker.output
        assert again.wait() == 0, again.output
    with open_trace(tmp_path / "run") as trace:
        [row] = trace.query("SELECT run_id FROM runs WHERE status = 'finished'").to_pylist()
        assert ledger_balance(trace, row["run_id"]) == []
        [steps] = trace.query(
            "SELECT count(DISTINCT step) AS n FROM ledger WHERE outcome = 'trained'"
        ).to_pylist()
    assert steps["n"] >= 1
