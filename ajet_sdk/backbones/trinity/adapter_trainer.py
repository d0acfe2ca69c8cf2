"""Trinity's verl trainer of a LoRA adapter, changed to hand over the adapter and nothing else.

Trinity's own gathers the base model's weights on every rank when it starts, writes them to the
shared file system or sends them to another process with each update, and rounds the adapter to 16
bits.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import trinity.trainer.verl.trainer
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from trinity.manager.synchronizer import Synchronizer
from trinity.trainer.verl.trainer import VERLTrainer
from trinity.trainer.verl.workers import TrinityActorRolloutRefWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id

from ajet_sdk.backbones.trinity.adapters import ADAPTER, handed_over

_WEIGHTS = "adapter_model.safetensors"


class AdapterWorker(TrinityActorRolloutRefWorker):  # type: ignore[misc]
    """A rank of the trainer."""

    def _maybe_patch_lora_fsdp2(self) -> None:
        """Does nothing. Trinity rounds the adapter's weights to the type of the passes, in which
        small updates are lost; FSDP2 itself keeps them, and sums gradients, in float32."""

    def _cache_state_dict_meta(self) -> None:
        """Does nothing: the base model's weights are not sent."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def save_state_dict(self, local_path: str, global_step: int = 0) -> None:
        """Write the adapter to `local_path`/lora_adapter."""
        self._save_lora(local_path)

    def _save_lora(self, local_path: str) -> None:
        """Write the adapter as peft and vLLM read it. All ranks must call it: they gather the
        weights together."""
        model = self.actor.engine.module
        weights = {}
        for name, value in get_peft_model_state_dict(model, save_embedding_layers=False).items():
            if isinstance(value, DTensor):
                value = value.to(get_device_id()).full_tensor()
            weights[name] = value.detach().to("cpu", torch.float32).contiguous()
        if torch.distributed.get_rank() == 0:
            directory = Path(local_path) / ADAPTER
            directory.mkdir(parents=True, exist_ok=True)
            settings = copy.copy(model.peft_config["default"])
            settings.base_model_name_or_path = self.config.model.path
            # The modules themselves: what `all-linear` or a pattern names depends on the reader.
            settings.target_modules = sorted({_module(name) for name in weights})
            settings.exclude_modules = None
            settings.inference_mode = True
            settings.save_pretrained(directory)
            save_file(weights, directory / _WEIGHTS, metadata={"format": "pt"})
        torch.distributed.barrier()


def _module(weight: str) -> str:
    """The module of an adapter's weight, as the base model names it."""
    return weight.removeprefix("base_model.model.").partition(".lora_")[0]


class AdapterTrainer(VERLTrainer):  # type: ignore[misc]
    """The trainer over all ranks."""

    async def upload_state_dict(self) -> None:
        """Write the adapter to the checkpoint store, then announce its version to the explorer."""
        directory = handed_over(Path(self.global_config.checkpoint_job_dir), self.global_steps)
        self.actor_rollout_wg.save_state_dict(str(directory.parent), global_step=self.global_steps)
        synchronizer = Synchronizer.get_actor(namespace=self.global_config.ray_namespace)
        await synchronizer.set_model_state_dict.remote(None, self.global_steps)


def train_adapter() -> None:
    """Let Trinity start these classes by the names of its own, in this process."""
    trinity.trainer.verl.trainer.TrinityActorRolloutRefWorker = AdapterWorker
    trinity.trainer.verl.trainer.VERLTrainer = AdapterTrainer
