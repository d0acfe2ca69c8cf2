"""`ajet trace rejudge diff` on the traces of real runs of the starter."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run, Task
from ajet_tools.cli.app import app

EVIL = "[bold red]x[/] \x1b[31mred\x07 \u202eback"


def ajet(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "110"})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.stdout if code == 0 else result.output


@contextmanager
def apart() -> Iterator[None]:
    """What the starter's agent brings into this process is gone afterwards."""
    path, before = [*sys.path], set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if "demo" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    with apart():
        yield


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starter, run twice: as it is, and with replies that are always right. Tests may add files
    to it."""
    here = tmp_path_factory.mktemp("again")
    with pytest.MonkeyPatch.context() as patch, apart():
        patch.chdir(here)
        ajet("init", "demo")
        patch.chdir(here / "demo")
        text = Path("replies.py").read_text()
        Path("sure.py").write_text(text.replace("total if total <= 100 else total + 1", "total"))
        common = [
            "agent.py:solve",
            "--judge",
            "agent.py:exact",
            "--tasks",
            "tasks.jsonl",
            "-k",
            "2",
        ]
        for name, script in (("first", "replies.py:reply"), ("second", "sure.py:reply")):
            ajet("run", *common, "--model", script, f"ajet.experiment_name={name}")
    return here / "demo"


@pytest.fixture
def demo(starter: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(starter)
    return starter


def first_episode(where: str) -> str:
    listed = json.loads(ajet("trace", "ls", where, "--json"))["episodes"]
    return str(min(listed, key=lambda e: (e["task_id"], e["attempt"]))["episode_id"])


def run_of(where: str) -> str:
    return str(json.loads(ajet("trace", "ls", where, "--json"))["run_id"])


WHERE = "launcher_record/first"


@pytest.mark.slow
def test_rejudge(demo: Path) -> None:
    Path("judges.py").write_text(
        "def strict(output, answer):\n    if answer == '99':\n        raise"
        " ValueError('ninety-nine')\n    return float(output == answer and len(output) =="
        " 2)\n\n\ndef never(output):\n    return None\n"
    )
    before = hashlib.sha256((demo / WHERE / "trace.duckdb").read_bytes()).hexdigest()
    said = ajet("trace", "rejudge", WHERE, "--judge", "judges.py:strict")
    assert "Mean reward 0.7143 → 0.7143 (+0) over 14 episodes with both" in said
    assert "The judge failed, 2 × ValueError: ninety-nine (episode " in said
    found = json.loads(ajet("trace", "rejudge", WHERE, "--judge", "regex:^1", "--json"))
    assert found["episodes"] == 16 and found["reward_after"] < found["reward_before"] == 0.75
    assert found["groups"]["groups"] == 8 and found["failures"] == []
    assert len(found["changed"]) == sum(row["change"] != 0 for row in found["tasks"]) * 2
    picked = json.loads(
        ajet("trace", "rejudge", WHERE, "--judge", "exact", "--filter", "reward<0.5", "--json")
    )
    assert picked["episodes"] == 4 and picked["reward_before"] == picked["reward_after"] == 0.0
    assert "failed, 16 × NoReward" in ajet(
        "trace", "rejudge", WHERE, "--judge", "judges.py:never", code=1
    )
    assert "no finished episode that fits" in ajet(
        "trace", "rejudge", WHERE, "--judge", "exact", "--filter", "split='train'", code=2
    )
    assert "there is no file none.py" in ajet(
        "trace", "rejudge", WHERE, "--judge", "none.py:j", code=2
    )
    assert "Missing option '--judge'" in ajet("trace", "rejudge", WHERE, code=2)
    assert hashlib.sha256((demo / WHERE / "trace.duckdb").read_bytes()).hexdigest() == before


@pytest.mark.slow
def test_diff_of_runs(demo: Path) -> None:
    a, b = run_of(WHERE), run_of("launcher_record/second")
    said = ajet("trace", "compare", a[:10], b[:10], WHERE, "launcher_record/second")
    assert "B - A by task: +0.25 over 8 tasks (2 better, 0 worse, 6 equal)." in said
    assert (
        "p = 0.5 (sign-flip permutation test of the mean, paired by task, all sign combinations)"
        in said
    )
    assert "ajet.model.scripted" in said and "sure.py" in said
    found = json.loads(ajet("trace", "compare", a, b, WHERE, "launcher_record/second", "--json"))
    assert (
        found["test"]["p"] == 0.5 and found["test"]["mean"] == 0.25 and found["a"]["solved"] == 0.75
    )
    assert [row["change"] for row in found["tasks"]].count(1.0) == 2
    assert [row["key"] for row in found["config"]] == ["ajet.model.scripted"]
    assert "to compare" in ajet("trace", "compare", a, a, WHERE, "--split", "train", code=2)
    episode = first_episode(WHERE)
    assert "two episodes or two runs" in ajet("trace", "compare", a, episode, WHERE, code=2)


def test_diff_of_runs_claims_nothing_of_few_tasks(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        for run_id, rewards in (("one", [0.0, 0.0, 0.5, None]), ("two", [1.0, 1.0, 0.5, 1.0])):
            writer.put(Run(run_id=run_id, status="finished"))
            for i, reward in enumerate(rewards):
                failed: dict[str, Any] = {"status": "failed", "cause": "KeyError", "error": "x"}
                given = failed if reward is None else {"rewards": (Reward(value=reward),)}
                writer.put(Episode(run_id=run_id, task=Task(task_id=f"t{i}"), **given))
    said = ajet("trace", "compare", "one", "two", str(tmp_path))
    assert "Not conclusive: at least 6 tasks are needed (smallest possible p here: 0.25)." in said
    assert (
        "0 tasks only in A, 1 only in B" in said
        and "failed: KeyError" in said
        and "p = " not in said
    )


@pytest.mark.slow
def test_diff_of_episodes(demo: Path) -> None:
    a, b = first_episode(WHERE), first_episode("launcher_record/second")
    same = ajet("trace", "compare", a, a, WHERE)
    assert "Identical messages: all 3." in same
    listed = json.loads(ajet("trace", "ls", WHERE, "--json"))["episodes"]
    other = max(listed, key=lambda e: str(e["task_id"]))["episode_id"]
    said = ajet("trace", "compare", a, other, WHERE)
    assert "First difference of the messages after 1 message:\nuser\n-  What is" in said
    found = json.loads(ajet("trace", "compare", a, b, WHERE, "launcher_record/second", "--json"))
    assert (
        found["a"]["task_id"] == found["b"]["task_id"] and found["rewards"][0]["reward"] == "exact"
    )
    assert found["message_a"] != found["message_b"]


def test_diff_of_agents_that_talk_at_once_and_of_hostile_text(tmp_path: Path) -> None:
    def call(episode: str, agent: str, said: list[str], reply: str) -> Call:
        roles = ["user", "assistant"] * len(said)
        messages = [
            {"role": role, "content": text} for role, text in zip(roles, said, strict=False)
        ]
        response = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
        return Call(
            episode_id=episode, agent=agent, request={"messages": messages}, response=response
        )

    with TraceWriter(tmp_path / "t.duckdb") as writer:
        writer.put(Run(run_id="r"))
        for episode, last in (("aa", "same"), ("bb", EVIL)):
            writer.put(call(episode, "wolf", ["hi"], "ho"), call(episode, "sheep", ["hi"], "baa"))
            writer.put(call(episode, "wolf", ["hi", "ho", "go on"], last))
            writer.put(Episode(episode_id=episode, run_id="r"))
        writer.put(Call(episode_id="cc", request={"input": EVIL}, response={"output": EVIL}))
    said = ajet("trace", "compare", "aa", "bb", str(tmp_path))
    assert "First difference of the messages after 5 messages:\nassistant (wolf)\n-  same\n" in said
    assert (
        "+  [bold red]x[/] \\x1b[31mred\\x07 \\u202eback" in said
        and "\x1b" not in said
        and "\x07" not in said
    )
    said = ajet("trace", "compare", "aa", "cc", str(tmp_path))
    assert (
        "+   [bold red]x[/] \\x1b[31mred\\x07 \\u202eback" in said
        and "\x1b" not in said
        and "\x07" not in said
    )
    cut = json.loads(ajet("trace", "compare", "aa", "cc", str(tmp_path), "--json"))
    assert cut["b"]["cause"] is None and cut["shared_tokens"] is None and cut["same_messages"] == 0


def test_diff_of_episodes_names_what_is_no_message(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    response = {"choices": [{"message": {"role": "assistant", "content": "ho"}}]}
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        writer.put(Run(run_id="r"))
        for episode, tool in (("aa", "search"), ("bb", "find")):
            tools = [{"type": "function", "function": {"name": tool}}]
            request = {"messages": messages, "tools": tools, "temperature": 1.0}
            writer.put(Call(episode_id=episode, model="policy", request=request, response=response))
            writer.put(Episode(episode_id=episode, run_id="r"))
    assert "The first requests differ in tools." in ajet(
        "trace", "compare", "aa", "bb", str(tmp_path)
    )
    found = json.loads(ajet("trace", "compare", "aa", "bb", str(tmp_path), "--json"))
    assert found["other_settings"] == ["tools"] and found["same_messages"] == 2


def test_a_difference_deep_in_a_long_message_is_shown(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        writer.put(Run(run_id="r"))
        for episode in ("aa", "bb"):
            text = "line\n" * 60_000 + f"here {episode}\n" + "line\n" * 60_000
            message = {"choices": [{"message": {"role": "assistant", "content": text}}]}
            messages = [{"role": "user", "content": "say"}]
            writer.put(Call(episode_id=episode, request={"messages": messages}, response=message))
            writer.put(Episode(episode_id=episode, run_id="r"))
    found = ajet("trace", "compare", "aa", "bb", str(tmp_path))
    assert "-  here aa\n+  here bb\n" in found and len(found) < 5_000


@pytest.mark.slow
def test_an_empty_trace(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.duckdb"):
        pass
    assert "there are no runs in this trace" in ajet(
        "trace", "rejudge", str(tmp_path), "--judge", "exact", code=2
    )
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        writer.put(Run(run_id="r", status="finished"))
    assert "has no finished episode" in ajet(
        "trace", "rejudge", str(tmp_path), "--judge", "exact", code=2
    )
    assert "no finished episode" in ajet("trace", "compare", "r", "r", str(tmp_path), code=2)
