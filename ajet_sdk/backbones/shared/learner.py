"""What the training loop asks of a model: `local` has it in this process, `tinker` at a service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.learn.scores import TokenScores
from ajet_sdk.learn.trainer import TrainerSettings
from ajet_sdk.protocols import Sampling
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Sample

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


class _Sampler(Protocol):
    policy_version: int | None
    max_model_len: int

    def exclusive(self) -> AbstractAsyncContextManager[None]: ...


class _Trainer(Protocol):
    settings: TrainerSettings
    updates: int
    plain_only: bool
    """It scores tokens that were sampled at temperature 1 without limits, masks or penalties, and no others."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]: ...

    def step(
        self,
        samples: Sequence[Sample],
        sampling: Sampling | Mapping[str, Sampling],
        scores: TokenScores | None,
        updated: Callable[[], None] | None = None,
        replay: Sequence[Sample] = (),
    ) -> dict[str, float]: ...

    def imitation_loss(self, samples: Sequence[Sample]) -> float:
        """The mean negative log-likelihood per trained token; nothing is trained."""
        ...


class Learner(Protocol):
    """The model with everything that samples from it and trains it, wherever it is."""

    @property
    def engine(self) -> TokenEngine: ...
    @property
    def sampler(self) -> _Sampler: ...
    @property
    def trainer(self) -> _Trainer: ...
    @property
    def tokenizer(self) -> HFTokenizer: ...

    def estimate(self, config: Config, *, steps: int, val_episodes: int) -> str:
        """What the rest of a run will take, in words."""
        ...

    def write(self, directory: Path) -> None:
        """Put into a directory what the next step depends on."""
        ...

    def read(self, directory: Path) -> None:
        """Take up what `write` wrote. Raises CheckpointError."""
        ...

    def export(self, run: Path) -> Path:
        """Write the result below the run's directory of checkpoints, and check that it can be loaded."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """What else is worth logging after a step."""
        ...

    def reason_to_stop(self) -> str:
        """Why the run has to end after this step; empty where it goes on."""
        ...
