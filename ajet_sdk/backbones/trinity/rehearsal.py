"""A rehearsal of a cluster run on this machine: the real Trinity, Ray and buffers with a tiny model
and a few tasks.

It finds errors that would stop a run on GPUs minutes after its start: unknown keys of Trinity, an
agent or a judge that cannot be imported in another process or sent to it, tasks without fields that
the workflow needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.shared.fit import check_shape
from ajet_sdk.backbones.shared.mapping import merged
from ajet_sdk.backbones.trinity.launch import validate_config
from ajet_sdk.backbones.trinity.learner import run_learner
from ajet_sdk.backbones.trinity.mapping import ALTERNATING, TrinityPlace, is_on_cpu, to_trinity
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError, TraceError
from ajet_sdk.learn.recipe import Demonstration, Recipe, Shape
from ajet_sdk.rollout.outcomes import failures_by_cause
from ajet_sdk.trace.reader import episodes, open_trace

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

_TASKS = 2
_STEPS = 2
_REPEATS = 2
_REPLY = 24
_TURNS = 4096
_WARM_UP = "ajet_sdk.learn.warm_up"
"""Imported by name, as it loads torch."""


async def check_mapping(config: Config, directory: Path, model: Path) -> Any:
    """Validate the Trinity config of the real run by all of Trinity's validators, which need no
    GPU, and return it.

    They write to `directory`. In a config without GPUs one of them asks the service for the model,
    which is `model` here. Raises ConfigError for keys that are unsupported, unknown to Trinity, or
    refused by its validators.
    """
    place = TrinityPlace(
        run_id="rehearsal",
        model=str(model) if is_on_cpu(config) else config.model.path or "",
        steps=config.trainer_common.total_steps or 1,
        lr=config.trainer_common.optim.lr,
        checkpoints=directory / "checkpoint",
        tasks=directory / "tasks",
        val_tasks=1,
    )
    mapping = to_trinity(config, place)
    check_shape(config)
    if not is_on_cpu(config):
        return validate_config(mapping)
    state = directory / "learner"
    log = directory / "learner.log"
    async with run_learner(str(model), state, log, temperature=1.0, max_model_len=64):
        return await asyncio.to_thread(validate_config, mapping)


def rehearse(config: Config, directory: Path, model: Path) -> Config:
    """The config of a small run: two steps of two tasks with two attempts each, on a CPU, under
    `directory`."""
    settings = config.model_dump(mode="json", exclude_unset=True)
    longest = min(config.rollout.max_model_len, _TURNS)
    small = {
        "experiment_name": f"rehearsal of {config.experiment_name}",
        "experiment_dir": str(directory),
        "backbone": "trinity",
        "model": {"path": str(model), "recipe": None, "base_url": None, "scripted": None, "lora": {"enabled": False}},
        "data": {"train_batch_size": _TASKS},
        "rollout": {
            "num_repeat": max(_REPEATS, min(config.rollout.num_repeat, _REPEATS)),
            "max_model_len": longest,
            "max_response_length_in_one_turn": min(config.rollout.max_response_length_in_one_turn, _REPLY, longest),
            "max_env_worker": min(config.rollout.max_env_worker, 8),
            "n_vllm_engine": 1,
            "tensor_parallel_size": 1,
            "min_sound_share": 0.0,
        },
        "trainer_common": {
            "total_steps": _STEPS, "val_tasks": 1, "val_pass_n": 1, "val_before_train": False, "test_freq": 0,
            "save_freq": 0, "nnodes": 1, "n_gpus_per_node": 0, "use_kl_loss": False, "entropy_coef": 0.0,
            "optim": {"lr_scheduler_type": "constant"}, "checkpoint_base_dir": None, "logger": [],
        },
    }  # fmt: skip
    roots = {
        name: value
        for name, value in config.roots.plain().items()
        if name not in ("trinity", "verl")
    }
    rehearsal = load_config(
        values={"ajet": merged(settings, small), **roots, ALTERNATING: {"rewards": "alternating"}}
    )
    rehearsal._source = config.source
    return rehearsal


def tiny_model(config: Config, directory: Path) -> tuple[Path, str]:
    """Make a model with a few hundred thousand random weights; returns its directory and the origin
    of its tokenizer.

    The tokenizer and chat template are those of `model.path`, if they are on this machine.
    """
    import torch

    learn = import_module(_WARM_UP)
    tokenizer, whose = _own_tokenizer(config)
    words = [
        Demonstration(
            [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "1 2 3"}]
        )
    ]
    recipe = Recipe(
        demonstrate=lambda _: words[0], shape=Shape(hidden=32, heads=2, kv_heads=1, intermediate=64)
    )
    if tokenizer is None:
        tokenizer = learn.train_tokenizer(recipe, words)
        whose = "a byte-level tokenizer with a ChatML template"
    torch.manual_seed(0)
    learn.save_model(learn.new_model(recipe, tokenizer), directory)
    tokenizer.save_pretrained(directory)
    return directory, whose


def _own_tokenizer(config: Config) -> tuple[Any, str]:
    from transformers import AutoTokenizer

    path = config.resolve(config.model.path or "")
    name = str(path) if config.model.path and path.exists() else config.model.path
    if not name:
        return None, ""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError):
        return None, ""
    if tokenizer.chat_template:
        return (tokenizer, f"the tokenizer of {config.model.path}")
    return (None, "")


def findings(directory: Path) -> tuple[dict[str, int], list[str]]:
    """Counts of episodes, calls, model versions and tokens in a rehearsal's traces, and a line per
    cause of failure."""
    try:
        trace = open_trace(directory)
    except TraceError as error:
        raise ConfigError(f"the rehearsal wrote no trace to {directory}: {error}") from error
    with trace:
        row = trace.query(_FOUND).to_pylist()[0]
        failures = failures_by_cause(episodes(trace))
    return {name: int(value or 0) for name, value in row.items()}, failures


_FOUND = """
    SELECT (SELECT count(*) FROM episodes) AS episodes,
        (SELECT count(*) FROM episodes WHERE status <> 'succeeded') AS failed,
        (SELECT count(*) FROM calls) AS calls,
        (SELECT count(DISTINCT policy_version) FROM calls WHERE trainable) AS versions,
        (SELECT sum(tokens) FROM ledger WHERE outcome = 'trained') AS trained"""


class Stopwatch:
    """Prints each finished stage of a rehearsal with its duration."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._at = time.perf_counter()

    def done(self, stage: str, details: Mapping[str, object] | str = "") -> None:
        now = time.perf_counter()
        if isinstance(details, str):
            text = details
        else:
            text = ", ".join(f"{value} {name}" for name, value in details.items())
        self._say(f"ok  {stage}{': ' if text else ''}{text}  ({now - self._at:.1f} s)")
        self._at = now
