"""Recipes: build a small model from demonstrations, for machines without a GPU or a network.

A recipe trains a byte-level BPE tokenizer and a Qwen3 of a hundred thousand parameters on
demonstrations of a task, until the real agent earns some reward with it; reinforcement learning
does the rest. The result is a Hugging Face checkpoint, which is reused until the recipe's content
changes. Each seed has its own directory, and `model.path` links to one of them. Runs of several
seeds can be concurrent: none moves what another reads, and each change is one rename.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.config.model_source import MARK, made_for_seed
from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet_sdk.config.config import Config
    from ajet_sdk.learn.probe import Probe
    from ajet_sdk.tokens.huggingface import HFTokenizer
    from ajet_sdk.types import Task

log = logging.getLogger("ajet")

Say = Callable[[str], None]
"""Prints a progress line."""

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML with Hermes tool calls, as used by Qwen's models."""

PICTURE_TEMPLATE = """\
{%- macro show(content) %}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
""" + CHAT_TEMPLATE.replace("+ message.content +", "+ show(message.content) +")
"""The same with pictures in the messages of users and tools."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A complete conversation of the agent; the assistant's messages are trained."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model: a Qwen3 with tied embeddings."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 192
    rope_theta: float = 10_000.0
    max_length: int = 4096


@dataclass(frozen=True, slots=True)
class PictureShape:
    """Size of the part that sees, which makes the model a Qwen3-VL. A token is `patch` × `merge`
    pixels wide and high."""

    pixels: int = 32
    """Usual width and height of a picture. Pictures of other sizes are taken, too."""
    patch: int = 8
    merge: int = 1
    hidden: int = 64
    layers: int = 2
    heads: int = 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings for a small model that can start to learn a task.

    `demonstrate` writes a conversation. Some should be wrong, since a model that has only seen
    success has nothing left to learn. From `min_steps` on, the agent runs on training tasks at
    temperature 1 every `check_every` steps, and the warm-up ends once it earns `enough`, or after
    `max_steps` with an error that reports the best reward.
    """

    demonstrate: Callable[[random.Random], Demonstration]
    enough: float = 0.25
    min_steps: int = 200
    max_steps: int = 400
    check_every: int = 50
    check_tasks: int = 128
    demonstrations: int = 2048
    batch: int = 32
    lr: float = 3e-3
    vocabulary: int = 800
    longest_token: int = 64
    """Longest token, in characters: constant text of the domain becomes a few tokens."""
    shape: Shape = field(default_factory=Shape)
    chat_template: str = CHAT_TEMPLATE
    pictures: PictureShape | None = None
    """Of a model that takes pictures; its `chat_template` must show them (`PICTURE_TEMPLATE`)."""

    def key(self, seed: int) -> str:
        """Hash of settings, template and demonstrations, on which the model depends."""
        settings = {k: v for k, v in asdict(self).items() if k != "demonstrate"}
        if self.pictures is None:
            del settings["pictures"]  # models made before there were any stay as they are
        draw = random.Random(seed)
        examples = [asdict(self.demonstrate(draw)) for _ in range(64)]
        text = json.dumps([settings, seed, examples], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def wants_recipe(config: Config) -> bool:
    """Whether the model at `model.path` comes from a recipe."""
    model = config.model
    path = config.model.path
    if not model.recipe or not path or model.base_url or model.scripted:
        return False
    return path.count("/") != 1 or path.startswith((".", "/", "~")) or Path(path).exists()


_PROBE = "ajet_sdk.learn.probe"
_WARM_UP = "ajet_sdk.learn.warm_up"
"""Loaded only to build a model, since they import torch."""


async def with_model(
    config: Config, agent: tuple[object, object, Sequence[Task]] | None = None
) -> Config:
    """Build a recipe's model; returns the config with its directory, which runs of other seeds do
    not replace.

    `agent`: workflow, judge and tasks to measure it with; by default those of the config. Raises as
    `build_recipe`.
    """
    if not wants_recipe(config):
        return config
    if agent is None:
        probe = None
    else:
        probe = import_module(_PROBE).Probe(config, *agent)
    source = {
        "path": str(await build_recipe(config, probe)),
        "recipe": None,
        "name": config.model_name,
    }
    return config.model_copy(update={"model": config.model.model_copy(update=source)})


async def build_recipe(config: Config, probe: Probe | None = None, say: Say = log.info) -> Path:
    """Build `model.path` by `model.recipe` unless it is up to date; return the model's directory.

    Each seed has its own directory, and `model.path` links to it until a run of another seed
    starts. A directory without a recipe's mark is a user's model and is left unchanged. `probe`
    measures the agent (default: the config's); `say` prints progress. Raises ConfigError, and
    TrainingError if the warm-up fails.
    """
    assert config.model.path is not None and config.model.recipe is not None
    path = config.resolve(config.model.path)
    if path.exists() and not recipe_of(path):
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model.path: {path} exists but contains no model; choose another directory for the"
                " recipe"
            )
        return path
    recipe = config.load(config.model.recipe)
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"model.recipe: {config.model.recipe} is a {type(recipe).__name__}, not a Recipe"
        )
    seed = config.trainer_common.seed
    key = recipe.key(seed)
    if (stored := find_model(path, seed, key)) is not None:
        return stored
    measured = probe or import_module(_PROBE).Probe.of(config)
    loop = asyncio.get_running_loop()

    def measure(model: PreTrainedModel, tokenizer: HFTokenizer, count: int) -> float:
        # The agent runs in the run's loop, to which connections of its module-level clients belong.
        reward: float = asyncio.run_coroutine_threadsafe(
            measured.reward(model, tokenizer, count), loop
        ).result()
        return reward

    make_model = import_module(_WARM_UP).make_model
    model: Path = await asyncio.to_thread(
        make_model, recipe, path, seed=seed, key=key, measure=measure, say=say
    )
    return model


def recipe_of(path: Path) -> dict[str, Any]:
    """The record of the model at `path` (`recipe`: the key; `seed`); empty if it is from no
    recipe."""
    mark = path / MARK
    record: dict[str, object] = json.loads(mark.read_text()) if mark.is_file() else {}
    return record


def find_model(path: Path, seed: int, key: str) -> Path | None:
    """Returns the directory of the seed's model, and links `path` to it; None if it is from another
    recipe.

    A directory at `path`, from an earlier version of ajet, is first moved to its seed's directory.
    """
    if not path.is_symlink() and (record := recipe_of(path)):
        model = made_for_seed(path, record["seed"])
        _discard(model)
        path.rename(model)
    model = made_for_seed(path, seed)
    if recipe_of(model).get("recipe") != key:
        return None
    _link(path, model)
    return model


def store_model(path: Path, write: Callable[[Path], None], record: dict[str, Any]) -> Path:
    """Store a model in its seed's directory atomically, replacing an earlier one, and link `path`
    to it.

    Returns the directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    model = made_for_seed(path, record["seed"])
    fresh = _unused_path(model)
    write(fresh)
    (fresh / MARK).write_text(json.dumps(record, indent=1))
    if (
        recipe_of(model).get("recipe") == record["recipe"]
    ):  # of a concurrent run, which may be reading it
        shutil.rmtree(fresh)
    else:
        _discard(model)
        fresh.rename(model)
    _link(path, model)
    return model


def _unused_path(path: Path) -> Path:
    """An unused name: random, since process ids repeat between containers."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}")


def _link(path: Path, model: Path) -> None:
    link = _unused_path(model)
    link.symlink_to(model.name)
    link.replace(path)


def _discard(model: Path) -> None:
    """Rename a model, then remove it, so that a half-removed directory is never taken for a
    model."""
    if model.exists():
        old = _unused_path(model)
        model.rename(old)
        shutil.rmtree(old)
