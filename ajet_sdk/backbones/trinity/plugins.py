"""Plug-ins for Trinity: the loss, that of `local` over the tokens of the whole batch, and the
monitor.

verl sums the losses of a rank's micro-batches and averages over ranks; Trinity's Tinker trainer
sums over sequences. The loss itself must therefore be scaled to the batch. Trinity's own losses
average over each micro-batch: the gradient would grow with the number of micro-batches, and tokens
in short ones would count more. Here `returns`, which is otherwise unused, has the weight of each
token times the number of ranks, with a sign that changes from turn to turn (see `weigh`).

The monitor sends the metrics of Trinity's explorer and trainer to the driver through the `Mailbox`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import EntropyLossFn
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.utils.monitor import Monitor

from ajet_sdk.cluster.mailbox import mailbox_of
from ajet_sdk.learn.objective import LossSettings, Scored, policy_loss

if TYPE_CHECKING:
    from trinity.common.config import Config as TrinityConfig


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The trained tokens of a micro-batch of Trinity's trainer."""

    sampler_N: torch.Tensor
    advantages_N: torch.Tensor
    rows_N: torch.Tensor
    is_odd_turn_N: torch.Tensor
    old_N: None = None
    """A step has one update, so these are the log-probabilities of its own pass."""

    def segments_N(self, level: Literal["turn", "sequence"]) -> torch.Tensor:
        """Index of the turn or row of each trained token."""
        if level == "sequence":
            return self.rows_N
        begins_N = self.rows_N.new_zeros(self.rows_N.shape)
        begins_N[1:] = (self.rows_N.diff() != 0) | (self.is_odd_turn_N.int().diff() != 0)
        return begins_N.cumsum(0)


class BatchLoss(PolicyLossFn):  # type: ignore[misc]
    """The policy objective of `local` (`learn.objective`).

    Args:
        settings: of `LossSettings`.
    """

    def __init__(self, *, settings: Mapping[str, Any], backend: str = "verl") -> None:
        super().__init__(backend=backend)
        self.settings = LossSettings(**settings)

    def __call__(
        self,
        logprob: torch.Tensor,
        old_logprob: torch.Tensor,
        action_mask: torch.Tensor,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        **kwargs: object,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """All of shape (rows, response length), or of one sequence (response length)."""
        return self.of_tokens(logprob, old_logprob, action_mask, advantages, returns)

    def of_tokens(
        self,
        logprob: torch.Tensor,
        old_logprob: torch.Tensor,
        action_mask: torch.Tensor,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        ref_logprob: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        trained = action_mask.bool()
        if not trained.any():
            return (logprob * 0.0).sum(), {}
        rows = torch.atleast_2d(trained).nonzero()[:, 0]
        signed_N = returns[trained]
        weights_N = signed_N.abs()
        tokens = _Tokens(old_logprob[trained], advantages[trained], rows, signed_N.signbit())
        reference_N = None if ref_logprob is None else ref_logprob[trained]
        scored = Scored(logprob[trained], None)
        loss_N, seen = policy_loss(scored, tokens, self.settings, reference_N)
        loss = (loss_N * weights_N).sum()
        apart_N = (tokens.sampler_N - scored.logprobs_N).detach()
        metrics = {
            "pg_loss": float(loss.detach()),
            "pg_clipfrac": float(seen["clip_share"].mean()),
            "ppo_kl": float(apart_N.mean()),
        }
        if reference_N is not None:
            metrics["kl_loss"] = float((seen["kl"].detach() * weights_N).sum())
        return loss, metrics

    @classmethod
    def default_args(cls) -> dict[str, object]:
        return {"settings": {}}


class BatchLossWithKL(BatchLoss):
    """The same with the KL divergence from the initial model."""

    def __call__(  # type: ignore[override]  # Trinity passes the arguments that the signature names
        self,
        logprob: torch.Tensor,
        old_logprob: torch.Tensor,
        action_mask: torch.Tensor,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        ref_logprob: torch.Tensor,
        **kwargs: object,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """All of shape (rows, response length), or of one sequence (response length)."""
        return self.of_tokens(logprob, old_logprob, action_mask, advantages, returns, ref_logprob)


class BatchEntropy(EntropyLossFn):  # type: ignore[misc]
    def __init__(self, entropy_coef: float) -> None:
        self.entropy_coef = entropy_coef

    def __call__(
        self, entropy: torch.Tensor, action_mask: torch.Tensor, **tensors: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """All of shape (rows, response length)."""
        bonus = (entropy * action_mask * tensors["returns"].abs()).sum()
        return self.entropy_coef * bonus, {"entropy_loss": float(bonus.detach())}


class DriverMonitor(Monitor):  # type: ignore[misc]
    """Sends the metrics of the explorer and the trainer to the driver."""

    def __init__(
        self, project: str, group: str, name: str, role: str, config: TrinityConfig | None = None
    ) -> None:
        self.role = role
        arguments = (config.monitor.monitor_args if config is not None else None) or {}
        self._mailbox = mailbox_of(arguments["run_id"])
        self._last: Awaitable[None] | None = None

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        numbers = {
            name: float(v)
            for name, v in data.items()
            if isinstance(v, (int, float)) or hasattr(v, "item")
        }
        self._last = self._mailbox.put.remote(
            "metrics", {"role": self.role, "step": int(step), "metrics": numbers}
        )

    async def flush(self) -> None:
        """Wait until the `Mailbox` has all logged metrics, which it receives in order."""
        if self._last is not None:
            await self._last

    def close(self) -> None:
        """Does nothing."""
