"""Plug-ins for Trinity: the loss, a mean over the tokens of the whole batch as in `local`, and the
monitor.

verl sums the losses of a rank's micro-batches and averages over ranks; Trinity's Tinker trainer
sums over sequences. The loss itself must therefore be scaled to the batch. Trinity's own losses
average over each micro-batch: the gradient would grow with the number of micro-batches, and tokens
in short ones would count more. Here `returns`, which is otherwise unused, has the weight of each
token: ranks / tokens of the batch (see `WholeSteps`).

The monitor sends the metrics of Trinity's explorer and trainer to the driver through the `Mailbox`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import EntropyLossFn
from trinity.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn
from trinity.utils.monitor import Monitor

from ajet_sdk.cluster.mailbox import mailbox_of
from ajet_sdk.learn.objective import kl_estimate

if TYPE_CHECKING:
    from trinity.common.config import Config as TrinityConfig


class BatchLoss(PPOPolicyLossFn):  # type: ignore[misc]
    """The clipped policy gradient."""

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
        loss, metrics = super().__call__(
            logprob=logprob, old_logprob=old_logprob, action_mask=action_mask, advantages=advantages
        )
        # Scales the mean over the micro-batch to its share of the mean over the batch.
        return loss * (action_mask * returns).sum(), metrics


class BatchLossWithKL(BatchLoss):
    """The clipped policy gradient with the KL divergence from the initial model.

    Args:
        kl_coef: its weight.
        kl_type: its estimator, as in `trainer_common.kl_loss_type`.
    """

    def __init__(self, *, kl_coef: float, kl_type: str, **arguments: object) -> None:
        super().__init__(**arguments)
        self.kl_coef, self.kl_type = kl_coef, kl_type

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
        loss, metrics = super().__call__(
            logprob=logprob,
            old_logprob=old_logprob,
            action_mask=action_mask,
            advantages=advantages,
            returns=returns,
        )
        kl = (kl_estimate(logprob, ref_logprob, self.kl_type) * action_mask * returns).sum()
        return loss + self.kl_coef * kl, {**metrics, "kl_loss": float(kl.detach())}


class BatchEntropy(EntropyLossFn):  # type: ignore[misc]
    def __init__(self, entropy_coef: float) -> None:
        self.entropy_coef = entropy_coef

    def __call__(
        self, entropy: torch.Tensor, action_mask: torch.Tensor, **tensors: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """All of shape (rows, response length)."""
        bonus = (entropy * action_mask * tensors["returns"]).sum()
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
