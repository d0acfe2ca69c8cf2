"""The shape of a transformer, from its `config.json` alone: what decides whether it fits a machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ajet_sdk.errors import ConfigError

_HUB_SECONDS = 10.0
_LARGEST = 10**9
"""No size of a model is larger."""
_WITHOUT_GATE = ("gpt2", "gpt_neox", "opt", "bloom", "falcon", "phi", "gptj", "starcoder2")
"""Model types whose feed-forward layer has two matrices; others have three."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder."""

    layers: int
    hidden: int
    inner: int
    """Width of the feed-forward layer; of an expert, for a mixture of experts."""
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int | None
    """Longest sequence that its positions reach; None: not said."""
    is_tied: bool
    """Whether the output layer is the embedding."""
    experts: int = 1
    matrices: int = 3
    """Matrices of a feed-forward layer."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, without norms and biases."""
        queries = self.heads * self.head_size
        keys = self.kv_heads * self.head_size
        attention = self.hidden * (2 * queries + 2 * keys)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + router + self.experts * self.matrices * self.hidden * self.inner

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and of the output layer if it is another one."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2)

    @property
    def parameters(self) -> int:
        """All parameters, without norms and biases: 0.1 % of a model."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of a LoRA adapter of all linear layers but the output layer. Those of experts
        are no layers of their own in transformers, and get none."""
        queries = self.heads * self.head_size
        keys = self.kv_heads * self.head_size
        ends = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        if self.experts == 1:
            ends += self.matrices * (self.hidden + self.inner)
        return self.layers * rank * ends

    def kv_bytes(self, tensor_parallel: int = 1, size: int = 2) -> int:
        """Bytes of keys and values of one token on each of `tensor_parallel` GPUs, of `size` bytes
        a number."""
        heads = max(1, -(-self.kv_heads // tensor_parallel))
        return 2 * size * self.layers * heads * self.head_size


def shape_of(values: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a `config.json` describes. Raises ConfigError if a size is missing."""
    text = values.get("text_config")
    config: Mapping[str, Any] = text if isinstance(text, Mapping) else values

    def size(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                if not 0 < value < _LARGEST:
                    raise ConfigError(f"{where}: {name} must be a positive number (got {value})")
                return value
        if default is None:
            raise ConfigError(f"{where} has no {names[0]}: it describes no decoder that is known")
        return default

    hidden = size("hidden_size", "n_embd", "d_model")
    heads = size("num_attention_heads", "n_head")
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=1)
    inner = size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    if experts > 1:
        inner = size("moe_intermediate_size", default=inner)
    context = size("max_position_embeddings", "n_positions", default=0)
    if context:
        context = max(context, _scaled(config.get("rope_scaling") or config.get("rope_parameters")))
    tied = config.get("tie_word_embeddings", values.get("tie_word_embeddings", False))
    return ModelShape(
        layers=size("num_hidden_layers", "n_layer"),
        hidden=hidden,
        inner=inner,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_size=size("head_dim", default=max(1, hidden // heads)),
        vocabulary=size("vocab_size"),
        context=context or None,
        is_tied=bool(tied),
        experts=experts,
        matrices=2 if config.get("model_type") in _WITHOUT_GATE else 3,
    )


def _scaled(scaling: object) -> int:
    """The positions that a scaling of rotary embeddings reaches; 0 without one."""
    if not isinstance(scaling, Mapping):
        return 0
    factor = scaling.get("factor")
    original = scaling.get("original_max_position_embeddings")
    if not isinstance(original, int) or not isinstance(factor, int | float):
        return 0
    return int(original * factor) if 0 < original * factor < _LARGEST else 0


def read_shape(model: str | Path, *, online: bool = False) -> ModelShape | None:
    """The shape of a model in a directory or in the hub's cache, with `online` also on the hub.

    None if its `config.json` is not at hand. Raises ConfigError for one that is no decoder's.
    """
    file = Path(model) / "config.json"
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else _on_hub(str(model), online)
        if text is None:
            return None
        values = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is no JSON object")
    return shape_of(values, str(file))


def _on_hub(name: str, online: bool) -> str | None:
    """The text of a hub model's `config.json`, from the cache, or with `online` from the hub, which
    is asked once; None without."""
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.constants import ENDPOINT
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:
        return None
    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    if isinstance(cached, str):
        return Path(cached).read_text(encoding="utf-8")
    if not online:
        return None
    token = os.environ.get("HF_TOKEN")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(
            f"{ENDPOINT}/{name}/resolve/main/config.json",
            headers=headers,
            follow_redirects=True,
            timeout=_HUB_SECONDS,
        )
    except httpx.HTTPError:
        return None
    return answer.text if answer.status_code == 200 else None
