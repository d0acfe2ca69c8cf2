"""Separate trained models: a model for each target, with one sampler and trainer each, in the shape
of one learner.

All begin as the model at `model.path`; with LoRA they share its frozen weights and have an adapter
each. A call goes to the model of its target (its target tag, or else its agent), and its tokens
train that model alone. The training loop sees one engine, one sampler and one trainer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ajet_sdk.config.model_source import SEPARATE, separate_targets
from ajet_sdk.engines.by_target import EngineByTarget
from ajet_sdk.errors import CheckpointError, TrainingError
from ajet_sdk.learn import checkpoint
from ajet_sdk.learn.batches import trained_positions
from ajet_sdk.learn.estimate import state_bytes
from ajet_sdk.learn.learner import Learner
from ajet_sdk.learn.scores import TokenScores
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Sampling
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Sample

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


class SeparateSampler:
    """The samplers of the models, which pause together and have the same policy version."""

    def __init__(self, learners: Mapping[str, Learner]) -> None:
        self._samplers = [learner.sampler for learner in learners.values()]
        self.max_model_len = self._samplers[0].max_model_len

    @property
    def policy_version(self) -> int | None:
        return self._samplers[0].policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        for sampler in self._samplers:
            sampler.policy_version = version

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """As `LocalSampler.exclusive`, of all models."""
        async with AsyncExitStack() as stack:
            for sampler in self._samplers:
                await stack.enter_async_context(sampler.exclusive())
            yield


class SeparateTrainer:
    """Trains each model on the samples of its target.

    `updates`, the policy version, counts for all models together: a step adds the number of updates
    of the model that makes the most. So no token is ever counted as younger than it is for its own
    model.
    """

    plain_only = False

    def __init__(self, trainers: Mapping[str, Trainer]) -> None:
        self._trainers = trainers
        self.updates = 0

    @property
    def settings(self) -> TrainerSettings:
        """The settings, which all trainers have."""
        return next(iter(self._trainers.values())).settings

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trainable parameters of all models."""
        return [p for trainer in self._trainers.values() for p in trainer.parameters]

    def updates_of(self, samples: Sequence[Sample]) -> int:
        """By how much a step on the samples raises `updates`."""
        by_target = self._by_target(samples)
        return max(
            self._trainers[target].updates_of([samples[i] for i in places])
            for target, places in by_target.items()
        )

    def step(
        self,
        samples: Sequence[Sample],
        sampling: Sampling | Mapping[str, Sampling] = Sampling(),  # noqa: B008, it is frozen
        scores: TokenScores | None = None,
        updated: Callable[[], None] | None = None,
        replay: Sequence[Sample] = (),
    ) -> dict[str, float]:
        """As `Trainer.step`, one model after the other; `updated` is called after the last.

        Metrics are means over the models, weighted by trained tokens (of maxima the largest), and those of
        each model as `train/NAME/TARGET`. `replay` must be empty: a conversation names no target.
        """
        assert not replay
        if scores is not None:
            scores.begin(samples)
        total = self.updates + self.updates_of(samples)
        measured: dict[str, tuple[int, dict[str, float]]] = {}
        for target, places in self._by_target(samples).items():
            own = [samples[i] for i in places]
            own_scores = None if scores is None else TokenScores()
            metrics = self._trainers[target].step(own, sampling, own_scores)
            if scores is not None and own_scores is not None:
                scores.take(places, own_scores)
            tokens = sum(len(trained_positions(sample)) for sample in own)
            measured[target] = (tokens, metrics)
        while self.updates < total:
            self.updates += 1
            if updated is not None:
                updated()
        return _together(measured)

    def reference_logprobs(
        self, samples: Sequence[Sample], sampling: Mapping[str, Sampling]
    ) -> list[torch.Tensor]:
        """As `Trainer.reference_logprobs`."""
        logprobs = [torch.empty(0)] * len(samples)
        for target, places in self._by_target(samples).items():
            own = [samples[i] for i in places]
            values = self._trainers[target].reference_logprobs(own, sampling)
            for place, value in zip(places, values, strict=True):
                logprobs[place] = value
        return logprobs

    def imitation_loss(self, samples: Sequence[Sample]) -> float:
        """Raises TrainingError: stored conversations name no target."""
        raise TrainingError("stored conversations name no target, so separate models have no loss")

    def _by_target(self, samples: Sequence[Sample]) -> dict[str, list[int]]:
        """The positions of the samples of each target that has some."""
        places: dict[str, list[int]] = {target: [] for target in self._trainers}
        for place, sample in enumerate(samples):
            places[sample.target].append(place)
        return {target: own for target, own in places.items() if own}


_SUMS = ("seconds", "tokens_per_second")


def _together(measured: Mapping[str, tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """The metrics of a step on several models, from the trained tokens and the metrics of each."""
    joint: dict[str, float] = {}
    for name in dict.fromkeys(name for _, metrics in measured.values() for name in metrics):
        weighted = [
            (count, metrics[name]) for count, metrics in measured.values() if name in metrics
        ]
        if name.endswith("_max"):
            joint[name] = max(value for _, value in weighted)
        else:
            tokens = sum(count for count, _ in weighted)
            joint[name] = sum(count * value for count, value in weighted) / tokens
    joint["seconds"] = sum(metrics["seconds"] for _, metrics in measured.values())
    all_tokens = sum(
        metrics["tokens_per_second"] * metrics["seconds"] for _, metrics in measured.values()
    )
    joint["tokens_per_second"] = all_tokens / joint["seconds"]
    for target, (_, metrics) in measured.items():
        own = {name: value for name, value in metrics.items() if name not in _SUMS}
        joint |= {f"train/{name}/{target}": value for name, value in own.items()}
    return joint


@dataclass(frozen=True)
class SeparateLearner:
    """The learners of several targets, with the methods of `learn.learner.Learner`."""

    learners: Mapping[str, Learner]
    engine: EngineByTarget
    sampler: SeparateSampler
    trainer: SeparateTrainer

    @staticmethod
    def of(learners: Mapping[str, Learner], model: str) -> SeparateLearner:
        """Put learners together, by target; `model` is the name of all in requests."""
        return SeparateLearner(
            learners,
            EngineByTarget(model, {name: learner.engine for name, learner in learners.items()}),
            SeparateSampler(learners),
            SeparateTrainer({name: learner.trainer for name, learner in learners.items()}),
        )

    @property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer, which all models have."""
        return next(iter(self.learners.values())).tokenizer

    @property
    def service_name(self) -> str:
        return ""

    def estimate(self, config: Config, *, steps: int, val_episodes: int) -> str:
        """Estimate the run's episodes and memory, as text."""
        first, *others = self.learners.values()
        more = sum(state_bytes(learner.trainer) for learner in others)
        text = first.estimate(config, steps=steps, val_episodes=val_episodes)
        named = ", ".join(self.learners)
        return f"a model for each of {named} ({more / 2**30:.1f} GiB more than for one): {text}"

    def write(self, directory: Path) -> None:
        """Save the training state of each model to a subdirectory named after its target."""
        for target, learner in self.learners.items():
            learner.write(_made(directory / target))
        self._describe(directory)

    def _describe(self, directory: Path) -> None:
        state = {"targets": list(self.learners), "updates": self.trainer.updates}
        (directory / SEPARATE).write_text(json.dumps(state))

    def read(self, directory: Path) -> None:
        """Restore the state that `write` saved. Raises CheckpointError."""
        targets = separate_targets(directory)
        if targets is None:
            raise CheckpointError(f"{directory} is no checkpoint of separate models")
        updates = json.loads((directory / SEPARATE).read_text())["updates"]
        if set(targets) != set(self.learners):
            raise CheckpointError(
                f"{directory} has models of {', '.join(targets)}, and the trained targets are"
                f" {', '.join(self.learners)}"
            )
        for target, learner in self.learners.items():
            learner.read(directory / target)
        self.trainer.updates = updates

    def remove(self, directory: Path) -> None:
        """Delete what `write` saved."""
        next(iter(self.learners.values())).remove(directory)

    def export(self, run: Path) -> Path:
        """Write each model as a Hugging Face checkpoint to `models/TARGET`; returns `models`.

        Raises CheckpointError if one isn't the trained model.
        """
        draft = run / ".models"
        shutil.rmtree(draft, ignore_errors=True)
        for target, learner in self.learners.items():
            model = learner.trainer.model
            tokenizer = learner.tokenizer.hf
            checkpoint.export(draft / target, model, tokenizer)
        self._describe(draft)
        checkpoint.replace(draft, run / "models")
        return run / "models"

    def metrics(self) -> Mapping[str, float]:
        return {}

    def reason_to_stop(self) -> str:
        return ""


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
