"""Reads the tensors of a checkpoint into a model, and says which of them do not fit.

transformers and peft fill a tensor that a checkpoint lacks with random numbers and warn at most. A
model that was read in part samples noise, and training it looks like training.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.utils import logging

from ajet_sdk.engines.local.vision import forbid
from ajet_sdk.errors import MissingExtra
from ajet_sdk.tokens.pictures import media_tokens, takes_pictures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOAD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    RuntimeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
"""What transformers and peft raise for a checkpoint or adapter that they cannot read."""

_NAMED = 3
"""Number of tensors that a message names."""

_OTHER_PARTS = re.compile(r"(^|[._])(vision|visual|image|audio|speech|multi_?modal|mm)[._]")
"""Tensors of the parts for images and sound, which a checkpoint of several modalities has and its
text model lacks."""
_OTHER_CONFIGS = ("vision_config", "audio_config", "image_config", "speech_config")
_DRAFT_HEADS = re.compile(r"(^|\.)mtp[._]")
"""Heads of multi-token prediction, which most classes of transformers leave out."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The tensors of a checkpoint that do not fit its model, by name."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    """Names with the shape in the checkpoint and the shape of the model."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.reshaped,
        }
        texts = [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds.items() if names]
        return "; ".join([*texts, *self._hint()])

    def _hint(self) -> list[str]:
        """What to do if all names have a prefix that a wrapper of the model added when it was
        saved."""
        prefix = _common_prefix(self.missing, self.unexpected)
        if prefix is None:
            return []
        if "base_model.model." in prefix:
            return [
                "these are peft's names: save the model after merge_and_unload(), or save the"
                " adapter alone"
            ]
        return [f"its names begin with {prefix!r}: save the model inside the wrapper that adds it"]


def _some(names: Collection[str]) -> str:
    listed = ", ".join(sorted(names)[:_NAMED])
    return f"{listed}, ..." if len(names) > _NAMED else listed


def _common_prefix(missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """What most unexpected names have before the name of a missing tensor."""
    wanted = set(missing)
    prefixes = set[str]()
    for name in unexpected:
        parts = name.split(".")
        for i in range(1, len(parts)):
            if ".".join(parts[i:]) in wanted:
                prefixes.add(".".join(parts[:i]) + ".")
                break
    return prefixes.pop() if len(prefixes) == 1 else None


def read_causal_lm(
    path: str | Path, *, trust_remote_code: bool, **options: Any
) -> tuple[PreTrainedModel, Mismatch]:
    """The causal language model at `path`, with its part for pictures if it has a processor for
    them; and its tensors that do not fit.

    Tied tensors may be missing, as may buffers that the model computes; tensors that its class
    ignores and parts for other modalities do not count as unexpected. Raises the errors of
    transformers.
    """
    sees = options.get("gguf_file") is None and takes_pictures(path)
    model_class = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # its table of tensors that do not fit, which a message here replaces
    try:
        with no_progress_bar():
            model, report = model_class.from_pretrained(
                path,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=trust_remote_code,
                **options,
            )
    finally:
        logging.set_verbosity(level)
    unexpected = [name for name in report["unexpected_keys"] if not _DRAFT_HEADS.search(name)]
    if unexpected and _has_other_parts(path, options.get("gguf_file")):
        unexpected = [name for name in unexpected if not _OTHER_PARTS.search(name)]
    reshaped = [
        f"{name} {tuple(there)} for {tuple(here)}"
        for name, there, here in report["mismatched_keys"]
    ]
    mark_untied(model)
    if sees:
        forbid(model, media_tokens(model.config.to_dict()))
    mismatch = Mismatch(
        missing=tuple(sorted(report["missing_keys"])),
        unexpected=tuple(sorted(unexpected)),
        reshaped=tuple(sorted(reshaped)),
    )
    return model, mismatch


def mark_untied(model: PreTrainedModel) -> None:
    """Say in the config that the output embedding is separate, if it is.

    transformers keeps such a tensor of a checkpoint anyway; others read the config and tie it, and
    then compute another model.
    """
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if head is None or embedding is None or _stored_weight(head) is _stored_weight(embedding):
        return
    for section in (model.config, model.config.get_text_config()):
        if getattr(section, "tie_word_embeddings", False):
            section.tie_word_embeddings = False


def _stored_weight(layer: Any) -> object:
    """The parameter of an embedding; an adapter of single tokens computes its `weight` anew at each
    access."""
    tokens = getattr(layer, "token_adapter", None)
    return layer.weight if tokens is None else tokens.base_layer.weight


def _has_other_parts(path: str | Path, gguf_file: str | None) -> bool:
    if gguf_file is not None:
        return False
    values, _ = PretrainedConfig.get_config_dict(path)
    return any(values.get(name) for name in _OTHER_CONFIGS)


def read_adapter(
    model: PreTrainedModel, path: Path, *, trainable: bool
) -> tuple[PreTrainedModel, Mismatch]:
    """The model with the adapter of a directory, and the adapter's tensors that do not fit.

    Raises MissingExtra, and the errors of peft.
    """
    peft = peft_package()
    with quiet_peft():
        adapted = peft.PeftModel.from_pretrained(model, str(path), is_trainable=trainable)
    return adapted, read_adapter_weights(adapted, path)


def read_adapter_weights(model: PreTrainedModel, path: Path) -> Mismatch:
    """Replace the weights of a model's adapter by those of a directory; returns the tensors that do
    not fit.

    Raises RuntimeError for tensors of another shape.
    """
    peft_package()
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    adapted: Any = model
    result = set_peft_model_state_dict(adapted, load_peft_weights(str(path), device="cpu"))
    if adapted.active_peft_config.is_prompt_learning:
        return Mismatch()  # peft reads a learned prompt by itself, strictly
    lacking = {name for name in result.missing_keys if adapted.active_adapter in name.split(".")}
    # a tensor may have several names, of which a file has one
    places = {name: tensor.data_ptr() for name, tensor in adapted.state_dict().items()}
    known = {place for name, place in places.items() if name not in lacking}
    missing = sorted(name for name in lacking if places[name] not in known)
    return Mismatch(missing=tuple(missing), unexpected=tuple(result.unexpected_keys))


def copy_sharing_frozen(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model that shares the weights that aren't trained: of a LoRA model, all but the
    adapter."""
    frozen = {
        id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad
    }
    return copy.deepcopy(model, dict[int, Any](frozen))


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """`copy_sharing_frozen`, for inference."""
    return copy_sharing_frozen(model).eval().requires_grad_(False)


def peft_package() -> ModuleType:
    """The package peft. Raises MissingExtra."""
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("peft", "local") from error
    module: ModuleType = peft
    return module


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence warnings of peft about what is handled here."""
    with warnings.catch_warnings():
        # it reads a deprecated attribute of transformers
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        # an adapter of a tied embedding: what is merged is untied first
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings", UserWarning)
        # `Mismatch` names them
        warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
        yield


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Disable the progress bar of transformers, which would disturb ajet's."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
