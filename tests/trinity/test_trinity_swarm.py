"""Trinity trains on the episodes of clients that join a server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

import torch

from ajet_sdk.trace.reader import ledger_balance, open_trace
from tests.programs import Program, running

from .experiments import Experiment

pytestmark = pytest.mark.slow

STEPS = 3
VALIDATION = {"task_reader": {"jsonl_dataset_file": {"validation": {"file_path": "val.jsonl"}}}}


def prepare(experiment: Callable[..., Experiment], staleness: int = 0) -> Experiment:
    config = {
        "rollout": {"max_staleness": staleness},
        "trainer_common": {"total_steps": STEPS, "test_freq": 1, "val_pass_n": 2},
        **VALIDATION,
    }
    one = experiment(["turns 1", "plain 1"], config)
    one.folder.mkdir()
    one.write()
    return one


def join(start: Callable[..., Program], url: str) -> Program:
    return start("train", "job.yaml", "--swarm", url)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_trains_what_its_client_did(
    experiment: Callable[..., Experiment], tiny: Path, staleness: int
) -> None:
    one = prepare(experiment, staleness)
    with running(one.folder) as start:
        server = start("swarm", "start", "job.yaml", "--port", "0")
        client = join(start, server.url())
        assert client.wait_beside(server) == 0, client.output + server.output
        assert server.wait() == 0, server.output
    with open_trace(one.directory) as trace:
        assert ledger_balance(trace, one.run_id) == []
    rows = one.query(
        "SELECT l.step, l.outcome, c.policy_version AS version, sum(l.tokens) AS tokens"
        " FROM ledger l JOIN calls c USING (call_id)"
        " JOIN episodes e ON e.episode_id = c.episode_id"
        " WHERE e.split = 'train' AND l.tokens > 0 GROUP BY ALL"
    )
    trained = [row for row in rows if row["outcome"] == "trained"]
    assert {row["step"] for row in trained} == set(range(1, STEPS + 1))
    assert {row["step"] - 1 - row["version"] for row in trained} <= set(range(staleness + 1))
    told = receipts(one)
    by_outcome: dict[str, int] = {}
    for row in one.query("SELECT outcome, sum(tokens) AS tokens FROM ledger GROUP BY outcome"):
        if row["tokens"]:
            by_outcome[row["outcome"]] = int(row["tokens"])
    assert told == by_outcome
    validated = one.query(
        "SELECT DISTINCT e.step, c.policy_version AS version FROM episodes e JOIN calls c USING"
        " (episode_id) WHERE e.split = 'val' AND e.status = 'succeeded' ORDER BY ALL"
    )
    # the last one is of the exported model, which has no version
    *before, last = [(row["step"], row["version"]) for row in validated]
    assert last == (STEPS, None)
    assert all(step == version for step, version in before)
    assert one.query("SELECT value FROM metrics WHERE name = 'val/reward' AND step = ?", STEPS)
    assert changed(one, tiny)


def receipts(one: Experiment) -> dict[str, int]:
    """What became of the clients' tokens, as `ajet trace receipts` prints it."""
    with running(one.folder) as start:
        program = start("trace", "receipts", str(one.directory), "--json")
        assert program.wait() == 0, program.output
    totals: dict[str, int] = {}
    for client in json.loads(program.output)["receipts"]:
        for outcome, tokens in client["tokens"].items():
            totals[outcome] = totals.get(outcome, 0) + tokens
    return totals


def changed(one: Experiment, tiny: Path) -> bool:
    """Whether the exported model is another one than the first."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM
    trained = model.from_pretrained(
        one.directory / "checkpoint" / one.run_id / "model"
    ).state_dict()
    start = model.from_pretrained(tiny).state_dict()
    return any(not torch.equal(value, start[name]) for name, value in trained.items())


def test_a_killed_server_goes_on(experiment: Callable[..., Experiment]) -> None:
    one = prepare(experiment)
    with running(one.folder) as start:
        server = start("swarm", "start", "job.yaml", "--port", "0")
        url = server.url()
        client = join(start, url)
        one.process = server.process  # type: ignore[assignment]
        one.until(lambda: one.steps_saved() >= 1)
        server.process.kill()
        server.process.wait()
        again = start("swarm", "start", "job.yaml", "--resume", "--port", str(httpx.URL(url).port))
        assert client.wait_beside(again) == 0, client.output + again.output
        assert again.wait() == 0, again.output
        assert re.search(r"resuming after step \d of 3", again.output)
    with open_trace(one.directory) as trace:
        assert ledger_balance(trace, one.run_id) == []
    twice = (
        "SELECT call_id FROM ledger WHERE outcome = 'trained' GROUP BY call_id HAVING count(*) > 1"
    )
    assert one.query(twice) == []
    trained = one.query("SELECT DISTINCT step FROM ledger WHERE outcome = 'trained' AND tokens > 0")
    assert {row["step"] for row in trained} <= set(range(1, STEPS + 1))
