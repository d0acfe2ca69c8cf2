"""Models of random weights that take pictures, of four kinds, with their processors; and pictures."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.pictures import Picture, picture_of
from ajet_sdk.protocols import Ask, Sampling
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Call, Sample

KINDS = ("qwen3_vl", "qwen2_5_vl", "idefics3", "gemma3")
PIXELS, PATCH, MERGE = 64, 8, 2
"""A picture of 64 × 64 pixels has 16 tokens."""
HIDDEN, HEAD, LAYERS = 64, 32, 2
"""vLLM's attention on a CPU takes no smaller head."""

_CHAT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MEDIA = {
    "qwen3_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "qwen2_5_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "idefics3": ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"],
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
}
_SHOWN = {
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
    "gemma3": "<start_of_image>",
}
_TEMPLATE = """\
{%- macro show(content) %}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- 'SHOWN' }}{%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def picture(seed: int, width: int = PIXELS, height: int = PIXELS) -> Picture:
    """A picture of random pixels."""
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return picture_of(png(Image.fromarray(noise)))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def image_part(shown: Picture) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": shown.url}}


def save_tiny_vision(kind: str, place: Path) -> Path:
    """The same model each time. Returns `place`."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(kind)
    model = _MAKERS[kind](tokenizer)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = None
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    for name, values in _processor(kind).items():
        (place / name).write_text(json.dumps(values))
    return place


def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*_CHAT, *_MEDIA[kind]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["system user assistant tool Which move? up down left"] * 50, trainer
    )
    named = ("image_token", "boi_token", "eoi_token")
    extra = dict(zip(named, _MEDIA[kind], strict=True)) if kind == "gemma3" else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        **({"extra_special_tokens": extra} if extra else {}),
    )
    tokenizer.chat_template = _TEMPLATE.replace("SHOWN", _SHOWN[kind])
    return tokenizer


def _text(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.05,
        "bos_token_id": None,
        **_ends(tokenizer),
    }


def _ends(tokenizer: Any) -> dict[str, Any]:
    return {
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


_EYE = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "initializer_range": 0.05}


def _grid_of_positions(tokenizer: Any) -> dict[str, Any]:
    axis = HEAD // 2 // 3
    sections = [HEAD // 2 - 2 * axis, axis, axis]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    return {**_text(tokenizer), "rope_parameters": rope}


def _qwen_tokens(tokenizer: Any) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = tokenizer.convert_tokens_to_ids(_MEDIA["qwen3_vl"])
    return dict(zip(names, ids, strict=True))


def _qwen_eye(**more: Any) -> dict[str, Any]:
    return {
        **_EYE,
        "depth": LAYERS,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN,
        **more,
    }


def _qwen3_vl(tokenizer: Any) -> Any:
    eye = _qwen_eye(num_position_embeddings=(PIXELS // PATCH) ** 2, deepstack_visual_indexes=[0])
    text = {**_grid_of_positions(tokenizer), "head_dim": HEAD}
    text["rope_parameters"]["mrope_interleaved"] = True  # what transformers always does; vLLM asks
    config = Qwen3VLConfig(
        text_config=text, vision_config=eye, **_qwen_tokens(tokenizer), **_ends(tokenizer)
    )
    return Qwen3VLForConditionalGeneration(config)


def _qwen2_5_vl(tokenizer: Any) -> Any:
    eye = _qwen_eye(window_size=PIXELS, fullatt_block_indexes=list(range(LAYERS)))
    config = Qwen2_5_VLConfig(
        text_config=_grid_of_positions(tokenizer),
        vision_config=eye,
        **_qwen_tokens(tokenizer),
        **_ends(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _tower() -> dict[str, Any]:
    return {
        **_EYE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "image_size": PIXELS,
        "patch_size": PATCH,
    }


def _idefics3(tokenizer: Any) -> Any:
    config = Idefics3Config(
        text_config={"model_type": "llama", "head_dim": HEAD, **_text(tokenizer)},
        vision_config=_tower(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=MERGE,
        **_ends(tokenizer),
    )
    return Idefics3ForConditionalGeneration(config)


def _gemma3(tokenizer: Any) -> Any:
    image, begin, end = tokenizer.convert_tokens_to_ids(_MEDIA["gemma3"])
    text = {
        **_text(tokenizer),
        "head_dim": HEAD,
        "sliding_window": 512,
        "query_pre_attn_scalar": HEAD,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=_tower(),
        mm_tokens_per_image=(PIXELS // PATCH // MERGE) ** 2,
        image_token_index=image,
        boi_token_index=begin,
        eoi_token_index=end,
        **_ends(tokenizer),
    )
    model = Gemma3ForConditionalGeneration(config)
    # transformers begins with zeros here, so that pictures would change nothing
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.05)
    return model


_MAKERS = {
    "qwen3_vl": _qwen3_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "idefics3": _idefics3,
    "gemma3": _gemma3,
}


def _processor(kind: str) -> dict[str, dict[str, Any]]:
    """The JSON files of a published checkpoint's processor."""
    scale = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    tokens = (PIXELS // PATCH // MERGE) ** 2
    if kind == "idefics3":
        picture = {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": PIXELS},
            "max_image_size": {"longest_edge": PIXELS},
            "do_image_splitting": False,
            **scale,
        }
        whole = {"processor_class": "Idefics3Processor", "image_seq_len": tokens}
    elif kind == "gemma3":
        picture = {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": PIXELS, "width": PIXELS},
            **scale,
        }
        whole = {"processor_class": "Gemma3Processor", "image_seq_length": tokens}
    else:
        picture = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 4 * PIXELS**2},
            "patch_size": PATCH,
            "merge_size": MERGE,
            "temporal_patch_size": 2,
            **scale,
        }
        names = {"qwen3_vl": "Qwen3VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}
        whole = {"processor_class": names[kind]}
    picture["processor_class"] = whole["processor_class"]
    return {"preprocessor_config.json": picture, "processor_config.json": whole}


async def conversation(
    engine: TokenEngine, *turns: list[dict[str, Any]], episode_id: str = "e", **sampling: Any
) -> list[Call]:
    """The calls of a conversation in which the user says something in each turn."""
    how = Sampling(**{"max_tokens": 5, "seed": 3, **sampling})
    messages: list[dict[str, Any]] = []
    calls: list[Call] = []
    for said in turns:
        messages.append({"role": "user", "content": said})
        answer = await engine.answer(Ask(how, episode_id, "a", messages=list(messages)))
        for choice in answer.choices:
            call = Call(
                episode_id=episode_id,
                index=len(calls),
                prompt_ids=answer.prompt_ids,
                pictures=answer.pictures,
                output_ids=choice.output_ids,
                logprobs=choice.logprobs,
                policy_version=choice.policy_version,
                weight_updates=choice.weight_updates,
                sampling=how.as_dict(),
            )
            calls.append(call)
        messages.append(answer.choices[0].message or {})
    return calls


def sample_of(calls: list[Call], advantage: float = 1.0) -> Sample:
    """The one training sample of calls that extend each other."""
    (line,) = merge(place_all(calls)).timelines
    return Sample(
        timeline=line,
        episode_id=calls[0].episode_id,
        group_id="g",
        reward=advantage,
        advantages=line.loss_mask.astype(np.float32) * np.float32(advantage),
    )


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def plain_pass(model: Any, tokenizer: HFTokenizer, call: Call) -> torch.Tensor:
    """The log-probabilities of a reply by `plain_logits`."""
    pictures = [placed.picture for placed in call.pictures]
    ids = [*call.prompt_ids.tolist(), *call.output_ids.tolist()]
    logits = plain_logits(model, tokenizer, ids, pictures)[len(call.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(call.output_ids)[:, None].long())


def plain_logits(
    model: Any, tokenizer: HFTokenizer, token_ids: Sequence[int], pictures: Sequence[Picture]
) -> torch.Tensor:
    """The model's own pass over ids with the processor's own tensors: no cache, no code of ours but
    the processor's."""
    ids = torch.tensor([token_ids])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert tokenizer.pictures is not None
    made = [tokenizer.pictures.process(each).pixels for each in pictures]
    for name in made[0] if made else ():
        axis = 1 if made[0]["pixel_values"].ndim == 5 else 0
        inputs[name] = torch.from_numpy(np.concatenate([one[name] for one in made], axis))
    types = (ids == tokenizer.pictures.token_id).long()
    kind = model.config.model_type
    if kind == "gemma3":
        inputs["token_type_ids"] = types
    elif kind.startswith("qwen"):
        if made:
            model.model.rope_deltas = None
            positions, _ = model.model.get_rope_index(
                ids,
                mm_token_type_ids=types,
                image_grid_thw=inputs["image_grid_thw"],
                attention_mask=inputs["attention_mask"],
            )
        else:
            positions = torch.arange(ids.shape[1]).expand(3, 1, -1)
        inputs["position_ids"] = positions
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    return logits
