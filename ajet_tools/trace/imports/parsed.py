"""What every importer makes of a source: runs, their metrics, and episodes with all that goes with them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ajet_sdk.types import Episode, Feedback, LedgerEntry, Metric, Run, Trained

__all__ = ["UNKNOWN_TIME", "Parsed", "stable_id", "text_of"]

UNKNOWN_TIME = datetime(1970, 1, 1, tzinfo=timezone.utc)
"""Stands where a source does not say when: a record needs a time, and none is to be invented."""


@dataclass(frozen=True)
class Parsed:
    """One thing read from a source."""

    run: Run | None = None
    metrics: tuple[Metric, ...] = ()
    episode: Episode | None = None
    ended: bool = True
    """False: only the calls are known, the episode had not ended."""
    superseded: bool = False
    ledger: tuple[LedgerEntry, ...] = ()
    feedback: tuple[Feedback, ...] = ()
    trained: tuple[Trained, ...] = ()


def stable_id(*parts: Any) -> str:
    """An id that is the same whenever the same source is read again."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode("utf-8", "replace")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def text_of(value: Any) -> str | None:
    """A value as text where it is something."""
    return None if value in (None, "") else str(value)
