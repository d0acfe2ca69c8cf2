"""Whether a model fits the GPUs of a cluster: divisibility, and bytes per GPU by what they are for.

The sizes are those of the default trainers: FSDP over all training GPUs, with float32 weights,
gradients and AdamW states, passes in 16 bits, checkpointed activations (Rajbhandari et al. 2020,
ZeRO, section 3 and 5.3, stage 3), and vLLM engines in 16 bits. Of a LoRA adapter, the base model is
in 16 bits and has neither gradients nor states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.mapping import MICRO_BATCH_TOKENS
from ajet_sdk.backbones.shared.model_shape import ModelShape, read_shape
from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

GB = 1e9
RESERVE = 2.0 * GB
"""Of a GPU: CUDA's context, buffers of NCCL, kernels' workspace."""
_GAPS = 1.1
"""Allocated over used memory of a trainer, as blocks leave gaps."""
_ENGINE = 2.5 * GB
"""Of an engine's GPU: activations of a batch of prompts, and CUDA graphs."""
_LOGIT_BYTES = 12
"""Of a token and a word: logits in 16 bits, their gradient, a float32 copy for the entropy, and its
exponentials."""


@dataclass(frozen=True)
class Card:
    """What one GPU of a kind holds, in bytes."""

    name: str
    count: int
    """GPUs of this kind."""
    parts: Mapping[str, float]

    @property
    def used(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Fit:
    """How a run fits its GPUs."""

    shape: ModelShape
    memory: float
    """Bytes of a GPU."""
    cards: tuple[Card, ...]
    kv_tokens: int
    """Tokens whose keys and values an engine can hold."""
    engines: int
    problems: list[str] = field(default_factory=list)
    """Why it doesn't fit, each with its arithmetic; empty if it does."""


def indivisible(config: Config, shape: ModelShape) -> list[str]:
    """What no memory can mend: heads that don't divide, and sequences beyond the positions."""
    rollout = config.rollout
    common = config.trainer_common
    wrong = []
    sizes = {
        "rollout.tensor_parallel_size": rollout.tensor_parallel_size,
        "trainer_common.ulysses_sequence_parallel_size": common.ulysses_sequence_parallel_size,
    }
    for key, size in sizes.items():
        if shape.heads % size:
            wrong.append(
                f"{key}: {size} does not divide the model's {shape.heads} attention heads;"
                f" {_of(divisors(shape.heads))} do"
            )
        elif shape.kv_heads % size and size % shape.kv_heads:
            wrong.append(
                f"{key}: {size} and the model's {shape.kv_heads} key-value heads: one must divide"
                " the other"
            )
    if shape.context is not None and rollout.max_model_len > shape.context:
        wrong.append(
            f"rollout.max_model_len: {rollout.max_model_len:,} is more than the"
            f" {shape.context:,} positions of the model; lower it, or take a model whose"
            " config.json has rope_scaling (YaRN) for this length"
        )
    return wrong


def shape_for(config: Config, *, online: bool = False) -> ModelShape | None:
    """The shape of the config's model; None if its `config.json` is not at hand."""
    path = config.model.path
    if not path:
        return None
    local = config.resolve(path)
    return read_shape(local if local.is_dir() else path, online=online)


def check_shape(config: Config) -> None:
    """Raise ConfigError if the model cannot run with the config's parallel sizes and lengths,
    whatever the memory. Nothing is checked for a model whose `config.json` is not at hand."""
    if not config.trainer_common.n_gpus_per_node:
        return
    shape = shape_for(config)
    problems = [] if shape is None else indivisible(config, shape)
    if problems:
        raise ConfigError(
            f"model.path: {config.model.path} does not fit this config:\n  "
            + "\n  ".join(problems)
            + "\n`ajet plan` shows what would"
        )


def fit(
    config: Config,
    shape: ModelShape,
    memory: float,
    *,
    engines: int,
    trainer_gpus: int,
    colocated: bool = False,
    longest: int | None = None,
) -> Fit:
    """Compare a run with GPUs of `memory` bytes.

    Args:
        engines: number of vLLM engines.
        trainer_gpus: number of GPUs that train.
        colocated: engines sample on the GPUs that train, as with backbone verl.
        longest: tokens of the longest conversation; None: `rollout.max_model_len`.
    """
    rollout = config.rollout
    parallel = rollout.tensor_parallel_size
    longest = rollout.max_model_len if longest is None else longest
    problems = indivisible(config, shape)
    if trainer_gpus < 1:
        problems.append("no GPU is left for training")
    states, activations = _trainer_parts(config, shape, max(1, trainer_gpus), longest)
    share = rollout.gpu_memory_utilization or (0.5 if colocated else 0.85)
    weights = 2.0 * shape.parameters / parallel
    if config.model.lora.enabled:
        versions = rollout.max_staleness + 2
        weights += versions * 2.0 * shape.adapter_parameters(config.model.lora.r) / parallel
    room = memory * share - weights - _ENGINE
    kv_tokens = max(0, int(room / shape.kv_bytes(parallel)))
    trainer = Card("trainer", trainer_gpus, {**states, **activations})
    engine = Card(
        "engine",
        engines * parallel,
        {"weights": weights, "activations": _ENGINE, "keys and values": max(0.0, room)},
    )
    if room <= 0:
        problems.append(
            f"an engine's GPU needs {_gb(weights)} for weights ({_gb(weights * parallel)} in 16"
            f" bits over {parallel}) and {_gb(_ENGINE)} for activations; {share:.0%} of"
            f" {_gb(memory)} are {_gb(memory * share)}"
        )
    elif kv_tokens < longest:
        problems.append(
            f"an engine has room for keys and values of {kv_tokens:,} tokens"
            f" ({shape.kv_bytes(parallel):,} bytes each), less than one conversation of"
            f" {longest:,} (rollout.max_model_len)"
        )
    if trainer_gpus >= 1 and trainer.used > memory:
        named = ", ".join(f"{name} {_gb(size)}" for name, size in trainer.parts.items())
        problems.append(
            f"each of the {trainer_gpus} training GPUs needs {_gb(trainer.used)} ({named}) and has"
            f" {_gb(memory)}"
        )
    if colocated and sum(states.values()) + memory * share > memory:
        problems.append(
            f"while engines sample on the same GPUs, the trainer's {_gb(sum(states.values()))} and"
            f" the engines' {_gb(memory * share)} (rollout.gpu_memory_utilization) exceed"
            f" {_gb(memory)}"
        )
    return Fit(shape, memory, (engine, trainer), kv_tokens, engines, problems)


def _trainer_parts(
    config: Config, shape: ModelShape, gpus: int, longest: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of a training GPU: those that stay, and those of a pass."""
    common = config.trainer_common
    lora = config.model.lora
    parameters = float(shape.parameters)
    trained = parameters
    frozen = 0.0
    if lora.enabled:
        trained = float(shape.adapter_parameters(lora.r))
        frozen = parameters
    states = {
        "weights": (4 * trained + 2 * frozen) / gpus,
        "optimizer": 8 * trained / gpus,
    }
    if common.fsdp_config.param_offload:
        states["weights"] = 0.0
    if common.fsdp_config.optimizer_offload:
        states["optimizer"] = 0.0
    if common.use_kl_loss and not lora.enabled:  # the base model without its adapter
        states["reference"] = 4 * parameters / gpus
    states["reserve"] = RESERVE
    tokens = max(common.micro_batch_tokens or MICRO_BATCH_TOKENS, longest)
    tokens = -(-tokens // common.ulysses_sequence_parallel_size)
    experts_used = min(shape.experts, 8)
    layer = 2.0 * (10 * shape.hidden + 4 * shape.inner * experts_used)
    kept = 2.0 * shape.layers * shape.hidden
    # Two layers are gathered at once, the next one while the present one is computed.
    gathered = 2.0 * (2 * shape.layer_parameters + shape.embedding_parameters)
    activations = {
        "gradients": 4 * trained / gpus,
        "gathered layers": gathered if gpus > 1 else 2 * parameters,
        "activations": _GAPS * tokens * (kept + layer),
        "logits": _GAPS * tokens * float(_LOGIT_BYTES * shape.vocabulary),
    }
    return states, activations


def divisors(number: int) -> list[int]:
    """The powers of two up to 16 that divide a number."""
    return [size for size in (1, 2, 4, 8, 16) if number % size == 0]


def _of(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB"
