"""rLLM's Tinker trainer, unmodified, learns against `ajet trainer serve`.

Skipped where it is not installed. Run with rLLM 0.3.0.pre (github.com/rllm-org/rllm, commit 9beb6e0; PyPI has none):
its packages `rllm` and `rllm_model_gateway` on the path, beside tinker-cookbook==0.6.1, hydra-core, polars, codetiming
and aiosqlite.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rllm.trainer.tinker.tinker_backend", reason="needs rLLM and tinker-cookbook")

from hydra import compose, initialize_config_module
from rllm.data import Dataset
from rllm.trainer import AgentTrainer
from rllm.types import Episode, Step, Trajectory
from rllm.workflows import TerminationReason
from rllm.workflows.workflow import Workflow

from tests.tinker.servers import Server
from tests.tinker.test_learning import GROUP, TOKENS, WANTED

STEPS = 8
QUESTIONS = ("Say yes.", "Say no.", "Say maybe.", "Say so.")


REWARDS = list[float]()


class WantedTokens(Workflow):
    """One call, rewarded by its share of wanted tokens."""

    async def run(self, task: dict[str, str], uid: str, **_: object) -> Episode:
        self.reset(task, uid)
        messages = [{"role": "user", "content": task["question"]}]
        output = await self.rollout_engine.get_model_response(messages, application_id=uid)
        reward = sum(token < WANTED for token in output.completion_ids) / max(1, len(output.completion_ids))
        REWARDS.append(reward)
        step = Step(chat_completions=messages, model_output=output, action=output.content, reward=reward)
        trajectory = Trajectory(name="wanted", task=task, steps=[step], reward=reward)
        return Episode(id=uid, task=task, trajectories=[trajectory], termination_reason=TerminationReason.ENV_DONE)


@pytest.mark.slow
def test_rllms_trainer_learns_which_tokens_are_wanted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {
        "rllm/backend": "tinker", "tinker_base_url": server.url, "model.name": server.model, "model.lora_rank": 8,
        "training.group_size": GROUP, "validation.group_size": 1, "training.learning_rate": 2e-2,
        "training.max_length": 256, "training.default_local_dir": tmp_path / "checkpoints",
        "rollout_engine.renderer_name": "role_colon", "rllm.data.train_batch_size": len(QUESTIONS),
        "rllm.data.max_prompt_length": 100, "rllm.data.max_response_length": TOKENS, "rllm.trainer.total_epochs": STEPS,
        "rllm.trainer.test_freq": 0, "rllm.trainer.save_freq": 4, "rllm.trainer.logger": "[console]",
    }  # fmt: skip
    with initialize_config_module("rllm.trainer.config", version_base=None):
        config = compose("unified", [f"{name}={value}" for name, value in settings.items()])
    tasks = Dataset([{"question": question} for question in QUESTIONS], "wanted", "train")
    AgentTrainer(
        workflow_class=WantedTokens, workflow_args={}, config=config, train_dataset=tasks, val_dataset=tasks,
        backend="tinker",
    ).train()  # fmt: skip
    rewards = np.array(REWARDS).reshape(STEPS, -1).mean(1)
    assert rewards[0] < 0.35 and rewards[-1] > 0.8
