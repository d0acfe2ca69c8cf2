"""Checks an exported model by loading it as a user would."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from ajet_sdk.engines.local.loading import no_progress_bar
from ajet_sdk.errors import CheckpointError
from ajet_sdk.protocols import Sampling
from ajet_sdk.types import Call

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FAR = 0.3
"""Largest mean difference of log-probabilities, in nats per token: bfloat16 and other kernels give some hundredths,
other weights whole nats."""
_CALLS, _TOKENS = 4, 2048
_SHARE = 0.25
"""Largest weights to load completely, as a share of the machine's memory."""


def check_export(path: Path, calls: Sequence[Call] = ()) -> float | None:
    """Load a Hugging Face checkpoint and compare its log-probabilities with those of `calls` by the final weights.

    Returns the mean difference over tokens; None without calls to compare, or if the model exceeds a quarter of this
    machine's memory, in which case only its names, shapes and values are checked.

    Raises CheckpointError if weights are missing, unexpected, of another shape or not finite, or if the probabilities
    differ too much.
    """
    _check_names(path)
    _check_values(path)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if weights > _SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        return None
    model, _ = _load(path, dtype="auto")
    model.eval()
    _scores(path, model, torch.arange(min(8, model.config.get_text_config().vocab_size)))
    gaps = [_gaps(path, model, call) for call in _comparable(calls)]
    if not gaps:
        return None
    gap = float(torch.cat(gaps).abs().mean())
    if gap > _FAR:
        raise CheckpointError(
            f"the log-probabilities of the model in {path} differ by {gap:.2f} from those it sampled with: it is "
            "not the model that was trained"
        )
    return gap


def _load(path: Path, **options: object) -> tuple[PreTrainedModel, dict[str, Sequence[object]]]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path, output_loading_info=True, local_files_only=True, trust_remote_code=False, **options
            )
        return cast("tuple[PreTrainedModel, dict[str, Sequence[object]]]", loaded)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"the model in {path} can't be loaded: {error}") from error
    finally:
        logging.set_verbosity(level)


def _check_names(path: Path) -> None:
    """Check names and shapes, without loading weights."""
    _, report = _load(path, device_map="meta")
    wrong = [
        f"{len(names)} {kind} ({', '.join(sorted(str(name) for name in names)[:3])})"
        for kind, names in (
            ("are missing", report["missing_keys"]),
            ("belong to no part of the model", report["unexpected_keys"]),
            ("have another shape", report["mismatched_keys"]),
        )
        if names
    ]
    if wrong:
        raise CheckpointError(f"the weights in {path} do not match the model: {'; '.join(wrong)}")


def _check_values(path: Path) -> None:
    """Check that values are finite, one tensor at a time."""
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
                    raise CheckpointError(f"{name} in {file} is not finite: the training diverged")


def _scores(path: Path, model: PreTrainedModel, ids_T: torch.Tensor) -> torch.Tensor:
    """Logits (T, vocabulary) in float32."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids_T.long()[None]).logits[0].float()
    if not torch.isfinite(logits).all():
        raise CheckpointError(f"the model in {path} computes logits that are not finite")
    return logits


def _comparable(calls: Sequence[Call]) -> list[Call]:
    """The shortest calls sampled from the whole distribution at a positive temperature."""
    fit: list[tuple[int, Call]] = []
    for call in calls:
        sampling = call.sampling
        drawn = Sampling.of(sampling)
        cut = drawn.top_p < 1 or drawn.top_k > 0 or drawn.min_p > 0 or drawn.processed
        if call.logprobs is None or call.prompt_ids is None or not len(call.prompt_ids) or cut:
            continue
        length = len(call.prompt_ids) + len(call.logprobs)
        if (sampling.get("temperature") or 0.0) > 0 and len(call.prompt_ids) < length <= _TOKENS:
            fit.append((length, call))
    return [call for _, call in sorted(fit, key=lambda scored: scored[0])[:_CALLS]]


def _gaps(path: Path, model: PreTrainedModel, call: Call) -> torch.Tensor:
    """Log-probabilities of the reply's tokens minus the recorded ones, shape (T,)."""
    prompt, reply = np.asarray(call.prompt_ids), np.asarray(call.output_ids)
    ids_T, start = torch.tensor(np.concatenate([prompt, reply]).astype(np.int64)), len(prompt)
    logits = _scores(path, model, ids_T)[start - 1 : -1] / float(call.sampling["temperature"])
    scored = torch.log_softmax(logits, -1).gather(1, ids_T[start:, None])[:, 0]
    return scored - torch.tensor(np.asarray(call.logprobs))
