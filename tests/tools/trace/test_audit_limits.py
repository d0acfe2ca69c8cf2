"""The auditor accepts a training whose requests have stops, limits and penalties, and whose judge
and agents fail."""

from __future__ import annotations

from pathlib import Path

import pytest

import ajet
from ajet_sdk.run import train
from ajet_tools.trace.files.audit import audit
from ajet_tools.trace.files.check import check
from tests.tiny_models import save_tiny
from tests.tools.trace.audited_runs import job

REQUESTS = ({"stop": ["e", "a"]}, {"stop": "o"}, {"top_p": 0.7}, {"frequency_penalty": 0.5}, {})


@ajet.judge
def undecided(output: str) -> float:
    if sum(map(ord, output)) % 5 == 0:
        raise ValueError("no opinion")
    return len(output) / 10


def agent() -> object:
    attempts: list[str] = []

    @ajet.workflow
    async def talk(question: str, model: ajet.Model) -> str:
        attempts.append(question)
        number = len(attempts)
        if number % 7 == 0:
            raise KeyError("the agent failed before its call")
        reply = await model.agent("solver").chat(
            [{"role": "user", "content": question}], **REQUESTS[number % 5]
        )
        if number % 4 == 0:  # a role that few attempts have
            for text in ("Hm.", "Hm again."):
                await model.agent("rare").chat([{"role": "user", "content": text}])
        return reply["content"] or "none"

    return talk


@pytest.mark.slow
@pytest.mark.long
def test_a_correct_training_passes(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    rollout = {"failure_reward": -0.5, "max_response_length_in_one_turn": 10, "sampling": "request"}
    config = job(tmp_path / "job", model, rollout=rollout, total_steps=3)
    train(config, workflow=agent(), judge=undecided)
    audited = audit(config.directory, weights=True)
    assert audited.differs == ()
    assert audited.rows["weights"] > 0
    assert check(config.directory) == []
