"""verl's own training loop over our manager: everything of `fit` but the workers on GPUs.

In their place stand a worker group that keeps what it is asked to train and a keeper of checkpoints
that does nothing.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl, see CONTRIBUTING.md")
pytest.importorskip("ray", reason="needs Ray, see CONTRIBUTING.md")

import ray
import yaml
from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager
from verl.trainer.ppo.utils import Role
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from ajet_sdk.backbones.verl.backbone import _Run
from ajet_sdk.errors import TrainingError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Run, new_id

from .setting import client_over


class Workers:
    """What verl's loop calls of its group of workers."""

    world_size = 1

    def __init__(self) -> None:
        self._dispatch_info: dict[str, list[int]] = {}
        self.trained: list[Any] = []

    def _query_dispatch_info(self, role: str) -> list[int]:
        return [0]

    def update_actor(self, batch: Any) -> Any:
        self.trained.append(batch)
        return tu.get_tensordict(
            {}, non_tensor_dict={"metrics": {"pg_loss": [0.5], "mfu": [0.1], "lr": 0.01}}
        )


class Checkpoints:
    """What it calls of its keeper of weights."""

    def update_weights(self, step: int) -> None: ...
    def sleep_replicas(self) -> None: ...


@pytest.mark.usefixtures("no_flash_attention")
def test_verls_loop_trains_what_we_sampled(
    setting: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = setting()
    metrics = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(metrics))
    config = here.verl
    config.trainer.save_freq, config.trainer.val_before_train, config.trainer.device = (
        -1,
        True,
        "cpu",
    )
    from verl.utils import hf_tokenizer

    data = {
        split: create_rl_dataset(config.data[f"{split}_files"], config.data, None, None)
        for split in ("train", "val")
    }
    trainer = RayPPOTrainer(
        config=config,
        tokenizer=hf_tokenizer(str(tiny)),
        role_worker_mapping={Role.ActorRollout: Workers},
        resource_pool_manager=ResourcePoolManager(
            {"global_pool": [1]}, {Role.ActorRollout: "global_pool"}
        ),
        train_dataset=data["train"],
        val_dataset=data["val"],
        collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, data["train"]),
        device_name="cpu",
    )
    workers = trainer.actor_rollout_wg = Workers()
    trainer.checkpoint_manager = Checkpoints()
    trainer.async_rollout_manager = here.manager(client_over(tiny))
    trainer.fit()

    told = [content for kind, content in here.news() if kind == "batch"]
    assert [content["step"] for content in told] == [1, 2] and len(workers.trained) == 2
    for batch, content in zip(workers.trained, told, strict=True):
        booked = sum(row["tokens"] for row in content["ledger"] if row["outcome"] == "trained")
        mask = batch["response_mask"].bool()
        assert mask.sum() == booked > 0
        assert (
            batch["advantages"][mask].abs().min() > 0
            and batch["advantages"][~mask].abs().max() == 0
        )
        assert (batch["old_log_probs"][mask] < 0).all(), (
            "the ratio is to the sampler's log-probability"
        )
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[2]["data"]["actor/pg_loss"] == 0.5 and "training/global_step" in lines[1]["data"]


def test_what_verl_fails_with_is_one_error(setting: Any) -> None:
    """The driver and verl's real trainer process, on a machine without GPUs."""
    here = setting()
    job = replace(here.job, run_id=new_id())
    with (
        TraceWriter(here.directory / "trace.duckdb") as writer,
        Loggers(
            ["console"], directory=here.directory, run_id=job.run_id, writer=writer, total_steps=2
        ) as loggers,
        pytest.raises(TrainingError, match=r"verl's trainer failed: .*GPU"),
    ):
        asyncio.run(_Run(job, writer, loggers, 2).run())
    said = yaml.safe_load((here.directory / "verl.yaml").read_text())
    assert (
        Path(said["ajet"]["job"]).is_file()
        and said["actor_rollout_ref"]["actor"]["optim"]["lr"] > 0
    )
    assert ray.is_initialized()


def test_a_run_that_is_over_is_exported_and_not_trained_again(setting: Any, tiny: Path) -> None:
    """Its trainer needs GPUs, of which this machine has none, so that starting it would be an
    error."""
    here = setting()
    saved = here.place.directory / "global_step_2" / "actor" / "huggingface"
    shutil.copytree(tiny, saved)
    (here.place.directory / "latest_checkpointed_iteration.txt").write_text("2")
    config = here.config.model_copy(
        update={
            "trainer_common": here.config.trainer_common.model_copy(
                update={"checkpoint_base_dir": str(here.place.checkpoints)}
            )
        }
    )
    job = replace(here.job, config=config, resume=True)
    with (
        TraceWriter(here.directory / "trace.duckdb") as writer,
        Gateway(writer),
        Loggers(
            ["console"], directory=here.directory, run_id=job.run_id, writer=writer, total_steps=2
        ) as loggers,
    ):
        writer.put(Run(run_id=job.run_id))
        loggers.log(2, {"val/reward": 0.5})
        writer.flush()
        tuned = asyncio.run(_Run(job, writer, loggers, 2).run())
    assert tuned.path is not None and (tuned.path / "model.safetensors").is_file()
    assert tuned.metrics["val/reward"] == 0.5
