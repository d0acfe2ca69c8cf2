"""New models that take pictures, for recipes: a Qwen3-VL with random weights, and its processor."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from ajet_sdk.engines.local.vision import forbid
from ajet_sdk.learn.recipe import PictureShape, Recipe
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.tokens.pictures import media_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_NAMES = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
_TIME = 2
"""Frames of a patch; a picture is shown twice."""


def picture_config(recipe: Recipe, shape: PictureShape, tokenizer: Any) -> Qwen3VLConfig:
    text = recipe.shape
    head = text.hidden // text.heads
    axis = head // 2 // 3
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tokens = tokenizer.convert_tokens_to_ids(list(TOKENS))
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": text.hidden,
            "intermediate_size": text.intermediate,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "head_dim": head,
            "max_position_embeddings": text.max_length,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": text.rope_theta,
                "mrope_section": [head // 2 - 2 * axis, axis, axis],
                "mrope_interleaved": True,  # transformers always does; vLLM reads it
            },
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
            "bos_token_id": None,
            **ends,
        },
        vision_config={
            "hidden_size": shape.hidden,
            "intermediate_size": 3 * shape.hidden,
            "depth": shape.layers,
            "num_heads": shape.heads,
            "patch_size": shape.patch,
            "spatial_merge_size": shape.merge,
            "temporal_patch_size": _TIME,
            "out_hidden_size": text.hidden,
            "num_position_embeddings": (shape.pixels // shape.patch) ** 2,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.05,
        },
        tie_word_embeddings=True,
        **ends,
        **dict(zip(_NAMES, tokens, strict=True)),
    )


def new_picture_model(recipe: Recipe, shape: PictureShape, tokenizer: Any) -> Any:
    """A Qwen3-VL with random weights from torch's global seed."""
    model: Any = Qwen3VLForConditionalGeneration(picture_config(recipe, shape, tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = None
    forbid(model, media_tokens(model.config.to_dict()))
    return model


def write_processor(shape: PictureShape, directory: Path) -> None:
    """Write the files of the processor, as a published checkpoint has them."""
    token = shape.patch * shape.merge
    picture: dict[str, object] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": token**2, "longest_edge": 4 * shape.pixels**2},
        "patch_size": shape.patch,
        "merge_size": shape.merge,
        "temporal_patch_size": _TIME,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    video = {**picture, "video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    for name, values in (
        ("preprocessor_config.json", picture),
        ("video_preprocessor_config.json", video),
        ("processor_config.json", {"processor_class": "Qwen3VLProcessor"}),
    ):
        (directory / name).write_text(json.dumps(values, indent=1))


def picture_tokenizer(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> HFTokenizer:
    """The tokenizer with the processor of the recipe's model."""
    shape = recipe.pictures
    assert shape is not None
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        tokenizer.save_pretrained(directory)
        picture_config(recipe, shape, cast("Any", tokenizer)).save_pretrained(directory)
        write_processor(shape, directory)
        return HFTokenizer(directory)
