"""Samples as verl's rows: the same ids, masks, log-probabilities and advantages, through verl's own
training loop."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs verl, see CONTRIBUTING.md")

import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, compute_advantage
from verl.trainer.ppo.reward import extract_reward
from verl.utils.dataset.rl_dataset import collate_fn

from ajet_sdk.backbones.verl import manager as _registers_the_estimator  # noqa: F401
from ajet_sdk.backbones.verl.batches import BatchPositions, reward_rows, training_rows, truncate
from ajet_sdk.backbones.verl.mapping import ESTIMATOR
from ajet_sdk.samples.build import balance
from tests.oracle import sampled


def through_the_loop(count: int, rows: DataProto) -> DataProto:
    """What verl's `fit` does with what its agent loop returns, up to the advantages, by verl's own
    functions."""
    slots = BatchPositions(count)
    batch = DataProto.from_single_dict(collate_fn([slots[at] for at in range(count)]))
    batch.non_tensor_batch["uid"] = np.array([str(at) for at in range(count)], dtype=object)
    asked = RayPPOTrainer._get_gen_batch(None, batch)
    assert len(asked) == count
    rows.meta_info.pop("timing")
    batch = batch.repeat(repeat_times=1, interleave=True).union(rows)
    for inputs in batch.non_tensor_batch["multi_modal_inputs"]:
        assert "image_grid_thw" not in inputs
    batch.batch["token_level_scores"], more = extract_reward(batch)
    assert not more
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    return compute_advantage(batch, adv_estimator=ESTIMATOR, config={})


def test_a_row_is_a_sample_token_for_token(model: Any) -> None:
    _, made = sampled(model)
    count = len(made.samples) + 5
    rows = through_the_loop(count, training_rows(made.samples, count, padding=0))
    tensors = rows.batch
    wide = tensors["prompts"].shape[1]
    for at, sample in enumerate(made.samples):
        line, seen = sample.timeline, tensors["attention_mask"][at].bool()
        assert tensors["input_ids"][at][seen].tolist() == line.token_ids.tolist()
        mask = torch.zeros_like(tensors["input_ids"][at])
        mask[wide:] = tensors["response_mask"][at]
        assert mask[seen].tolist() == line.loss_mask.astype(int).tolist()
        assert mask[~seen].sum() == 0
        for name, expected in (
            ("rollout_log_probs", line.logprobs),
            ("advantages", sample.advantages),
        ):
            whole = torch.zeros(mask.shape)
            whole[wide:] = tensors[name][at]
            trained = line.loss_mask
            np.testing.assert_array_equal(
                whole[seen].numpy()[trained], np.asarray(expected)[trained]
            )
        assert tensors["position_ids"][at][seen].tolist() == list(range(len(line.token_ids)))
    assert tensors["response_mask"][len(made.samples) :].sum() == 0, "blanks train nothing"
    assert torch.equal(
        tensors["input_ids"], torch.cat([tensors["prompts"], tensors["responses"]], 1)
    )
    assert {1, 2} <= set(rows.non_tensor_batch["__num_turns__"].tolist())


@pytest.mark.usefixtures("no_flash_attention")
def test_verls_metrics_and_dispatch_take_the_rows(model: Any) -> None:
    from verl.trainer.ppo.metric_utils import compute_data_metrics
    from verl.workers.utils.padding import left_right_2_no_padding

    for made in (list(sampled(model)[1].samples), []):  # a step may leave nothing to train on
        rows = through_the_loop(32, training_rows(made, 32, padding=0))
        assert compute_data_metrics(rows, use_critic=False)["response_length/min"] >= 1
        assert all(len(part) == 4 for part in rows.chunk(8))
        assert (
            left_right_2_no_padding(rows.to_tensordict())["input_ids"].offsets().diff().min() >= 2
        )


def test_too_many_timelines_are_cut_evenly_and_booked(model: Any) -> None:
    episodes, made = sampled(model)
    calls = [call for episode in episodes for call in episode.calls]
    assert len(made.samples) == 24
    for most in (24, 20, 8, 3):
        kept, ledger = truncate(made, most)
        assert len(kept) == most and not balance(ledger, calls)
        rows = Counter(sample.episode_id for sample in kept)
        assert max(rows.values()) - min(rows[episode.episode_id] for episode in episodes) <= 1
        trained = sum(entry.tokens for entry in ledger if entry.outcome == "trained")
        assert trained == sum(int(sample.timeline.loss_mask.sum()) for sample in kept)
        assert [s.episode_id for s in kept] == sorted(s.episode_id for s in kept), (
            "in the order of the episodes"
        )


def test_a_validation_is_a_row_a_task_with_its_reward() -> None:
    rows = reward_rows([0.5, 0.0, 1.0], padding=0)
    assert extract_reward(rows)[0].sum(-1).tolist() == [0.5, 0.0, 1.0]
