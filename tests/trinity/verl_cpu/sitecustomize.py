"""Lets Trinity's verl trainer run where there is no GPU: each process of a run reads this from its
PYTHONPATH.

Only devices are replaced: gloo for NCCL, the CPU for a CUDA device, pageable for pinned memory, and
a vLLM on the CPU for Trinity's, which needs CUDA. FSDP2, the optimiser, the checkpoints, the queue
and the losses are the real ones.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ajet_sdk.backbones.trinity.without_vllm import stand_in

_LARGE = 1 << 34


def device(module: ModuleType) -> None:
    """What verl asks of a device, of the CPU."""
    import torch

    def nothing(*_: Any, **__: Any) -> int:
        return 0

    asked = (
        "memory_reserved memory_allocated max_memory_allocated max_memory_reserved empty_cache"
        " ipc_collect reset_peak_memory_stats set_device manual_seed manual_seed_all"
    )
    cpu: Any = torch.cpu
    for name in asked.split():
        if not hasattr(cpu, name):
            setattr(cpu, name, nothing)
    cpu.mem_get_info = lambda *_: (_LARGE, _LARGE)
    cpu.get_rng_state = lambda *_: torch.get_rng_state()
    cpu.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    cuda: Any = torch.cuda
    cuda.synchronize = cuda.empty_cache = nothing
    cuda.get_device_capability = lambda *_: (8, 0)


def gloo(module: Any) -> None:
    """One process group over gloo, where verl names a CUDA and a CPU backend."""
    whole = module.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return whole(timeout_second, backend or "gloo")

    module.initialize_global_process_group_ray = initialize


def gloo_in_workers(module: Any) -> None:
    from verl.utils import distributed  # type: ignore[import-not-found]

    module.initialize_global_process_group_ray = distributed.initialize_global_process_group_ray


def engines(module: Any) -> None:
    """FSDP2's engine is registered for CUDA alone, and pins memory."""
    from verl.workers.engine.base import EngineRegistry  # type: ignore[import-not-found]

    pinned = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda **_: pinned(pin_memory=False)
    kinds = EngineRegistry._engines["language_model"]
    for name in ("fsdp", "fsdp2"):
        kinds[name].setdefault("cpu", kinds[name]["cuda"])


def sampler(module: Any) -> None:
    """Trinity's vLLM actor needs CUDA: the one here starts a vLLM for the CPU and gives it the
    weights."""
    create = module.Allocator.create_engine

    async def create_engine(self: Any, config: Any, role: str, engine_id: int) -> Any:
        if config.engine_type != "vllm":
            return await create(self, config, role, engine_id)
        from cpu_vllm import CpuVllm  # type: ignore[import-not-found]

        config = module.deepcopy(config)
        config.engine_id = engine_id
        name = self.get_actor_name(role, engine_id, 0)
        bundle = self.bundle_result.actor_bundle_map[name]
        return await module.get_model_wrapper(CpuVllm, config, self.pg, [(name, bundle)])

    module.Allocator.create_engine = create_engine


CHANGES: dict[str, Callable[[Any], None]] = {
    "verl.utils.device": device,
    "verl.utils.distributed": gloo,
    "verl.workers.engine_workers": gloo_in_workers,
    "verl.workers.engine.fsdp.transformer_impl": engines,
    "trinity.common.models.allocator": sampler,
}


class AfterImport(MetaPathFinder):
    """Changes a module of `CHANGES` when it has been read."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in CHANGES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            read = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                read(module)
                CHANGES[name](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterImport())
stand_in()  # no process imports the vLLM that is installed but the one that serves it
