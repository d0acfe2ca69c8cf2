"""The trained copy of the model: log-probabilities out, their gradients in, AdamW steps; and its state on disk.

Whoever has the loss need not have the model: with g = d(loss)/d(logprob), the gradient of sum(g * logprob) is the
loss's own. What needs more than log-probabilities is added here, as `local` adds it, per token of the whole batch: the
KL term, the entropy bonus, and the course of the learning rate. The model is in evaluation mode throughout: dropout
would make the two passes differ.
Letters of shapes: B sequences, T the length of one, N tokens of all sequences one after another.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_settings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.errors import CheckpointError, RequestRefused, TrainingError
from ajet_sdk.learn.batches import MicroBatch, micro_batches
from ajet_sdk.learn.checkpoint import export, read_weights, replace
from ajet_sdk.learn.losses import score
from ajet_sdk.learn.objective import Scored, kl_estimate
from ajet_sdk.learn.trainer import TrainerSettings
from ajet_sdk.learn.trees import grid, pairs_per_token
from ajet_sdk.tokens.huggingface import HFTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MICRO_BATCH_TOKENS = 8192
_OPTIMISER = "optimiser.pt"

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Adam:
    """The parameters of one AdamW step. `grad_clip_norm` 0 clips nothing."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token sequences one after another: at each place the token seen, the token to score, and whether to score it."""

    lengths_B: npt.NDArray[np.int64]
    ids_N: npt.NDArray[np.int64]
    targets_N: npt.NDArray[np.int64]
    needed_N: npt.NDArray[np.bool_]

    def check(self, vocabulary: int) -> None:
        """Raises RequestRefused where the arrays do not fit together or hold ids that the model has not."""
        total = int(self.lengths_B.sum())
        sizes = {len(self.ids_N), len(self.targets_N), len(self.needed_N), total}
        if len(sizes) > 1 or (len(self.lengths_B) and self.lengths_B.min() < 0):
            raise RequestRefused("ids, targets and needed must each be as long as the sum of lengths")
        both = np.concatenate([self.ids_N, self.targets_N[self.needed_N]])
        if len(both) and not 0 <= both.min() <= both.max() < vocabulary:
            raise RequestRefused(f"token ids must be less than the model's {vocabulary}")

    @classmethod
    def whole(cls, ids: Sequence[int]) -> Sequences:
        """One sequence, each of whose tokens but the first is scored."""
        ids_T = np.asarray(ids, np.int64)
        return cls(np.array([len(ids_T) - 1]), ids_T[:-1], ids_T[1:], np.ones(len(ids_T) - 1, np.bool_))


@dataclass(frozen=True, slots=True)
class _Group:
    """A micro-batch, and where its scored tokens stand among the N."""

    batch: MicroBatch
    places: npt.NDArray[np.intp]


def _groups(sequences: Sequences, temperature: float, pairs: int = 0) -> list[_Group]:
    """Micro-batches; a sequence is cut behind the last token whose logits are needed. `pairs`: see `trees_of`."""
    starts = np.cumsum(sequences.lengths_B) - sequences.lengths_B
    needed = [
        np.flatnonzero(sequences.needed_N[start : start + length])
        for start, length in zip(starts, sequences.lengths_B, strict=True)
    ]
    which = [row for row, at in enumerate(needed) if len(at)]
    inputs = [sequences.ids_N[starts[row] :][: int(needed[row][-1]) + 1] for row in which]
    groups = []
    for group in micro_batches(inputs, _MICRO_BATCH_TOKENS, pairs_per_token=pairs):
        rows, at = grid([inputs[i] for i in group.members], group.row_sizes)
        chosen = [which[i] for i in group.members]
        places = np.concatenate([starts[row] + needed[row] for row in chosen])
        none = torch.zeros(len(places))
        batch = MicroBatch(
            rows=rows,
            positions_N=torch.from_numpy(np.concatenate([a[needed[row]] for a, row in zip(at, chosen, strict=True)])),
            targets_N=torch.from_numpy(sequences.targets_N[places]),
            sampler_N=none,
            advantages_N=none,
            temperatures_N=None if temperature == 1.0 else torch.full((len(places),), temperature),
        )
        groups.append(_Group(batch, places))
    return groups


def logprobs_of(model: PreTrainedModel, ids: Sequence[int], temperature: float) -> Floats:
    """Log-probabilities of all tokens but the first, each in the context before it; shape T - 1."""
    sequences = Sequences.whole(ids)
    sequences.check(_vocabulary(model))
    logprobs_N = np.zeros(len(sequences.ids_N), np.float32)
    with torch.no_grad():
        for group in _groups(sequences, temperature):
            logprobs_N[group.places] = score(model, group.batch, entropy=False).logprobs_N.float().numpy()
    return logprobs_N


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().num_embeddings)


class Learner:
    """Owns the weights that are trained, in float32. Not for several threads at once.

    `settings` gives the KL and entropy terms and the course of the learning rate; None: none of them, and a rate that
    stays.
    """

    def __init__(self, model_path: Path, temperature: float, settings: TrainerSettings | None = None) -> None:
        self.temperature = temperature
        self.model_path = model_path
        self.settings = settings or TrainerSettings(lr=1.0, warmup_steps=0)
        self._tokenizer = HFTokenizer(model_path)
        self.start()

    def start(self) -> None:
        """Begin with the base model's weights and a fresh optimiser."""
        self.model = load_model(self.model_path, dtype="float32", device="cpu")
        self._pairs_per_token = pairs_per_token(self.model)
        self._reference: PreTrainedModel | None = None
        self.optimiser = torch.optim.AdamW(self.model.parameters())
        self.updates = 0
        """Optimiser steps applied to these weights."""
        self._groups: list[_Group] | None = None
        self._graph: torch.Tensor | None = None

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def forward(self, sequences: Sequences) -> Floats:
        """Log-probabilities under the sampling temperature, shape N; 0 where none is needed."""
        sequences.check(_vocabulary(self.model))
        groups = _groups(sequences, self.temperature, self._pairs_per_token)
        self._groups, self._graph = groups, None
        logprobs_N = np.zeros(len(sequences.ids_N), np.float32)
        for group in groups:
            with torch.set_grad_enabled(group is groups[-1]):  # the last graph is kept: it is used next
                self._graph = score(self.model, group.batch, entropy=False).logprobs_N
            logprobs_N[group.places] = self._graph.detach().numpy()
        return logprobs_N

    def backward(self, gradients_N: Floats) -> None:
        """Add the gradients of the loss to the weights' own, from those with regard to the last forward's result."""
        groups, graph = self._groups, self._graph
        self._groups, self._graph = None, None
        if groups is None:
            raise RequestRefused("the gradients do not belong to any forward pass")
        if groups and max(int(group.places.max()) for group in groups) >= len(gradients_N):
            raise RequestRefused("there are fewer gradients than log-probabilities of the forward pass")
        tokens = sum(len(group.places) for group in groups)
        for group in reversed(groups):
            given_N = torch.from_numpy(gradients_N[group.places])
            if self._has_terms:
                scored = score(self.model, group.batch, entropy=True, entropy_grad=True)
                ((scored.logprobs_N * given_N).sum() + self._terms(group.batch, scored) / tokens).backward()
                continue
            logprobs_N = score(self.model, group.batch, entropy=False).logprobs_N if graph is None else graph
            graph = None
            logprobs_N.backward(given_N)

    @property
    def _has_terms(self) -> bool:
        return bool(self.settings.loss.kl_coef or self.settings.loss.entropy_coef)

    def _terms(self, batch: MicroBatch, scored: Scored) -> torch.Tensor:
        """Sum over tokens of the loss's terms that the caller cannot know."""
        loss = self.settings.loss
        assert scored.entropy_N is not None
        terms = -loss.entropy_coef * scored.entropy_N.sum()
        if loss.kl_coef:
            if self._reference is None:
                self._reference = load_model(self.model_path, dtype="float32", device="cpu")
            with torch.no_grad():
                reference_N = score(self._reference, batch, entropy=False).logprobs_N
            terms = terms + loss.kl_coef * kl_estimate(scored.logprobs_N, reference_N, loss.kl_type).sum()
        return terms

    def update(self, adam: Adam) -> float:
        """One AdamW step. Returns the norm of the gradients before clipping; raises TrainingError if not finite."""
        limit = adam.grad_clip_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if not math.isfinite(norm):
            self.optimiser.zero_grad()
            raise TrainingError(
                f"the gradient of update {self.updates + 1} is not finite; try a smaller trainer_common.optim.lr"
            )
        for group in self.optimiser.param_groups:
            group.update(
                lr=replace_settings(self.settings, lr=adam.learning_rate).lr_after(self.updates),
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.updates += 1
        return norm

    def save_weights(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint, whole or not at all."""
        export(directory, self.model, self._tokenizer.hf)

    def save_state(self, directory: Path) -> None:
        """Write all that the next step depends on, whole or not at all."""
        fresh = directory.with_name(f".{directory.name}.new")
        if fresh.exists():
            shutil.rmtree(fresh)
        export(fresh, self.model, self._tokenizer.hf)
        torch.save({"updates": self.updates, "optimiser": self.optimiser.state_dict()}, fresh / _OPTIMISER)
        replace(fresh, directory)

    def load_state(self, directory: Path) -> None:
        """Take up what `save_state` wrote. Raises CheckpointError."""
        try:
            state = torch.load(directory / _OPTIMISER, weights_only=True, map_location="cpu")
            self.start()
            read_weights(directory, self.model)
            self.optimiser.load_state_dict(state["optimiser"])
            self.updates = int(state["updates"])
        except CheckpointError:
            raise
        except Exception as error:  # what damaged bytes raise in pickle and torch has no common class
            raise CheckpointError(f"{directory} cannot be restored: {type(error).__name__}: {error}") from error
