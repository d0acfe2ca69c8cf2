"""`TinkerTrainer`: applies the config's objective at a service.

A loss that the service has takes one pass. Others are expressed by advantages: a forward pass gives
log-probabilities, our objective their gradient g, and importance sampling at a ratio of 1 with the
advantage -g has that gradient. This takes about 1.5 times the compute. Entropy, which needs more
than log-probabilities, is not supported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from ajet_sdk.engines.picture_text import PictureSpan, picture_spans
from ajet_sdk.engines.tinker.answers import WrongAnswer, check_agreement
from ajet_sdk.engines.tinker.service import Adam, Costs, Datum, Loss, wait
from ajet_sdk.errors import TrainingError
from ajet_sdk.learn.batches import collate, trained_positions
from ajet_sdk.learn.losses import loss_of, units
from ajet_sdk.learn.objective import LossSettings, Scored, token_weights
from ajet_sdk.learn.scores import Tally, TokenScores
from ajet_sdk.learn.tinker.scaling import Scaling, grad_norm
from ajet_sdk.learn.trainer import TrainerSettings
from ajet_sdk.pictures import within
from ajet_sdk.protocols import Sampling, Tokenizer
from ajet_sdk.types import Floats, Sample

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.engines.tinker.sdk import SdkService, SdkWeights


def loss_of_service(
    settings: LossSettings, scaling: Scaling
) -> tuple[Loss, tuple[float, float] | None] | None:
    """The service's equivalent loss with its ratio bounds; None if it has none."""
    if settings.objective == "imitation":  # an average by weights cannot be rescaled by weights
        return None if scaling.by_tokens else ("cross_entropy", None)
    odd = (
        settings.objective != "policy",
        settings.ratio_level != "token",
        settings.ratio_base != "sampler",
        settings.importance_weights != "none",
        settings.kl_coef,
        settings.clip_ratio_max is not None,
    )
    if any(odd):
        return None
    bounds = (1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    losses: dict[str, tuple[Loss, tuple[float, float] | None]] = {
        "none": ("importance_sampling", None), "two_sided": ("ppo", bounds), "one_sided": ("cispo", bounds),
    }  # fmt: skip
    return losses.get(settings.clip_type)


def forward_passes(config: Config, steps: int) -> int:
    """Number of passes over a step's samples besides training: for an unsupported loss, and for the
    reference."""
    loss = TrainerSettings.of(config, 0.0, steps).loss
    return (loss_of_service(loss, Scaling()) is None) + loss.has_reference


@dataclass(frozen=True, slots=True)
class _Share:
    """Samples of an update."""

    samples: list[Sample]
    at: list[np.ndarray[tuple[int], np.dtype[np.intp]]]
    """Positions of each sample's trained tokens."""
    weights: list[np.ndarray[tuple[int], np.dtype[np.float32]]] | None
    """Weights of each sample's trained tokens in the loss; None for pairs."""
    pictures: list[list[PictureSpan]]
    """Of each sample, up to its last trained token."""

    def datum(self, i: int, values: Floats, logprobs: Floats | None = None) -> Datum:
        """Builds a datum of sample `i` up to its last trained token; `values` and `logprobs` are of
        trained tokens."""
        ids = self.samples[i].timeline.token_ids
        at = self.at[i]
        size = int(at[-1])
        places = [np.zeros(size, np.float32) for _ in range(2)]
        for array, trained in zip(places, (values, logprobs), strict=True):
            if trained is not None:
                array[at - 1] = trained
        return Datum(
            ids[: size + 1].tolist(),
            places[0],
            None if logprobs is None else places[1],
            self.pictures[i],
        )

    @property
    def targets(self) -> list[int]:
        return [int(at[-1]) for at in self.at]


class TinkerTrainer:
    """Trains an adapter at a service; `updates` counts applied updates."""

    plain_only = True
    parameters: Sequence[torch.Tensor] = ()

    def __init__(
        self,
        service: SdkService,
        settings: TrainerSettings,
        scaling: Scaling,
        costs: Costs,
        seconds: float,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        """Needed for samples with pictures."""
        self.service = service
        self.settings = settings
        self.scaling = scaling
        self.costs = costs
        self.updates = 0
        self.seconds = seconds
        """Time limit of a request."""
        self.loss = loss_of_service(settings.loss, scaling)

    def step(
        self,
        samples: Sequence[Sample],
        sampling: Sampling | Mapping[str, Sampling] = Sampling(),  # noqa: B008, it is frozen
        scores: TokenScores | None = None,
        updated: Callable[[], None] | None = None,
        replay: Sequence[Sample] = (),
    ) -> dict[str, float]:
        """Train on samples drawn at temperature 1 without limits, as `Trainer.step` does without
        `replay`.

        Raises TrainingError if the service fails or the loss is not finite.
        """
        started = time.perf_counter()
        tally = Tally()
        lr = self.settings.lr
        old = self._old_logprobs(samples)
        for epoch in range(self.settings.ppo_epochs):
            for number, members in enumerate(self.settings.shares(samples, self.updates)):
                first = epoch == 0 and number == 0
                chosen = [i for i in members if len(trained_positions(samples[i]))]
                lr = self.settings.lr_after(self.updates)
                seen = self._update(
                    self._share([samples[i] for i in chosen]),
                    None if old is None else [old[i] for i in chosen],
                    tally,
                    first=first,
                )
                if scores is not None and first:
                    scores.record(samples, chosen, [(range(len(chosen)), Scored(seen, None))])
                if updated is not None:
                    updated()
        seconds = time.perf_counter() - started
        tokens = sum(len(sample.timeline.token_ids) for sample in samples)
        return tally.means() | {"lr": lr, "seconds": seconds, "tokens_per_second": tokens / seconds}

    def updates_of(self, samples: Sequence[Sample]) -> int:
        """Number of updates in a step on the samples."""
        return self.settings.updates_of(samples)

    def imitation_loss(self, samples: Sequence[Sample]) -> float:
        """Mean negative log-likelihood per trained token, without training."""
        share = self._share([sample for sample in samples if len(trained_positions(sample))])
        return -float(np.concatenate(self._forward(share)).mean())

    def reference_logprobs(
        self, samples: Sequence[Sample], sampling: Mapping[str, Sampling]
    ) -> list[torch.Tensor]:
        """Log-probabilities of each sample's trained tokens under the service's base model."""
        share = self._share(list(samples))
        return list(self._reference(share).split([len(at) for at in share.at]))

    def _share(self, samples: list[Sample]) -> _Share:
        paired = self.settings.loss.objective == "preference"
        if paired:
            weights = None
        else:
            weights = token_weights(samples, self.settings.loss)
        at = [trained_positions(sample) for sample in samples]
        return _Share(samples, at, weights, [self._pictures(sample) for sample in samples])

    def _pictures(self, sample: Sample) -> list[PictureSpan]:
        line = sample.timeline
        if not line.pictures:
            return []
        if self._tokenizer is None or self._tokenizer.pictures is None:
            raise TrainingError("the samples have pictures, but the model takes none")
        trained = trained_positions(sample)
        size = int(trained[-1]) if len(trained) else 0
        return picture_spans(line.token_ids.tolist(), within(line.pictures, size), self._tokenizer)

    def _old_logprobs(self, samples: Sequence[Sample]) -> list[Floats] | None:
        """Log-probabilities of trained tokens before the step's first update; None if unused."""
        if self.settings.loss.ratio_base != "trainer" or self.settings.updates_of(samples) == 1:
            return None
        share = self._share([sample for sample in samples if len(trained_positions(sample))])
        scored = iter(self._forward(share))
        return [
            next(scored) if len(trained_positions(sample)) else np.empty(0, np.float32)
            for sample in samples
        ]

    def _forward(self, share: _Share) -> list[Floats]:
        data = [share.datum(i, np.ones(len(at), np.float32)) for i, at in enumerate(share.at)]
        self.costs.add(prefilled=sum(share.targets))
        return _trained(
            share,
            wait(
                self.service.forward(data),
                self.seconds,
                f"forward of update {self.updates + 1}",
                self.service,
            ),
        )

    def _update(
        self, share: _Share, old: list[Floats] | None, tally: Tally, *, first: bool
    ) -> torch.Tensor:
        """Makes an optimizer update. Returns the log-probabilities of the trained tokens before
        it."""
        factors = self.scaling.factors(share.targets)
        logprobs: list[Floats] | None = None
        if self.loss is None:
            logprobs = self._forward(share)
            gradients = self._measure(share, logprobs, old, tally, first=first)
            values = [
                -gradient * factor for gradient, factor in zip(gradients, factors, strict=True)
            ]
            data = [share.datum(i, value, logprobs[i]) for i, value in enumerate(values)]
            loss: Loss = "importance_sampling"
            bounds: tuple[float, float] | None = None
        else:
            loss, bounds = self.loss
            assert share.weights is not None
            data = []
            for i, (sample, at) in enumerate(zip(share.samples, share.at, strict=True)):
                weights = share.weights[i] * factors[i]
                imitates = loss == "cross_entropy"
                if imitates:
                    values_i = weights
                else:
                    values_i = weights * sample.advantages[at]
                data.append(
                    share.datum(i, values_i, None if imitates else sample.timeline.logprobs[at])
                )
        self.costs.add(trained=sum(share.targets))
        learnt = self.service.forward_backward(data, loss, bounds)
        settings = self.settings
        adam = Adam(
            settings.lr_after(self.updates),
            settings.betas,
            settings.weight_decay,
            settings.grad_clip,
        )
        applied = self.service.optim_step(adam)  # sent before the gradient is ready
        scored = _trained(
            share,
            wait(
                learnt, self.seconds, f"forward_backward of update {self.updates + 1}", self.service
            ),
        )
        if logprobs is None:
            logprobs = scored
            self._measure(share, logprobs, old, tally, first=first)
        if first and self.settings.loss.objective == "policy":
            self._check_agreement(share, logprobs)
        norm = grad_norm(
            wait(applied, self.seconds, f"optim_step of update {self.updates + 1}", self.service)
        )
        if norm is not None and not math.isfinite(norm):
            raise WrongAnswer(f"{self.service.name} reports {norm} as the norm of a gradient")
        if norm is not None:
            tally.add("grad_norm", torch.tensor([norm]))
        self.updates += 1
        return torch.from_numpy(np.concatenate(logprobs))

    def _check_agreement(self, share: _Share, logprobs: list[Floats]) -> None:
        """Raise TrainingError if the service scores far otherwise what the same weights sampled
        there."""
        versions = [sample.timeline.policy_version for sample in share.samples]
        fresh = [i for i, version in enumerate(versions) if version == self.updates]
        if fresh:
            sampled = np.concatenate(
                [share.samples[i].timeline.logprobs[share.at[i]] for i in fresh]
            )
            check_agreement(
                self.service.name, sampled, np.concatenate([logprobs[i] for i in fresh])
            )

    def _measure(
        self,
        share: _Share,
        logprobs: list[Floats],
        old: list[Floats] | None,
        tally: Tally,
        *,
        first: bool,
    ) -> list[Floats]:
        """Gradients of the update's loss by the log-probabilities of each sample's trained
        tokens."""
        new_N = torch.from_numpy(np.concatenate(logprobs)).requires_grad_()
        batch = collate([_without_pictures(sample) for sample in share.samples])
        if share.weights is not None:
            batch = replace(batch, weights_N=torch.from_numpy(np.concatenate(share.weights)))
        if old is not None:
            batch = replace(batch, old_N=torch.from_numpy(np.concatenate(old)))
        settings = self.settings.loss
        if settings.has_reference:
            reference_N = self._reference(share)
        else:
            reference_N = None
        loss_N, seen = loss_of(Scored(new_N, None), batch, settings, reference_N)
        pairs = len(units(share.samples, settings))
        if batch.weights_N is None:
            total = loss_N.sum() / pairs
        else:
            total = (loss_N * batch.weights_N).sum()
        if not math.isfinite(total.item()):
            raise TrainingError(
                f"the loss of update {self.updates + 1} is not finite; try a smaller"
                " trainer_common.optim.lr"
            )
        total.backward()
        tally.add("loss", total.detach())
        tally.add_all(seen, first=first)
        assert new_N.grad is not None
        ends = np.cumsum([len(at) for at in share.at])[:-1]
        return np.split(new_N.grad.numpy(), ends)

    def _reference(self, share: _Share) -> torch.Tensor:
        self.costs.add(prefilled=sum(share.targets))
        ids = [
            s.timeline.token_ids[: size + 1]
            for s, size in zip(share.samples, share.targets, strict=True)
        ]
        futures = [
            self._base.logprobs(ids_T.tolist(), pictures)
            for ids_T, pictures in zip(ids, share.pictures, strict=True)
        ]
        scored = [
            wait(each, self.seconds, "log-probabilities of the reference", self.service)
            for each in futures
        ]
        return torch.from_numpy(np.concatenate(_trained(share, scored)))

    @cached_property
    def _base(self) -> SdkWeights:
        return self.service.base()


def _without_pictures(sample: Sample) -> Sample:
    """The same trained tokens; no model computes here what they follow."""
    if not sample.timeline.pictures:
        return sample
    timeline = sample.timeline.model_copy(update={"pictures": ()})
    return sample.model_copy(update={"timeline": timeline})


def _trained(share: _Share, logprobs: list[Floats]) -> list[Floats]:
    return [values[at - 1] for values, at in zip(logprobs, share.at, strict=True)]
