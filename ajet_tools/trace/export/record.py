"""What an export knows of one episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ajet_sdk.types import Episode, Feedback, LedgerEntry

__all__ = ["Record"]


@dataclass(frozen=True)
class Record:
    """An episode with what was said of it and what became of its tokens, where that was asked for."""

    episode: Episode
    ended: bool = True
    """False: the trace has only its calls."""
    feedback: tuple[Feedback, ...] = ()
    ledger: tuple[LedgerEntry, ...] = ()
    trained: tuple[Mapping[str, Any], ...] = ()
    """Rows of the table `trained`, their arrays as lists."""
    superseded: bool = False
    redacted: Mapping[str, int] = field(default_factory=dict)
    """How many values of each kind were replaced in it."""
