"""The columns of the list of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ajet_tools.trace.text import one_line
from ajet_tools.tui.widgets.listing import Column

__all__ = ["CAUSE_COLUMN", "EPISODE_COLUMNS"]

Row = Mapping[str, Any]
_TONES = {"succeeded": "good", "failed": "bad", "timeout": "warn", "aborted": "warn"}


def _task(row: Row) -> str:
    return str(row["task"] or row["task_id"] or "")


def _status(row: Row) -> str:
    """A resume rolled a superseded episode back: how it had ended no longer counts."""
    return "superseded" if row["superseded"] else row["status"] or "unended"


def _tone(row: Row) -> str:
    return "faint" if row["superseded"] else _TONES.get(row["status"], "faint")


def _reward(row: Row) -> str:
    value = row["reward"]
    return "" if value is None else f"{value:.4g}"


def _reward_tone(row: Row) -> str:
    return "faint" if row["superseded"] else ""


def _tokens(row: Row) -> str:
    """1,234; from 100,000 on 123.4k."""
    count = row["tokens"]
    if count is None:
        return ""
    return f"{count:,}" if count < 100_000 else f"{count / 1000:.1f}k" if count < 10_000_000 else f"{count / 1e6:.1f}M"


def _seconds(row: Row) -> str:
    seconds = row["seconds"]
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes}m {left:02d}s" if minutes < 100 else f"{minutes // 60}h {minutes % 60:02d}m"


def _number(name: str) -> Any:
    def text(row: Row) -> str:
        return "" if row[name] is None else str(row[name])

    return text


EPISODE_COLUMNS = (
    Column("task", "task", 14, _task, most=120),
    Column("attempt", "try", 3, _number("attempt"), right=True),
    Column("status", "status", 10, _status, tone=_tone),
    Column("reward", "reward", 7, _reward, right=True, tone=_reward_tone),
    Column("turns", "turns", 5, _number("turns"), right=True),
    Column("agents", "agents", 6, _number("agents"), right=True),
    Column("tokens", "tokens", 6, _tokens, right=True),
    Column("seconds", "time", 7, _seconds, right=True),
    Column("step", "step", 4, _number("step"), right=True),
)
"""In the order of the keys 1 to 9 that sort by them."""


def _cause(row: Row) -> str:
    """The cause, and what its error says first."""
    said = one_line(row["error"] or "")
    cause = row["cause"] or ""
    return said if not cause or cause in said else f"{cause}: {said}" if said else cause


CAUSE_COLUMN = Column("cause", "cause", 20, _cause, most=160)
"""Why an episode failed: for a list of those that did."""
