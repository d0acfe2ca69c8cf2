"""The mode of a model's modules while it is scored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def policy_pass(model: PreTrainedModel) -> Iterator[None]:
    """The mode of passes with gradients: the policy as it was sampled from, without dropout or other noise.

    That is evaluation mode. Only modules that save memory by checkpointing, which transformers do in training mode
    alone, are told that they train; what they themselves would drop (`dropout`, `layerdrop`) is 0 meanwhile.
    """
    was = {module: module.training for module in model.modules()}
    dropped: list[tuple[torch.nn.Module, str, float]] = []
    for module in was:
        module.training = bool(getattr(module, "gradient_checkpointing", False))
        if module.training:
            dropped += [(module, n, v) for n, v in vars(module).items() if "drop" in n and isinstance(v, float)]
    try:
        for module, name, _ in dropped:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, value in dropped:
            setattr(module, name, value)
        for module, training in was.items():
            module.training = training
