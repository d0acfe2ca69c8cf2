"""A trainer over a service: the same gradient as `local` has, however the service weighs
sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
import torch

from ajet_sdk.config.schema import Prices
from ajet_sdk.engines.tinker.service import Adam, Costs, Datum, Loss, wait
from ajet_sdk.errors import TrainingError
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.scores import TokenScores
from ajet_sdk.learn.tinker.scaling import Scaling, measure_scaling
from ajet_sdk.learn.tinker.trainer import TinkerTrainer, loss_of_service
from ajet_sdk.learn.trainer import Trainer, TrainerSettings, trainable_parameters
from ajet_sdk.types import Floats, Sample
from tests.sdk.learn.test_trainer import batch, tiny, with_lora

T = TypeVar("T")


def done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def plain_sum(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.sum() for loss in losses]).sum()


def averaged(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """As SkyRL's JAX backend has it: of each sequence over its targets, and over the sequences."""
    return torch.stack([loss.mean() for loss in losses]).mean()


@dataclass
class TorchService:
    """A service in this process: plain torch, a model with an adapter, and one way to weigh
    sequences."""

    model: torch.nn.Module
    weigh: Callable[[Sequence[torch.Tensor]], torch.Tensor] = plain_sum
    tells_norm: bool = True
    max_model_len: int | None = None
    name: str = "the test's service"
    reason: str = ""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(trainable_parameters(self.model))
        self.asked: list[str] = []

    def scores(self, data: Sequence[Datum]) -> list[torch.Tensor]:
        ids = [torch.tensor(list(one.token_ids)) for one in data]
        return [
            self.model(input_ids=one[None, :-1])
            .logits[0]
            .log_softmax(-1)
            .gather(1, one[1:, None])[:, 0]
            for one in ids
        ]

    def forward(self, data: Sequence[Datum]) -> Future[list[Floats]]:
        self.asked.append("forward")
        with torch.no_grad():
            return done([one.numpy() for one in self.scores(data)])

    def forward_backward(
        self, data: Sequence[Datum], loss: Loss, bounds: tuple[float, float] | None = None
    ) -> Future[list[Floats]]:
        self.asked.append(loss)
        scored, losses = self.scores(data), []
        for new, one in zip(scored, data, strict=True):
            weight = torch.from_numpy(np.array(one.weights))
            if loss == "cross_entropy":
                losses.append(-weight * new)
                continue
            ratio = (new - torch.from_numpy(np.array(one.logprobs))).exp()
            clipped = ratio.clamp(*bounds) if bounds else ratio
            losses.append(
                -clipped.detach() * weight * new
                if loss == "cispo"
                else -torch.minimum(ratio * weight, clipped * weight)
            )
        self.weigh(losses).backward()
        return done([one.detach().numpy() for one in scored])

    def optim_step(self, adam: Adam) -> Future[Mapping[str, float]]:
        parameters = trainable_parameters(self.model)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip or torch.inf))
        for group in self.optimizer.param_groups:
            group |= {"lr": adam.lr, "betas": adam.betas, "weight_decay": adam.weight_decay}
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return done({"torch/grad_norm": norm} if self.tells_norm else {})

    def trial(self) -> TorchService:
        return TorchService(with_lora(tiny()), self.weigh, self.tells_norm)

    def base(self) -> TorchBase:
        return TorchBase(self)


@dataclass
class TorchBase:
    service: TorchService

    def logprobs(self, token_ids: Sequence[int], pictures: Sequence[object]) -> Future[Floats]:
        with self.service.model.disable_adapter(), torch.no_grad():  # type: ignore[operator]
            return done(self.service.scores([Datum(token_ids, np.zeros(0, np.float32))])[0].numpy())


def adapted(seed: int = 3) -> torch.nn.Module:
    """A model whose adapter has moved away from its start."""
    return moved(with_lora(tiny()), seed)


def moved(model: torch.nn.Module, seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in trainable_parameters(model):
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def local_trainer(settings: TrainerSettings) -> Trainer:
    """A trainer whose reference is the bare model, like a service's, and whose adapter has moved
    since."""
    trainer = Trainer(with_lora(tiny()), settings)
    moved(trainer.model)
    return trainer


def moments(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.Tensor:
    """The first moments: of a single step, the gradient as it was applied, times 0.1."""
    return torch.cat(
        [optimizer.state[one]["exp_avg"].flatten() for one in trainable_parameters(model)]
    )


def off_policy(samples: Sequence[Sample]) -> list[Sample]:
    """The samples as another policy would have sampled them: ratios within and beyond the
    bounds."""
    draw, moved = np.random.default_rng(5), []
    for sample in samples:
        line = sample.timeline
        logprobs = line.logprobs - np.where(
            line.loss_mask, draw.normal(0, 0.3, len(line.token_ids)), 0.0
        )
        other = type(line).model_validate({**dict(line), "logprobs": logprobs.astype(np.float32)})
        moved.append(sample.model_copy(update={"timeline": other}))
    return moved


LOSSES = {
    "ppo": (LossSettings(), "ppo"),
    "grpo": (LossSettings(clip_ratio_high=0.2, loss_aggregation="sample"), "ppo"),
    "importance sampling": (LossSettings(clip_type="none"), "importance_sampling"),
    "cispo": (
        LossSettings(clip_type="one_sided", clip_ratio_low=1.0, clip_ratio_high=0.1),
        "cispo",
    ),
    "constant length": (LossSettings(loss_aggregation="constant", loss_length=50), "ppo"),
    "imitation": (LossSettings(objective="imitation"), "cross_entropy"),
    "kl": (LossSettings(kl_coef=0.3), None),
    "dual clip": (LossSettings(clip_ratio_max=1.1), None),
    "gspo": (LossSettings(ratio_level="sequence", clip_ratio_low=0.05, clip_ratio_high=0.05), None),
    "sapo": (LossSettings(clip_type="soft"), None),
    "tis": (LossSettings(ratio_base="trainer", importance_weights="truncated"), None),
}
"""Each with the loss of the service that it is."""


@pytest.mark.slow
@pytest.mark.parametrize("weigh", [plain_sum, averaged], ids=["sum", "averaged"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_stored_batch_has_the_same_gradient_at_a_service_as_here(
    name: str, weigh: Callable[[Sequence[torch.Tensor]], torch.Tensor]
) -> None:
    loss, theirs = LOSSES[name]
    scaling = Scaling(by_tokens=weigh is averaged, by_sequences=weigh is averaged)
    samples = off_policy(batch(adapted(), 1))
    settings = TrainerSettings(lr=1e-3, loss=loss, warmup_steps=0, grad_clip=1e-2)
    there = adapted()
    trainer, service = local_trainer(settings), TorchService(there, weigh)
    remote = TinkerTrainer(service, settings, scaling, Costs(Prices()), 60.0)
    scores, remote_scores = TokenScores(), TokenScores()
    said, remote_said = (
        trainer.step(samples, scores=scores),
        remote.step(samples, scores=remote_scores),
    )
    gradient = moments(trainer.optimizer, trainer.model)
    assert (moments(service.optimizer, there) - gradient).norm() < 1e-5 * gradient.norm()
    for metric in {*said, *remote_said} - {"seconds", "tokens_per_second", "entropy"}:
        assert remote_said[metric] == pytest.approx(said[metric], rel=1e-5, abs=1e-6), metric
    for ours, seen in zip(scores.logprobs, remote_scores.logprobs, strict=True):
        np.testing.assert_allclose(seen, ours, rtol=1e-5, atol=1e-6)
    known = theirs if not (theirs == "cross_entropy" and scaling.by_tokens) else None
    assert service.asked == ([known] if known else ["forward", "importance_sampling"]), (
        "one pass where it has the loss"
    )
    assert (loss_of_service(loss, scaling) or [None])[0] == known


@pytest.mark.slow
def test_pairs_and_several_updates_a_step_too() -> None:
    samples = batch(adapted(), 1)
    pairs = []
    for i, one in enumerate(samples):
        better = np.where(one.timeline.loss_mask, 1.0 - 2.0 * (i % 2), 0.0).astype(np.float32)
        pairs.append(one.model_copy(update={"group_id": str(i // 2), "advantages": better}))
    for loss, given in (
        (LossSettings(objective="preference"), pairs),
        (LossSettings(ratio_base="trainer"), off_policy(samples)),
    ):
        settings = TrainerSettings(
            lr=1e-3, loss=loss, warmup_steps=0, mini_batch_num=2, ppo_epochs=2
        )
        there, versions = adapted(), list[int]()
        trainer = local_trainer(settings)
        remote = TinkerTrainer(TorchService(there), settings, Scaling(), Costs(Prices()), 60.0)
        said = trainer.step(given)
        remote_said = remote.step(given, updated=lambda: versions.append(remote.updates))  # noqa: B023
        assert versions == [1, 2, 3, 4] and trainer.updates == 4
        assert remote_said["loss"] == pytest.approx(said["loss"], rel=1e-3)
        assert remote_said["grad_norm"] == pytest.approx(said["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("tells_norm", [True, False])
def test_how_a_service_weighs_sequences_is_measured(tells_norm: bool) -> None:
    ids = list(range(3, 11))
    for weigh in (plain_sum, averaged):
        scaling = measure_scaling(TorchService(adapted(), weigh, tells_norm), ids, 60.0)
        assert scaling == Scaling(weigh is averaged, weigh is averaged and tells_norm)
    assert Scaling(True, True).factors([3, 5]) == [6.0, 10.0]


def test_a_service_that_weighs_them_otherwise_is_refused() -> None:
    def odd(losses: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([loss.sum() / len(loss) ** 2 for loss in losses]).sum()

    with pytest.raises(TrainingError, match="neither alike nor by their lengths"):
        measure_scaling(TorchService(adapted(), odd), list(range(3, 11)), 60.0)


def test_tokens_and_dollars_are_counted() -> None:
    costs = Costs(Prices(prefill=1.0, cached=0.5, sample=3.0, train=2.0))
    costs.sampled(100, [10, 20], cached=40)
    trainer = TinkerTrainer(
        TorchService(adapted()),
        TrainerSettings(lr=1e-3, loss=LossSettings(kl_coef=0.1)),
        Scaling(),
        costs,
        60.0,
    )
    samples = batch(adapted(), 1)
    trainer.step(samples)
    targets = sum(len(sample.timeline.token_ids) - 1 for sample in samples)
    assert costs.metrics() == {
        "cost/prefilled_tokens": 60 + 2 * targets,  # its own forward pass, and the reference
        "cost/cached_tokens": 40,
        "cost/sampled_tokens": 30,
        "cost/trained_tokens": targets,
        "cost/dollars": pytest.approx((60 + 2 * targets + 0.5 * 40 + 3 * 30 + 2 * targets) / 1e6),
    }
    assert "cost/dollars" not in Costs(Prices()).metrics(), (
        "without prices nothing is known of dollars"
    )


def test_the_first_model_scores_alike_here_and_at_a_service() -> None:
    settings = TrainerSettings(lr=0.1, warmup_steps=1, has_reference=True)
    here, there = (
        local_trainer(settings),
        TinkerTrainer(TorchService(adapted()), settings, Scaling(), Costs(Prices()), 60.0),
    )
    samples = batch(adapted(), 1)
    before = here.reference_logprobs(samples, {})
    for trainer in (here, there):
        trainer.step(samples)
        for first, later in zip(before, trainer.reference_logprobs(samples, {}), strict=True):
            torch.testing.assert_close(later, first, atol=1e-5, rtol=1e-5)


def test_a_request_that_hangs_is_named() -> None:
    with pytest.raises(TrainingError, match=r"optim_step of update 3 for 0\.01 s .*--resume"):
        wait(Future(), 0.01, "optim_step of update 3", TorchService(adapted()))
