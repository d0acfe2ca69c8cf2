"""Training on from a LoRA adapter: what `model.lora` may say about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ajet_sdk.config.model_source import adapter_base, adapter_values, merged_model
from ajet_sdk.engines.local.products import inner_model
from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet_sdk.config.config import Config

_NAMES = {"r": "r", "alpha": "lora_alpha", "target_modules": "target_modules"}
"""Keys of `model.lora` and their names in peft's settings."""
_ALL = "all-linear"


def check_start_adapter(config: Config, path: Path | str, say: Callable[[str], None]) -> None:
    """Raise ConfigError if `model.path` is an adapter that the settings of `model.lora` don't
    fit."""
    values = adapter_values(path)
    if values is None:
        return
    lora = config.model.lora
    if not lora.enabled:
        raise ConfigError(
            f"model.path: {path} is a LoRA adapter; to train it on, set model.lora.enabled: true;"
            f" to train all weights, {_merged(Path(path))}"
        )
    conflicts: list[str] = []
    for key, name in _NAMES.items():
        ours: object = getattr(lora, key)
        theirs = values.get(name)
        if config.is_set(f"model.lora.{key}") and ours != _ALL and not _equal(ours, theirs):
            conflicts.append(f"model.lora.{key} is {ours}, and the adapter's {theirs}")
    if conflicts:
        raise ConfigError(_conflict(path, "; ".join(conflicts)))
    say(
        f"training the adapter in {path} on (rank {values.get('r')}, alpha"
        f" {values.get('lora_alpha')}); the initial model, to which a divergence is measured, is"
        f" {adapter_base(path)} with this adapter"
    )


def check_all_linear(config: Config, path: Path | str, model: PreTrainedModel) -> None:
    """Raise ConfigError if the config sets `all-linear`, and the adapter at `model.path` leaves out
    linear layers."""
    if adapter_values(path) is None or not config.is_set("model.lora.target_modules"):
        return
    if config.model.lora.target_modules != _ALL:
        return
    inner = inner_model(model)
    head = inner.get_output_embeddings()
    for name, layer in inner.named_modules():
        of_adapter = "lora_" in name or ".base_layer" in name
        if isinstance(layer, torch.nn.Linear) and layer is not head and not of_adapter:
            raise ConfigError(
                _conflict(
                    path, f"model.lora.target_modules is {_ALL}, and the adapter has no {name}"
                )
            )


def _conflict(path: Path | str, conflicts: str) -> str:
    return (
        f"{conflicts}: an adapter keeps its shape when it is trained on. Leave out these keys, or"
        f" start a new adapter on the merged model: {_merged(Path(path))}"
    )


def _merged(adapter: Path) -> str:
    place = merged_model(adapter)
    if place is not None:
        return f"set model.path: {place}, which has this run's last adapter merged"
    return (
        "set model.path to a model with the adapter merged (a finished run exports one as `model/`)"
    )


def _equal(ours: object, theirs: object) -> bool:
    if isinstance(ours, list | tuple) and isinstance(theirs, list):
        return set(ours) == set(theirs)
    return ours == theirs
