"""`dataset calibrate`: pass rates by the ordinary run, a band of them, nothing measured twice,
nothing made up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
from tests.waiting import until

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


def calibrate(
    *arguments: str, judge: str = "agent.py:exact", agent: str = "agent.py:solve"
) -> Result:
    options = ["--workflow", agent, "--judge", judge, *arguments]
    if "--base-url" not in arguments:
        options += ["--scripted", "replies.py:reply"]
    return CliRunner().invoke(app, ["dataset", "calibrate", *options])


def asked() -> int:
    return len(Path("asked.txt").read_text().splitlines()) if Path("asked.txt").exists() else 0


def test_each_row_gets_its_pass_rate_and_the_rest_stays_as_it_was(here: Path) -> None:
    done = calibrate("tasks.jsonl", "-k", "8", "--out", "all.jsonl")
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
    assert "solved       0/8       2" in done.stderr and "solved       8/8       2" in done.stderr


def test_a_band_keeps_the_rows_within_and_puts_the_others_apart_with_the_reason(here: Path) -> None:
    done = calibrate("tasks.jsonl", "-k", "8", "--band", "0.1:0.9", "--out", "fit.jsonl", "--json")
    summary = json.loads(done.stdout)
    assert done.exit_code == 0 and (summary["kept"], summary["outside"], summary["tasks"]) == (
        2,
        4,
        6,
    )
    assert sum(summary["histogram"]) == 6 and len(summary["histogram"]) == 9
    assert [row["question"] for row in read_rows("fit.jsonl")] == ["seldom 0", "seldom 1"]
    assert {row["rejected"] for row in read_rows("fit.rejected.jsonl")} == {
        "too hard: solved in 0 of 8 attempts",
        "too easy: solved in 8 of 8 attempts",
    }


def test_what_was_measured_is_not_measured_again(here: Path) -> None:
    calibrate("tasks.jsonl", "-k", "4", "--out", "a.jsonl")
    assert asked() == 24
    again = calibrate(
        "a.jsonl", "-k", "4", "--out", "b.jsonl", "--measurements", "a.measured.jsonl", "--json"
    )
    assert asked() == 24 and json.loads(again.stdout)["known"] == 6
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    write_rows(
        "tasks.jsonl", [*read_rows("tasks.jsonl"), {"question": "seldom 9", "answer": "yes"}]
    )
    calibrate("tasks.jsonl", "-k", "4", "--out", "a.jsonl")
    assert asked() == 28  # the new one only


@pytest.mark.parametrize("change", ["k", "agent", "judge", "model", "content", "temperature"])
def test_other_conditions_are_measured_anew(here: Path, change: str) -> None:
    write_rows("one.jsonl", [{"question": "seldom", "answer": "yes"}])
    options = ["one.jsonl", "-k", "2", "--out", "a.jsonl"]
    calibrate(*options)
    assert asked() == 2
    more: list[str] = []
    if change == "k":
        options[2] = "3"
    elif change == "content":
        write_rows("one.jsonl", [{"question": "seldom", "answer": "Yes"}])
    elif change == "temperature":
        more = ["--temperature", "0.3"]
    else:
        file = Path("replies.py" if change == "model" else "agent.py")
        file.write_text(file.read_text() + "\n# changed\n")
    judge = "exact" if change == "judge" else "agent.py:exact"
    assert calibrate(*options, *more, judge=judge).exit_code == 0
    assert asked() == 2 + (3 if change == "k" else 2)


def test_rows_of_one_content_are_one_task(here: Path) -> None:
    write_rows("twice.jsonl", [{"question": "always", "answer": "yes"}] * 3)
    calibrate("twice.jsonl", "-k", "4", "--out", "out.jsonl")
    assert asked() == 4 and [row["metadata"]["pass_rate"] for row in read_rows("out.jsonl")] == [
        1,
        1,
        1,
    ]


def test_a_difficulty_of_the_datasets_own_stays(here: Path) -> None:
    write_rows(
        "own.jsonl", [{"question": "always", "answer": "yes", "metadata": {"difficulty": 3}}]
    )
    done = calibrate("own.jsonl", "-k", "2", "--out", "out.jsonl")
    assert read_rows("out.jsonl")[0]["metadata"] == {"difficulty": 3, "pass_rate": 1.0}
    assert "an existing difficulty" in done.stderr


def test_an_agents_own_failure_is_no_solution(here: Path) -> None:
    write_rows(
        "ovens.jsonl",
        [{"question": "always an oven", "answer": "yes"}, {"question": "always", "answer": "yes"}],
    )
    done = calibrate("ovens.jsonl", "-k", "4", "--out", "out.jsonl", agent="agent.py:breaks")
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
    done = calibrate("mixed.jsonl", "-k", "2", "--out", "out.jsonl", judge="agent.py:number")
    assert done.exit_code == 1
    assert [(row["question"], row["metadata"]["pass_rate"]) for row in read_rows("out.jsonl")] == [
        ("always 1", 1.0)
    ]
    spoilt = read_rows("out.rejected.jsonl")
    assert len(spoilt) == 1 and "metadata" not in spoilt[0]
    assert (
        "not measured: judge number: ValueError" in spoilt[0]["rejected"]
        and "ValueError" in done.stderr
    )


def test_where_nothing_can_be_measured_it_says_why(here: Path) -> None:
    done = calibrate("tasks.jsonl", "-k", "2", "--out", "out.jsonl", judge="agent.py:number")
    assert (
        done.exit_code == 2
        and "none of the 6 rows could be measured" in done.stderr
        and "ValueError" in done.stderr
    )
    assert Path("out.measured.jsonl").exists() is False


def test_over_http(here: Path, model_server: Callable[..., Any]) -> None:
    def say(body: dict[str, Any], number: int) -> Any:
        question = body["messages"][-1]["content"]
        if "never" in question:
            return model_server.refusal(400, "not for you", code="nope")  # type: ignore[attr-defined]
        return "yes" if "always" in question or number % 3 == 0 else "no"

    server = model_server(say)
    done = calibrate(
        "tasks.jsonl",
        "-k",
        "3",
        "--out",
        "out.jsonl",
        "--base-url",
        server.url,
        "--model",
        "remote",
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


def test_a_wrong_key_measures_nothing_and_keeps_what_was(
    here: Path, model_server: Callable[..., Any]
) -> None:
    server = model_server(lambda body, n: "yes")
    options = ("-k", "2", "--out", "out.jsonl", "--base-url", server.url, "--model", "remote")
    write_rows("some.jsonl", read_rows("tasks.jsonl")[:2])
    assert calibrate("some.jsonl", *options).exit_code == 0
    write_rows("many.jsonl", [{"question": f"new {i}", "answer": "yes"} for i in range(500)])
    for status, why in ((401, "check the API key"), (400, "none of the first 64 attempts")):
        server.say = lambda body, n, status=status: model_server.refusal(status, "wrong key")  # type: ignore[attr-defined]
        calls = len(server.requests)
        done = calibrate("many.jsonl", *options)
        assert done.exit_code == 2 and why in done.stderr and "wrong key" in done.stderr, (
            done.output
        )
        assert len(server.requests) - calls < 300
        assert len(read_rows("out.jsonl")) == len(read_rows("out.measured.jsonl")) == 2


@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_too_many_requests_are_told(
    here: Path, model_server: Callable[..., Any], command: str
) -> None:
    def say(body: dict[str, Any], number: int) -> Any:
        if number < 3:
            return model_server.refusal(429, "slow down", headers={"retry-after": "0.1"})  # type: ignore[attr-defined]
        return "yes"

    at = ("--base-url", model_server(say).url, "--model", "remote")
    if command == "calibrate":
        done = calibrate("tasks.jsonl", "-k", "1", "--out", "out.jsonl", *at)
    else:
        options = ("--judge", "agent.py:exact", "--tasks", "tasks.jsonl", *at)
        done = CliRunner().invoke(app, ["run", "agent.py:solve", *options])
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert said.count("answered 429, too many requests (1 so far); next request in") == 1
    assert "rollout.max_env_worker" in said and "Traceback" not in said


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(here: Path) -> None:
    write_rows("many.jsonl", [{"question": f"always {i}", "answer": "yes"} for i in range(40)])
    Path("replies.py").write_text(
        "import time\nfrom pathlib import Path\n\ndef reply(ask):\n    time.sleep(0.1)\n"
        "    open('asked.txt', 'a').write('x\\n')\n    return 'yes'\n"
    )
    command = [sys.executable, "-m", "ajet", "dataset", "calibrate", "many.jsonl", "-w", "agent.py:solve", "--judge",
               "agent.py:exact", "--scripted", "replies.py:reply", "-k", "2", "--concurrency", "2",
               "--out", "out.jsonl"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    known = Path("out.measured.jsonl")
    until(lambda: known.exists() and len(known.read_text().splitlines()) >= 4)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130 and "run the same command again" in said
    assert not Path("out.jsonl").exists()
    before, calls = len(read_rows("out.measured.jsonl")), asked()
    assert 4 <= before < 40
    done = subprocess.run(
        [*command, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert json.loads(done.stdout)["known"] == before
    assert asked() - calls == (40 - before) * 2 and len(read_rows("out.jsonl")) == 40


def test_a_line_that_a_kill_cut_off_is_measured_again_and_other_files_are_refused(
    here: Path,
) -> None:
    calibrate("tasks.jsonl", "-k", "2", "--out", "a.jsonl")
    file = Path("a.measured.jsonl")
    file.write_bytes(file.read_bytes()[:-30])
    done = calibrate("tasks.jsonl", "-k", "2", "--out", "a.jsonl", "--json")
    assert json.loads(done.stdout)["known"] == 5 and asked() == 14
    done = calibrate("tasks.jsonl", "-k", "2", "--out", "a.jsonl", "--json")
    assert json.loads(done.stdout)["known"] == 6 and asked() == 14
    file.write_text("not this\n")
    refused = calibrate("tasks.jsonl", "-k", "2", "--out", "a.jsonl")
    assert refused.exit_code == 1 and "a.measured.jsonl line 1" in refused.stderr


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
        (["tasks.jsonl", "--out", "o.jsonl", "--band", "1:0"], "LOW:HIGH"),
        (["absent.jsonl", "--out", "o.jsonl"], "absent.jsonl"),
        (["empty.jsonl", "--out", "o.jsonl"], "no row"),
        (["bad.jsonl", "--out", "o.jsonl"], "bad.jsonl line 2"),
        (["tasks.jsonl", "--out", "o.jsonl", "-k", "2", "--temperature", "0"], "greedy"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    here: Path, options: list[str], words: str
) -> None:
    Path("empty.jsonl").write_text("")
    Path("bad.jsonl").write_text('{"question": "always"}\n{"question"\n')
    done = calibrate(*options)
    assert done.exit_code == 2 and words in done.stderr and asked() == 0
    assert not Path("o.jsonl").exists()


def test_rows_go_to_stdout(here: Path) -> None:
    done = calibrate("tasks.jsonl", "-k", "2", "--out", "-")
    assert done.exit_code == 0 and len([json.loads(line) for line in done.stdout.splitlines()]) == 6
