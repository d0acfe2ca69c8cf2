"""Whether a run of backbone `local` fits one device, by the estimate that the run itself makes, of
its model without weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.fit import GB, RESERVE, Card, Fit
from ajet_sdk.engines.local.loading import model_without_weights
from ajet_sdk.engines.local.sampler import KV_ON_CPU, KV_SHARE
from ajet_sdk.learn.batches import tokens_of_a_pass
from ajet_sdk.learn.estimate import (
    conversations_at_once,
    longest_conversation,
    memory_parts,
    state_bytes,
)
from ajet_sdk.learn.trainer import Trainer, TrainerSettings

if TYPE_CHECKING:
    from ajet_sdk.backbones.shared.model_shape import ModelShape
    from ajet_sdk.config.config import Config


def fit_local(config: Config, shape: ModelShape, memory: float, longest: int | None = None) -> Fit:
    """Compare a run with one device of `memory` bytes: a GPU, or with `model.device: cpu` the
    memory of the machine. `longest` is the length of the longest conversation in tokens; None: that
    of the config or the model.

    Raises ConfigError for a model that transformers can't build.
    """
    source = config.model
    assert source.path is not None, "the shape is that of a path"
    on_gpu = source.device != "cpu"
    local = config.resolve(source.path)
    path = local if local.is_dir() else source.path
    model = model_without_weights(path, source, on_gpu=on_gpu)
    checkpointing = source.gradient_checkpointing
    if longest is None:
        longest = longest_conversation(config, model)
    settings = TrainerSettings.of(config, lr=0.0, steps=1)
    if not settings.micro_batch_tokens:
        tokens = tokens_of_a_pass(
            model, checkpointing=checkpointing, memory=memory if on_gpu else None
        )
        settings = replace(settings, micro_batch_tokens=tokens)
    trainer = Trainer(model, settings)
    if on_gpu:
        kv_limit = int(KV_SHARE * max(0.0, memory - state_bytes(trainer)))
    else:
        kv_limit = KV_ON_CPU
    parts = memory_parts(
        config,
        trainer,
        tokens=max(trainer.micro_batch_tokens, longest),
        rows=conversations_at_once(config),
        longest=longest,
        kv_limit=kv_limit,
    )
    if on_gpu:
        parts["reserve"] = RESERVE
    card = Card("GPU" if on_gpu else "machine", 1, parts)
    problems = list[str]()
    if card.used > memory:
        named = ", ".join(f"{name} {size / GB:.1f} GB" for name, size in parts.items())
        problems.append(
            f"the {card.name} needs {card.used / GB:.1f} GB ({named}) and has {memory / GB:.1f} GB"
        )
    kv_tokens = int(kv_limit / shape.kv_bytes(1, model.dtype.itemsize))
    return Fit(shape, memory, (card,), kv_tokens, 1, problems)
