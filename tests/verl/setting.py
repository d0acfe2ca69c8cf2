"""A job of two-turn episodes on disk, and an object with the interface of verl's client over a real
tiny model.

The client stands for verl's `LLMServerClient`, which needs GPUs: the same `generate`, over our own
sampler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from verl import DataProto
from verl.utils.dataset.rl_dataset import collate_fn

from ajet_sdk.backbones.verl.backbone import compose_config
from ajet_sdk.backbones.verl.batches import BatchPositions
from ajet_sdk.backbones.verl.manager import AjetManager
from ajet_sdk.backbones.verl.mapping import VerlPlace, to_verl
from ajet_sdk.backbones.verl.runner import write_job
from ajet_sdk.cluster.mailbox import open_mailbox
from ajet_sdk.config.config import load_config
from ajet_sdk.protocols import Job
from ajet_sdk.types import Task, new_id

QUESTIONS = ["Say yes.", "Say no.", "Say maybe.", "Say yes, no."]


def agent() -> tuple[Any, Any]:
    """A workflow of two turns and a judge, made here so that they travel by value."""
    import ajet

    @ajet.workflow
    async def talk(question: str) -> str:
        from openai import AsyncOpenAI

        client = AsyncOpenAI()
        said = [{"role": "user", "content": question}]
        for _ in range(2):
            reply = await client.chat.completions.create(model="any", messages=said)
            said += [
                reply.choices[0].message.model_dump(include={"role", "content"}),
                {"role": "user", "content": "On."},
            ]
        return str(said[1]["content"])

    @ajet.judge
    def length(output: str) -> float:
        return float(len(output) % 5)

    return talk, length


def client_over(tiny: Path, broken: bool = False) -> Any:
    """What verl calls a client; each process that it reaches loads the model for itself."""

    class Client:
        def __init__(self) -> None:
            self.engine: Any = None

        async def generate(
            self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
        ) -> Any:
            from verl.workers.rollout.replica import TokenOutput

            from ajet_sdk.config.config import load_config
            from ajet_sdk.engines.local.loading import local_engine
            from ajet_sdk.protocols import Sampling

            if broken:
                raise ValueError("the engine is out of order")
            if self.engine is None:
                values = {
                    "model": {"path": str(tiny), "dtype": "float32"},
                    "rollout": {"max_model_len": 256},
                }
                self.engine = local_engine(load_config(values=values))
            asked = {key: value for key, value in sampling_params.items() if key != "logprobs"}
            (got,) = await self.engine.sampler.sample(prompt_ids, Sampling(**asked), request_id)
            return TokenOutput(token_ids=list(got.output_ids), log_probs=list(got.logprobs), stop_reason="completed",
                               extra_fields={"global_steps": 0})  # fmt: skip

    return Client()


class Setting:
    """A job on disk, its Post, and verl's config for it."""

    def __init__(self, folder: Path, tiny: Path, rows: int = 2) -> None:
        self.run_id = new_id()
        self.config = load_config(
            values={
                "backbone": "verl",
                "experiment_dir": str(folder),
                "model": {"path": str(tiny), "dtype": "float32"},
                "data": {"train_batch_size": 2},
                "rollout": {
                    "num_repeat": 3,
                    "temperature": 1.0,
                    "max_model_len": 256,
                    "max_env_worker": 4,
                    "max_response_length_in_one_turn": 6,
                    "min_sound_share": 0.2,
                    "max_retries": 0,
                    "multi_turn": {"expected_steps": rows},
                },
                "trainer_common": {
                    "n_gpus_per_node": 1,
                    "total_steps": 2,
                    "val_pass_n": 2,
                    "use_kl_loss": False,
                    "optim": {"warmup_steps": 0},
                    "logger": ["console"],
                },
            }
        )
        self.tasks = [Task(main_query=q, metadata={"question": q}) for q in QUESTIONS]
        self.job = Job(config=self.config, workflow=agent()[0], judge=agent()[1], train=self.tasks,
                       val=self.tasks[:2], run_id=self.run_id, directory=folder)  # fmt: skip
        place = VerlPlace(
            run_id=self.run_id,
            model=str(tiny),
            steps=2,
            lr=0.01,
            checkpoints=folder / "store",
            val_tasks=2,
        )
        write_job(place.job, self.job, self.job.val, str(tiny), folder)
        assert place.job.stat().st_mode & 0o077 == 0, "it may hold keys"
        self.verl = compose_config(to_verl(self.config, place))
        self.post = open_mailbox(self.run_id)
        self.directory, self.place = folder, place

    def manager(self, client: Any) -> AjetManager:
        return AjetManager.create(config=self.verl, llm_client=client, teacher_client=None,
                                  reward_loop_worker_handles=None)  # fmt: skip

    def asked(self, count: int, step: int, validate: bool = False) -> DataProto:
        slots = BatchPositions(count)
        batch = DataProto.from_single_dict(collate_fn([slots[at] for at in range(count)]))
        batch.meta_info = {"global_steps": step, "validate": validate}
        return batch

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        return list(ray.get(self.post.take.remote(1.0)))
