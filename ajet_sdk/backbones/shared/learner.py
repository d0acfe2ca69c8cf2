"""The model interface of the training loop: in this process (`local`) or at a service (`tinker`)."""

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
    """Only tokens sampled at temperature 1 without limits, masks or penalties can be scored."""

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

    def reference_logprobs(self, samples: Sequence[Sample], sampling: Mapping[str, Sampling]) -> list[torch.Tensor]:
        """Log-probabilities of each sample's trained tokens under the first model."""
        ...

    def imitation_loss(self, samples: Sequence[Sample]) -> float:
        """The mean negative log-likelihood per trained token; nothing is trained."""
        ...


class Learner(Protocol):
    """A model that can be sampled from and trained."""

    @property
    def engine(self) -> TokenEngine: ...
    @property
    def sampler(self) -> _Sampler: ...
    @property
    def trainer(self) -> _Trainer: ...
    @property
    def tokenizer(self) -> HFTokenizer: ...

    def estimate(self, config: Config, *, steps: int, val_episodes: int) -> str:
        """Estimated time of the rest of the run, as text."""
        ...

    def write(self, directory: Path) -> None:
        """Save the training state to a directory."""
        ...

    def read(self, directory: Path) -> None:
        """Restore the state that `write` saved. Raises CheckpointError."""
        ...

    def remove(self, directory: Path) -> None:
        """Delete what `write` saved, wherever it is."""
        ...

    def export(self, run: Path) -> Path:
        """Export the final model to the checkpoint directory and check that it loads."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Further metrics of the last step."""
        ...

    def reason_to_stop(self) -> str:
        """Why the run must stop after this step; empty if it continues."""
        ...
