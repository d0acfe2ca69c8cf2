"""Loads a causal language model from a directory or by name, and makes an engine of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ajet_sdk.config.model_source import ADAPTER, adapter_base, check_source, refuse_code
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.products import inner_model, multiply_in
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.engines.local.vision import freeze_tower, is_of_tower
from ajet_sdk.engines.local.weights import (
    LOAD_ERRORS,
    mark_untied,
    peft_package,
    quiet_peft,
    read_adapter,
    read_causal_lm,
)
from ajet_sdk.errors import ConfigError, first_line
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.tokens.pictures import takes_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet_sdk.config.config import Config
    from ajet_sdk.config.schema import Lora, ModelSource

_SMALL = 20_000_000
"""Parameters below which a single thread is faster."""


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    attn_implementation: str = "auto",
    device: str = "auto",
    lora: Lora | None = None,
    trust_remote_code: bool = False,
    trains_tower: bool = True,
) -> PreTrainedModel:
    """Load the model at `path`, ready to sample.

    dtype `auto` is float32 on a CPU and bfloat16 on a GPU; `bfloat16` on a CPU keeps the weights in
    float32 and multiplies in bfloat16. For a directory with a LoRA adapter, the base model is
    loaded with the adapter; `lora` (r, alpha, target_modules) adds a new adapter to train. Without
    `trains_tower` the part of a model that sees is frozen. Raises ConfigError.
    """
    target = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    )
    kind, products = _types(dtype, on_gpu=target.type == "cuda")
    if attn_implementation.startswith("flash") and (target.type != "cuda" or kind == torch.float32):
        raise ConfigError(
            f"model.attn_implementation: {attn_implementation} needs bfloat16 on a GPU, but the"
            f" model is {str(kind).removeprefix('torch.')} on {target.type}; set model.dtype:"
            " bfloat16, or attn_implementation: sdpa"
        )
    adapter_on = adapter_base(path)
    base = adapter_on or path
    try:
        check_source(base)
    except ConfigError as error:
        if adapter_on is None:
            raise
        raise ConfigError(
            f"{error} (it is the base of the adapter in {path}, by its {ADAPTER})"
        ) from error
    if attn_implementation == "auto":
        extra = {}
    else:
        extra = {"attn_implementation": attn_implementation}
    try:
        model, mismatch = read_causal_lm(
            base, dtype=kind, trust_remote_code=trust_remote_code, **extra
        )
    except LOAD_ERRORS as error:
        refuse_code(base, error)
        raise ConfigError(
            f"model.path: {base} cannot be loaded as a causal language model: {error}"
        ) from error
    if mismatch:
        raise ConfigError(
            f"model.path: the weights in {base} do not match the model of its config.json:"
            f" {mismatch}. Untrained tensors in their place would make another model; use a"
            " complete checkpoint"
        )
    if adapter_on is not None:
        model = _with_adapter(model, Path(path), base, trainable=lora is not None)
        lora = None
    model = _prepared(model, lora, trains_tower)
    if (
        target.type == "cpu"
        and "OMP_NUM_THREADS" not in os.environ
        and model.num_parameters() < _SMALL
    ):
        torch.set_num_threads(1)
    if products != kind:
        multiply_in(model, products)  # pyright: ignore[reportArgumentType]
    return model.to(target).eval()  # pyright: ignore[reportArgumentType]  # a decorator hides the signature


def model_without_weights(
    path: str | Path, source: ModelSource, *, on_gpu: bool
) -> PreTrainedModel:
    """The model of a section `model` on the device `meta`, of its `config.json` alone, as
    `load_model` prepares it for a GPU or a CPU. Raises ConfigError."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind, products = _types(source.dtype, on_gpu=on_gpu)
    model_class = AutoModelForImageTextToText if takes_pictures(path) else AutoModelForCausalLM
    try:
        shape = AutoConfig.from_pretrained(path, trust_remote_code=source.trust_remote_code)
        with torch.device("meta"):
            model = model_class.from_config(shape, dtype=kind)
    except LOAD_ERRORS as error:
        raise ConfigError(
            f"model.path: {path} cannot be built as a causal language model: {first_line(error)}"
        ) from error
    lora = source.lora if source.lora.enabled else None
    model = _prepared(model, lora, source.vision_tower == "trained")
    if products != kind:
        multiply_in(model, products)
    if source.gradient_checkpointing:
        enable_checkpointing(model)
    return model


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Compute activations again in the backward pass, in place of keeping them."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # the name in newer versions
    (enable or model.gradient_checkpointing_enable)()
    model.enable_input_require_grads()


def _types(dtype: str, *, on_gpu: bool) -> tuple[torch.dtype, torch.dtype]:
    """The types of the weights and of the products of `model.dtype`."""
    if dtype == "auto":
        kind = torch.bfloat16 if on_gpu else torch.float32
    else:
        kind = _dtype(dtype)
    if not on_gpu and kind == torch.bfloat16:
        return torch.float32, kind
    return kind, kind


def _prepared(model: PreTrainedModel, lora: Lora | None, trains_tower: bool) -> PreTrainedModel:
    """The model with a new adapter, if any is to be trained."""
    if lora is not None and lora.enabled:
        targets = lora.target_modules
        model = add_adapter(
            model,
            lora.r,
            lora.alpha,
            targets if isinstance(targets, str) else list(targets),
            adapts_tower=trains_tower,
        )
    if not trains_tower:
        freeze_tower(model)
    _untie_adapted(model)
    return model


def _with_adapter(
    model: PreTrainedModel, adapter: Path, base: str | Path, *, trainable: bool
) -> PreTrainedModel:
    """The model with an adapter. Raises ConfigError if the adapter isn't complete, or is one of
    another model."""
    try:
        adapted, mismatch = read_adapter(model, adapter, trainable=trainable)
    except LOAD_ERRORS as error:
        raise ConfigError(
            f"model.path: the adapter in {adapter} does not fit {base}: {error}"
        ) from error
    if mismatch:
        raise ConfigError(f"model.path: the adapter in {adapter} does not fit {base}: {mismatch}")
    return adapted


def _dtype(name: str) -> torch.dtype:
    torch_dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ConfigError(
            f"model.dtype: {name} is not supported; use auto, float32, bfloat16 or float16"
        )
    return torch_dtype


def _untie_adapted(model: PreTrainedModel) -> None:
    """Give the output embedding its own weights if an adapter changes it or the tied input
    embedding.

    The adapter of one of the two changes this one alone. Merged into the common tensor it would
    change both.
    """
    inner: Any = inner_model(model)
    head = inner.get_output_embeddings()
    embedding = inner.get_input_embeddings()
    if head is None:
        return
    if hasattr(head, "get_base_layer") or hasattr(embedding, "get_base_layer"):
        layer = getattr(head, "get_base_layer", lambda: head)()
        if layer.weight is embedding.weight:
            layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    mark_untied(inner)


def add_adapter(
    model: PreTrainedModel,
    rank: int,
    alpha: float,
    targets: str | list[str],
    *,
    adapts_tower: bool = True,
) -> PreTrainedModel:
    """The model with a new LoRA adapter to train, also of the part that sees if `adapts_tower`.

    Raises ConfigError, MissingExtra.
    """
    peft = peft_package()
    if adapts_tower:
        tower = []
    else:
        tower = [name for name, _ in model.named_modules() if is_of_tower(name)]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        exclude_modules=tower or None,
    )
    with quiet_peft():
        try:
            return peft.get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"model.lora.target_modules: {error}") from error


def local_engine(config: Config) -> TokenEngine:
    """Return an engine over `config.model` in this process, for sampling only."""
    spec = config.model
    if spec.path is None:
        raise ConfigError(
            "model.path is not set: the local engine needs a local directory or a Hugging Face name"
        )
    if config.resolve(spec.path).exists():
        path = str(config.resolve(spec.path))
    else:
        path = spec.path
    tokenizer = HFTokenizer(path, trust_remote_code=spec.trust_remote_code)
    model = load_model(
        path,
        dtype=spec.dtype,
        attn_implementation=spec.attn_implementation,
        device=spec.device,
        trust_remote_code=spec.trust_remote_code,
    )
    longest = (
        getattr(model.config.get_text_config(), "max_position_embeddings", None)
        or config.rollout.max_model_len
    )
    sampler = LocalSampler(
        model,
        tokenizer,
        model_name=config.model_name,
        max_model_len=min(config.rollout.max_model_len, longest),
        max_batch=config.rollout.max_env_worker,
        seed=config.trainer_common.seed,
        deterministic=config.rollout.deterministic,
        policy_version=None,
    )
    return TokenEngine(sampler, tokenizer, tool_call_parser=spec.tool_call_parser)
