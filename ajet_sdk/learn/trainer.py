"""The trainer: optimizer updates on samples, and their metrics."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ajet_sdk.config.objective import objective_of
from ajet_sdk.engines.local.vision import Vision, vision_of
from ajet_sdk.engines.local.weights import frozen_copy
from ajet_sdk.errors import ConfigError, TrainingError
from ajet_sdk.learn.batches import (
    MicroBatch,
    collate,
    micro_batches,
    tokens_of_a_pass,
    trained_inputs,
    trained_positions,
)
from ajet_sdk.learn.losses import loss_of, policy_pass, score, units
from ajet_sdk.learn.objective import LossSettings, Scored, token_weights
from ajet_sdk.learn.scores import Tally, TokenScores
from ajet_sdk.learn.trees import shares_prefixes
from ajet_sdk.protocols import Sampling, Tokenizer
from ajet_sdk.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet_sdk.config.config import Config

_OBJECTIVES: dict[str, Literal["imitation", "preference"]] = {
    "sft": "imitation",
    "dpo": "preference",
}
_IMITATION = LossSettings(objective="imitation")


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Optimizer, schedule, batching and loss."""

    lr: float
    loss: LossSettings = field(default_factory=LossSettings)
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 5
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    total_updates: int = 1
    """Optimizer updates of the whole run, at whose end a decaying learning rate reaches 0."""
    grad_clip: float = 1.0
    mini_batch_num: int = 1
    """Optimizer updates per step and epoch, each on its share of the samples."""
    ppo_epochs: int = 1
    micro_batch_tokens: int | None = None
    """Tokens in a forward and backward pass, with padding, shared prefixes counted once; bounds
    memory without changing results. None: as many as fit the device (`tokens_of_a_pass`)."""
    seed: int = 0
    has_reference: bool = False
    """Whether `reference_logprobs` will be called."""

    @classmethod
    def of(cls, config: Config, lr: float, steps: int) -> TrainerSettings:
        """Reads the settings of a config, for a run of `steps` steps."""
        common = config.trainer_common
        optim = config.trainer_common.optim
        by_reward = common.algorithm.by_reward
        in_reward = common.algorithm.use_kl_in_reward
        if in_reward and not common.algorithm.has_kl_in_reward:
            raise ConfigError(
                "trainer_common.algorithm.use_kl_in_reward is for adv_estimator grpo, rloo and opo;"
                " set it to false and use trainer_common.use_kl_loss with kl_loss_coef"
            )
        return cls(
            lr=lr,
            loss=LossSettings(
                **(objective_of(config) | ({} if by_reward else {"kl_coef": 0.0})),
                entropy_coef=common.entropy_coef if by_reward else 0.0,
                objective=_OBJECTIVES.get(common.algorithm.adv_estimator, "policy"),
                beta=common.algorithm.beta,
                replay_coef=common.algorithm.replay_coef,
            ),
            weight_decay=optim.weight_decay,
            betas=(optim.betas[0], optim.betas[1]),
            warmup_steps=optim.warmup_steps,
            lr_scheduler_type=optim.lr_scheduler_type,
            total_updates=steps * common.ppo_epochs * common.mini_batch_num,
            grad_clip=optim.grad_clip,
            mini_batch_num=common.mini_batch_num,
            ppo_epochs=common.ppo_epochs,
            micro_batch_tokens=common.micro_batch_tokens,
            seed=common.seed,
            has_reference=in_reward,
        )

    def lr_after(self, updates: int) -> float:
        """Learning rate of the next update: it rises to `lr` during the warm-up, then stays or
        falls to 0.

        It depends on the number of updates and the length of the run alone, so that a resumed run
        goes on as one that had its length from the start.
        """
        if updates < self.warmup_steps:
            return self.lr * (updates + 1) / self.warmup_steps
        falling = max(1, self.total_updates - self.warmup_steps)
        gone = min(1.0, (updates - self.warmup_steps) / falling)
        shares = {
            "constant": 1.0,
            "linear": 1.0 - gone,
            "cosine": (1.0 + math.cos(math.pi * gone)) / 2,
        }
        return self.lr * shares[self.lr_scheduler_type]

    def schedule_notice(self, done: int, planned: int | None) -> str:
        """What to know about the learning rate of a run that begins after `done` updates; empty if
        nothing.

        `planned` is the number of updates of the run that is resumed.
        """
        if done < self.total_updates < self.warmup_steps:
            peak = self.lr_after(self.total_updates - 1)
            return (
                f"the warm-up (trainer_common.optim.warmup_steps: {self.warmup_steps} updates) is"
                f" longer than the run ({self.total_updates}): the learning rate rises to"
                f" {peak:.3g} and doesn't reach {self.lr:.3g}"
            )
        if planned is None or planned == self.total_updates or self.lr_scheduler_type == "constant":
            return ""
        before = replace(self, total_updates=planned).lr_after(done)
        now = self.lr_after(done)
        return (
            f"the run was planned for {planned} updates and now has {self.total_updates}, over"
            f" which the learning rate falls: the next update has {now:.3g}; by the former plan it"
            f" was {before:.3g}"
        )

    def mini_batches(self, samples: Sequence[Sample]) -> int:
        return min(self.mini_batch_num, len(units(samples, self.loss)))

    def updates_of(self, samples: Sequence[Sample]) -> int:
        """Number of updates in a step on the samples."""
        return self.ppo_epochs * self.mini_batches(samples)

    def shares(self, samples: Sequence[Sample], updates: int) -> list[list[int]]:
        """Positions of the samples in each mini-batch, shuffled for every epoch."""
        order = units(samples, self.loss)
        number = self.mini_batches(samples)
        if number > 1:
            random.Random(f"{self.seed}/{updates}").shuffle(order)
        return [[index for unit in order[i::number] for index in unit] for i in range(number)]


def batches_of(
    samples: Sequence[Sample],
    sampling: Sampling | Mapping[str, Sampling],
    tokens: int,
    device: torch.device,
    tokenizer: Tokenizer | None,
    together: Sequence[Sequence[int]] | None = None,
    *,
    share: bool,
    vision: Vision | None = None,
) -> Iterator[tuple[list[int], MicroBatch]]:
    """Yields micro-batches of at most `tokens` with the positions of their samples; see
    `micro_batches`, `collate`."""
    for group in micro_batches(
        [trained_inputs(sample) for sample in samples], tokens, together, share=share
    ):
        members = [samples[i] for i in group.members]
        yield group.members, collate(members, sampling, device, tokenizer, group.row_sizes, vision)


def logprobs_of(
    samples: Sequence[Sample],
    batches: Iterator[tuple[list[int], MicroBatch]],
    score_N: Callable[[MicroBatch], torch.Tensor],
) -> list[torch.Tensor]:
    """Log-probabilities of each sample's trained tokens, in order; `score_N` computes them for a
    micro-batch."""
    logprobs = [torch.empty(0)] * len(samples)
    for members, batch in batches:
        counts = [len(trained_positions(samples[i])) for i in members]
        with torch.no_grad():
            for i, values in zip(members, score_N(batch).split(counts), strict=True):
                logprobs[i] = values
    return logprobs


def trainable_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The trainable parameters: all of a full model, the adapter's of a LoRA model."""
    return [p for p in model.parameters() if p.requires_grad]


def adamw(
    parameters: list[torch.Tensor] | list[torch.nn.Parameter], **options: Any
) -> torch.optim.AdamW:
    """AdamW in one kernel for all tensors; torch's default on a CPU is a loop in Python over
    them."""
    fused = parameters[0].device.type in ("cpu", "cuda")
    return torch.optim.AdamW(parameters, fused=fused, **options)


class Trainer:
    """Applies a loss to a model, in place.

    Weights below fp32 get fp32 master copies, so that AdamW's small steps are not lost to rounding.
    For a KL term and for preferences, a copy of the initial model is the frozen reference. It
    shares the weights that aren't trained. Of a LoRA model, only the adapter is copied, which may
    have been trained before.
    """

    plain_only = False

    def __init__(
        self, model: PreTrainedModel, settings: TrainerSettings, tokenizer: Tokenizer | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        """Needed to score calls with penalties, forbidden words and the like."""
        self.settings = settings
        self.updates = 0
        """Number of optimizer updates: the policy version."""
        self.parameters = trainable_parameters(model)
        if not self.parameters:
            raise ConfigError("the model has no trainable parameters")
        self.masters = [
            p if p.dtype == torch.float32 or p.dtype == torch.float64 else p.detach().float()
            for p in self.parameters
        ]
        self.optimizer = adamw(
            self.masters, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )
        checkpointing = any(
            getattr(module, "gradient_checkpointing", False) for module in model.modules()
        )
        self.micro_batch_tokens = settings.micro_batch_tokens or tokens_of_a_pass(
            model, checkpointing=checkpointing
        )
        with policy_pass(model):
            self._shares = shares_prefixes(model)
        self._vision = vision_of(model, tokenizer)
        self._threads = torch.get_num_threads()
        self.reference: PreTrainedModel | None = None
        """The frozen initial model; None if not needed."""
        if settings.loss.has_reference or settings.has_reference:
            self.reference = frozen_copy(model)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def step(
        self,
        samples: Sequence[Sample],
        sampling: Sampling | Mapping[str, Sampling] = Sampling(),  # noqa: B008, it is frozen
        scores: TokenScores | None = None,
        updated: Callable[[], None] | None = None,
        replay: Sequence[Sample] = (),
    ) -> dict[str, float]:
        """Train on the samples.

        Args:
            sampling: of all samples, or of each call by `call_id`.
            scores: records the scores of the first update's forward pass. With several mini-batches, tokens of the
                others stay unknown, since their pass sees changed weights.
            updated: called after each update, before the passes of the next one.
            replay: replies to imitate in addition, distributed over the step's updates.

        Returns metrics without the prefix `train/`. Raises TrainingError if the loss is not finite.
        """
        if not samples:
            raise TrainingError("there are no samples to train on")
        torch.set_num_threads(self._threads)  # set per thread, and a pool may use any thread
        started = time.perf_counter()
        tally = Tally()
        try:
            with policy_pass(self.model):
                old = self._old_logprobs(samples, sampling)
                for epoch in range(self.settings.ppo_epochs):
                    for number, share in enumerate(self.settings.shares(samples, self.updates)):
                        first = epoch == 0 and number == 0
                        if old is None:
                            shared_old = None
                        else:
                            shared_old = [old[i] for i in share]
                        self._replay(replay[number :: self.settings.mini_batches(samples)], tally)
                        seen = self._update(
                            [samples[i] for i in share], sampling, tally, shared_old, first=first
                        )
                        if scores is not None and first:
                            scores.record(samples, share, seen)
                        if updated is not None:
                            updated()
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"out of GPU memory in a training step ({str(error).partition('. ')[0]}); lower "
                f"trainer_common.micro_batch_tokens ({self.micro_batch_tokens}), or set "
                "model.gradient_checkpointing: true or model.lora.enabled: true"
            ) from error
        finally:
            self._clear()
        means = tally.means()  # waits for the GPU, which runs behind
        seconds = time.perf_counter() - started
        tokens = sum(len(s.timeline.token_ids) for s in samples)
        lr = self.optimizer.param_groups[0]["lr"]
        return means | {"lr": lr, "seconds": seconds, "tokens_per_second": tokens / seconds}

    def updates_of(self, samples: Sequence[Sample]) -> int:
        """Number of updates in a step on the samples."""
        return self.settings.updates_of(samples)

    def _old_logprobs(
        self, samples: Sequence[Sample], sampling: Sampling | Mapping[str, Sampling]
    ) -> list[torch.Tensor] | None:
        """Log-probabilities of each sample's trained tokens before the step's first update; None if
        the step has one update, whose own pass computes them, or if the loss doesn't use them."""
        if self.settings.loss.ratio_base != "trainer" or self.settings.updates_of(samples) == 1:
            return None
        batches = self._batches(samples, sampling)
        return logprobs_of(
            samples, batches, lambda batch: score(self.model, batch, entropy=False).logprobs_N
        )

    def reference_logprobs(
        self, samples: Sequence[Sample], sampling: Mapping[str, Sampling]
    ) -> list[torch.Tensor]:
        """Log-probabilities of each sample's trained tokens under the initial model, with the
        policy's limits."""

        def reference(batch: MicroBatch) -> torch.Tensor:
            if batch.limits is None:
                support_MV = None
            else:
                support_MV = score(self.model, batch, entropy=False).support_MV
            return self._reference_logprobs(batch, support_MV)

        with policy_pass(self.model):
            return logprobs_of(samples, self._batches(samples, sampling), reference)

    def _batches(
        self,
        samples: Sequence[Sample],
        sampling: Sampling | Mapping[str, Sampling],
        together: Sequence[Sequence[int]] | None = None,
    ) -> Iterator[tuple[list[int], MicroBatch]]:
        tokens = self.micro_batch_tokens
        share = self._shares
        return batches_of(
            samples,
            sampling,
            tokens,
            self.device,
            self.tokenizer,
            together,
            share=share,
            vision=self._vision,
        )

    def _update(
        self,
        samples: Sequence[Sample],
        sampling: Sampling | Mapping[str, Sampling],
        tally: Tally,
        old: Sequence[torch.Tensor] | None,
        *,
        first: bool,
    ) -> list[tuple[list[int], Scored]]:
        """Makes an optimizer update. Returns the samples' positions in each micro-batch and their
        detached scores."""
        seen: list[tuple[list[int], Scored]] = []
        together = units(samples, self.settings.loss)
        paired = self.settings.loss.objective == "preference"
        weights = [] if paired else token_weights(samples, self.settings.loss)
        total = torch.zeros((), device=self.device)
        for members, batch in self._batches(samples, sampling, together if paired else None):
            if weights:
                weights_N = torch.from_numpy(np.concatenate([weights[i] for i in members])).to(
                    self.device
                )
                if old is None:
                    old_N = None
                else:
                    old_N = torch.cat([old[i] for i in members])
                batch = replace(batch, weights_N=weights_N, old_N=old_N)
            loss, scored = self._backward(batch, len(together), tally, first=first)
            total += loss
            seen.append((members, scored))
        tally.add("loss", total)
        tally.add("grad_norm", torch.tensor([self._apply()]))
        return seen

    def _replay(self, samples: Sequence[Sample], tally: Tally) -> None:
        """Adds gradients of imitation, with equal token weights, to those of the next update."""
        weights = token_weights(samples, _IMITATION)
        for members, batch in self._batches(samples, {}) if samples else ():
            weights_N = torch.from_numpy(np.concatenate([weights[i] for i in members])).to(
                self.device
            )
            loss_N, _ = loss_of(score(self.model, batch, entropy=False), batch, _IMITATION)
            (self.settings.loss.replay_coef * (loss_N * weights_N).sum()).backward()
            self._gather()
            tally.add("replay_loss", loss_N.detach())

    def imitation_loss(self, samples: Sequence[Sample]) -> float:
        """Mean negative log-likelihood per trained token, without training."""
        tally = Tally()
        with policy_pass(self.model), torch.no_grad():
            for _, batch in self._batches(samples, {}):
                tally.add(
                    "loss", loss_of(score(self.model, batch, entropy=False), batch, _IMITATION)[0]
                )
        return tally.means()["loss"]

    def _backward(
        self, batch: MicroBatch, pairs: int, tally: Tally, *, first: bool
    ) -> tuple[torch.Tensor, Scored]:
        """Adds the gradients of a micro-batch. Returns its share of the update's loss and its
        detached scores."""
        settings = self.settings.loss
        reference_N = None
        if (
            settings.has_reference and batch.limits is None
        ):  # first, while there are no activations in memory
            reference_N = self._reference_logprobs(batch)
        scored = score(self.model, batch, entropy=True, entropy_grad=bool(settings.entropy_coef))
        if settings.has_reference and batch.limits is not None:
            reference_N = self._reference_logprobs(batch, scored.support_MV)
        loss, seen = loss_of(scored, batch, settings, reference_N)
        if batch.weights_N is None:
            share = loss.sum() / pairs
        else:
            share = (loss * batch.weights_N).sum()
        share.backward()
        self._gather()
        tally.add_all(seen, first=first)
        entropy_N = scored.entropy_N
        return share.detach(), Scored(
            scored.logprobs_N.detach(), None if entropy_N is None else entropy_N.detach()
        )

    def _reference_logprobs(
        self, batch: MicroBatch, support_MV: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert self.reference is not None
        with torch.no_grad():
            return score(self.reference, batch, entropy=False, support_MV=support_MV).logprobs_N

    def _gather(self) -> None:
        """Accumulates the gradients of a pass in the master copies.

        A bfloat16 sum would stop growing at 256 times the size of an addend.
        """
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if master is not parameter and parameter.grad is not None:
                gradient = parameter.grad.float()
                parameter.grad = None
                if master.grad is None:
                    master.grad = gradient
                else:
                    master.grad = master.grad.add_(gradient)

    def _apply(self) -> float:
        """Applies the accumulated gradients. Returns their norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.settings.grad_clip))
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient of update {self.updates + 1} is not finite; try a smaller"
                " trainer_common.optim.lr"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_after(self.updates)
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if master is not parameter:
                with torch.no_grad():
                    parameter.copy_(master)
        self._clear()
        self.updates += 1
        return norm

    def _clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, object]:
        """Everything besides the weights that the next step depends on, as tensors, numbers and
        lists."""
        masters = [
            m.detach() for m, p in zip(self.masters, self.parameters, strict=True) if m is not p
        ]
        state = {
            "updates": self.updates,
            "optimizer": self.optimizer.state_dict(),
            "masters": masters,
        }
        state["rng"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["device_rng"] = torch.cuda.get_rng_state(self.device)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore an earlier trainer's state; the model's weights are restored separately."""
        self.updates = int(state["updates"])
        self.optimizer.load_state_dict(state["optimizer"])
        lower = [m for m, p in zip(self.masters, self.parameters, strict=True) if m is not p]
        with torch.no_grad():
            for master, saved in zip(lower, state["masters"], strict=True):
                master.copy_(saved)
        torch.set_rng_state(state["rng"])
        if "device_rng" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["device_rng"], self.device)
