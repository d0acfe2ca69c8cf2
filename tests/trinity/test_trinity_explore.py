"""Mode `explore` into Trinity's SQL buffer, read back by Trinity's own reader: our samples, token
for token."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

import numpy as np
import torch
from trinity.buffer import get_buffer_reader
from trinity.common.config import ExperienceBufferConfig
from trinity.common.experience import Experience

from ajet_sdk.samples.build import Batch, build
from ajet_sdk.trace.reader import episodes, ledger_balance, open_trace
from ajet_sdk.types import Episode, Sample

from .experiments import Experiment

KINDS = ("single", "turns", "team", "fork", "half")
ATTEMPTS = 4


def read_back(path: Path, name: str, size: int) -> list[Experience]:
    """Everything in the buffer, by the reader with which Trinity's trainer would take it."""
    storage = ExperienceBufferConfig(
        name=name, storage_type="sql", path=f"sqlite:///{path}", max_read_timeout=10, batch_size=size,
        schema_type="experience",
    ).to_storage_config()  # fmt: skip
    storage.wrap_in_ray = False
    found: list[Experience] = asyncio.run(get_buffer_reader(storage).read())
    return found


def whole(experience: Experience, values: torch.Tensor) -> Any:
    return np.concatenate(
        [np.zeros(experience.prompt_length, values.numpy().dtype), values.numpy()]
    )


def same(sample: Sample, experience: Experience) -> None:
    line = sample.timeline
    assert experience.tokens.tolist() == line.token_ids.tolist()
    assert whole(experience, experience.action_mask).tolist() == line.loss_mask.tolist()
    np.testing.assert_array_equal(whole(experience, experience.logprobs), line.logprobs)
    assert experience.reward == sample.reward
    assert experience.info["agent"] == line.agent
    assert [row["call_id"] for row in experience.info["trained"]] == [
        span.call_id for span in line.spans
    ]
    np.testing.assert_allclose(
        whole(experience, experience.advantages), sample.advantages, rtol=1e-5
    )


def test_what_is_explored_is_what_we_sampled(
    experiment: Callable[..., Experiment], nodes: Any
) -> None:
    questions = [f"{kind} {number}" for kind in KINDS for number in (1, 2)]
    one = experiment(
        questions,
        {
            "data": {"train_batch_size": len(questions)},
            "rollout": {"num_repeat": ATTEMPTS, "max_retries": 0},
            "trainer_common": {"total_steps": 1},
        },
    )
    database = one.folder / "explored.db"
    buffer = {"name": "explored", "storage_type": "sql", "path": f"sqlite:///{database}"}
    one.roots = {
        "trinity": {"mode": "explore", "buffer": {"trainer_input": {"experience_buffer": buffer}}}
    }
    one.start("--with-ray-cluster", nodes.address)
    assert one.wait() == 0, one.output()

    with open_trace(one.directory) as trace:
        ours, wrong = episodes(trace, one.run_id, split="train"), ledger_balance(trace, one.run_id)
    assert wrong == []
    assert len(ours) == len(questions) * ATTEMPTS
    kinds = Counter(
        episode.task.metadata.get("question", episode.task.main_query).split()[0]
        for episode in ours
    )
    assert kinds == dict.fromkeys(KINDS, 2 * ATTEMPTS)
    failed = [episode for episode in ours if episode.status == "failed"]
    assert failed and all("breaks" in (episode.error or "") for episode in failed)

    groups: dict[str, list[Episode]] = {}
    for episode in ours:
        groups.setdefault(episode.group_id, []).append(episode)
    batches: list[Batch] = [
        build(sorted(group, key=lambda e: e.attempt)) for group in groups.values()
    ]
    samples = {_place(sample): sample for batch in batches for sample in batch.samples}
    count = sqlite3.connect(database).execute("SELECT count(*) FROM explored").fetchone()[0]
    found = read_back(database, "explored", count)
    assert len(found) == len(samples) == count and samples
    attempts = {episode.episode_id: episode.attempt for episode in ours}
    for experience in found:
        key = (
            experience.info["episode_id"],
            *(row["call_id"] for row in experience.info["trained"]),
        )
        sample = samples.pop(key)
        same(sample, experience)
        assert (experience.eid.task, experience.eid.run) == (
            sample.group_id,
            attempts[sample.episode_id],
        )
    assert not samples, "every sample is in the buffer"
    assert {experience.info["agent"] for experience in found} == {"default", "critic"}
    forks = {
        e.episode_id
        for e in ours
        if e.task.metadata.get("question", e.task.main_query).startswith("fork")
    }
    lines = Counter(experience.info["episode_id"] for experience in found)
    assert all(lines[episode] > 1 for episode in forks if episode in lines)
    assert one.gone() == {}


def _place(sample: Sample) -> tuple[str, ...]:
    return (sample.episode_id, *(span.call_id for span in sample.timeline.spans))
