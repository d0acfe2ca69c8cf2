"""The types of `tinker` that Trinity-RFT 0.6.0 makes and reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class AdamParams:
    """`eps` is torch's default, which Trinity leaves as it is. `grad_clip_norm` 0 clips nothing."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass
class ModelInput:
    """Token ids."""

    tokens: list[int]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        return cls([int(i) for i in tokens])

    def to_ints(self) -> list[int]:
        return self.tokens


@dataclass
class Datum:
    """A sequence to train on: `loss_fn_inputs` holds `target_tokens` and, where some don't count, `weights`."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, object] = field(default_factory=dict)


@dataclass
class SamplingParams:
    """How to sample."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass
class SampledSequence:
    """One continuation; `stop_reason` is `stop` or `length`."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str = "stop"


@dataclass
class SampleResponse:
    """All continuations of a prompt."""

    sequences: list[SampledSequence]
