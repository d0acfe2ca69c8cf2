"""Measures the agent's reward during a recipe's warm-up: on training tasks, at temperature 1."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from ajet_sdk.capture.hooks import installed
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.frozen import before_training
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.judges.load import load_judge
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.rollout.outcomes import check_sound
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.tokens.huggingface import HFTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from ajet_sdk.config.config import Config
    from ajet_sdk.types import Task


class Probe:
    """Runs a workflow on training tasks with a model in memory, without recording."""

    def __init__(
        self,
        config: Config,
        workflow: Callable[..., object] | None,
        judge: object,
        tasks: Sequence[Task],
    ) -> None:
        self.config = before_training(config)
        self.workflow = workflow
        self.judge = judge
        self.tasks = list(tasks)
        random.Random(config.trainer_common.seed).shuffle(self.tasks)

    @classmethod
    def of(cls, config: Config) -> Probe:
        """Builds a probe from a config's workflow, judge and tasks."""
        if config.rollout.user_workflow is None:
            raise ConfigError(
                "rollout.user_workflow is not set; model.recipe needs the agent to measure its"
                " model"
            )
        return cls(
            config,
            config.load(config.rollout.user_workflow),
            load_judge(config),
            load_tasks(config).train,
        )

    async def reward(self, model: PreTrainedModel, tokenizer: HFTokenizer, count: int) -> float:
        """Mean reward over `count` tasks; an episode that failed by its own fault counts as 0.

        Raises TrainingError if fewer than `rollout.min_sound_share` of them are sound.
        """
        rollout = self.config.rollout
        longest: int = model.config.get_text_config().max_position_embeddings
        limit = min(rollout.max_model_len, longest)
        sampler = LocalSampler(
            model,
            tokenizer,
            model_name="recipe",
            max_model_len=limit,
            max_batch=rollout.max_env_worker,
            seed=0,
        )
        engine = TokenEngine(sampler, tokenizer)
        seed = self.config.trainer_common.seed
        attempts = [
            Attempt(
                task=self.tasks[i % len(self.tasks)],
                group_id=f"probe-{i}",
                seed=seed * 1_000_003 + i,
                group_seed=i,
                must_call=True,
            )
            for i in range(count)
        ]
        try:
            with installed(), Gateway() as gateway:
                episodes = await run_batch(
                    self.workflow,
                    self.judge,
                    attempts,
                    engine=engine,
                    gateway=gateway,
                    config=self.config,
                    sampling=SamplingOverride(temperature=1.0, top_p=1.0, top_k=-1),
                )
        finally:
            await engine.aclose()
        check_sound(episodes, rollout.min_sound_share)
        return sum(e.reward or 0.0 for e in episodes) / len(episodes)
