"""A model of random weights on disk, with the tokenizer and the chat template that ajet gives new
models."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from ajet_sdk.learn import warm_up
from ajet_sdk.learn.recipe import Demonstration, Recipe, Shape

VLLMS = Shape(hidden=64, heads=2, kv_heads=1, intermediate=64, max_length=4096)
"""Heads of 32 places, vLLM's least."""


SMALL = Shape(hidden=16, heads=2, kv_heads=1, intermediate=32, max_length=1024)


def save_tiny(place: Path, shape: Shape = SMALL) -> Path:
    """The same model each time. Its tokenizer knows "Say yes." by few tokens. Returns `place`."""

    def parrot(draw: random.Random) -> Demonstration:
        word = draw.choice(["yes", "no", "maybe"])
        return Demonstration(
            [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]
        )

    draw, recipe = random.Random(0), Recipe(parrot, shape=shape)
    tokenizer = warm_up.train_tokenizer(recipe, [parrot(draw) for _ in range(50)])
    torch.manual_seed(0)
    warm_up.new_model(recipe, tokenizer).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place
