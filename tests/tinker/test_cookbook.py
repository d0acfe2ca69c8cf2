"""tinker-cookbook's own RL trainer, unmodified, learns against `ajet trainer serve`.

Skipped where it is not installed: `pip install tinker-cookbook==0.6.1`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker_cookbook", reason="needs tinker-cookbook")

import chz
import tinker
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult

from tests.tinker.servers import Server
from tests.tinker.test_learning import GROUP, PROMPTS, TOKENS, WANTED

STEPS = 8


class WantedTokens(Env):
    """One turn, rewarded by its share of wanted tokens."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        return tinker.ModelInput.from_ints(list(self._prompt)), []

    async def step(self, action: list[int], *, extra: object = None) -> StepResult:
        reward = sum(token < WANTED for token in action) / max(1, len(action))
        return StepResult(
            reward=reward,
            episode_done=True,
            next_observation=tinker.ModelInput.empty(),
            next_stop_condition=[],
        )


class Group(EnvGroupBuilder):
    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt

    async def make_envs(self) -> list[Env]:
        return [WantedTokens(self._prompt) for _ in range(GROUP)]


class Prompts(RLDataset):
    def get_batch(self, index: int) -> list[EnvGroupBuilder]:
        return [Group(prompt) for prompt in PROMPTS]

    def __len__(self) -> int:
        return STEPS


@chz.chz
class PromptsBuilder(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, None]:
        return Prompts(), None


@pytest.mark.slow
def test_the_cookbooks_trainer_learns_which_tokens_are_wanted(
    server: Server, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"eval_every": 0, "save_every": 0, "num_groups_to_log": 0}
    config = train.Config(
        learning_rate=2e-2,
        dataset_builder=PromptsBuilder(),
        model_name=str(server.model),
        recipe_name="ajet",
        max_tokens=TOKENS,
        log_path=str(tmp_path / "log"),
        lora_rank=8,
        base_url=server.url,
        **settings,
    )
    asyncio.run(train.main(config))
    lines = (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    rewards = [
        value
        for line in lines
        if (value := json.loads(line).get("env/all/reward/total")) is not None
    ]
    assert len(rewards) == STEPS and rewards[0] < 0.35 and rewards[-1] > 0.8
