"""`ajet work` and `ajet train --swarm` as programs of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import ConfigError
from ajet_sdk.swarm_worker import config_for_server
from ajet_sdk.types import Task
from ajet_tools.cli.work import split_url
from tests.sdk.swarm.scripted_server import ScriptedSwarm
from tests.waiting import until

AGENT = """
import asyncio

import ajet


@ajet.workflow
async def solve(question: str, model: ajet.Model) -> str:
    reply = await model.chat([{"role": "user", "content": question}])
    return reply.content


@ajet.workflow
async def sleep(question: str, model: ajet.Model) -> str:
    reply = await model.chat([{"role": "user", "content": question}])
    await asyncio.sleep(3600)
    return reply.content


@ajet.judge
def is_ok(output: str) -> bool:
    return output == "ok"
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with an agent and its tasks."""
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"question": f"Say {word}.", "task_id": word} for word in ("yes", "no", "maybe")]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def start(
    directory: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A worker in its own process."""
    return subprocess.Popen(
        [sys.executable, "-m", "ajet", "work", *arguments],
        cwd=directory,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_worker_ends_with_the_training(directory: Path) -> None:
    with ScriptedSwarm(directory / "server") as server:
        worker = start(
            directory,
            server.url,
            "agent.py:solve",
            *("--judge", "agent.py:is_ok", "--tasks", "tasks.jsonl", "--json"),
        )
        episodes = server.end_step()
        server.finish()
        out, err = worker.communicate(timeout=120)
        assert worker.returncode == 0, err
        summary = json.loads(out)
    assert {e.episode_id for e in episodes} <= {r["episode_id"] for r in summary["receipts"]}
    assert summary["reward"] == 1.0


@pytest.mark.slow
def test_a_worker_needs_neither_torch_nor_the_servers_files(directory: Path) -> None:
    (directory / "without").mkdir()
    for package in ("torch", "transformers", "tokenizers", "textual", "ray"):
        (directory / "without" / f"{package}.py").write_text("raise ImportError('not installed')")
    tasks = [Task(metadata={"question": "Say yes."}, task_id="yes")]
    with ScriptedSwarm(directory / "server", planned=tasks, groups=1) as server:
        worker = start(
            directory,
            server.url,
            *("agent.py:solve", "--judge", "agent.py:is_ok"),
            environment={"PYTHONPATH": str(directory / "without")},
        )
        episodes = server.end_step()
        server.finish()
        _, err = worker.communicate(timeout=120)
        assert worker.returncode == 0, err
    assert [e.reward for e in episodes] == [1.0, 1.0]


@pytest.mark.slow
def test_ctrl_c_aborts_open_episodes(directory: Path) -> None:
    with ScriptedSwarm(directory / "server") as server:
        worker = start(
            directory,
            server.url,
            *("agent.py:sleep", "--judge", "agent.py:is_ok", "--tasks", "tasks.jsonl"),
        )
        until(lambda: len(server.collection.attempts.open) == 4)
        worker.send_signal(signal.SIGINT)
        worker.communicate(timeout=120)
        assert worker.returncode == 130
        assert server.collection.attempts.open == {}
        assert server.recorded() == []
        assert until(lambda: server.collection.pool.groups == [])


@pytest.mark.slow
def test_a_validation_is_scored(directory: Path) -> None:
    with ScriptedSwarm(directory / "server", lambda ask: "ok") as server:
        worker = start(
            directory,
            server.url,
            *("agent.py:solve", "--judge", "agent.py:is_ok", "--tasks", "tasks.jsonl"),
            *("--split", "val", "-k", "2", "--json"),
        )
        out, err = worker.communicate(timeout=120)
        assert worker.returncode == 0, err
    summary = json.loads(out)
    assert (summary["episodes"], summary["reward"]) == (6, 1.0)
    assert summary["pass_at"] == {"1": 1.0, "2": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("http://127.0.0.1:1",),
        ("http://127.0.0.1:1", "agent.py:missing", "--judge", "agent.py:is_ok"),
        ("http://127.0.0.1:1", "agent.py:solve", "--judge", "exact", "--split", "val"),
        ("agent.py:solve", "--judge", "agent.py:is_ok"),
    ],
)
def test_mistakes_are_told_before_any_request(arguments: tuple[str, ...], directory: Path) -> None:
    worker = start(directory, *arguments, environment={"AJET_SWARM_URL": ""})
    _, err = worker.communicate(timeout=120)
    assert worker.returncode == 2, err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "url", "rest"),
    [
        (["http://host:1", "agent.py:solve"], "http://host:1", ["agent.py:solve"]),
        (["host:10086", "agent.py:solve", "a=1"], "host:10086", ["agent.py:solve", "a=1"]),
        (["[::1]:10086"], "[::1]:10086", []),
        (["https://host/path/", "x"], "https://host/path/", ["x"]),
        (["agent.py:solve"], None, ["agent.py:solve"]),
        (["package.module:solve"], None, ["package.module:solve"]),
        ([], None, []),
    ],
)
def test_the_server_stands_before_the_agent(
    arguments: list[str], url: str | None, rest: list[str]
) -> None:
    assert split_url(arguments) == (url, rest)


def test_the_server_gets_the_config_without_what_is_the_clients() -> None:
    config = Config(
        experiment_name="joined",
        experiment_dir="/somewhere/here",
        model={"path": "Qwen/Qwen2.5-0.5B-Instruct"},
        data={"train_batch_size": 2},
        rollout={"user_workflow": "agent.py->solve", "num_repeat": 3, "max_env_worker": 5},
        task_judge={"judge_type": "customized_protocol", "judge_protocol": "agent.py->is_ok"},
        trainer_common={"total_epochs": 3},
    )
    sent = yaml.safe_load(config_for_server(config, tasks=10))
    received = load_config(values=sent)
    assert received.experiment_name == "joined"
    assert (received.model.path, received.rollout.num_repeat) == (config.model.path, 3)
    assert received.trainer_common.total_steps == 15
    assert received.rollout.user_workflow is None
    for key in ("task_reader", "task_judge", "experiment_dir", "rollout.max_env_worker"):
        assert not received.is_set(key)


def test_a_debug_run_is_not_sent() -> None:
    with pytest.raises(ConfigError):
        config_for_server(Config(backbone="debug"), tasks=1)
