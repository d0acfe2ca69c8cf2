"""Models in the shapes of Qwen2.5 with random weights, and what their passes cost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from ajet_sdk.backbones.shared.model_shape import shape_of
from ajet_sdk.learn import warm_up
from ajet_sdk.learn.checkpoint import save_model
from ajet_sdk.learn.recipe import Demonstration, Recipe
from ajet_sdk.types import Sample

_HALF_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_THREE_BILLION = {
    **_HALF_BILLION,
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
}
_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
SHAPES: dict[str, dict[str, Any]] = {"0.5B": _HALF_BILLION, "3B": _THREE_BILLION, "tiny": _TINY}
_SHARP = 6.0
"""Scale of the last norm: random weights alone give logits so flat that no error would be seen in
them."""


def save(place: Path, size: str, device: torch.device) -> Path:
    """Write model and tokenizer to a directory, in bfloat16. Returns it.

    `size`: a name in `SHAPES`. The weights are drawn on the device, where it is quicker.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def greet(draw: random.Random) -> Demonstration:
        word = draw.choice(["yes", "no", "maybe"])
        return Demonstration(
            [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]
        )

    draw, recipe = random.Random(0), Recipe(greet, vocabulary=400)
    tokenizer = warm_up.train_tokenizer(recipe, [greet(draw) for _ in range(50)])
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[size],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with device:
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.mul_(_SHARP)
    save_model(model, place)
    tokenizer.save_pretrained(place)
    return place


def operations(model: Any, samples: list[Sample], *, frozen: bool) -> float:
    """Floating-point operations of a training step over the samples, as they are defined: nothing
    recomputed or padded.

    Two for each weight and token forward, as many backward for the activations and, unless the
    weights are `frozen`, for the weights (Kaplan et al. 2020, arXiv:2001.08361, table 1); attention
    sees half of each square. The output layer is applied to trained tokens only.
    """
    shape = model.config.get_text_config()
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = bare.get_output_embeddings().weight
    body = sum(
        p.numel() for name, p in bare.named_parameters() if "lora_" not in name and p is not head
    )
    passes = 2 if frozen else 3
    total = 0.0
    for sample in samples:
        length, trained = len(sample.timeline.token_ids), int(sample.timeline.loss_mask.sum())
        pairs = 2 * length**2 * shape.hidden_size * shape.num_hidden_layers
        total += passes * 2 * (body * length + head.numel() * trained) + 3 * pairs
    return total


def dense_operations(config: Any, tokens: int) -> float:
    """Floating-point operations of a training step over one sequence of which each token is
    trained; see `operations`."""
    shape = shape_of(config.to_dict())
    pairs = 2 * tokens**2 * shape.hidden * shape.layers
    return (
        6.0 * (shape.layers * shape.layer_parameters + shape.hidden * shape.vocabulary) * tokens
        + 3 * pairs
    )
