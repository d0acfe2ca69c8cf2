"""Trinity's trainer, whose step is one update of the whole batch, however many timelines the step's episodes gave."""

from __future__ import annotations

from typing import Any

from trinity.common.experience import Experience
from trinity.trainer.trainer import Trainer

from ajet_sdk.backbones.unpadding import unpad_without_flash_attention

__all__ = ["WholeBatchTrainer", "one_mini_batch"]


class WholeBatchTrainer(Trainer):  # type: ignore[misc]
    """A Ray actor, started like Trinity's own."""

    async def prepare(self) -> None:
        if self.config.trainer.trainer_type == "verl":
            unpad_without_flash_attention()
        await super().prepare()

    async def train(self) -> str:
        """Trinity's loop; when it returns the driver can have all that it told."""
        name = str(await super().train())
        await self.monitor.arrived()
        return name

    async def train_step(self, exps: list[Experience]) -> dict[str, Any]:
        """One update; metrics of it."""
        if self.config.trainer.trainer_type == "verl":
            one_mini_batch(self.engine.config, len(exps))
        metrics: dict[str, Any] = await super().train_step(exps)
        return metrics


def one_mini_batch(verl: Any, size: int) -> None:
    """Set the size of verl's mini-batches, which is fixed there and must divide every batch."""
    verl.actor.ppo_mini_batch_size = size
