"""What the driver makes of a verl run: the Post's news and verl's own file of metrics, under the names of `local`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ajet_sdk.backbones.progress import Progress
from ajet_sdk.types import LedgerEntry

__all__ = ["VerlProgress"]

_LOOK = 1.0
_NAMES = {
    "actor/pg_loss": "train/loss",
    "actor/pg_clipfrac": "train/clip_fraction",
    "actor/ppo_kl": "train/approx_kl",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "actor/kl_loss": "train/kl",
    "actor/entropy_loss": "train/entropy",
    "timing_s/gen": "time/rollout",
    "timing_s/update_actor": "time/train",
    "timing_s/step": "time/step",
}
_OTHERS = ("actor/", "perf/", "timing_s/", "response_length/", "prompt_length/")
"""What is passed on under verl's name. Its scores are left out: they are advantages here."""


class VerlProgress(Progress):
    """Listens to the Post, and follows the file into which verl's `file` logger writes a line for each step."""

    _batches: dict[int, Mapping[str, Any]]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._batches = {}

    async def follow(self, path: Path) -> None:
        """Read what is written until `finish`, and then what is left."""
        place, rest = 0, b""
        while True:
            last = self._ended.is_set()
            fresh = await asyncio.to_thread(_read, path, place)
            place += len(fresh)
            *lines, rest = (rest + fresh).split(b"\n")
            for line in lines:
                self._line(json.loads(line))
            if last:
                return
            await asyncio.sleep(_LOOK)

    def _line(self, told: Mapping[str, Any]) -> None:
        """A step is done once verl says so: then its metrics are logged and its tokens are booked as trained."""
        step, said = int(told["step"]), told["data"]
        if "training/global_step" not in said:
            return  # a validation, whose episodes the Post tells of
        metrics: dict[str, float] = {}
        batch = self._batches.pop(step, None)
        if batch is not None:
            metrics |= batch["metrics"]
            self._writer.put(*(LedgerEntry(**row) for row in batch["ledger"]))
        metrics |= {
            _NAMES.get(name, name): float(value)
            for name, value in said.items()
            if isinstance(value, (int, float)) and math.isfinite(value) and name.startswith((*_OTHERS, *_NAMES))
        }
        self._trained_on(step, metrics)

    def _batch(self, told: Mapping[str, Any]) -> None:
        """The samples of a step are on their way into the trainer."""
        self._batches[int(told["step"])] = told
        for line in told["words"]:
            self._loggers.say(f"step {told['step']}: {line}")


def _read(path: Path, place: int) -> bytes:
    """What stands in the file after `place`; nothing where there is no file yet."""
    if not path.exists():
        return b""
    with path.open("rb") as stream:
        stream.seek(place)
        return stream.read()
