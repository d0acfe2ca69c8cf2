"""Builds a recipe's model: trains its tokenizer, then the model on demonstrations, until the agent
earns some reward.

The agent is measured with the same engine, gateway and judge as in the run that follows.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ajet_sdk.engines.local.vision import vision_of
from ajet_sdk.engines.picture_text import with_image_parts
from ajet_sdk.engines.retokenize import calls_of, retokenise
from ajet_sdk.errors import TrainingError
from ajet_sdk.learn.batches import collate
from ajet_sdk.learn.checkpoint import save_model
from ajet_sdk.learn.losses import score
from ajet_sdk.learn.picture_model import (
    TOKENS,
    new_picture_model,
    picture_tokenizer,
    write_processor,
)
from ajet_sdk.learn.recipe import Demonstration, Recipe, Say, store_model
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

Measure = Callable[[Any, HFTokenizer, int], float]
"""(model, tokenizer, number of tasks) -> mean reward of the agent at temperature 1."""


def make_model(
    recipe: Recipe, path: Path, *, seed: int, key: str, measure: Measure, say: Say
) -> Path:
    """Train a model and store it at `path` atomically. Returns the directory that `path` links
    to."""
    started = time.perf_counter()
    draw = random.Random(f"{seed}/demonstrations")
    demonstrations = [recipe.demonstrate(draw) for _ in range(recipe.demonstrations)]
    tokenizer = train_tokenizer(recipe, demonstrations)
    exact = exact_tokenizer(recipe, tokenizer)
    samples = tokenize_demonstrations(exact, demonstrations)
    torch.manual_seed(seed)
    model = new_model(recipe, tokenizer)
    say(
        f"recipe: warming up a model of {model.num_parameters():,} parameters on"
        f" {len(demonstrations):,} demonstrations"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps, reward = warm_up(recipe, model, exact, samples, seed, measure, say)
    finally:
        torch.set_num_threads(threads)
    record = {"recipe": key, "seed": seed, "steps": steps, "reward": reward}

    def write(directory: Path) -> None:
        save_model(model, directory)
        tokenizer.save_pretrained(directory)
        if recipe.pictures is not None:
            write_processor(recipe.pictures, directory)

    model_path = store_model(path, write, record)
    say(
        f"recipe: {path} made in {time.perf_counter() - started:.0f} s; reward {reward:.2f} at"
        " temperature 1"
    )
    return model_path


def train_tokenizer(recipe: Recipe, demonstrations: Sequence[Demonstration]) -> Any:
    """Train a byte-level BPE on rendered demonstrations, with a token for each digit, sign and
    special token."""

    def wrap(backend: Tokenizer) -> Any:
        fast = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            model_max_length=recipe.shape.max_length,
        )
        fast.chat_template = recipe.chat_template
        return fast

    blank = wrap(Tokenizer(models.BPE()))
    special = [*SPECIAL, *(TOKENS if recipe.pictures else ())]
    apart = re.compile("|".join(map(re.escape, special)))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[-+*/=]|\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        min_frequency=5,
        max_token_length=recipe.longest_token,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def pieces() -> Iterator[str]:
        for demonstration in demonstrations[:1000]:
            text = blank.apply_chat_template(
                with_image_parts(demonstration.messages),
                tools=demonstration.tools,
                tokenize=False,
            )
            yield from filter(None, apart.split(text))

    backend.train_from_iterator(pieces(), trainer)
    return wrap(backend)


def exact_tokenizer(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> HFTokenizer:
    """The tokenizer as engines use it, with the processor if the recipe's model takes pictures."""
    if recipe.pictures is None:
        return HFTokenizer(tokenizer)
    return picture_tokenizer(recipe, tokenizer)


def tokenize_demonstrations(
    exact: HFTokenizer, demonstrations: Sequence[Demonstration]
) -> list[Sample]:
    """Turn demonstrations into training samples, rendered, tokenized and merged as in serving."""
    samples = []
    for number, demonstration in enumerate(demonstrations):
        calls = calls_of(demonstration.messages, demonstration.tools, f"demonstration {number}")
        for line in merge(retokenise(calls, exact)).timelines:
            ids = {"episode_id": line.call_ids[0], "group_id": line.call_ids[0]}
            samples.append(
                Sample(
                    timeline=line, reward=1.0, advantages=line.loss_mask.astype("float32"), **ids
                )
            )
    return samples


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A Qwen3, or Qwen3-VL, with random weights from torch's global seed."""
    shape = recipe.shape
    ends = cast("Any", tokenizer)
    if recipe.pictures is not None:
        return new_picture_model(recipe, recipe.pictures, ends)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=ends.eos_token_id,
        pad_token_id=ends.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def warm_up(
    recipe: Recipe,
    model: PreTrainedModel,
    tokenizer: HFTokenizer,
    samples: Sequence[Sample],
    seed: int,
    measure: Measure,
    say: Say,
) -> tuple[int, float]:
    """Train until the agent earns enough. Returns the number of steps and the reward."""
    optimizer = torch.optim.AdamW(
        model.parameters(), recipe.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    batches = _batches(samples, recipe.batch, random.Random(f"{seed}/batches"))
    vision = vision_of(model, tokenizer)
    best = 0.0
    for step in range(1, recipe.max_steps + 1):
        share = 0.1 + 0.45 * (1 + math.cos(math.pi * step / recipe.max_steps))
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * share * min(1.0, step / 20)
        model.train()
        batch = collate(next(batches), vision=vision)
        loss = -score(model, batch, entropy=False).logprobs_N.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= recipe.min_steps and step % recipe.check_every == 0:
            model.eval()
            reward = measure(model, tokenizer, recipe.check_tasks)
            best = max(best, reward)
            say(
                f"recipe: step {step}, loss {float(loss.detach()):.3f}, reward {reward:.2f} at"
                " temperature 1"
            )
            if reward >= recipe.enough:
                return step, reward
    raise TrainingError(
        f"the recipe's warm-up reached a reward of {best:.2f} in {recipe.max_steps} steps, less"
        f" than {recipe.enough:.2f} (enough); give simpler demonstrations, or raise max_steps"
    )


def _batches(samples: Sequence[Sample], size: int, draw: random.Random) -> Iterator[list[Sample]]:
    """Endless batches, shuffled for each epoch.

    They mix samples of all lengths: sorted by length, a batch would have one kind of behavior only.
    """
    order = list(samples)
    while True:
        draw.shuffle(order)
        for start in range(0, len(order) - size + 1, size):
            yield order[start : start + size]
