"""A batch as agents leave it, and the local loss of it: what Trinity's and verl's losses are
compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ajet_sdk.learn.batches import collate, micro_batches, trained_inputs
from ajet_sdk.learn.losses import score
from ajet_sdk.learn.objective import policy_loss, token_weights
from ajet_sdk.learn.trainer import TrainerSettings
from ajet_sdk.protocols import Sampling
from ajet_sdk.samples.build import Batch, build
from ajet_sdk.types import Call, Episode, Reward, Sample

TEMPERATURE = 0.8
LOSSES: list[dict[str, Any]] = [
    {},
    {"ratio_level": "sequence", "loss_aggregation": "sample", "clip_ratio_low": 0.05},  # GSPO
    {"ratio_level": "turn", "loss_aggregation": "sample", "clip_ratio_low": 0.05},
    {"clip_type": "one_sided"},  # CISPO
    {"clip_type": "soft", "loss_aggregation": "agent"},  # SAPO
    {"clip_ratio_max": 1.5, "loss_aggregation": "turn"},  # dual clip
    {"ratio_base": "trainer", "importance_weights": "truncated", "importance_bounds": [0.0, 1.2]},
    {"ratio_base": "trainer", "importance_weights": "masked", "importance_bounds": [0.7, 1.3]},
    {
        "clip_type": "none",
        "importance_weights": "masked",
        "importance_level": "sequence",
        "ratio_base": "trainer",
        "loss_aggregation": "constant",
        "loss_length": 50,
    },
]
"""Settings of the policy objective that differ in each of its parts."""
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def sampled(model: Any) -> tuple[list[Episode], Batch]:
    """Two groups; turns that extend, forks, two agents. By a policy a little apart from the model,
    so clipping acts."""
    draw = random.Random(7)
    size = model.config.vocab_size

    def ids(least: int, most: int) -> list[int]:
        return [draw.randrange(size) for _ in range(draw.randint(least, most))]

    def call(name: str, index: int, prompt: list[int], agent: str = "default") -> Call:
        output = ids(1, 9)
        with torch.no_grad():
            logits_TV = (
                model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
                / TEMPERATURE
            )
        exact = torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(output)[:, None])[:, 0]
        apart = [value + draw.gauss(0, 0.4) for value in exact.tolist()]
        return Call(call_id=f"{name}.{index}", episode_id=name, index=index, agent=agent, policy_version=0,
                    prompt_ids=prompt, output_ids=output, logprobs=apart)  # fmt: skip

    episodes = []
    for group in range(2):
        for attempt in range(4):
            name, first = f"e{group}.{attempt}", ids(3, 12)
            calls = [call(name, 0, first)]
            seen = [*first, *calls[0].output_ids.tolist()]  # type: ignore[union-attr]
            calls += [call(name, 1, [*seen, *ids(2, 5)]), call(name, 2, [*seen, *ids(2, 5)])]
            calls += [call(name, 3, ids(4, 8), "critic")]
            episodes.append(Episode(episode_id=name, group_id=f"g{group}", attempt=attempt, calls=tuple(calls),
                                    rewards=(Reward(value=draw.random()),)))  # fmt: skip
    return episodes, build(episodes)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """What the backward passes have left; it is taken away."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def local_loss(
    model: Any,
    samples: Sequence[Sample],
    config: Any,
    reference: Any = None,
    temperature: float = TEMPERATURE,
) -> float:
    """As the local trainer: micro-batches, and the weighted sum over tokens. Leaves gradients."""
    settings = TrainerSettings.of(config, 1e-3, 4).loss
    weights, loss = token_weights(samples, settings), 0.0
    groups = micro_batches([trained_inputs(sample) for sample in samples], 128)
    assert len(groups) > 1
    for group in groups:
        batch = collate([samples[i] for i in group.members], Sampling(temperature))
        reference_N = None
        if settings.kl_coef:
            with torch.no_grad():
                reference_N = score(reference, batch, entropy=False).logprobs_N
        loss_N, _ = policy_loss(
            score(model, batch, entropy=True, entropy_grad=True), batch, settings, reference_N
        )
        weights_N = torch.from_numpy(np.concatenate([weights[i] for i in group.members]))
        part = (loss_N * weights_N).sum()
        part.backward()
        loss += float(part.detach())
    return loss


def check_same(
    ours: tuple[float, dict[str, torch.Tensor]], theirs: tuple[float, dict[str, torch.Tensor]]
) -> None:
    """A loss and its gradients are another's, and the gradients are not nothing."""
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    assert ours[1].keys() == theirs[1].keys() and any(
        value.abs().max() > 1e-3 for value in ours[1].values()
    )
    for name, value in ours[1].items():
        torch.testing.assert_close(theirs[1][name], value, **CLOSE)
