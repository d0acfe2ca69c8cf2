"""`ajet run --out`: pass rates of the rows, and nothing made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ajet_sdk.errors import ConfigError
from ajet_tools.cli.app import app
from ajet_tools.dataset.calibrate import Band
from tests.tools.dataset.written import AGENT, read_rows, write_rows

pytestmark = pytest.mark.slow

MORE = """
@ajet.workflow
async def breaks(question: str) -> str:
    if "oven" in question:
        raise RuntimeError("the oven is broken")
    return await solve(question)

@ajet.judge
def number(output: str, answer: str) -> float:
    return float(int(output) == int(answer))
"""
REPLIES = """
import re
from pathlib import Path

def reply(ask):
    question = ask.body["messages"][-1]["content"]
    with Path("asked.txt").open("a") as file:
        file.write(question + "\\n")
    never, always, seldom = ("never" in question, "always" in question, ask.sampling.seed % 4 == 0)
    return "no" if never else "yes" if always or seldom else "no"
"""


@pytest.fixture
def here(job: Callable[..., Path]) -> Path:
    tasks = [{"question": f"{kind} {i}", "answer": "yes", "source": "book", "metadata": {"page": i}}
             for i in range(2) for kind in ("never", "seldom", "always")]  # fmt: skip
    return job({"agent": AGENT + MORE, "replies": REPLIES}, tasks=tasks)


def scored(*arguments: str, judge: str = "agent.py:exact", agent: str = "agent.py:solve") -> Result:
    options = [agent, "--judge", judge, *arguments]
    if "--model" not in arguments:
        options += ["--model", "replies.py:reply"]
    return CliRunner().invoke(app, ["run", *options])


def asked() -> int:
    return len(Path("asked.txt").read_text().splitlines()) if Path("asked.txt").exists() else 0


def test_each_row_gets_its_pass_rate_and_the_rest_stays_as_it_was(here: Path) -> None:
    done = scored("--tasks", "tasks.jsonl", "-k", "8", "--out", "all.jsonl")
    assert done.exit_code == 0, done.output
    assert asked() == 48
    before, after = read_rows("tasks.jsonl"), read_rows("all.jsonl")
    rates = [row["metadata"].pop("pass_rate") for row in after]
    assert [row["metadata"].pop("difficulty") for row in after] == [
        pytest.approx(1 - rate) for rate in rates
    ]
    assert after == before
    assert rates[0] == rates[3] == 0 and rates[2] == rates[5] == 1
    assert 0 < rates[1] < 1 and rates[1] * 8 == int(rates[1] * 8)


def test_a_filter_keeps_the_rows_of_a_range(here: Path) -> None:
    done = scored("--tasks", "tasks.jsonl", "-k", "8", "--out", "scored.jsonl", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["scored"]["rows"] == 6
    band = "metadata.pass_rate between 0.1 and 0.9"
    kept = CliRunner().invoke(app, ["dataset", "filter", "scored.jsonl", band, "-o", "fit.jsonl"])
    assert kept.exit_code == 0, kept.output
    assert [row["question"] for row in read_rows("fit.jsonl")] == ["seldom 0", "seldom 1"]


def test_rows_of_one_content_are_one_task(here: Path) -> None:
    write_rows("twice.jsonl", [{"question": "always", "answer": "yes"}] * 3)
    scored("--tasks", "twice.jsonl", "-k", "4", "--out", "out.jsonl")
    assert asked() == 4 and [row["metadata"]["pass_rate"] for row in read_rows("out.jsonl")] == [
        1,
        1,
        1,
    ]


def test_a_difficulty_of_the_datasets_own_stays(here: Path) -> None:
    write_rows(
        "own.jsonl", [{"question": "always", "answer": "yes", "metadata": {"difficulty": 3}}]
    )
    scored("--tasks", "own.jsonl", "-k", "2", "--out", "out.jsonl")
    assert read_rows("out.jsonl")[0]["metadata"] == {"difficulty": 3, "pass_rate": 1.0}


def test_an_agents_own_failure_is_no_solution(here: Path) -> None:
    write_rows(
        "ovens.jsonl",
        [{"question": "always an oven", "answer": "yes"}, {"question": "always", "answer": "yes"}],
    )
    done = scored(
        "--tasks", "ovens.jsonl", "-k", "4", "--out", "out.jsonl", agent="agent.py:breaks"
    )
    assert done.exit_code == 0 and [
        row["metadata"]["pass_rate"] for row in read_rows("out.jsonl")
    ] == [0, 1]


def test_a_judge_that_raises_measures_nothing_and_is_no_zero(here: Path) -> None:
    write_rows(
        "mixed.jsonl",
        [{"question": "always", "answer": "yes"}, {"question": "always 1", "answer": "1"}],
    )
    Path("replies.py").write_text(
        "def reply(ask):\n    q = ask.body['messages'][-1]['content']\n    return '1' if '1' in q"
        " else 'x'"
    )
    done = scored(
        "--tasks", "mixed.jsonl", "-k", "2", "--out", "out.jsonl", judge="agent.py:number"
    )
    assert done.exit_code == 1
    assert [(row["question"], row["metadata"]["pass_rate"]) for row in read_rows("out.jsonl")] == [
        ("always 1", 1.0)
    ]
    spoilt = read_rows("out.rejected.jsonl")
    assert len(spoilt) == 1 and "metadata" not in spoilt[0]
    assert (
        "not measured: judge number: ValueError" in spoilt[0]["rejected"]
        and "ValueError" in done.output
    )


def test_where_nothing_can_be_measured_it_says_why(here: Path) -> None:
    done = scored(
        "--tasks", "tasks.jsonl", "-k", "2", "--out", "out.jsonl", judge="agent.py:number"
    )
    assert (
        done.exit_code == 2
        and "none of the 6 rows could be measured" in done.stderr
        and "ValueError" in done.stderr
    )
    assert not Path("out.jsonl").exists()


def test_over_http(here: Path, model_server: Callable[..., Any]) -> None:
    def say(body: dict[str, Any], number: int) -> Any:
        question = body["messages"][-1]["content"]
        if "never" in question:
            return model_server.refusal(400, "not for you", code="nope")  # type: ignore[attr-defined]
        return "yes" if "always" in question or number % 3 == 0 else "no"

    server = model_server(say)
    done = scored(
        "--tasks",
        "tasks.jsonl",
        "-k",
        "3",
        "--out",
        "out.jsonl",
        "--model",
        f"remote@{server.url}",
        "--json",
    )
    assert done.exit_code == 1, done.output
    assert {body["model"] for body in server.requests} == {"remote"}
    rates = {row["question"]: row["metadata"]["pass_rate"] for row in read_rows("out.jsonl")}
    assert set(rates) == {"always 0", "always 1", "seldom 0", "seldom 1"} and rates["always 0"] == 1
    apart = read_rows("out.rejected.jsonl")  # what a provider refuses to answer is not thereby hard
    assert [row["question"] for row in apart] == ["never 0", "never 1"] and "not for you" in apart[
        0
    ]["rejected"]


def test_too_many_requests_are_told(here: Path, model_server: Callable[..., Any]) -> None:
    def say(body: dict[str, Any], number: int) -> Any:
        if number < 3:
            return model_server.refusal(429, "slow down", headers={"retry-after": "0.1"})  # type: ignore[attr-defined]
        return "yes"

    done = scored("--tasks", "tasks.jsonl", "--model", f"remote@{model_server(say).url}")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert said.count("answered 429, too many requests (1 so far); next request in") == 1
    assert "rollout.max_env_worker" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("0.1:0.9", 0.1, 0.9), (":0.5", 0.0, 0.5), ("0.25:", 0.25, 1.0), (":", 0.0, 1.0)],
)
def test_a_band(text: str, low: float, high: float) -> None:
    assert (
        Band.parse(text) == Band(low, high) and low in Band.parse(text) and high in Band.parse(text)
    )


@pytest.mark.parametrize("text", ["0.9:0.1", "0.5", "a:b", "-1:1", "0:2", "nan:1", ""])
def test_what_is_no_band(text: str) -> None:
    with pytest.raises(ConfigError, match=r"LOW:HIGH"):
        Band.parse(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tasks", "absent.jsonl", "--out", "o.jsonl"], "absent.jsonl"),
        (["--tasks", "empty.jsonl", "--out", "o.jsonl"], "no rows"),
        (["--tasks", "bad.jsonl", "--out", "o.jsonl"], "bad.jsonl line 2"),
        (["--tasks", "tasks.jsonl", "--val-tasks", "tasks.jsonl", "--out", "o.jsonl"], "one set"),
        (
            ["--tasks", "tasks.jsonl", "--out", "o.jsonl", "-k", "2", "ajet.rollout.temperature=0"],
            "greedy",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    here: Path, options: list[str], words: str
) -> None:
    Path("empty.jsonl").write_text("")
    Path("bad.jsonl").write_text('{"question": "always"}\n{"question"\n')
    done = scored(*options)
    assert done.exit_code == 2 and words in done.stderr and asked() == 0
    assert not Path("o.jsonl").exists()


def test_rows_go_to_stdout(here: Path) -> None:
    done = scored("--tasks", "tasks.jsonl", "-k", "2", "--out", "-")
    assert done.exit_code == 0 and len([json.loads(line) for line in done.stdout.splitlines()]) == 6
