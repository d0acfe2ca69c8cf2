"""`ajet trace branch`: a stored episode, sampled again from one of its calls on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from typer.testing import CliRunner

from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.trace.schema import OF_VALIDATION
from ajet_sdk.types import Episode
from ajet_tools.cli.app import app

AGENT = """
import asyncio
import pathlib

import ajet

@ajet.workflow
async def solve(question: str, model: ajet.Model) -> str:
    messages = [{"role": "user", "content": question}]
    for turn in range(3):
        reply = await model.chat(messages)
        messages += [reply, {"role": "user", "content": f"turn {turn}: and then?"}]
    return reply["content"]

@ajet.workflow
async def restless(question: str, model: ajet.Model) -> str:
    clock = pathlib.Path("clock")
    clock.write_text(str(int(clock.read_text()) + 1 if clock.exists() else 0))
    try:
        first = await model.chat([{"role": "user", "content": f"{question} It is {clock.read_text()} o'clock."}])
        return (await model.chat([{"role": "user", "content": first["content"]}]))["content"]
    except Exception:
        return "an agent that carries on without a model"

@ajet.workflow
async def hasty(question: str, model: ajet.Model) -> str:
    first = await model.chat([{"role": "user", "content": question}])
    if pathlib.Path("known").exists():
        return "good"
    return (await model.chat([{"role": "user", "content": first["content"]}]))["content"]

@ajet.workflow
async def team(question: str, model: ajet.Model) -> str:
    async def ask(part):
        await asyncio.sleep(0.001 * (part if pathlib.Path("turned").exists() else 3 - part))
        return (await model.chat([{"role": "user", "content": f"part {part}"}]))["content"]

    parts = await asyncio.gather(*map(ask, range(3)))
    return (await model.chat([{"role": "user", "content": " ".join(parts)}]))["content"]

@ajet.judge
def best(output: str) -> float:
    return float(output == "good")
"""
REPLIES = """
def bad(ask):
    return f"bad {len(ask.messages)}" if len(ask.messages) < 5 else "bad"

def good(ask):
    return "good"

def counted(ask):
    counted.count = getattr(counted, "count", 0) + (len(ask.messages) == 5)  # last calls, in whatever order forks run
    return "good" if counted.count == 1 else "bad"

def sampler(output=None):
    from ajet_sdk.engines.chat import TokenEngine
    from ajet_sdk.engines.scripted import ByteTokenizer
    from ajet_sdk.protocols import Sampled

    class Sampler:
        model, max_model_len, takes_pictures = "bytes", 4096, False

        async def sample(self, prompt_ids, sampling, session, pictures=()):
            tokenizer = ByteTokenizer()
            start = tokenizer.decode(prompt_ids).rpartition("assistant\\n")[2]
            if output is not None:
                return [Sampled(output, [-0.5] * len(output), "stop", 3)] * sampling.n
            ids = [*tokenizer.encode("good"[len(start):] if "good".startswith(start) else "!"), min(tokenizer.eos_ids)]
            return [Sampled(ids, [-0.5] * len(ids), "stop", 3)] * sampling.n

        def forget(self, session):
            pass

        async def aclose(self):
            pass

    return TokenEngine(Sampler(), ByteTokenizer())

tokens = sampler()
odd = sampler([0xff, 257])  # no UTF-8: tokenized again, its text has other ids
"""


def ajet(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "110"})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.stdout if code == 0 else result.output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "replies.py").write_text(REPLIES)
    (tmp_path / "tasks.jsonl").write_text('{"question": "Say good."}\n')
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def run(agent: str = "solve", replies: str = "bad") -> Episode:
    scripted = ["--model", f"replies.py:{replies}"]
    ajet(
        "run",
        f"agent.py:{agent}",
        "--judge",
        "agent.py:best",
        "--tasks",
        "tasks.jsonl",
        *scripted,
        "ajet.experiment_name=first",
    )
    [episode] = stored("launcher_record/first")
    return episode


def stored(where: str) -> list[Episode]:
    with open_trace(where) as trace:
        return episodes(trace)


def branch(episode: Episode, *arguments: str, code: int = 0) -> dict[str, Any]:
    said = ajet(
        "trace",
        "branch",
        episode.episode_id,
        "launcher_record/first",
        *arguments,
        "--json",
        code=code,
    )
    result: dict[str, Any] = json.loads(said)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True])
def test_forks_of_a_held_out_task_are_held_out(here: Path, held_out: bool) -> None:
    original = run()
    if held_out:
        [file] = Path("launcher_record/first").glob("*.duckdb")
        with duckdb.connect(str(file)) as trace:
            trace.execute(
                """UPDATE runs SET config = json_merge_patch(config, '{"tasks": "validation"}')"""
            )
    result = branch(original, "--at", "1", "-k", "1", "--model", "replies.py:good")
    with open_trace(result["directory"]) as reader:
        rows = reader.query(f"SELECT {OF_VALIDATION} AS held_out FROM episodes e").to_pylist()
    assert rows == [{"held_out": held_out}]


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 2])
def test_calls_before_the_branch_are_as_recorded(here: Path, at: int) -> None:
    original = run(replies="odd")
    result = branch(original, "--at", str(at), "-k", "2", "--model", "replies.py:good")
    forks = stored(result["directory"])
    assert [fork["reward"] for fork in result["forks"]] == [1.0, 1.0] and result["reward"] == 0.0
    assert result["counted"] == len(forks) == 2 and result["call"] == at
    for fork in forks:
        assert fork.task == original.task and len(fork.calls) == 3
        for number, (call, recorded) in enumerate(zip(fork.calls, original.calls, strict=True)):
            assert [number <= at, number < at] == [
                getattr(call, name).tolist() == getattr(recorded, name).tolist()
                for name in ("prompt_ids", "output_ids")
            ]
            assert (call.extends_call_id is None) == (number == 0)  # one timeline, in the exact ids
    assert f"(message {2 * at + 1})" in result["forks"][0]["first_difference"]


@pytest.mark.slow
def test_the_same_model_gives_the_same_episode(here: Path) -> None:
    original = run()
    result = branch(original, "--at", original.calls[1].call_id[:9], "-k", "1")
    assert result["forks"][0]["first_difference"] is None and result["mean_reward"] == 0.0
    assert "the same to the end" in ajet(
        "trace", "branch", original.episode_id, "launcher_record/first", "--at", "1", "-k", "1"
    )


@pytest.mark.slow
def test_an_agent_that_asks_something_else_is_no_fork(here: Path) -> None:
    original = run("restless")
    result = branch(original, "--at", "1", "-k", "2", code=1)
    assert result["mean_reward"] is None and result["counted"] == 0
    assert [fork["reward"] for fork in result["forks"]] == [None, None]
    assert (
        result["forks"][0]["not_replayed"]
        == 'message 0 (user) of call 0 was "good. It is 0 o\'clock." and is "good. It is 1'
        " o'clock.\""
    )
    assert all(
        fork.status == "failed" and fork.reward is None for fork in stored(result["directory"])
    )
    said = ajet(
        "trace",
        "branch",
        original.episode_id,
        "launcher_record/first",
        "--at",
        "1",
        "-k",
        "1",
        code=1,
    )
    assert "Not counted, 1 × message 0 (user) of call 0 was" in said


@pytest.mark.slow
def test_an_agent_that_returns_before_the_branch_earns_nothing(here: Path) -> None:
    original = run("hasty")
    Path("known").touch()
    result = branch(original, "--at", "1", "-k", "1", code=1)
    [fork] = result["forks"]
    assert (fork["reward"], fork["status"], fork["cause"]) == (None, "failed", "NotReplayed")
    assert fork["not_replayed"].endswith("NotReplayed: it returned before call 1")
    assert [episode.rewards for episode in stored(result["directory"])] == [()]


@pytest.mark.slow
@pytest.mark.parametrize("at", range(4))
def test_calls_beside_each_other_may_come_in_another_order(here: Path, at: int) -> None:
    original = run("team")
    Path("turned").touch()
    asked = original.calls[at].request["messages"][0]["content"]
    result = branch(original, "--at", str(at), "-k", "2", "--model", "replies.py:good")
    assert result["counted"] == 2 and "assistant" in result["forks"][0]["first_difference"]
    for fork in stored(result["directory"]):
        replies = {
            call.request["messages"][0]["content"]: call.response["choices"][0]["message"][
                "content"
            ]
            for call in fork.calls
        }
        before = [
            c.request["messages"][0]["content"]
            for c in original.calls
            if c.started_at < original.calls[at].started_at
        ]
        assert replies[asked] == "good" and all(replies[text] == "bad 1" for text in before)


@pytest.mark.slow
def test_a_reply_goes_on_from_a_token(here: Path) -> None:
    original = run(replies="tokens")
    result = branch(original, "--at", "2", "--token", "3", "-k", "2")
    for fork in stored(result["directory"]):
        call, recorded = fork.calls[2], original.calls[2]
        assert (
            call.output_ids is not None
            and recorded.output_ids is not None
            and call.logprobs is not None
        )
        assert (
            call.output_ids.tolist() == recorded.output_ids.tolist()
        )  # "goo", then "d" and the end of the turn
        assert (
            call.response["choices"][0]["message"]["content"] == "good" and len(call.logprobs) == 5
        )
    assert "takes messages and not token ids" in ajet(
        "trace",
        "branch",
        original.episode_id,
        "launcher_record/first",
        "--at",
        "0",
        "--token",
        "2",
        "--model",
        "replies.py:good",
        code=2,
    )
    assert "--token 5: the reply of call 0 has 5 tokens" in ajet(
        "trace",
        "branch",
        original.episode_id,
        "launcher_record/first",
        "--at",
        "0",
        "--token",
        "5",
        code=2,
    )


@pytest.mark.slow
def test_what_cannot_be_branched_is_refused(here: Path) -> None:
    original = run()
    command = ("trace", "branch", original.episode_id, "launcher_record/first", "--at")
    assert "no call of the workflow has that number or start of an id" in ajet(
        *command, "7", code=2
    )
    assert "sampled greedily" in ajet(*command, "0", "ajet.rollout.temperature=0", code=2)
    assert "give one trace only" in ajet(*command, "0", "launcher_record", code=2)
    assert not Path(f"launcher_record/branch-of-{original.episode_id[:12]}").exists()
    said = ajet(*command, "1", "-k", "2", "--model", "replies.py:counted")
    assert "Mean reward 0.5 over 2 forks: 1 above the original, 0 below" in said
    query = "SELECT config->'branch' AS branch FROM runs ORDER BY started_at DESC LIMIT 1"
    assert original.episode_id in ajet("trace", "sql", query, "launcher_record", "--json")
