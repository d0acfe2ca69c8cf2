"""A model sharded by FSDP2, as the trainers of a cluster have it, on one GPU: against `ajet plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ajet_sdk.backbones.shared.fit import fit
from ajet_sdk.backbones.shared.model_shape import read_shape
from ajet_sdk.config.config import load_config
from tests.gpu import Figure, Setting
from tests.gpu.local import model_of
from tests.gpu.machine import clock, free, matmul_rate, peak_memory
from tests.gpu.made_model import dense_operations

_RESERVED = "reserve"
"""Part of the plan that torch's allocator doesn't count: CUDA's context and the like."""


def sharded(setting: Setting) -> Iterator[Figure]:
    """Memory and speed of a step of the trainers that `ajet plan` computes, one GPU for all."""
    tokens = 64 if setting.dry else 8192
    size = "0.5B"
    model, optimizer = _open(setting, size)
    try:
        yield from _measured(setting, size, model, optimizer, tokens)
    finally:
        torch.distributed.destroy_process_group()
        del model, optimizer
        free(setting.device)


def _open(setting: Setting, size: str) -> tuple[Any, torch.optim.Optimizer]:
    """Float32 weights with passes in bfloat16 and checkpointed activations, and AdamW over them."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    backend = "nccl" if setting.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    model: Any = AutoModelForCausalLM.from_pretrained(model_of(setting, size), dtype=torch.float32)
    model.to(setting.device)
    model.config.use_cache = False
    model.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6)


def _measured(
    setting: Setting, size: str, model: Any, optimizer: torch.optim.Optimizer, tokens: int
) -> Iterator[Figure]:
    device = setting.device
    draw = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(0, model.config.vocab_size, (1, tokens), generator=draw).to(device)
    losses = []

    def step() -> None:
        loss = model(input_ids=ids_1T, labels=ids_1T).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    case = f"{size} FSDP2"
    step()  # the first one makes AdamW's states
    held = sum(4 * p.numel() for p in model.parameters())
    states = 2 * held
    begin = clock(device)
    step()
    seconds = clock(device) - begin
    measured = held + states + peak_memory(device, step)
    yield Figure(case, "loss falls", losses[-1], "< the first", losses[-1] < losses[0])
    yield Figure(case, "trained tokens/s", tokens / seconds)
    rate = dense_operations(model.config, tokens) / seconds
    best = matmul_rate(device, torch.bfloat16, 128 if setting.dry else 8192)
    yield Figure(case, "share of matmul", rate / best)

    values = {
        "model": {"path": str(model_of(setting, size))},
        "rollout": {"max_model_len": tokens},
        "trainer_common": {"micro_batch_tokens": tokens, "use_kl_loss": False},
    }
    shape = read_shape(model_of(setting, size))
    assert shape is not None
    plan = fit(load_config(values=values), shape, 80e9, engines=1, trainer_gpus=1)
    parts = next(card.parts for card in plan.cards if card.name == "trainer")
    planned = sum(value for name, value in parts.items() if name != _RESERVED)
    yield Figure(case, "planned, MiB", planned / 2**20)
    near = None if setting.dry else 0.7 < planned / measured < 1.4
    yield Figure(case, "measured, MiB", measured / 2**20, "within 0.7 to 1.4", near)
