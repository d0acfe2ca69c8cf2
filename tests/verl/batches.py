"""A batch as agents leave it: two groups, turns that extend, forks, two agents; and configs for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from ajet_sdk.backbones.verl.mapping import Place, to_verl
from ajet_sdk.config import load_config
from ajet_sdk.samples import Batch, build
from ajet_sdk.types import Call, Episode, Reward

TEMPERATURE = 0.8


def config_of(**trainer_common: Any) -> Any:
    """A config of ours for eight GPUs."""
    return load_config(
        values={
            "backbone": "verl",
            "experiment_name": "oracle",
            "model": {"path": "org/model"},
            "data": {"train_batch_size": 2},
            "rollout": {"temperature": TEMPERATURE, "num_repeat": 4, "multi_turn": {"expected_steps": 4}},
            "trainer_common": {"use_kl_loss": False, "clip_ratio_low": 0.1, **trainer_common},
        }
    )


def mapping_of(config: Any, store: Path, model: str = "org/model") -> dict[str, Any]:
    """What verl gets of it."""
    return to_verl(config, Place(run_id="r", model=model, steps=4, lr=1e-3, checkpoints=store, val_tasks=3))


def stored(model: Any) -> tuple[list[Episode], Batch]:
    """Sampled by a policy a little apart from the model, so that clipping acts."""
    draw = random.Random(7)
    size = model.config.vocab_size

    def ids(least: int, most: int) -> list[int]:
        return [draw.randrange(size) for _ in range(draw.randint(least, most))]

    def call(name: str, index: int, prompt: list[int], agent: str = "default") -> Call:
        output = ids(1, 9)
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
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
