"""Measures how a service weights the sequences of a request, and computes factors that compensate
for it.

By the API's contract a loss is the sum over tokens. Some servers average each sequence over its
tokens and a request over its sequences, which changes the objective if lengths differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ajet_sdk.engines.tinker.service import Adam, Datum, wait
from ajet_sdk.errors import TrainingError

if TYPE_CHECKING:
    from ajet_sdk.engines.tinker.sdk import SdkService

_SIGN_STEP = Adam(lr=1e-3, betas=(1e-3, 1e-3))
"""AdamW without momentum moves each weight by the sign of its gradient."""
_NO_STEP = Adam(lr=1e-12)
_NEAR = 1.25
"""Ratio of the two opposite advantages in a probe."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Divisors that the service applies."""

    by_tokens: bool = False
    """The loss of each sequence by its number of targets."""
    by_sequences: bool = False
    """The gradient of an update by its number of sequences."""

    def factors(self, targets: Sequence[int]) -> list[float]:
        """Factors for the losses of sequences, by their numbers of targets, that make the gradient
        a sum."""
        count = len(targets) if self.by_sequences else 1
        return [float(count * (size if self.by_tokens else 1)) for size in targets]

    def __str__(self) -> str:
        if not self.by_tokens and not self.by_sequences:
            return "the service adds up the losses of tokens, as the API has it"
        parts = ["each sequence over its tokens"] if self.by_tokens else []
        parts += ["an update over its sequences"] if self.by_sequences else []
        return (
            f"the service averages {' and '.join(parts)}; advantages are scaled so that its"
            " gradient is the same sum"
        )


def measure_scaling(service: SdkService, token_ids: Sequence[int], seconds: float) -> Scaling:
    """Try it with a new adapter of the service, on a few tokens. Raises TrainingError where it does
    neither."""
    trial = service.trial()
    for by_tokens in (False, True):
        scaling = Scaling(by_tokens)
        tests = [(1 / _NEAR, True), (_NEAR, False)]
        if all(_rises(trial, token_ids, pull, scaling, seconds) == rises for pull, rises in tests):
            return Scaling(by_tokens, _averages(trial, token_ids, scaling, seconds))
    raise TrainingError(
        "the service weighs the sequences of a request neither alike nor by their lengths, so that"
        " training there would not follow the loss of the config; report its name and version to"
        " the authors of ajet"
    )


def _rises(
    trial: SdkService, ids: Sequence[int], pull: float, scaling: Scaling, seconds: float
) -> bool:
    """Whether a step increases the likelihood of the last token of `ids`, if its advantage is 1 in
    a sequence that ends there and -`pull` in a longer one."""
    sequences = [list(ids), [*ids, *ids, *ids]]
    position = len(ids) - 2

    def data(advantages: Sequence[float], logprob: float = 0.0) -> list[Datum]:
        factors = scaling.factors([len(ids_T) - 1 for ids_T in sequences])
        return [
            Datum(
                ids_T,
                _at(position, len(ids_T) - 1, advantage * factor),
                _at(position, len(ids_T) - 1, logprob),
            )
            for ids_T, advantage, factor in zip(sequences, advantages, factors, strict=True)
        ]

    before = float(
        wait(trial.forward(data([0.0, 0.0])), seconds, "a forward pass", trial)[0][position]
    )
    learnt = trial.forward_backward(data([1.0, -pull], before), "importance_sampling")
    applied = trial.optim_step(_SIGN_STEP)
    wait(learnt, seconds, "forward_backward of the probe", trial)
    wait(applied, seconds, "optim_step of the probe", trial)
    return (
        float(wait(trial.forward(data([0.0, 0.0])), seconds, "a forward pass", trial)[0][position])
        > before
    )


def _averages(trial: SdkService, ids: Sequence[int], scaling: Scaling, seconds: float) -> bool:
    """Whether a second sequence without a loss reduces the gradient norm, if the service reports
    it."""
    size = len(ids) - 1
    position = len(ids) - 2
    pulled = Datum(ids, _at(position, size, scaling.factors([size])[0]), _at(position, size, 0.0))
    idle = Datum(ids, _at(position, size, 0.0), _at(position, size, 0.0))
    norms = []
    for data in ([pulled], [pulled, idle]):
        learnt = trial.forward_backward(data, "importance_sampling")
        applied = trial.optim_step(_NO_STEP)
        wait(learnt, seconds, "forward_backward of the probe", trial)
        norms.append(grad_norm(wait(applied, seconds, "optim_step of the probe", trial)))
    first, second = norms
    return first is not None and second is not None and second < 0.75 * first


def grad_norm(metrics: Mapping[str, float]) -> float | None:
    """The gradient norm among a service's metrics, if reported."""
    return next(
        (float(value) for name, value in metrics.items() if name.endswith("grad_norm")), None
    )


def _at(position: int, size: int, value: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    array = np.zeros(size, np.float32)
    array[position] = value
    return array
