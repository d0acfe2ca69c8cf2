"""The learner: a model with its sampler and trainer in this process, and the weights as a vLLM
server loads them."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file

from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.loading import enable_checkpointing, load_model
from ajet_sdk.engines.local.products import inner_model, instructions, products_of
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.engines.local.vision import check_vision, vision_of
from ajet_sdk.engines.local.weights import copy_sharing_frozen
from ajet_sdk.engines.vllm.engine import (
    has_token_route,
    samples_with_vllm,
    settings_of,
)
from ajet_sdk.engines.vllm.sampler import VllmSampler
from ajet_sdk.engines.vllm.server import LARGEST_RANK
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn import checkpoint
from ajet_sdk.learn.estimate import estimate
from ajet_sdk.learn.probe import Probe
from ajet_sdk.learn.recipe import build_recipe, wants_recipe
from ajet_sdk.learn.start_adapter import check_all_linear, check_start_adapter
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.tokens.pictures import processor_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ajet_sdk.config.config import Config


@dataclass(frozen=True)
class Learner:
    """A model with its sampler and trainer."""

    engine: TokenEngine
    sampler: LocalSampler | VllmSampler
    trainer: Trainer
    tokenizer: HFTokenizer

    def estimate(self, config: Config, *, steps: int, val_episodes: int) -> str:
        """Estimate the run's episodes and memory, as text."""
        sampled = isinstance(self.sampler, LocalSampler)
        return str(
            estimate(config, self.trainer, steps=steps, val_episodes=val_episodes, sampled=sampled)
        )

    def write(self, directory: Path) -> None:
        """Save the training state to a directory."""
        checkpoint.write_trainer(directory, self.trainer, self.tokenizer.hf)

    def read(self, directory: Path) -> None:
        """Restore the state that `write` saved. Raises CheckpointError."""
        checkpoint.read_trainer(directory, self.trainer)

    def remove(self, directory: Path) -> None:
        """Delete what `write` saved."""
        shutil.rmtree(directory)

    def export(self, run: Path) -> Path:
        """Write the model as a Hugging Face checkpoint. Raises CheckpointError if it isn't the
        trained model."""
        return checkpoint.export(run / "model", self.trainer.model, self.tokenizer.hf)

    @property
    def service_name(self) -> str:
        """Name of the service that trains; empty, as it is this process."""
        return ""

    def metrics(self) -> Mapping[str, float]:
        """Additional metrics of the last step."""
        return {}

    def reason_to_stop(self) -> str:
        """The reason to stop after this step; empty to continue."""
        return ""


def default_lr(parameters: int, *, lora: bool) -> float:
    """Default learning rate by number of parameters.

    For full weights it falls from 1e-3 (up to a million parameters) to 1e-6 (from a billion); for
    adapters, whose best rate hardly depends on the size (Schulman et al. 2025, "LoRA Without
    Regret"), from 1e-3 (up to 200 million) to 1e-4 (from 2 billion). Both are linear between on
    logarithmic axes.
    """
    first, decades, falls = (math.log10(2e8), 1.0, 1.0) if lora else (6.0, 3.0, 3.0)
    share = min(1.0, max(0.0, (math.log10(max(parameters, 1)) - first) / decades))
    return float(f"{10.0 ** (-3.0 - falls * share):.1e}")


async def open_learner(
    config: Config, probe: Probe, steps: int, say: Callable[[str], None]
) -> Learner:
    """Load the model, or build it from its recipe, with a sampler and a trainer for `steps`
    steps."""
    path = await _path_of(config, probe, say)
    learner = await asyncio.to_thread(_load, config, path, steps, samples_with_vllm(config), say)
    if isinstance(learner.sampler, VllmSampler):
        say(
            "Starting the vLLM server, which may take a minute; log file:"
            f" {learner.sampler.settings.log}"
        )
        try:
            await learner.sampler.ready()
        except BaseException:
            await learner.engine.aclose()
            raise
    return learner


async def open_learners(
    config: Config, probe: Probe, steps: int, say: Callable[[str], None], targets: Sequence[str]
) -> dict[str, Learner]:
    """As `open_learner`, a learner for each target; with LoRA they share the frozen weights."""
    path = await _path_of(config, probe, say)
    return await asyncio.to_thread(_load_several, config, path, steps, say, targets)


async def _path_of(config: Config, probe: Probe, say: Callable[[str], None]) -> Path | str:
    """The directory or hub name of the model, which a recipe builds first. Raises ConfigError."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if config.model.base_url or config.model.scripted:
        raise ConfigError(
            "backbone local trains model weights: set model.path instead of model.base_url or"
            " model.scripted"
        )
    if not config.model.path:
        raise ConfigError(
            "model.path is not set: backbone local needs a local directory or a Hugging Face name"
        )
    if wants_recipe(config):
        return await build_recipe(config, probe, say)
    directory = config.resolve(config.model.path)
    return directory if directory.exists() else config.model.path


def _load(
    config: Config, path: Path | str, steps: int, vllm: bool, say: Callable[[str], None]
) -> Learner:
    model = _load_model(config, path, say)
    return _assemble(config, path, model, steps, config.model_name, vllm)


def _load_several(
    config: Config,
    path: Path | str,
    steps: int,
    say: Callable[[str], None],
    targets: Sequence[str],
) -> dict[str, Learner]:
    model = _load_model(config, path, say)
    models = [model, *(copy_sharing_frozen(model) for _ in targets[1:])]
    return {
        target: _assemble(config, path, own, steps, f"{config.model_name}/{target}", vllm=False)
        for target, own in zip(targets, models, strict=True)
    }


def _load_model(config: Config, path: Path | str, say: Callable[[str], None]) -> PreTrainedModel:
    """Load the model to train. Raises ConfigError."""
    import torch

    check_start_adapter(config, path, say)
    torch.manual_seed(config.trainer_common.seed)
    source = config.model
    model = load_model(
        path,
        dtype=source.dtype,
        attn_implementation=source.attn_implementation,
        device=source.device,
        lora=source.lora if source.lora.enabled else None,
        trust_remote_code=source.trust_remote_code,
        trains_tower=source.vision_tower == "trained",
    )
    check_all_linear(config, path, model)
    if source.gradient_checkpointing:
        enable_checkpointing(model)
    if products_of(model) != model.dtype:
        say(
            f"matrices are multiplied in bfloat16 ({instructions() or 'slow on this CPU'}): sampler"
            " and trainer may differ by some hundredths of a nat per token"
            " (train/logprob_gap_mean); exact: model.dtype: float32"
        )
    if config.trainer_common.optim.lr is None:
        lr = _learning_rate(config, model)
        say(
            f"trainer_common.optim.lr is not set; using {lr:g} for"
            f" {model.num_parameters():,} parameters"
        )
    return model


def _learning_rate(config: Config, model: PreTrainedModel) -> float:
    lr = config.trainer_common.optim.lr
    if lr is None:
        return default_lr(model.num_parameters(), lora=config.model.lora.enabled)
    return lr


def _assemble(
    config: Config,
    path: Path | str,
    model: PreTrainedModel,
    steps: int,
    model_name: str,
    vllm: bool,
) -> Learner:
    """A learner of a loaded model."""
    source = config.model
    tokenizer = HFTokenizer(str(path), trust_remote_code=source.trust_remote_code)
    lr = _learning_rate(config, model)
    trainer = Trainer(model, TrainerSettings.of(config, lr, steps), tokenizer)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    max_model_len = min(config.rollout.max_model_len, longest or config.rollout.max_model_len)
    sampler: LocalSampler | VllmSampler
    if vllm:
        sampler = _vllm_sampler(config, path, model, tokenizer, max_model_len)
    else:
        sampler = LocalSampler(
            model,
            tokenizer,
            model_name=model_name,
            max_model_len=max_model_len,
            max_batch=config.rollout.max_env_worker,
            seed=config.trainer_common.seed,
            deterministic=config.rollout.deterministic,
            apart=config.rollout.max_staleness > 0,
        )
    engine = TokenEngine(sampler, tokenizer, tool_call_parser=source.tool_call_parser)
    return Learner(engine, sampler, trainer, tokenizer)


def _vllm_sampler(
    config: Config,
    path: Path | str,
    model: PreTrainedModel,
    tokenizer: HFTokenizer,
    max_model_len: int,
) -> VllmSampler:
    """A sampler over a vLLM server that gets the model's weights after each step."""
    vision = vision_of(model, tokenizer)
    if vision is not None:
        check_vision(model, vision)
    served = ServedWeights(model, tokenizer.hf)
    settings = settings_of(
        config,
        path,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        lora_rank=served.lora_rank,
        trained=True,
        takes_pictures=vision is not None and has_token_route(),
    )
    return VllmSampler(
        settings,
        eos_ids=tokenizer.eos_ids,
        directory=config.directory,
        write=served.write,
        adapter=served.lora_rank is not None,
        written=served.differs,
        tokenizer=tokenizer,
    )


_EMBEDDING = "output_embedding.safetensors"
_REST = "model-00001-of-00001.safetensors"


@dataclass(frozen=True)
class ServedWeights:
    """Writes the weights of a model in training for its server."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    """Of transformers."""

    @property
    def lora_rank(self) -> int | None:
        """Rank of the served adapter; None if full weights are served."""
        if self._lora:
            lora = getattr(self.model, "active_peft_config", None)
        else:
            lora = None
        if lora is None or lora.r > LARGEST_RANK:
            return None
        unsupported = (
            lora.use_dora,
            lora.bias != "none",
            lora.modules_to_save,
            lora.rank_pattern,
            lora.alpha_pattern,
            lora.trainable_token_indices,
            self._adapts_embeddings,
        )
        return None if any(unsupported) else int(lora.r)

    @property
    def _adapts_embeddings(self) -> bool:
        inner = self._inner
        return any(
            hasattr(layer, "get_base_layer")
            for layer in (inner.get_output_embeddings(), inner.get_input_embeddings())
        )

    @property
    def differs(self) -> bool:
        """Whether the initial weights differ from those at `model.path`."""
        return self._lora or self._tied

    @property
    def _lora(self) -> bool:
        return hasattr(self.model, "merge_adapter")

    @property
    def _inner(self) -> Any:
        return inner_model(self.model)

    @property
    def _tied(self) -> bool:
        inner = self._inner
        head = inner.get_output_embeddings()
        return head is not None and head.weight is inner.get_input_embeddings().weight

    def write(self, directory: Path) -> None:
        """Write the current weights to a new directory."""
        if self.lora_rank is not None:
            checkpoint.save_adapter(self.model, directory)
            return
        if self._lora:
            checkpoint.export(directory, self.model, self.tokenizer, compare=False)
        else:
            checkpoint.save_model(self.model, directory)
            if processor_files(self.tokenizer.name_or_path):  # a server may start with these files
                checkpoint.save_tokenizer(self.tokenizer, directory)
        if self._tied:
            self._untie(directory)

    def _untie(self, directory: Path) -> None:
        """Write the tied output embedding as a separate tensor.

        On a CPU vLLM stores it separately and reloads only tensors in the checkpoint, so that a
        tied one would keep old weights.
        """
        head = self._inner.get_output_embeddings()
        name = (
            next(name for name, module in self._inner.named_modules() if module is head) + ".weight"
        )
        weight = head.weight.detach().contiguous().cpu()
        save_file({name: weight}, directory / _EMBEDDING, metadata={"format": "pt"})
        index = directory / "model.safetensors.index.json"
        if not index.is_file():
            (directory / "model.safetensors").rename(directory / _REST)
            with safe_open(directory / _REST, framework="pt") as file:
                index.write_text(
                    json.dumps({"metadata": {}, "weight_map": dict.fromkeys(file.keys(), _REST)})
                )
        known = json.loads(index.read_text())
        known["weight_map"][name] = _EMBEDDING
        index.write_text(json.dumps(known))
        config = directory / "config.json"
        shape = json.loads(config.read_text())
        for section in (shape, shape.get("text_config")):
            if isinstance(section, dict):
                section["tie_word_embeddings"] = False
        config.write_text(json.dumps(shape, indent=1))
