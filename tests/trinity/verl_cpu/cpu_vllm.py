"""Trinity's rollout model over a vLLM on the CPU, which ajet's own sampler starts and gives new
weights."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import save_file
from trinity.common.constants import SyncMethod
from trinity.common.models.model import BaseInferenceModel
from trinity.common.models.utils import load_state_dict_iterator
from trinity.manager.synchronizer import Synchronizer

from ajet_sdk.engines.vllm.sampler import VllmSampler
from ajet_sdk.engines.vllm.server import Settings


class CpuVllm(BaseInferenceModel):
    """An actor: the server's address for the runners, and weights out of Trinity's synchroniser
    into it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._synchronizer = Synchronizer.get_actor(namespace=ray.get_runtime_context().namespace)
        self._port = self.get_available_address(random_port=True)[1]
        self._version = 0
        self._weights: dict[str, Any] = {}

    async def prepare(self) -> None:
        os.environ["PYTHONPATH"] = os.environ[
            "AJET_TEST_PLAIN_PATH"
        ]  # without what is changed here
        config = self.config
        directory = Path(os.environ["AJET_TEST_VLLM"])
        settings = Settings(
            model=config.model_path,
            tokenizer=config.model_path,
            name=config.model_path,
            log=directory / "vllm.log",
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.extra_engine_args["max_num_seqs"],
            seed=config.seed,
            gpus=(),
            changing=True,
            lora_rank=config.lora_kwargs["max_lora_rank"] if config.enable_lora else None,
            port=self._port,
        )
        self._sampler = VllmSampler(
            settings, eos_ids=frozenset(), directory=directory, write=self._write
        )
        await self._sampler.ready()
        self._prepared = True

    def get_api_server_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def get_model_version(self) -> int:
        return self._version

    async def sync_model_weights(
        self, model_version: int, method: Any, timeout: float = 1200
    ) -> int:
        if model_version == self.config.extra_engine_args.get("test_loses_version"):
            raise ConnectionError("the weights were lost on their way")
        if method == SyncMethod.MEMORY:
            self._weights, _ = await self._synchronizer.get_model_state_dict.remote()
        else:
            checkpoint = (
                Path(self.config.checkpoint_job_dir) / f"global_step_{model_version}" / "actor"
            )
            self._weights = dict(load_state_dict_iterator(str(checkpoint)))
        async with self._sampler.exclusive():
            self._sampler.policy_version = model_version
        self._version = model_version
        return model_version

    def _write(self, place: Path) -> None:
        place.mkdir(parents=True)
        for file in Path(self.config.model_path).glob("*"):
            if file.suffix != ".safetensors":
                shutil.copy2(file, place / file.name)
        whole = {
            name: value.detach().float().clone().contiguous()
            for name, value in self._weights.items()
        }
        save_file(whole, place / "model.safetensors", metadata={"format": "pt"})

    async def shutdown(self) -> None:
        await asyncio.shield(self._sampler.aclose())
