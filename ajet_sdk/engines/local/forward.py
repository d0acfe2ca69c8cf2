"""Forward passes over rows of a `RowCache`: by the model itself, or for the Llama family with far
fewer operations.

For small models or small batches the time of a pass depends on the number of operations, of which
transformers uses about four times as many as needed. `forward_of` chooses the fast pass only if it
computes the same logits in a trial. Shapes: B rows, T tokens each, N = B * T, W visible positions,
H heads of size D, V the vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from ajet_sdk.engines.local.cache import RowCache
from ajet_sdk.engines.local.products import exact_products, inner_model, products_of
from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_log = logging.getLogger(__name__)
_FAMILY = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
_FUSE_BELOW = 20_000_000
"""Parameters up to which weights are concatenated into a copy, to be multiplied at once."""


class UnsupportedModel(Exception):
    """A model that cannot be run over rows."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a pass of a model that takes pictures has beside ids and places."""

    positions: torch.Tensor
    """(3, B, T), or (B, T) if the model has no grid of positions."""
    arguments: Mapping[str, torch.Tensor]
    """The pixels of the pictures among the ids."""


class ModelForward:
    """The model's own forward pass over the rows that `cache` was told of; the logits behind each
    row's token at `last_B`, [B, V]. None: each row's last token is its T-th."""

    def __init__(self, model: PreTrainedModel, cache: RowCache) -> None:
        self._model, self._cache = model, {cache_name(model): cache}

    def refresh(self) -> None:
        """There is no copy of the weights."""

    def __call__(
        self,
        ids_BT: torch.Tensor,
        places_BT: torch.Tensor,
        mask: torch.Tensor | None,
        last_B: torch.Tensor | None,
        shown: Shown | None = None,
    ) -> torch.Tensor:
        keep: torch.Tensor | int = 1
        which_B = None
        if last_B is not None:
            keep, which_B = last_B.unique(return_inverse=True)
        config = self._model.config
        chosen = config._attn_implementation
        # Rows of unlike length need a mask, which flash attention cannot take.
        if chosen in ("sdpa", "eager"):
            config._attn_implementation = chosen
        else:
            config._attn_implementation = "sdpa"
        try:
            logits: torch.Tensor = self._model(
                input_ids=ids_BT,
                position_ids=places_BT if shown is None else shown.positions,
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=keep,
                **self._cache,
                **({} if shown is None else shown.arguments),
            ).logits
        finally:
            config._attn_implementation = chosen
        if which_B is None:
            return logits[:, -1]
        return logits[torch.arange(len(ids_BT), device=logits.device), which_B]


def vocabulary(model: PreTrainedModel) -> int:
    """Number of token embeddings of the model."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.num_embeddings)


def cache_name(model: PreTrainedModel) -> str:
    """The name of the model's cache argument: `cache` in newer versions of transformers."""
    if "cache" in inspect.signature(inner_model(model).forward).parameters:
        return "cache"
    return "past_key_values"


def causal_mask(places_BT: torch.Tensor, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive causal mask over the first `window` positions: 0 if visible, else -inf; [B, 1, T,
    window]."""
    hidden = torch.arange(window, device=places_BT.device) > places_BT[:, :, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, -torch.inf
    )[:, None]


@dataclass(slots=True)
class _Layer:
    norm: torch.Tensor
    projections: list[tuple[torch.Tensor, torch.Tensor | None]]
    """Weight and bias of query, key and value; a single pair if fused."""
    head_norm: torch.Tensor | None
    """Scales of the norms of query and key heads, [heads of both, D]."""
    out: tuple[torch.Tensor, torch.Tensor | None]
    mlp_norm: torch.Tensor
    gates: list[torch.Tensor]
    down: torch.Tensor


class LlamaForward:
    """The arithmetic of Llama, Mistral, Qwen 2 and Qwen 3 over the model's own weights; called as
    `ModelForward`."""

    def __init__(self, model: PreTrainedModel, cache: RowCache) -> None:
        self._model = model
        self._cache = cache
        config = model.config
        self._heads: int = config.num_attention_heads
        self._kv: int = config.num_key_value_heads
        self._size: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._eps: float = config.rms_norm_eps
        self._products: torch.dtype = model.dtype
        self._fuse = _small(model)
        self._cos = self._sin = torch.empty(0)
        self._layers: list[_Layer] = []

    def refresh(self) -> None:
        """Update copies after the weights have changed."""
        self._layers = []

    def _prepare(self) -> None:
        body: Any = self._model.model
        self._products = products_of(self._model)
        self._layers = [self._layer(layer) for layer in body.layers]

    def _layer(self, layer: Any) -> _Layer:
        attention = layer.self_attn
        mlp = layer.mlp
        projections = [
            self._linear(m) for m in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        gates = [self._linear(mlp.gate_proj)[0], self._linear(mlp.up_proj)[0]]
        if self._fuse:
            biases = [bias for _, bias in projections if bias is not None]
            weight = torch.cat([weight for weight, _ in projections])
            projections = [(weight, torch.cat(biases) if biases else None)]
            gates = [torch.cat(gates)]
        head_norm = None
        if hasattr(attention, "q_norm"):
            scales = [
                attention.q_norm.weight.expand(self._heads, -1),
                attention.k_norm.weight.expand(self._kv, -1),
            ]
            head_norm = torch.cat(scales)
        return _Layer(
            norm=layer.input_layernorm.weight,
            projections=projections,
            head_norm=head_norm,
            out=self._linear(attention.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight,
            gates=gates,
            down=self._linear(mlp.down_proj)[0],
        )

    def _linear(self, linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias = linear.bias
        return _weight(linear).to(self._products), None if bias is None else bias.to(self._products)

    def _rotation(self, places_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._cache.capacity > len(self._cos):
            every = torch.arange(self._cache.capacity + 64, device=places_N.device)
            cos, sin = self._model.model.rotary_emb(
                self._model.model.embed_tokens.weight[:1], every[None]
            )
            half = self._size // 2
            self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)
        return self._cos[places_N][:, None], self._sin[places_N][:, None]

    def __call__(
        self,
        ids_BT: torch.Tensor,
        places_BT: torch.Tensor,
        mask: torch.Tensor | None,
        last_B: torch.Tensor | None,
        shown: Shown | None = None,
    ) -> torch.Tensor:
        assert shown is None, "models of the Llama family take no pictures"
        if not self._layers:
            self._prepare()
        body = self._model.model
        shape = (*ids_BT.shape, -1, self._size)
        x = F.embedding(ids_BT.reshape(-1), body.embed_tokens.weight)
        cos, sin = self._rotation(places_BT.reshape(-1))
        width = (x.shape[-1],)
        if mask is not None and ids_BT.shape[1] > 1:
            mask = mask.repeat(1, 1, self._heads // self._kv, 1)
        for i, layer in enumerate(self._layers):
            h = F.rms_norm(x, width, layer.norm, self._eps)
            x = _add(
                x, self._attend(i, layer, h.to(self._products), cos, sin, mask, shape), *layer.out
            )
            h = F.rms_norm(x, width, layer.mlp_norm, self._eps).to(self._products)
            if len(layer.gates) == 1:
                gate, up = F.linear(h, layer.gates[0]).chunk(2, -1)
            else:
                gate = F.linear(h, layer.gates[0])
                up = F.linear(h, layer.gates[1])
            x = _add(x, F.silu(gate).mul_(up), layer.down)
        batch, length = ids_BT.shape
        if last_B is not None:
            x = x[torch.arange(batch, device=x.device) * length + last_B]
        elif length > 1:
            x = x.view(batch, length, -1)[:, -1]
        return F.linear(
            F.rms_norm(x, width, body.norm.weight, self._eps), self._model.lm_head.weight
        )

    def _attend(
        self,
        index: int,
        layer: _Layer,
        h: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        parts = [F.linear(h, weight, bias) for weight, bias in layer.projections]
        qkv = (
            (parts[0] if len(parts) == 1 else torch.cat(parts, -1))
            .to(cos.dtype)
            .view(h.shape[0], -1, self._size)
        )
        both = self._heads + self._kv
        half = self._size // 2
        qk = qkv[:, :both]
        if layer.head_norm is not None:
            qk = F.rms_norm(qk, (self._size,), None, self._eps) * layer.head_norm
        qk = torch.addcmul(qk * cos, torch.cat((qk[..., half:], qk[..., :half]), -1), sin)
        batch = shape[0]
        length = shape[1]
        group = self._heads // self._kv
        key = qk[:, self._heads :].view(shape).transpose(1, 2)
        value = qkv[:, both:].view(shape).transpose(1, 2)
        key, value = self._cache.update(key, value, index)
        query = qk[:, : self._heads].view(batch, length, self._kv, group, self._size)
        if mask is not None:
            # Queries that share a key head are stacked, to avoid copies of the keys.
            query = query.permute(0, 2, 3, 1, 4).reshape(
                batch, self._kv, group * length, self._size
            )
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            out = out.view(batch, self._kv, group, length, self._size).permute(0, 3, 1, 2, 4)
        else:
            query = query.flatten(2, 3).transpose(1, 2)
            key, value = (
                t[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for t in (key, value)
            )
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        return out.reshape(h.shape[0], -1).to(h.dtype)


def _add(
    x: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x + a linear layer of h, in the type of x."""
    if x.dtype != h.dtype:
        return x + F.linear(h, weight, bias)
    x = torch.addmm(x, h, weight.t())
    return x if bias is None else x + bias


def _weight(linear: Any) -> torch.Tensor:
    """A linear layer's weight, with its LoRA adapters merged in."""
    if isinstance(linear, nn.Linear):
        return linear.weight
    merged: torch.Tensor = linear.get_base_layer().weight
    for adapter in linear.active_adapters:
        merged = merged + linear.get_delta_weight(adapter)
    return merged


def _is_llama_family(model: PreTrainedModel) -> bool:
    if type(model).__name__ not in _FAMILY:
        return False
    parts: Any = model
    if getattr(model.config, "hidden_act", None) != "silu" or parts.lm_head.bias is not None:
        return False
    if model.config.rope_parameters.get("rope_type", "default") not in _STATIC_ROPE:
        return False
    layers = parts.model.layers
    if any(name.endswith("bias") for layer in layers for name, _ in layer.mlp.named_parameters()):
        return False
    linears = [m for layer in layers for name, m in layer.named_modules() if name.endswith("_proj")]
    if any(hasattr(m, "get_base_layer") for m in set(model.modules()) - set(linears)):
        return False  # an adapter of the embedding or the head
    if all(type(m) is nn.Linear for m in linears):
        return True
    # Adapters are merged into a copy of the weights, which `refresh` renews. Weights in bfloat16
    # would round away the changes of an adapter.
    mergeable = all(isinstance(m, nn.Linear) or hasattr(m, "get_delta_weight") for m in linears)
    return mergeable and bool(model.dtype == torch.float32)


def _small(model: PreTrainedModel) -> bool:
    return bool(sum(p.numel() for p in model.parameters()) < _FUSE_BELOW)


def forward_of(model: PreTrainedModel, cache: RowCache) -> LlamaForward | ModelForward:
    """The fastest forward pass with the model's logits. Raises UnsupportedModel if masks cannot
    separate rows."""
    bare = inner_model(model)
    if reason := unsupported_reason(model.config.get_text_config()):
        raise UnsupportedModel(f"{type(bare).__name__} has {reason}.")
    if _is_llama_family(bare):
        short = LlamaForward(bare, cache)
        gap = _gap(model, short, cache)
        if gap <= tolerance(model):
            return short
        _log.warning(
            "The fast forward pass differs by %.2g for %s; using the model's own.",
            gap,
            type(bare).__name__,
        )
    fast = ModelForward(model, cache)
    try:
        gap = _gap(model, fast, cache)
    except Exception as error:  # a model may fail in any way
        raise UnsupportedModel(
            f"{type(bare).__name__} does not support batches ({error})."
        ) from error
    if not gap <= tolerance(model):
        raise UnsupportedModel(
            f"{type(bare).__name__} computes different results in a batch (by {gap:.2g})."
        )
    return fast


def unsupported_reason(config: PretrainedConfig) -> str | None:
    """Why a model's layers do not attend to the whole context, by its config; None if they do."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return "layers of type " + ", ".join(sorted(kinds))
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "a sliding window"
    return None


def rope_kinds(text_config: PretrainedConfig) -> list[tuple[str, dict[str, object]]]:
    """The kinds of rotary embedding of a model, with their parameters."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return [(str(parameters.get("rope_type", "")), parameters) for parameters in (rope, *nested)]


def check_rope(config: PretrainedConfig, max_model_len: int) -> None:
    """Refuse lengths at which a model changes the angles of its rotary embedding. Raises
    ConfigError.

    Dynamic NTK and LongRoPE choose the angles by the longest conversation of a pass, which would
    make earlier keys and those of other conversations in the batch wrong.
    """
    text = config.get_text_config()
    for kind, rope in rope_kinds(text):
        steady: Any = text.max_position_embeddings if "dynamic" in kind else None
        if kind == "longrope":
            steady = rope.get("original_max_position_embeddings") or text.max_position_embeddings
        if steady is not None and max_model_len > steady:
            raise ConfigError(
                f"rollout.max_model_len {max_model_len}: beyond {steady} tokens the model's rotary"
                f" embedding ({kind}) depends on the longest conversation, which makes cached keys"
                f" wrong. Set it to {steady} or less"
            )


def tolerance(model: PreTrainedModel) -> float:
    """Largest `distance` of logits due to another order of computation.

    Rounding accumulates over 24 layers to 1.5 % in bfloat16 and to 1e-6 in float32. A wrongly
    masked token changes them by tens of percent.
    """
    return {torch.float32: 5e-3, torch.float16: 2e-2}.get(model.dtype, 0.1)


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The root mean square of the difference, relative to the spread of the expected logits.

    An absolute difference would depend on the scale of the logits: at 20, rounding alone causes
    0.5. Forbidden tokens (`vision.forbid`) are left out, whose logits would hide all others.
    """
    allowed = expected > lowest_logit(expected.dtype) / 2
    logits = logits[allowed].detach().float()
    expected = expected[allowed].detach().float()
    off = logits - expected
    return float(off.square().mean().sqrt() / expected.std().clamp_min(1e-12))


def lowest_logit(dtype: torch.dtype) -> float:
    """The logit of a token that is never sampled: finite, since 0 · -inf in a masked loss is
    NaN."""
    return max(-1e9, float(torch.finfo(dtype).min) / 4)


def _gap(model: PreTrainedModel, forward: LlamaForward | ModelForward, cache: RowCache) -> float:
    """The largest distance of the logits from the model's own, over a fresh pass, an extension and
    one token."""
    device = model.device
    length = 7
    ids = (
        torch.arange(2 * length, device=device).view(2, length) * 7919 + 13
    ) % model.config.get_text_config().vocab_size
    cache.resize(2, length)
    rows = torch.arange(2, device=device)
    places = torch.arange(length, device=device).expand(2, -1)
    was_training = model.training
    model.eval()
    forward.refresh()
    try:
        with torch.inference_mode(), exact_products(model):
            expected = model(input_ids=ids, use_cache=False).logits
            gap = 0.0
            for begin, end in ((0, 3), (3, 6), (6, 7)):
                at = places[:, begin:end]
                write = (rows[:, None] * length + at).reshape(-1)
                if begin:
                    cache.extend(write, rows, end)
                else:
                    cache.fresh(write)
                logits = forward(
                    ids[:, begin:end],
                    at,
                    causal_mask(at, end, model.dtype) if begin else None,
                    None,
                )
                gap = max(gap, distance(logits, expected[:, end - 1]))
        return gap
    finally:
        model.train(was_training)
        forward.refresh()
        cache.drop()
