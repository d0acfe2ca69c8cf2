"""A base model in memory, shared by the policies of all clients, each with a LoRA adapter.

The loss is that of the API: a sum over the tokens of all sequences. Gradients accumulate over
requests until the next step. Checkpoints are on disk under the API's paths:
`tinker://ID/weights/NAME` is the directory STATE/ID/weights/NAME.

Letters of shapes: B sequences, T the length of one, N tokens of a micro-batch, V the vocabulary.
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ajet_sdk.config.model_source import adapter_values
from ajet_sdk.dialects.json import Json
from ajet_sdk.engines.local.forward import vocabulary
from ajet_sdk.engines.local.loading import add_adapter, load_model
from ajet_sdk.engines.local.vision import is_of_tower, vision_of
from ajet_sdk.errors import CheckpointError, ConfigError, RequestRefused, TrainingError
from ajet_sdk.learn.batches import (
    MicroBatch,
    logit_rows,
    micro_batches,
    tokens_of_a_pass,
    with_pictures,
)
from ajet_sdk.learn.checkpoint import read_weights, save_adapter
from ajet_sdk.learn.losses import score
from ajet_sdk.learn.objective import LossSettings, Scored, policy_loss
from ajet_sdk.learn.trainer import adamw
from ajet_sdk.learn.trees import grid, shares_prefixes
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trainer_service.data import Batch, PromptScores
from ajet_sdk.trainer_service.inputs import ModelInput
from ajet_sdk.types import Floats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet_sdk.dialects.json import Json

_ALPHA = 32
"""LoRA alpha: adapters are scaled by `_ALPHA / rank`, so that a learning rate fits all ranks."""
_LORA = "lora.json"
_OPTIMISER = "optimiser.pt"


@dataclass(frozen=True, slots=True)
class Lora:
    """Rank of an adapter, and the kinds of layers that it changes."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class Adam:
    """Parameters of an AdamW step. `grad_clip_norm` 0 disables clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class BaseModel:
    """The frozen weights shared by all policies."""

    def __init__(
        self,
        path: str,
        *,
        device: str = "auto",
        max_model_len: int | None = None,
        temperature: float = 1.0,
    ) -> None:
        """Tokens are scored at `temperature`. Raises ConfigError if there is no model at `path`."""
        if adapter_values(path) is not None:
            raise ConfigError(
                f"{path} is a LoRA adapter; serve a whole model, such as one with the adapter"
                " merged (a finished run exports one as `model/`)"
            )
        self.path = path
        self.temperature = temperature
        self.model = load_model(path, device=device).requires_grad_(False)
        shape = self.model.config.get_text_config()
        longest = getattr(shape, "max_position_embeddings", None)
        self.max_model_len: int = min(filter(None, (max_model_len, longest)), default=8192)
        self.vocabulary = vocabulary(self.model)
        self.threads = torch.get_num_threads()
        self.shares = shares_prefixes(self.model)
        self.tokenizer = HFTokenizer(path)
        self.vision = vision_of(self.model, self.tokenizer)
        self._kinds = _layers(self.model)

    def policy_module(self, lora: Lora | None) -> PreTrainedModel:
        """A new module over the same weights, with its own adapter, since threads cannot share a
        module."""
        weights = {id(parameter): parameter for parameter in self.model.parameters()}
        module = copy.deepcopy(self.model, dict[int, object](weights)).eval()
        return module if lora is None else self._with_adapter(module, lora)

    def _with_adapter(self, module: PreTrainedModel, lora: Lora) -> PreTrainedModel:
        chosen = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        targets = sorted(
            {name for kind, names in self._kinds.items() if chosen[kind] for name in names}
        )
        if not targets:
            raise RequestRefused(
                "the LoRA changes no layer; set one of train_attn, train_mlp and train_unembed"
            )
        devices = [module.device] if module.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            if lora.seed is not None:
                torch.manual_seed(lora.seed)
            return add_adapter(module, lora.rank, _ALPHA, targets, adapts_tower=False).eval()

    def sampling_module(self, path: Path | None) -> PreTrainedModel:
        """A module with the adapter saved in `path`, or the base model."""
        if path is None:
            return self.policy_module(None)
        module = self.policy_module(read_lora(path))
        read_weights(path, module)
        return module.requires_grad_(False)


def _layers(model: PreTrainedModel) -> dict[str, set[str]]:
    """Names of a model's linear layers by kind, as in an adapter's config; without those of the
    part that sees, whose names may be numbers, as are the language model's blocks."""
    head = model.get_output_embeddings()
    kinds: dict[str, set[str]] = defaultdict(set)
    for name, layer in model.named_modules():
        if layer is head:
            kinds["unembed"].add(name)
        elif isinstance(layer, torch.nn.Linear) and not is_of_tower(name):
            parts = name.split(".")
            kinds[
                "attn" if any("attn" in part or "attention" in part for part in parts) else "mlp"
            ].add(parts[-1])
    return kinds


def read_lora(path: Path) -> Lora:
    """Reads the kind of adapter at `path`. Raises CheckpointError."""
    try:
        return Lora(**json.loads((path / _LORA).read_text())["lora"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name} is no checkpoint of this server: {error}") from error


class Policy:
    """A client's weights with their optimizer. Not thread-safe."""

    def __init__(self, base: BaseModel, lora: Lora) -> None:
        self.base = base
        self.lora = lora
        self.module = base.policy_module(lora)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._optimiser = adamw(self.parameters)
        self._pass_tokens = tokens_of_a_pass(self.module, checkpointing=False)

    @classmethod
    def load(cls, base: BaseModel, path: Path, *, optimiser: bool) -> Policy:
        """Load a policy that `save` wrote to `path`. Raises CheckpointError."""
        policy = cls(base, read_lora(path))
        policy.restore(path, optimiser=optimiser)
        return policy

    def restore(self, path: Path, *, optimiser: bool) -> None:
        """Restore saved weights, with their optimizer or a fresh one. Raises CheckpointError."""
        if replace(lora := read_lora(path), seed=None) != replace(self.lora, seed=None):
            raise CheckpointError(
                f"{path.name} is another kind of adapter ({lora}; this one is {self.lora}); make a"
                " training client of it with create_training_client_from_state"
            )
        if optimiser and not (path / _OPTIMISER).is_file():
            raise CheckpointError(
                f"{path.name} was saved for a sampler and has no optimiser; load its weights alone"
            )
        self.drop_gradients()
        try:
            read_weights(path, self.module)
            self._optimiser = adamw(self.parameters)
            if optimiser:
                device = self.parameters[0].device
                self._optimiser.load_state_dict(
                    torch.load(path / _OPTIMISER, weights_only=True, map_location=device)
                )
        except (
            Exception
        ) as error:  # errors of pickle and torch for damaged bytes have no common class
            raise CheckpointError(
                f"{path.name} cannot be read: {type(error).__name__}: {error}"
            ) from error

    def save(
        self, directory: Path, *, optimiser: bool, about: dict[str, object] | None = None
    ) -> None:
        """Write adapter and optimizer to `directory`; the adapter is in peft's format."""
        directory.mkdir(parents=True)
        save_adapter(self.module, directory)
        (directory / _LORA).write_text(json.dumps({"lora": asdict(self.lora), **(about or {})}))
        if optimiser:
            torch.save(self._optimiser.state_dict(), directory / _OPTIMISER)

    def score(self, batch: Batch, *, backward: bool) -> tuple[list[Floats], float]:
        """Compute the log-probabilities of all targets, and the sum of the loss; `backward` adds
        its gradient.

        Raises RequestRefused for tokens outside the vocabulary, TrainingError if the loss is not
        finite.
        """
        batch.check(self.base.vocabulary, self.base.max_model_len)
        torch.set_num_threads(self.base.threads)  # set per thread
        logprobs: list[Floats] = [np.zeros(0, np.float32)] * len(batch.inputs)
        total = 0.0
        keyed = [given.keyed for given in batch.inputs]
        for group in micro_batches(keyed, self._pass_tokens, share=self.base.shares):
            micro = self._micro_batch(batch, group.members, group.row_sizes)
            with torch.set_grad_enabled(backward):
                scored = score(self.module, micro, entropy=False)
                loss = _token_losses(batch, scored, micro).sum()
                if backward:
                    loss.backward()
            total += float(loss.detach())
            sizes = [len(batch.inputs[i].ids) for i in group.members]
            for i, values in zip(
                group.members, scored.logprobs_N.detach().float().cpu().split(sizes), strict=True
            ):
                logprobs[i] = values.numpy()
        if not math.isfinite(total):
            raise TrainingError(
                f"the loss is not finite ({total}); look at the advantages and sampled"
                " log-probabilities"
            )
        return logprobs, total

    def _micro_batch(self, batch: Batch, members: list[int], row_sizes: list[int]) -> MicroBatch:
        device = self.parameters[0].device
        heat = self.base.temperature
        inputs = [batch.inputs[i] for i in members]
        keyed = [given.keyed for given in inputs]
        rows, places = grid(keyed, row_sizes, device)
        if self.base.vision is not None:
            pictures = [placed for given in inputs for placed in given.pictures]
            rows = with_pictures(rows, keyed, places, pictures, self.base.vision)
        joined = (
            np.concatenate([part[i] for i in members])
            for part in (batch.targets, batch.sampled, batch.shares)
        )
        targets_N, sampler_N, advantages_N = (
            torch.from_numpy(array).to(device) for array in joined
        )
        return MicroBatch(
            rows=rows,
            logits=logit_rows(
                np.concatenate(places), np.full(len(targets_N), heat, np.float32), device
            ),
            targets_N=targets_N,
            sampler_N=sampler_N,
            advantages_N=advantages_N,
        )

    def step(self, adam: Adam) -> float:
        """Apply the accumulated gradients with AdamW. Returns their norm before clipping. Raises
        TrainingError."""
        torch.set_num_threads(self.base.threads)
        limit = adam.grad_clip_norm if adam.grad_clip_norm > 0 else math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, limit))
        if not math.isfinite(norm):
            raise TrainingError(
                "the gradient is not finite and was dropped; the weights are as they were before"
            )
        for group in self._optimiser.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        self._optimiser.step()
        self.drop_gradients()
        return norm

    @property
    def has_gradient(self) -> bool:
        """Whether there are gradients since the last step."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def drop_gradients(self) -> None:
        self._optimiser.zero_grad(set_to_none=True)


def _token_losses(batch: Batch, scored: Scored, micro: MicroBatch) -> torch.Tensor:
    """The API's loss per token. DRO: Richemond et al. 2024, arXiv:2405.19107."""
    if batch.loss == "cross_entropy":
        return -scored.logprobs_N * micro.advantages_N
    if batch.loss == "dro":
        apart_N = scored.logprobs_N - micro.sampler_N
        return (
            -scored.logprobs_N * micro.advantages_N + 0.5 * batch.config["beta"] * apart_N.square()
        )
    settings = LossSettings(clip_type="none")
    if batch.loss != "importance_sampling":
        settings = LossSettings(
            clip_type="two_sided" if batch.loss == "ppo" else "one_sided",
            clip_ratio_low=1.0 - batch.config["clip_low_threshold"],
            clip_ratio_high=batch.config["clip_high_threshold"] - 1.0,
        )
    return policy_loss(scored, micro, settings)[0]


def adam_of(parameters: Json) -> Adam:
    """Read the parameters of a step from JSON. Raises RequestRefused."""
    names = {field.name for field in fields(Adam)}
    if unknown := set(parameters) - names - {"type"}:
        raise RequestRefused(
            f"AdamW has no parameter {sorted(unknown)[0]!r}; it has {', '.join(sorted(names))}"
        )
    adam = Adam(**{name: float(value) for name, value in parameters.items() if name != "type"})
    if (
        not all(math.isfinite(value) and value >= 0 for value in asdict(adam).values())
        or max(adam.beta1, adam.beta2) >= 1
    ):
        raise RequestRefused(
            f"the parameters of AdamW must be finite and not negative, betas below 1 (got {adam})"
        )
    return adam


def prompt_scores(
    base: BaseModel, module: PreTrainedModel, prompt: ModelInput, top: int, last: int | None
) -> PromptScores:
    """Log-probabilities of a prompt's tokens except the first, and the `top` most likely at each
    position."""
    torch.set_num_threads(base.threads)
    size = len(prompt.ids)
    begin = max(1, size - last if last is not None else 1)
    logprobs_T = np.full(size, np.nan, np.float32)
    ids_TK = np.zeros((size, top), np.int32)
    logprobs_TK = np.full((size, top), -99999.0, np.float32)
    if size > begin:
        tokens = torch.as_tensor(prompt.ids, dtype=torch.int64, device=module.device)
        inputs = {"input_ids": tokens[None]}
        if base.vision is not None:
            pictures = {placed.picture.key: placed.picture for placed in prompt.pictures}
            inputs = base.vision.inputs(prompt.keyed, pictures, module.device)
        with torch.inference_mode():
            logits_TV = module(**inputs, use_cache=False).logits[0, begin - 1 : -1].float()
            all_TV = torch.log_softmax(logits_TV / base.temperature, dim=-1)
            logprobs_T[begin:] = all_TV.gather(1, tokens[begin:, None])[:, 0].cpu().numpy()
            if top:
                best = all_TV.topk(top, dim=-1)
                ids_TK[begin:], logprobs_TK[begin:] = (
                    best.indices.cpu().numpy(),
                    best.values.cpu().numpy(),
                )
    return PromptScores(logprobs_T, ids_TK, logprobs_TK)


SAVE = "save_weights"
SNAPSHOT = "save_weights_for_sampler"
EXPORT = "save_weights_external"
_PARTS = {SAVE: "weights", SNAPSHOT: "sampler_weights", EXPORT: "external_weights"}
_SESSIONS = "sessions"
"""Directory of unnamed weights, one per sampling session."""
_KEPT = 16
"""Number of sampling sessions per policy whose weights are kept."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_POLICY = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,127}:train:[0-9]{1,16}")
"""Ids of policies. They name directories, so nothing else may be one, whoever asks."""
_PATH = re.compile(
    rf"tinker://({_POLICY.pattern})/({'|'.join([*_PARTS.values(), _SESSIONS])})/({_NAME.pattern})"
)


class Checkpoints:
    """Stores the weights of all policies in a directory. Checkpoints are written to a draft and
    renamed."""

    def __init__(self, state: Path) -> None:
        self.state = state

    def directory(self, policy_id: str) -> Path:
        """The directory of a policy. Raises RequestRefused for what is no id."""
        if not _POLICY.fullmatch(policy_id):
            raise RequestRefused(
                f"{policy_id!r:.100} is no id of a model; use the id from create_model", "model_id"
            )
        return self.state / policy_id.replace(":", "_")

    def keep(self, policy_id: str, seq: int, policy: Policy) -> Path:
        """Save the weights after a request, for the next server on this state."""
        directory = self.directory(policy_id) / f"step-{seq}"
        shutil.rmtree(
            directory, ignore_errors=True
        )  # left by a server that was killed while writing
        policy.save(directory, optimiser=True)
        return directory

    def save(self, policy_id: str, policy: Policy, kind: str, body: Json) -> str:
        """Save a checkpoint for a client; returns its path. Raises RequestRefused."""
        name = body.get("path")
        session = body.get("sampling_session_seq_id")
        if name is None:
            if session is None:
                name = f"step-{body['seq_id']}"
            else:
                name = str(session)
        if not _NAME.fullmatch(name):
            raise RequestRefused(
                f"{name!r} is no name of a checkpoint: use letters, digits, '.', '_' and '-'",
                "path",
            )
        if body.get("age_encryption_recipients"):
            raise RequestRefused(
                "this server encrypts no checkpoints; leave age_encryption_recipients out"
            )
        part = _PARTS[kind] if session is None else _SESSIONS
        target = self.directory(policy_id) / part / name
        path = f"tinker://{policy_id}/{part}/{name}"
        if target.exists() and kind == SAVE and not body.get("overwrite"):
            raise RequestRefused(
                f"{path} is there already; pass overwrite=True, or choose another name", "path"
            )
        draft = target.with_name(f".{name}")
        shutil.rmtree(draft, ignore_errors=True)
        policy.save(
            draft, optimiser=kind == SAVE, about={"user_metadata": body.get("user_metadata")}
        )
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        if session is not None:
            for old in sorted(
                target.parent.iterdir(), key=lambda directory: directory.stat().st_mtime
            )[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        return path

    def place(self, path: str) -> Path:
        """The directory that a tinker:// path names, be it there or not."""
        parts = _PATH.fullmatch(path)
        if parts:
            return self.directory(parts[1]) / parts[2] / parts[3]
        return self.state / "none"

    def find(self, path: str) -> Path:
        """The directory of an existing path. Raises CheckpointError."""
        directory = self.place(path)
        if (
            directory.resolve().parent.parent.parent != self.state.resolve()
            or not directory.is_dir()
        ):
            raise CheckpointError(
                f"there is no checkpoint {path} on this server; unnamed ones of"
                f" save_weights_and_get_sampling_client are kept for the newest {_KEPT} sessions of"
                " a model"
            )
        return directory

    def named(self, policies: Iterable[str]) -> dict[str, Path]:
        """The named checkpoints of policies, by their paths."""
        checkpoints: dict[str, Path] = {}
        for id_ in policies:
            for part in _PARTS.values():
                for directory in sorted((self.directory(id_) / part).glob("[!.]*")):
                    checkpoints[f"tinker://{id_}/{part}/{directory.name}"] = directory
        return checkpoints
