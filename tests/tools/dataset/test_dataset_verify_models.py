"""Verification by others than the writer: models of their own, ways that combine, each counted
apart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ajet_sdk.engines.budget import Budget, BudgetSpent, Price
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_tools.cli.app import app
from ajet_tools.dataset.verify import open_verification
from ajet_tools.dataset.verify.combined import (
    KINDS,
    CombinedVerifier,
    VerifierPart,
    Verify,
    checks_of,
    split_spec,
)
from ajet_tools.dataset.verify.verdict import RowVerdict

WRITER = """
import json, random

def reply(ask):
    chance = random.Random(f"{ask.sampling.seed}")
    pairs = [(chance.randint(10, 99), chance.randint(10, 99)) for _ in range(4)]
    wrong = lambda: 1 if chance.random() < 0.5 else 0
    rows = [{"main_query": f"What is {a} plus {b}?", "metadata": {"answer": str(a + b + wrong())}} for a, b in pairs]
    return [json.dumps(rows)] * ask.sampling.n
"""
CHECKER = """
import json, re

def added(ask):
    a, b = map(int, re.findall(r"is (\\d+) plus (\\d+)", ask.body["messages"][-1]["content"])[-1])
    return a + b

def solve(ask):
    return [f"ANSWER: {added(ask)}"] * ask.sampling.n

def reply(ask):
    return grade(ask) if "<answer>" in ask.body["messages"][-1]["content"] else solve(ask)

def grade(ask):
    [answer] = re.findall(r"<answer>\\s*(\\d+)", ask.body["messages"][-1]["content"])
    right = int(answer) == added(ask) and int(answer) % 2 == 0
    return [json.dumps({"score": float(right), "reason": "odd numbers are not trusted"})]
"""
SEEDS = [
    {"main_query": f"What is {n} plus 7?", "metadata": {"answer": str(n + 7)}} for n in (11, 25, 38)
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "writer.py").write_text(WRITER)
    (tmp_path / "checker.py").write_text(CHECKER)
    (tmp_path / "seeds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SEEDS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def expand(*options: str) -> Any:
    given = [
        "dataset",
        "expand",
        "seeds.jsonl",
        "--count",
        "12",
        "--model",
        "writer.py:reply",
        *options,
    ]
    return CliRunner().invoke(app, given, catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_a_verifier_of_ones_own_for_each_part_and_what_each_took() -> None:
    models = ("--verify-model", "checker.py:reply,price=1000/1000")
    prices = ("--model", "writer.py:reply,price=1/1")
    made = expand("--out", "data", "--verify", "agreement:2,llm", *models, *prices, "--json")
    assert made.exit_code == 0, made.output
    report = json.loads(made.stdout)
    agreement, llm = report["checks"]
    assert agreement["model"] == llm["model"] == "scripted:checker.py:reply"
    assert agreement["refused"] > 0 and llm["refused"] > 0
    assert llm["checked"] == agreement["checked"] - agreement["refused"], (
        "a refused row is shown to no other"
    )
    assert llm["calls"] >= llm["checked"] and agreement["calls"] >= agreement["checked"]
    checks = llm["money"] + agreement["money"]
    assert report["money"] == pytest.approx(checks, rel=0.01) and report["money"] > checks
    rows = [json.loads(line) for line in Path("data/train.jsonl").read_text().splitlines()]
    for row in rows:
        a, b = (
            int(word.strip("?")) for word in row["main_query"].split() if word.strip("?").isdigit()
        )
        assert int(row["metadata"]["answer"]) == a + b and (a + b) % 2 == 0
        verdict = row["provenance"]["verdict"]
        assert (
            verdict["verifier"] == "agreement:2,llm"
            and [one["ok"] for one in verdict["details"]["parts"]] == [True] * 2
        )
    rejected = [json.loads(line) for line in Path("data/rejected.jsonl").read_text().splitlines()]
    details = {
        one["rejected"]["detail"]
        for one in rejected
        if one["rejected"]["reason"] == "the grader finds it wrong"
    }
    assert details and all("odd numbers are not trusted" in detail for detail in details)
    card = Path("data/README.md").read_text()
    assert f"{agreement['checked']:,} rows checked by scripted:checker.py:reply" in card
    first = Path("data/train.jsonl").read_bytes(), card
    again = expand("--out", "data", "--verify", "agreement:2,llm", *models, *prices, "--resume")
    assert (
        again.exit_code == 0
        and (Path("data/train.jsonl").read_bytes(), Path("data/README.md").read_text()) == first
    )
    other = expand(
        "--out",
        "data",
        "--verify",
        "agreement:2,llm",
        "--resume",
        "--verify-model",
        "checker.py:solve",
    )
    assert other.exit_code == 2 and "verify_model" in other.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--verify", "none", "--verify-model", "m"), "asks no model"),
        (
            ("--verify", "code,llm", "--verify-model", "m"),
            "add its endpoint",
        ),
        (("--verify", "agreement:3", "--verify-model", "judge-7b"), "add its endpoint"),
        (("--verify", "agreement:3,none"), "cannot be combined"),
        (
            (
                "--verify",
                "llm",
                "--verify-model",
                "checker.py:grade",
                "--model",
                "writer.py:reply,price=1/1",
                "--budget",
                "usd=1",
            ),
            "NAME@URL,price=IN/OUT",
        ),
    ],
)
@pytest.mark.usefixtures("place")
def test_what_cannot_be_is_said_before_the_first_call(options: tuple[str, ...], words: str) -> None:
    refused = expand("--out", "data", *options)
    assert refused.exit_code != 0 and words in " ".join(refused.output.split())
    assert not Path("data/.expand/run.json").exists()


part = st.sampled_from(
    ["agreement:3", "code", "llm", "judge:agent.py:exact", "judge:c++/a,b.py:exact:3"]
)


@given(st.lists(part, min_size=1, max_size=4))
def test_a_spec_is_split_as_it_was_joined(parts: list[str]) -> None:
    assert split_spec(",".join(parts)) == parts


class Says:
    def __init__(self, name: str, ok: bool, failed: bool = False) -> None:
        self.name, self.calls, self.ok, self.failed, self.asked = name, 0, ok, failed, 0

    async def check(self, row: Any, endpoint: Any) -> RowVerdict:
        self.asked += 1
        return RowVerdict(self.ok, f"{self.name} says {self.ok}", failed=self.failed)


@given(st.lists(st.booleans(), min_size=2, max_size=4))
def test_all_must_pass_and_none_is_asked_after_a_refusal(answers: list[bool]) -> None:
    parts = [VerifierPart(Says(str(number), ok)) for number, ok in enumerate(answers)]
    verdict = asyncio.run(CombinedVerifier("spec", parts).check({}, None))
    assert verdict.ok == all(answers)
    checks = checks_of(CombinedVerifier("spec", parts), [{"verdict": verdict.as_json("spec")}])
    asked = answers.index(False) + 1 if False in answers else len(answers)
    assert [check.checked for check in checks] == [1] * asked + [0] * (len(parts) - asked)
    assert sum(check.refused for check in checks) == (not verdict.ok)


def test_a_part_has_its_own_count_and_the_limits_of_the_whole() -> None:
    async def body() -> None:
        whole = Budget(calls=3, price=Price(1, 1))
        own = whole.part(Price(10, 10))
        ticket = await own.admit(10, 10)
        own.settle(ticket, 100, 100)
        ticket = await whole.admit(10, 10)
        whole.settle(ticket, 100, 100)
        assert (own.spent.calls, whole.spent.calls) == (1, 2)
        assert own.cost == pytest.approx(2000 / 1e6) and whole.cost == pytest.approx(2200 / 1e6)
        own.release(await own.admit(1, 1))
        assert (own.spent.calls, whole.spent.calls) == (2, 3)
        with pytest.raises(BudgetSpent, match="3 calls"):
            await own.admit(1, 1)

        nested = own.part(Price(10, 10))
        assert nested.whole is whole, "a part of a part counts in the same whole"

        unpriced = Budget(price=Price(1, 1)).part(None)
        unpriced.settle(await unpriced.admit(10, 10), 100, 100)
        assert unpriced.cost is None and unpriced.whole is not None and unpriced.whole.cost == 0

    asyncio.run(body())


def test_the_writer_as_verifier_is_counted_apart(model_server) -> None:
    server = model_server(lambda body, number: "ANSWER: 42")

    async def body() -> CombinedVerifier:
        writer = ModelClient(server.url, "m", budget=Budget())
        verifier = open_verification("agreement:1", writer)
        assert verifier is not None
        try:
            assert (await verifier.check({"question": "6 * 7?", "answer": "42"}, writer)).ok
            await writer.chat([{"role": "user", "content": "write"}])
            own = verifier.parts[0].endpoint
            assert (
                own is not None and own.budget.spent.calls == 1 and writer.budget.spent.calls == 2
            )
            writer.halt()
            with pytest.raises(Exception, match="not sent: the run is ending"):
                await verifier.check({"question": "7 * 7?", "answer": "49"}, writer)
        finally:
            await writer.aclose()
        return verifier

    asyncio.run(body())


@pytest.mark.parametrize("spec", ["agreement:3+code", "code|llm"])
def test_what_was_joined_otherwise_is_told_the_comma(spec: str) -> None:
    assert set(KINDS) == {"agreement", "judge", "code", "llm", "none"}
    with pytest.raises(ConfigError, match="commas"):
        open_verification(Verify(spec), ModelClient("http://127.0.0.1:9", "m"))
