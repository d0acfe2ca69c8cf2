"""Learning through the API: policy gradients on a tiny task, from samples of the server to its
weights and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinker import types

from tests.tinker.servers import Server, datum, train

WANTED = 64
"""Ids below it are rewarded: a fifth of the vocabulary."""
PROMPTS = ([41, 84, 73, 91, 82], [23, 24, 27, 17, 27], [92, 75, 27, 23, 24], [27, 25, 26, 27, 35])
GROUP, TOKENS = 16, 12


def group_of(sampler: Any, prompt: list[int], seed: int) -> tuple[list[types.Datum], float]:
    """Sampled replies, each rewarded by its share of wanted tokens, with advantages within the
    group."""
    params = types.SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=seed, stop=[])
    replies = sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params).result().sequences
    rewards = np.array([np.mean(np.array(reply.tokens) < WANTED) for reply in replies])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    before = np.zeros(len(prompt) - 1)
    data = [
        datum(
            [*prompt, *reply.tokens],
            logprobs=np.concatenate([before, reply.logprobs]),
            advantages=np.concatenate(
                [before, np.full(len(reply.tokens), advantage / len(reply.tokens))]
            ),
        )
        for reply, advantage in zip(replies, advantages, strict=True)
    ]
    return data, float(rewards.mean())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_a_policy_learns_which_tokens_are_wanted(loss: Any, server: Server, service: Any) -> None:
    trainer = train(service, server.model, rank=8, seed=0)
    rewards = []
    for step in range(8):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        groups = [group_of(sampler, prompt, 100 * step + i) for i, prompt in enumerate(PROMPTS)]
        rewards.append(np.mean([reward for _, reward in groups]))
        trainer.forward_backward([one for data, _ in groups for one in data], loss)
        trainer.optim_step(types.AdamParams(learning_rate=2e-2)).result()
    print(loss, [round(float(reward), 3) for reward in rewards])
    assert rewards[0] < 0.35
    assert rewards[-1] > 0.8
