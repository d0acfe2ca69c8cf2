"""Samples as Trinity's experiences, and our parts in its pipeline: nothing changes on the way, and
steps stay whole."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trinity.buffer import get_buffer_writer
from trinity.common.config import BufferConfig, ExperienceBufferConfig, TrainerInput
from trinity.common.experience import EID, Experience

from ajet_sdk.backbones.shared.steps import tasks_of_step
from ajet_sdk.backbones.trinity.batches import GivenAdvantages, OrderOfLocal, WholeSteps, blank
from ajet_sdk.backbones.trinity.workflow import to_experience
from ajet_sdk.cluster.mailbox import open_mailbox
from ajet_sdk.samples.build import Batch
from ajet_sdk.types import Episode, Sample, Task

from .samples import batches

FEW = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


def converted(episodes: list[Episode], batch: Batch) -> list[tuple[Sample, Experience]]:
    by_id = {episode.episode_id: episode for episode in episodes}
    steps = dict.fromkeys(by_id, 0)
    made = []
    for sample in batch.samples:
        made.append(
            (sample, to_experience(sample, by_id[sample.episode_id], steps[sample.episode_id]))
        )
        steps[sample.episode_id] += 1
    return made


def whole(experience: Experience, values: torch.Tensor) -> Any:
    """Values of the response at their places in the whole sequence, 0 before."""
    return np.concatenate(
        [np.zeros(experience.prompt_length, values.numpy().dtype), values.numpy()]
    )


def check_equal(sample: Sample, experience: Experience) -> None:
    line = sample.timeline
    assert experience.tokens.tolist() == line.token_ids.tolist()
    assert whole(experience, experience.action_mask).tolist() == line.loss_mask.tolist()
    np.testing.assert_array_equal(whole(experience, experience.logprobs), line.logprobs)
    np.testing.assert_array_equal(whole(experience, experience.advantages), sample.advantages)
    assert experience.reward == sample.reward


@FEW
@given(batches())
def test_an_experience_is_the_sample_and_survives_the_wire(
    made: tuple[list[Episode], Batch],
) -> None:
    episodes, batch = made
    pairs = converted(episodes, batch)
    flush = Experience.deserialize_many(Experience.serialize_many([one for _, one in pairs]))
    attempts = {episode.episode_id: episode.attempt for episode in episodes}
    for (sample, sent), got in zip(pairs, flush, strict=True):
        check_equal(sample, sent)
        check_equal(sample, got)
        assert got.experience_type == "multi_turn"
        assert (got.eid.task, got.eid.run) == (sample.group_id, attempts[sample.episode_id])
        assert (
            got.info["episode_id"] == sample.episode_id
            and got.info["agent"] == sample.timeline.agent
        )
    assert len({one.eid.uid for _, one in pairs}) == len(pairs)


@FEW
@given(batches())
def test_every_trained_token_is_told_of_once(made: tuple[list[Episode], Batch]) -> None:
    """What the trainer will book adds up, call by call, to what the ledger of the samples says is
    trained."""
    episodes, batch = made
    told: dict[str, int] = {}
    for _, experience in converted(episodes, batch):
        for row in experience.info["trained"]:
            told[row["call_id"]] = told.get(row["call_id"], 0) + row["tokens"]
        assert sum(row["tokens"] for row in experience.info["trained"]) == int(
            experience.action_mask.sum()
        )
    booked = {
        row.call_id: row.tokens for row in batch.ledger if row.outcome == "trained" and row.tokens
    }
    assert told == booked


def made_of(counts: list[int], advantages: list[float]) -> list[Experience]:
    """Experiences with so many trained tokens among others."""
    made = []
    for position, (count, value) in enumerate(zip(counts, advantages, strict=True)):
        mask = torch.tensor([True] * count + [False] * (position % 3))
        made.append(
            Experience(
                eid=EID(task=str(position)),
                tokens=torch.arange(2 + len(mask), dtype=torch.int32),
                prompt_length=2,
                logprobs=-torch.ones(len(mask)),
                action_mask=mask,
                advantages=torch.where(mask, value, 0.0),
                returns=torch.zeros(len(mask)),
                reward=value,
                info={
                    "model_version": 0,
                    "trained": [
                        {"episode_id": "e", "call_id": str(position), "tokens": count, "version": 0}
                    ],
                },
            )
        )
    return made


steps = st.lists(st.tuples(st.integers(1, 9), st.floats(-3, 3, width=16)), min_size=1, max_size=9)


@FEW
@given(steps, st.integers(1, 8), st.integers(0, 3))
def test_a_step_is_filled_up_with_what_is_not_trained(
    rows: list[tuple[int, float]], multiple: int, blanks: int
) -> None:
    given_ = made_of([count for count, _ in rows], [value for _, value in rows])
    before = [one.advantages.clone() for one in given_]
    kept, metrics = GivenAdvantages(multiple_of=multiple).process(
        [*(blank() for _ in range(blanks)), *given_]
    )
    assert len(kept) % multiple == 0 and len(kept) - len(given_) < multiple, (
        "no more blanks than needed"
    )
    assert kept[: len(given_)] == given_ and metrics == {"timelines": len(given_)}
    assert all(torch.equal(one.advantages, old) for one, old in zip(given_, before, strict=True))
    assert all(not one.action_mask.any() and not one.info["trained"] for one in kept[len(given_) :])
    assert {one.info["step_size"] for one in kept} == {len(kept)}


def test_a_step_in_which_nothing_is_to_be_trained_is_one_blank() -> None:
    kept, metrics = GivenAdvantages().process([blank(), blank(), blank()])
    assert [one.info["step_size"] for one in kept] == [1] and metrics == {"timelines": 0}
    assert not kept[0].action_mask.any() and torch.isfinite(kept[0].advantages).all()


@pytest.mark.usefixtures("nodes")
def test_the_trainer_reads_whole_steps_and_leaves_out_what_is_too_old(tmp_path: Path) -> None:
    """Through Trinity's own queue, in which the steps lie one behind the other."""
    asyncio.run(_read_back(uuid.uuid4().hex, [3, 1, 4], tmp_path / "kept.jsonl"))


async def _read_back(run_id: str, sizes: list[int], kept_in: Path) -> None:
    import ray

    post = open_mailbox(run_id)
    storage = ExperienceBufferConfig(
        name=f"b{run_id}", storage_type="queue", max_read_timeout=60, batch_size=99
    )
    storage.ray_namespace = ray.get_runtime_context().namespace
    storage.path = str(kept_in)
    buffer = BufferConfig(trainer_input=TrainerInput(experience_buffer=storage))
    writer = get_buffer_writer(storage)
    await writer.acquire()
    for step, size in enumerate(sizes, start=1):
        experiences = made_of([2] * size, [1.0] * size)
        for position, one in enumerate(experiences):
            one.info["trained"][0] |= {
                "call_id": f"{step}.{position}",
                "version": max(0, step - 1 - position),
            }
        kept, _ = GivenAdvantages().process(experiences)
        await writer.write(kept)
    strategy = WholeSteps(buffer, max_staleness=1, run_id=run_id)
    for step, size in enumerate(sizes, start=1):
        batch, metrics, _ = await asyncio.wait_for(strategy.sample(step), 60)
        assert len(batch) == size
        lags = [min(position, step - 1) for position in range(size)]
        trained = [bool(one.action_mask.any()) for one in batch]
        assert trained == [lag <= 1 for lag in lags]
        assert all(
            bool(one.advantages.any()) == yes for one, yes in zip(batch, trained, strict=True)
        )
        assert metrics["train/staleness"] == sum(lags) / size and metrics["train/timelines"] == size
        ((kind, told),) = await post.take.remote(10.0)
        assert kind == "trained" and told["step"] == step
        outcomes = {row["call_id"]: (row["outcome"], row["tokens"]) for row in told["calls"]}
        assert outcomes == {
            f"{step}.{position}": ("trained" if lag <= 1 else "stale", 2)
            for position, lag in enumerate(lags)
        }
    await writer.release()


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 12), st.integers(0, 3), st.integers(1, 6), st.integers(0, 5)
)
def test_the_order_of_tasks_is_the_one_of_local(
    tasks: int, size: int, seed: int, upto: int, at: int
) -> None:
    every = [Task(task_id=str(i), main_query=str(i)) for i in range(tasks)]
    order = order_of(tasks, seed)
    for step in range(1, upto + 1):
        if step == at:  # a resumed run
            state, order = order.state_dict(), order_of(tasks, seed)
            order.load_state_dict(state)
        assert [every[i] for i in order.get_indices(size)] == tasks_of_step(every, step, size, seed)


def order_of(tasks: int, seed: int) -> OrderOfLocal:
    return OrderOfLocal(SimpleNamespace(dataset_size=tasks), SimpleNamespace(seed=seed))
