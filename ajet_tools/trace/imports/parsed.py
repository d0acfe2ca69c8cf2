"""What every importer makes of a source: runs, their metrics, and episodes with all that goes with them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ajet_sdk.types import Episode, Feedback, LedgerEntry, Metric, Run, Task, Trained
from ajet_tools.trace.text import message_text

__all__ = ["UNKNOWN_TIME", "Parsed", "stable_id", "task_of", "text_of"]

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


def task_of(messages: Any, metadata: Mapping[str, Any], episode_id: str, own: Mapping[str, Any] | None = None) -> Task:
    """What was asked last, with what was said before it, as the task: equal where these and the metadata are.

    Where there is neither question nor metadata it is the episode's own. `own` is what the source says of its task.
    """
    listed = [m for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    at = max((i for i, m in enumerate(listed) if m.get("role") == "user"), default=None)
    asked = "" if at is None else message_text({"role": "user", "content": listed[at].get("content")})
    before = [] if at is None else listed[: at + 1]
    history = [dict(m) for m in before] if any(m.get("role") == "assistant" for m in before) else []
    known = own or ({} if asked or metadata else {"task_id": stable_id("task", episode_id)})
    return Task(**{"main_query": asked, "init_messages": history, "metadata": dict(metadata), **known})
