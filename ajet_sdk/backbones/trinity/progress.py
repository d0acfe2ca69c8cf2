"""What the driver makes of what Trinity tells: metrics of its explorer and trainer, and rows of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ajet_sdk.backbones.progress import Progress
from ajet_sdk.types import LedgerEntry

__all__ = ["TrinityProgress"]


class TrinityProgress(Progress):
    """Listens to the `Post` for what `monitor` and `batches` put there, too."""

    def _metrics(self, told: Mapping[str, Any]) -> None:
        log = self._trained_on if told["role"] == "trainer" else self._loggers.log
        log(int(told["step"]), told["metrics"])

    def _trained(self, told: Mapping[str, Any]) -> None:
        """Book what the trainer took from the buffer."""
        self._writer.put(
            *(
                LedgerEntry(
                    run_id=self._job.run_id,
                    step=int(told["step"]),
                    episode_id=row["episode_id"],
                    call_id=row["call_id"],
                    outcome=row["outcome"],
                    tokens=row["tokens"],
                )
                for row in told["calls"]
            )
        )
