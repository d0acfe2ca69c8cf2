"""`expand --for` and `--from-failures`: rows by what they teach a policy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ajet_sdk.engines.reply_cache import ReplyCache
from ajet_tools.cli.app import app
from tests.tiny_models import save_tiny
from tests.tools.dataset.written import AGENT, read_rows

POLICY = """
import re
from pathlib import Path

def reply(ask):
    a, b = map(int, re.search(r"([0-9]+)\\+([0-9]+)", ask.body["messages"][-1]["content"]).groups())
    with Path("asked.txt").open("a") as file:
        file.write("x")
    return str(a + b) if a < 300 or (a < 600 and ask.sampling.seed % 2) else "I give up"

def down(ask):
    raise ConnectionError("the server is down")
"""
TEACHER = """
import json, random, re

def reply(ask):
    prompt = ask.body["messages"][-1]["content"]
    chance, rows = random.Random(f"{ask.sampling.seed} {prompt}"), []
    for _ in range(int(re.search(r"JSON array of ([0-9]+)", prompt)[1])):
        a, b = chance.randint(100, 999), chance.randint(100, 999)
        question, answer = f"What is {a}+{b}?", str(a + b + (chance.random() < 0.2))
        nested = {"main_query": question, "metadata": {"answer": answer}}
        rows.append({"question": question, "answer": answer} if '"question"' in prompt else nested)
    return json.dumps(rows)
"""
SEEDS = [(101, 202), (305, 120), (700, 111), (812, 333)]


@pytest.fixture
def here(job: Callable[..., Path]) -> Path:
    rows = [{"question": f"What is {a}+{b}?", "answer": str(a + b)} for a, b in SEEDS]
    return job({"policy": POLICY, "teacher": TEACHER}, seeds=rows)


def expand(*arguments: str) -> Result:
    options = ["--model", "teacher.py:reply", "--verify", "judge:agent.py:correct", *arguments]
    return CliRunner().invoke(app, ["dataset", "expand", *options])


FOR = ("--for", "policy.py:reply,workflow=agent.py:solve,judge=agent.py:exact,attempts=6")


def first(row: dict[str, Any]) -> int:
    return int(re.findall("[0-9]+", row.get("question") or row["main_query"])[0])


@pytest.mark.slow
def test_rows_that_the_policy_solves_sometimes_are_kept_and_a_resumed_run_tries_none_again(
    here: Path,
) -> None:
    Path("agent.py").write_text(AGENT + CORRECT)
    done = expand("seeds.jsonl", "--count", "6", "--out", "data", *FOR)
    assert done.exit_code == 0, done.output
    assert "attempts of the policy" in done.stderr
    rows, refused = read_rows("data/train.jsonl"), read_rows("data/rejected.jsonl")
    assert len(rows) == 6 and all(300 <= first(row) < 600 for row in rows)
    assert all(0.2 <= row["metadata"]["pass_rate"] <= 0.8 for row in rows)
    parts = [row["provenance"]["verdict"]["details"]["parts"] for row in rows]
    assert all(
        [one["verifier"] for one in part] == ["judge:agent.py:correct", "policy"] for part in parts
    )
    trials = [part[1]["details"] for part in parts]
    assert [one["solved"] / one["attempts"] for one in trials] == pytest.approx(
        [row["metadata"]["pass_rate"] for row in rows], abs=1e-6
    )
    reasons = {row["rejected"]["reason"]: first(row) for row in refused if "question" in row}
    assert reasons["too easy for the policy"] < 600 <= reasons["too hard for the policy"]
    tried = Path("asked.txt").read_text().count("x")
    wrong = [row for row in refused if "policy" not in row["rejected"]["reason"]]
    assert wrong and tried == 6 * len(
        ReplyCache(Path("data/.expand/replies.sqlite")).entries("measured ")
    ), "what was refused before is not tried"
    before = Path("data/train.jsonl").read_bytes()
    again = expand("seeds.jsonl", "--count", "6", "--out", "data", *FOR, "--resume")
    assert again.exit_code == 0, again.output
    assert Path("data/train.jsonl").read_bytes() == before
    assert Path("asked.txt").read_text().count("x") == tried
    other = expand(
        "seeds.jsonl", "--count", "6", "--out", "data", FOR[0], FOR[1] + ",band=0.1:0.9", "--resume"
    )
    assert other.exit_code and "for.pass_rate was 0.2:0.8, is 0.1:0.9" in other.output

    grown = expand("--from-failures", "data/.expand/trials", "--count", "4", "--out", "more")
    assert grown.exit_code == 0, grown.output
    assert "tasks with answers of" in grown.stderr
    failed = {first(row) for row in [*rows, *refused] if "question" in row}
    [card] = re.findall("[0-9]+ tasks with answers", grown.stderr)
    assert 0 < int(card.split()[0]) <= len(failed)
    for row in read_rows("more/train.jsonl"):
        assert row["metadata"]["answer"] == str(
            sum(map(int, re.findall("[0-9]+", row["main_query"])))
        )
        assert row["provenance"]["seeds"]


CORRECT = """
@ajet.judge
def correct(output: str, main_query: str) -> float:
    import re
    a, b = map(int, re.findall("[0-9]+", main_query))
    return float(output == str(a + b))
"""


@pytest.mark.slow
def test_a_policy_that_cannot_be_asked_ends_the_run_and_refuses_nothing_as_too_hard(
    here: Path,
) -> None:
    Path("agent.py").write_text(AGENT + CORRECT)
    options = [option.replace("policy.py:reply", "policy.py:down") for option in FOR]
    done = expand("seeds.jsonl", "--count", "40", "--out", "data", *options)
    assert done.exit_code
    assert "the policy could not try any of 8 tasks; the last" in done.output
    assert "the server is down" in done.output
    assert "too hard" not in done.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--for", "policy.py:reply"], "--for needs an agent"),
        (["--from-failures", "trace"], "nothing to grow from"),
        ([FOR[0], FOR[1] + ",band=0.9:0.1"], "LOW:HIGH"),
        ([FOR[0], FOR[1] + ",attempts=0"], "1 to 1000"),
    ],
)
def test_what_does_not_go_together_is_said(here: Path, options: list[str], says: str) -> None:
    done = expand("seeds.jsonl", "--out", "data", *options)
    assert done.exit_code and says in f"{done.exception}{done.output}"


def test_a_policy_that_cannot_be_opened_is_told_before_a_row_is_paid_for(here: Path) -> None:
    Path("agent.py").write_text(AGENT + CORRECT)
    weights = save_tiny(here / "policy") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    Path("teacher.py").write_text(
        TEACHER.replace("def reply(ask):", "def reply(ask):\n    open('paid', 'w').close()")
    )
    options = ["--for", "policy,workflow=agent.py:solve,judge=agent.py:exact"]
    done = expand("seeds.jsonl", "--count", "6", "--out", "data", *options)
    assert done.exit_code and "bug" not in done.output, done.output
    assert "model.path: " in done.output and "cannot be loaded" in done.output
    assert not Path("paid").exists() and not Path("data/.expand/run.json").exists()


def test_a_mistake_in_the_scripted_replies_is_told_with_its_line(here: Path) -> None:
    Path("teacher.py").write_text("def reply(ask):\n    found = []\n    return found[0]\n")
    Path("agent.py").write_text(AGENT + CORRECT)
    done = expand("seeds.jsonl", "--count", "2", "--out", "data")
    told = " ".join(done.output.split())
    assert (
        done.exit_code and "teacher.py line 3 raised IndexError: list index out of range" in told
    ), told
    assert "bug" not in told
