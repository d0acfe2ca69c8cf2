"""Agents that are programs: what a child process is given, and how a program ends with its
episode."""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.agent.context import current_episode
from ajet_sdk.agent.workflow import Workflow, WorkflowOutput
from ajet_sdk.capture.hooks import installed
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ConfigError, EpisodeError, ProgramFailed
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_episode
from tests.waiting import is_running, until

ASK = """
import json, os, sys
from urllib.request import Request, urlopen
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
body = {"model": sys.argv[1], "messages": [{"role": "user", "content": sys.stdin.read()}]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))["choices"][0]["message"]["content"])
"""


def in_loop(test: Any) -> Any:
    """An async test."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with installed(), Gateway() as running:
        yield running


async def episode(gateway: Gateway, workflow: Any, **rollout: Any) -> ajet.Episode:
    config = load_config(values={"ajet": {"rollout": rollout}})
    task = ajet.Task(task_id="one", main_query="17 plus 25")
    engine = ScriptedEngine(lambda ask: "policy: " + ask.body["messages"][-1]["content"])
    return await run_episode(
        workflow, one, Attempt(task), engine=engine, gateway=gateway, config=config
    )


@ajet.judge
def one() -> float:
    return 1.0


@in_loop
async def test_a_program_is_the_agent(gateway: Gateway, tmp_path: Path) -> None:
    @ajet.workflow
    async def ask(question: str) -> str:
        done = await ajet.run_program(
            [sys.executable, "-c", ASK, "any"], cwd=tmp_path, input=question
        )
        assert done.returncode == 0 and done.stderr == "" and done.seconds > 0
        return done.stdout.strip()

    finished = await episode(gateway, ask)
    assert (finished.status, finished.output) == ("succeeded", "policy: 17 plus 25")
    assert [call.trainable for call in finished.calls] == [True]
    assert finished.calls[0].output_ids is not None


@in_loop
async def test_a_program_with_a_handle_may_name_several_models(gateway: Gateway) -> None:
    @ajet.workflow
    async def team(model: ajet.Model, question: str) -> str:
        env = ajet.child_env(model.agent("coder"))
        for name in ("large", "small"):
            await ajet.run_program([sys.executable, "-c", ASK, name], env=env, input=question)
        return ""

    finished = await episode(gateway, team)
    assert [(call.agent, call.trainable) for call in finished.calls] == [("coder", True)] * 2

    @ajet.workflow
    async def forgets(model: ajet.Model, question: str) -> str:
        return str(ajet.child_env())

    finished = await episode(gateway, forgets)
    assert finished.cause == "EpisodeError" and "use ajet.child_env(model)" in str(finished.error)


@in_loop
async def test_a_class_workflow_gives_its_endpoint(gateway: Gateway) -> None:
    class Agent(Workflow):
        async def execute(self, workflow_task: Any, tuner: Any) -> WorkflowOutput:
            env = ajet.child_env(tuner.as_oai_baseurl_apikey(agent_name="coder"))
            await ajet.run_program([sys.executable, "-c", ASK, "any"], env=env, input="x")
            return WorkflowOutput(reward=1)

    finished = await episode(gateway, Agent)
    assert [call.agent for call in finished.calls] == ["coder"], finished.error


@in_loop
async def test_the_environment(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-mine")

    @ajet.workflow
    def look(question: str) -> dict[str, str]:
        return ajet.child_env()

    found = (await episode(gateway, look)).output
    assert found is not None
    assert {name: value for name, value in os.environ.items() if found[name] != value}.keys() <= {
        *("NO_PROXY", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"),
    }
    assert found["NO_PROXY"] == "example.org,127.0.0.1" and found["no_proxy"] == "127.0.0.1"
    assert found["OPENAI_BASE_URL"] == found["ANTHROPIC_BASE_URL"] + "/v1"
    with pytest.raises(EpisodeError, match="needs an active episode"):
        ajet.child_env()
    with pytest.raises(EpisodeError, match="needs an active episode"):
        await ajet.run_program(["true"])


@in_loop
async def test_what_fails_says_why(gateway: Gateway, tmp_path: Path) -> None:
    env = dict(os.environ)
    with pytest.raises(ProgramFailed) as failed:
        await ajet.run_program(
            ["sh", "-c", "echo so far; echo the cause >&2; exit 3"], cwd=tmp_path, env=env
        )
    assert "exited with status 3" in str(failed.value) and str(failed.value).endswith(
        "stderr:\nthe cause"
    )
    assert failed.value.result is not None and failed.value.result.stdout == "so far\n"
    done = await ajet.run_program(["sh", "-c", "kill -9 $$"], env=env, check=False)
    assert done.returncode == -9
    with pytest.raises(ProgramFailed, match=r"was killed by SIGKILL after .*; it printed nothing"):
        await ajet.run_program(["sh", "-c", "kill -9 $$"], env=env)
    with pytest.raises(ProgramFailed, match="'no-such-program' could not be started: No such file"):
        await ajet.run_program(["no-such-program"], env=env)
    with pytest.raises(ProgramFailed, match=r"its working directory .*nowhere does not exist"):
        await ajet.run_program(["true"], cwd=tmp_path / "nowhere", env=env)
    with pytest.raises(ConfigError, match="the command must be a list"):
        await ajet.run_program("echo hello", env=env)


SLEEPS = 'sleep 600 & echo $! > "$0/inner"; echo $$ > "$0/outer"; echo begun; wait'


def pids(folder: Path) -> list[int]:
    until(
        lambda: all(
            (folder / name).exists() and (folder / name).read_text() for name in ("inner", "outer")
        )
    )
    return [int((folder / name).read_text()) for name in ("inner", "outer")]


@in_loop
async def test_past_its_time_it_ends_with_its_group(gateway: Gateway, tmp_path: Path) -> None:
    @ajet.workflow
    async def slow(question: str) -> None:
        await ajet.run_program(["sh", "-c", SLEEPS, str(tmp_path)], timeout=0.3)

    finished = await episode(gateway, slow)
    assert finished.status == "timeout" and finished.rewards == ()
    assert "did not finish within 0.3 s; the end of its stdout:\nbegun" in str(finished.error)
    until(lambda: not any(map(is_running, pids(tmp_path))))


@pytest.mark.parametrize("how", ["async", "in a thread", "left behind"])
@in_loop
async def test_the_end_of_the_episode_ends_it(gateway: Gateway, tmp_path: Path, how: str) -> None:
    async def run() -> None:
        await ajet.run_program(["sh", "-c", SLEEPS, str(tmp_path)])

    @ajet.workflow(timeout=0.5)
    async def waits(question: str) -> None:
        await run()

    @ajet.workflow(timeout=0.5)
    def waits_in_a_thread(question: str) -> None:
        asyncio.run(run())

    @ajet.workflow
    async def returns(question: str) -> str:
        returns.task = asyncio.ensure_future(run())  # type: ignore[attr-defined]
        await asyncio.to_thread(pids, tmp_path)
        return "done"

    workflow = {"async": waits, "in a thread": waits_in_a_thread, "left behind": returns}[how]
    finished = await episode(gateway, workflow)
    assert finished.status == ("succeeded" if how == "left behind" else "timeout")
    until(lambda: not any(map(is_running, pids(tmp_path))))


@in_loop
async def test_a_cancelled_episode_leaves_no_orphan(gateway: Gateway, tmp_path: Path) -> None:
    @ajet.workflow
    async def waits(question: str) -> None:
        await ajet.run_program(["sh", "-c", SLEEPS, str(tmp_path)])

    running = asyncio.ensure_future(episode(gateway, waits))
    found = await asyncio.to_thread(pids, tmp_path)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    until(lambda: not any(map(is_running, found)))


@in_loop
async def test_a_program_that_ends_takes_its_background_along(tmp_path: Path) -> None:
    done = await ajet.run_program(
        ["sh", "-c", f"({SLEEPS}) & sleep 0.1", str(tmp_path)], env=dict(os.environ)
    )
    assert done.seconds < 60, "what it leaves behind holds its output open, and is not waited for"
    until(lambda: not any(map(is_running, pids(tmp_path))))
    assert current_episode.get() is None
