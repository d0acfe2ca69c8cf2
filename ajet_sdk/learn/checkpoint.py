"""Checkpoints: the full training state, in a directory that is complete or absent; checks of
exported models.

`checkpoint/{run_id}/step_000020/` holds the model (a Hugging Face checkpoint; with LoRA its
adapter), `trainer.pt` (optimizer, master weights, random state) and `state.json`. It is written to
a draft directory and renamed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ajet_sdk.config.model_source import STATE, saved_steps, step_directory
from ajet_sdk.engines.local.products import exact_products
from ajet_sdk.engines.local.weights import (
    LOAD_ERRORS,
    Mismatch,
    no_progress_bar,
    read_adapter_weights,
    read_causal_lm,
)
from ajet_sdk.errors import CheckpointError
from ajet_sdk.learn.losses import policy_pass
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Sampling
from ajet_sdk.tokens.pictures import processor_files
from ajet_sdk.types import Call

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ajet_sdk.config.config import Config
    from ajet_sdk.types import Task

_TRAINER = "trainer.pt"


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run. The step also gives the data position: the order of tasks depends only on
    the seed."""

    step: int
    """Number of finished steps."""
    policy_version: int
    shared: dict[str, str] | None = None
    """Settings that a resumed run must share, as JSON by name; None in checkpoints of older
    versions."""
    metrics: dict[str, float] = field(default_factory=dict)
    total_updates: int | None = None
    """Planned updates of the whole run; None in checkpoints of older versions."""
    taken: list[tuple[int, int]] = field(default_factory=list)
    """Batch and position of each group that was trained, of batches that have others, with
    `rollout.carry_over`."""


def shared_settings(
    config: Config, settings: TrainerSettings, tasks: Sequence[Task]
) -> dict[str, str]:
    """Settings that a resumed run must share, as JSON by name: model, tasks, seed, batch,
    optimizer, loss."""
    ids = json.dumps([task.task_id for task in tasks]).encode()
    sections = {
        "model": config.model.model_dump(mode="json", include={"path", "lora"}),
        "training tasks": hashlib.blake2b(ids, digest_size=16).hexdigest(),
        "data.train_batch_size": config.data.train_batch_size,
        "rollout.num_repeat": config.rollout.num_repeat,
        "rollout.trained_models": config.rollout.trained_models,
        "trainer": dataclasses.asdict(settings),
        "algorithm": config.trainer_common.algorithm.model_dump(mode="json"),
    }
    named = dict(_flat("", sections))
    del named["trainer.total_updates"]  # a longer run may continue
    return named


def _flat(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, json.dumps(value)


def save(
    directory: Path,
    write: Callable[[Path], None],
    progress: Progress,
    keep: int,
    best: int | None = None,
    remove: Callable[[Path], object] = shutil.rmtree,
) -> Path:
    """Write a checkpoint, then `remove` all but the newest `keep` and that of step `best`; return
    its path."""
    directory.mkdir(parents=True, exist_ok=True)
    target = step_directory(directory, progress.step)
    fresh = directory / f".{target.name}.{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    write(fresh)
    (fresh / STATE).write_text(json.dumps(asdict(progress), indent=1))
    replace(fresh, target)
    for step, old in [*saved_steps(directory).items()][: -max(1, keep)]:
        if step != best:
            remove(old)
    return target


def latest(directory: Path) -> Path | None:
    """Returns the newest checkpoint of a run, or None."""
    return max(saved_steps(directory).items(), default=(0, None))[1]


def read(path: Path) -> Progress:
    """Reads the progress of a checkpoint. Raises CheckpointError."""
    try:
        values = json.loads((path / STATE).read_text())
        values.pop("fingerprint", None)  # written by older versions
        return Progress(**values)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is incomplete or damaged: {error}") from error


def restore(path: Path, take_up: Callable[[Path], None], shared: Mapping[str, str]) -> Progress:
    """Restore model and trainer with `take_up`. Raises CheckpointError for a checkpoint of another
    job.

    A setting that only one version of ajet has is not compared.
    """
    progress = read(path)
    before = progress.shared
    if before is None:
        raise CheckpointError(
            f"{path} was made by a version of ajet that recorded no settings to compare; start"
            " without --resume, or resume with that version"
        )
    changed = [
        f"{name} {before[name]}, now {now}"
        for name, now in shared.items()
        if before.get(name, now) != now
    ]
    if changed:
        raise CheckpointError(
            f"{path} was made with other settings ({'; '.join(changed)}); start without --resume,"
            " or restore the config"
        )
    take_up(path)
    return progress


def write_trainer(directory: Path, trainer: Trainer, tokenizer: PreTrainedTokenizerBase) -> None:
    if hasattr(trainer.model, "merge_adapter"):
        save_adapter(trainer.model, directory)
    else:
        save_model(trainer.model, directory)
    save_tokenizer(tokenizer, directory)
    torch.save(trainer.state(), directory / _TRAINER)


def read_trainer(path: Path, trainer: Trainer) -> None:
    """Restore model and trainer from `write_trainer`. Raises CheckpointError."""
    try:
        read_weights(path, trainer.model)
        trainer.restore(torch.load(path / _TRAINER, weights_only=True, map_location="cpu"))
    except CheckpointError:
        raise
    except Exception as error:  # errors of pickle and torch for damaged bytes have no common class
        raise CheckpointError(
            f"{path} cannot be restored: {type(error).__name__}: {error}"
        ) from error


def export(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    compare: bool = True,
) -> Path:
    """Write a Hugging Face checkpoint; a LoRA model is merged, with its adapter in `adapter/`.

    With `compare`, the checkpoint is loaded before it takes its place, and its log-probabilities
    are compared with the model's. Raises CheckpointError if they differ.
    """
    fresh = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        if hasattr(model, "merge_adapter"):
            save_adapter(model, fresh / "adapter")
            save_tokenizer(tokenizer, fresh / "adapter")
            _write_merged(fresh, model)
        else:
            save_model(model, fresh)
        save_tokenizer(tokenizer, fresh)
        if compare:
            check_export(fresh, policy=model)
    except CheckpointError as error:
        shutil.rmtree(fresh)
        raise CheckpointError(str(error).replace(str(fresh), str(directory))) from error
    replace(fresh, directory)
    return directory


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Save a tokenizer, and the processor for pictures that it was loaded with, if any."""
    tokenizer.save_pretrained(directory)
    for file in processor_files(tokenizer.name_or_path):
        shutil.copyfile(file, directory / file.name)


def _write_merged(directory: Path, model: Any) -> None:
    """Save the base model with the adapter merged, without changing the model in memory."""
    base = model.get_base_model()
    layers = {name: value for name, value in model.state_dict().items() if ".base_layer." in name}
    before = {name: value.to("cpu", copy=True) for name, value in layers.items()}
    model.merge_adapter()
    try:
        save_model(base, directory, state_dict=_merged_weights(base))
    finally:
        model.unmerge_adapter()
        model.load_state_dict(before, strict=False)


def _merged_weights(base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of a base model with merged adapters, by the names of a model without any.

    peft puts the module that an adapter changes into another one, by kind of adapter: `base_layer`,
    `token_adapter`, or a trained copy (`modules_to_save`), beside which the original stays.
    """
    with torch.device("meta"):
        names = type(base)(base.config).state_dict().keys()
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in base.state_dict().items():
        if ".original_module." in name:
            continue
        bare = _PEFT_MODULES.sub(".", name)
        if bare in names:
            weights[bare] = tensor
    return weights


_PEFT_MODULES = re.compile(
    r"\.(?:(?:token_adapter\.base_layer|base_layer|modules_to_save\.[^.]+)\.)+"
)
"""Possibly several in one another: each matrix of a layer of experts gets its own."""


def save_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Save a model's adapter in peft's format, without the embeddings of the base model."""
    save_model(model, directory, save_embedding_layers=False)


def save_model(model: PreTrainedModel, directory: Path, **options: Any) -> None:
    """`save_pretrained` without its progress bar."""
    with no_progress_bar():
        model.save_pretrained(directory, **options)


def read_weights(path: Path, model: PreTrainedModel) -> None:
    """Load the weights of a checkpoint into a model of the same shape, in place. Raises
    CheckpointError."""
    if hasattr(model, "merge_adapter"):
        try:
            mismatch = read_adapter_weights(model, path)
        except LOAD_ERRORS as error:
            raise CheckpointError(f"{path} is a checkpoint of another adapter: {error}") from error
        if mismatch:
            raise CheckpointError(f"{path} is a checkpoint of another adapter: {mismatch}")
        return
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        weights |= load_file(file)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    lacking = tuple(name for name in missing if name not in tied)
    mismatch = Mismatch(missing=lacking, unexpected=tuple(unexpected))
    if mismatch:
        raise CheckpointError(f"{path} is a checkpoint of another model: {mismatch}")


def replace(fresh: Path, target: Path) -> None:
    """Rename a finished directory to its target; an existing one is moved aside first."""
    aside = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    fresh.rename(target)
    shutil.rmtree(aside, ignore_errors=True)


_FAR = 0.3
"""Largest mean difference of log-probabilities, in nats per token: bfloat16 and other kernels give
some hundredths, other weights whole nats."""
_log = logging.getLogger("ajet")
_CALLS = 4
_TOKENS = 2048
_SHARE = 0.25
"""Largest weights to load completely, as a share of the machine's memory."""


def check_export(
    path: Path, calls: Sequence[Call] = (), policy: PreTrainedModel | None = None
) -> float | None:
    """Load a Hugging Face checkpoint and compare its log-probabilities with those of the trained
    model.

    They are known from `calls` by the final weights, or from the `policy` itself, if it is in this
    process.

    Returns the mean difference over tokens; None without calls or policy, or if the model exceeds a
    quarter of this machine's memory, in which case only its names, shapes and values are checked.

    Raises CheckpointError if weights are missing, unexpected, of another shape or not finite, or if
    the probabilities differ too much.
    """
    _load(path, device_map="meta")  # names and shapes alone
    _check_values(path)
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    if weights > _SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        _log.warning(
            "%s is too large to be loaded again here: its log-probabilities were not compared", path
        )
        return None
    model = _load(path, dtype="auto").eval()
    size = model.config.get_text_config().vocab_size
    _scores(path, model, torch.arange(min(8, size)))
    if policy is not None:
        return _compare_with_policy(path, model, policy, size)
    gaps = [_gaps(path, model, call) for call in _comparable(calls)]
    if not gaps:
        return None
    gap = float(torch.cat(gaps).abs().mean())
    if gap > _FAR:
        raise CheckpointError(
            f"the log-probabilities of the model in {path} differ by {gap:.2f} from those it"
            " sampled with: it is not the model that was trained"
        )
    return gap


_PROMPTS = 4
_PROMPT_TOKENS = 64
_LIKELY = 16
"""Number of tokens compared at each position, the policy's most likely ones."""
_NEAR = 1e-3
_NEAR_IN_16_BITS = 0.05
"""Largest difference of a log-probability in float32; largest mean difference in 16 bits, to which
an adapter's changes are rounded when it is merged."""


def _compare_with_policy(
    path: Path, model: PreTrainedModel, policy: PreTrainedModel, size: int
) -> float:
    """The mean difference of the log-probabilities of a checkpoint and of the policy.

    Prompts of random tokens meet every part of the model, and far more rows of its embeddings than
    texts do.
    """
    generator = torch.Generator().manual_seed(0)
    longest = (
        getattr(model.config.get_text_config(), "max_position_embeddings", None) or _PROMPT_TOKENS
    )
    shape = (_PROMPTS, min(_PROMPT_TOKENS, longest))
    ids_BT = torch.randint(0, size, shape, generator=generator)
    exported: list[torch.Tensor] = []
    trained: list[torch.Tensor] = []
    with policy_pass(policy), exact_products(policy):
        for ids_T in ids_BT:
            policys_TV = torch.log_softmax(_scores(path, policy, ids_T.to(policy.device)), -1).cpu()
            best_TK = policys_TV.topk(min(_LIKELY, size), -1).indices
            trained.append(policys_TV.gather(1, best_TK))
            exported.append(torch.log_softmax(_scores(path, model, ids_T), -1).gather(1, best_TK))
    difference = (torch.cat(exported) - torch.cat(trained)).abs()
    mean = float(difference.mean())
    most = float(difference.max())
    if policy.dtype == torch.float32:
        far = most > _NEAR
    else:
        far = mean > _NEAR_IN_16_BITS
    if far:
        raise CheckpointError(
            f"the log-probabilities of the model in {path} differ from those of the trained model"
            f" by up to {most:.2g} (mean {mean:.2g}), so it was not exported; the run's newest"
            " checkpoint has the trained weights"
        )
    return mean


def _load(path: Path, **options: object) -> PreTrainedModel:
    """The model at `path`. Raises CheckpointError if its tensors do not fit."""
    try:
        model, mismatch = read_causal_lm(
            path, local_files_only=True, trust_remote_code=False, **options
        )
    except LOAD_ERRORS as error:
        raise CheckpointError(f"the model in {path} can't be loaded: {error}") from error
    if mismatch:
        raise CheckpointError(f"the weights in {path} do not match the model: {mismatch}")
    return model


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
    """The shortest calls without pictures, sampled from the whole distribution at a positive
    temperature."""
    fit: list[tuple[int, Call]] = []
    for call in calls:
        sampling = call.sampling
        drawn = Sampling.of(sampling)
        cut = drawn.top_p < 1 or drawn.top_k > 0 or drawn.min_p > 0 or drawn.processed
        if call.logprobs is None or call.prompt_ids is None or not len(call.prompt_ids) or cut:
            continue
        if call.pictures:
            continue
        length = len(call.prompt_ids) + len(call.logprobs)
        if (sampling.get("temperature") or 0.0) > 0 and len(call.prompt_ids) < length <= _TOKENS:
            fit.append((length, call))
    return [call for _, call in sorted(fit, key=lambda scored: scored[0])[:_CALLS]]


def _gaps(path: Path, model: PreTrainedModel, call: Call) -> torch.Tensor:
    """Log-probabilities of the reply's tokens minus the recorded ones, shape (T,)."""
    prompt = np.asarray(call.prompt_ids)
    reply = np.asarray(call.output_ids)
    ids_T = torch.tensor(np.concatenate([prompt, reply]).astype(np.int64))
    start = len(prompt)
    logits = _scores(path, model, ids_T)[start - 1 : -1] / float(call.sampling["temperature"])
    scored = torch.log_softmax(logits, -1).gather(1, ids_T[start:, None])[:, 0]
    return scored - torch.tensor(np.asarray(call.logprobs))
