"""Activation memory per token, and the number of tokens in a training pass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ajet_sdk.engines.local.products import products_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FEWEST, _MOST = 512, 8192
"""Bounds of the tokens in a pass: fewer lose speed, more gain none."""
_CPU_BYTES = 2 << 30
_SHARE = 0.25
"""Share of the device's memory for activations."""


def tokens_of_a_pass(model: PreTrainedModel, *, checkpointing: bool) -> int:
    """Default number of tokens in a training pass: activations take at most a quarter of the device's memory, and on a
    CPU at most 2 GiB."""
    if model.device.type == "cuda":
        limit = torch.cuda.mem_get_info(model.device)[1] * _SHARE
    else:
        limit = min(_CPU_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE)
    stored, once, scored = bytes_of_a_token(model, checkpointing=checkpointing)
    return max(_FEWEST, min(_MOST, int(limit / (stored + once + scored)) // 64 * 64))


def bytes_of_a_token(model: PreTrainedModel, *, checkpointing: bool) -> tuple[int, int, int]:
    """Bytes of a token's activations in all layers, of temporary ones, and of a trained token's logits."""
    shape, size = model.config.get_text_config(), model.dtype.itemsize
    hidden, layers = shape.hidden_size, shape.num_hidden_layers
    inner = getattr(shape, "intermediate_size", None) or 4 * hidden
    product = products_of(model).itemsize
    layer = size * 8 * hidden + product * (2 * hidden + 4 * inner)  # two norms, attention; gate and up, their product
    if hasattr(model, "disable_adapter") and product < 4:  # adapters, and their copy of each input
        layer += (4 if product == size else product) * (6 * hidden + inner)
    logits = shape.vocab_size * (12 if size == 4 else 16)  # with gradient and log-probabilities, in float32
    return (layers * hidden * size, layer, logits) if checkpointing else (layers * layer, 0, logits)
