"""What only a GPU shows: `python -m tests.gpu`, or `just test-gpu`. `--dry` runs the same code in
tiny shapes on a CPU.

Each part yields figures; one that fails is reported and the next begins. Nothing is fetched: the
models are made here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

__all__ = ["Figure", "Setting", "Skipped"]


class Skipped(Exception):
    """A part that cannot run here, and why."""


@dataclass(frozen=True)
class Figure:
    """One measured number of a case. `passed` is None where there is no goal."""

    case: str
    name: str
    value: float | str
    goal: str = ""
    passed: bool | None = None


@dataclass(frozen=True)
class Setting:
    """Where the parts run, and how large."""

    dry: bool
    device: torch.device
    folder: Path
    """For models and runs; gone at the end."""
    named: frozenset[str] = field(default_factory=frozenset)
    """Parts asked for by name."""
