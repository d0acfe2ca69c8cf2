"""The loss: a mean over the tokens of the whole batch, as in `local`.

verl adds up the losses of a rank's micro-batches and averages the ranks, Trinity's Tinker trainer adds up those of the
sequences, and both leave it to the loss to know its share of the batch. Trinity's own losses take the mean of each
micro-batch instead: the gradient would grow with their number, and a token in a short one would count for more. Here
`returns`, which no other part reads, holds what each token counts: ranks / tokens of the batch (see `WholeSteps`).

Trinity's monitor interface: the metrics of its explorer and trainer go to the driver by the `Mailbox`.
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
        # What a mean over this micro-batch's tokens counts in the mean over the batch's.
        return loss * (action_mask * returns).sum(), metrics


class BatchLossWithKL(BatchLoss):
    """The same with the divergence from the first model.

    Args:
        kl_coef: its weight.
        kl_type: its estimator, as `trainer_common.kl_loss_type` names it.
    """

    def __init__(self, *, kl_coef: float, kl_type: str, **arguments: object) -> None:
        super().__init__(**arguments)
        self.kl_coef, self.kl_type = kl_coef, kl_type

    def __call__(  # type: ignore[override]  # Trinity gives a loss what its signature names
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
            logprob=logprob, old_logprob=old_logprob, action_mask=action_mask, advantages=advantages, returns=returns
        )
        kl = (kl_estimate(logprob, ref_logprob, self.kl_type) * action_mask * returns).sum()
        return loss + self.kl_coef * kl, {**metrics, "kl_loss": float(kl.detach())}


class BatchEntropy(EntropyLossFn):  # type: ignore[misc]
    def __init__(self, entropy_coef: float) -> None:
        self.entropy_coef = entropy_coef

    def __call__(
        self, entropy: torch.Tensor, action_mask: torch.Tensor, **tensors: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """`entropy` and what is given are of shape (rows, response length)."""
        bonus = (entropy * action_mask * tensors["returns"]).sum()
        return self.entropy_coef * bonus, {"entropy_loss": float(bonus.detach())}


class DriverMonitor(Monitor):  # type: ignore[misc]
    """Sends the metrics of the explorer and the trainer to the driver."""

    def __init__(self, project: str, group: str, name: str, role: str, config: TrinityConfig | None = None) -> None:
        self.role = role
        arguments = (config.monitor.monitor_args if config is not None else None) or {}
        self._mailbox = mailbox_of(arguments["run_id"])
        self._last: Awaitable[None] | None = None

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        numbers = {name: float(v) for name, v in data.items() if isinstance(v, (int, float)) or hasattr(v, "item")}
        self._last = self._mailbox.put.remote("metrics", {"role": self.role, "step": int(step), "metrics": numbers})

    async def flush(self) -> None:
        """Wait until everything that was logged is with the `Mailbox`, which takes it in order."""
        if self._last is not None:
            await self._last

    def close(self) -> None:
        """Nothing is held."""
