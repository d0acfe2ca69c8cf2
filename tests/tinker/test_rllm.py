"""rLLM's Tinker trainer, unmodified, learns against `ajet trainer serve`.

Skipped where it is not installed. Run with rLLM 0.3.0.pre (github.com/rllm-org/rllm, commit
9beb6e0; PyPI has none): its packages `rllm` and `rllm_model_gateway` on the path, beside
tinker-cookbook==0.6.1, hydra-core, polars, codetiming, aiosqlite and fastapi.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rllm.trainer.tinker.tinker_backend", reason="needs rLLM and tinker-cookbook")

import rllm
from hydra import compose, initialize_config_module
from openai import AsyncOpenAI
from rllm.data import Dataset
from rllm.eval.types import EvalOutput
from rllm.trainer import AgentTrainer
from rllm.types import AgentConfig, Episode, Step, Task, Trajectory
from rllm.workflows import TerminationReason
from rllm.workflows.workflow import Workflow

from ajet_sdk.gateway.gateway import listening_socket
from tests.tinker.servers import Server
from tests.tinker.test_learning import GROUP, TOKENS, WANTED

STEPS = 8
QUESTIONS = ("Say yes.", "Say no.", "Say maybe.", "Say so.")


REWARDS = list[float]()


def reward_of(tokens: list[int]) -> float:
    """The share of wanted tokens."""
    REWARDS.append(sum(token < WANTED for token in tokens) / max(1, len(tokens)))
    return REWARDS[-1]


class Asking(Workflow):
    """One call."""

    async def run(self, task: dict[str, str], uid: str, **_: object) -> Episode:
        self.reset(task, uid)
        messages = [{"role": "user", "content": task["question"]}]
        output = await self.rollout_engine.get_model_response(messages, application_id=uid)
        reward = reward_of(output.completion_ids)
        step = Step(
            chat_completions=messages, model_output=output, action=output.content, reward=reward
        )
        trajectory = Trajectory(name="asking", task=task, steps=[step], reward=reward)
        return Episode(
            id=uid,
            task=task,
            trajectories=[trajectory],
            termination_reason=TerminationReason.ENV_DONE,
        )


@rllm.rollout(name="asking")
async def asking(task: Task, config: AgentConfig) -> Episode:
    """The same by an OpenAI client, through rLLM's gateway."""
    async with AsyncOpenAI(base_url=config.base_url, api_key="EMPTY") as client:
        messages = [{"role": "user", "content": task.metadata["question"]}]
        await client.chat.completions.create(model=config.model, messages=messages)
    return Episode(trajectories=[Trajectory(name="asking", steps=[Step()])])


@rllm.evaluator
def wanted(task: object, episode: Episode) -> EvalOutput:
    reward = reward_of(episode.trajectories[0].steps[0].response_ids)
    return EvalOutput(reward=reward, is_correct=reward > 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "agent",
    [{"workflow_class": Asking, "workflow_args": {}}, {"agent_flow": asking, "evaluator": wanted}],
)
def test_rllms_trainer_learns_which_tokens_are_wanted(
    agent: dict[str, Any], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    REWARDS.clear()
    with listening_socket("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {
        "rllm/backend": "tinker", "tinker_base_url": server.url, "model.name": server.model, "model.lora_rank": 8,
        "training.group_size": GROUP, "validation.group_size": 1, "training.learning_rate": 2e-2,
        "training.max_length": 256, "training.default_local_dir": tmp_path / "checkpoints",
        "rollout_engine.renderer_name": "role_colon", "rllm.data.train_batch_size": len(QUESTIONS),
        "rllm.data.max_prompt_length": 100, "rllm.data.max_response_length": TOKENS, "rllm.trainer.total_epochs": STEPS,
        "rllm.trainer.test_freq": 0, "rllm.trainer.save_freq": 4, "rllm.trainer.logger": "[console]",
        "rllm.gateway.port": port, "rllm.gateway.host": "127.0.0.1",
    }  # fmt: skip
    with initialize_config_module("rllm.trainer.config", version_base=None):
        config = compose("unified", [f"{name}={value}" for name, value in settings.items()])
    tasks = Dataset([{"question": question} for question in QUESTIONS], "wanted", "train")
    AgentTrainer(
        **agent, config=config, train_dataset=tasks, val_dataset=tasks, backend="tinker"
    ).train()
    rewards = np.array(REWARDS).reshape(STEPS, -1).mean(1)
    assert rewards[0] < 0.35 and rewards[-1] > 0.8
