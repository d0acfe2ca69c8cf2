"""Columns of the list of episodes, and rows of unfinished episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ajet_sdk.protocols import TraceReader
from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import compact, lasting, number
from ajet_tools.trace.queries.episodes import ListedEpisode, UnfinishedEpisode
from ajet_tools.tui.widgets.listing_rows import Column

_TONES = {
    "succeeded": "",
    "failed": "bad",
    "timeout": "warn",
    "aborted": "warn",
    "superseded": "faint",
}


def _format_status(row: ListedEpisode) -> str:
    if row["superseded"]:
        return "superseded"
    return row["status"] or "unended"


def _reward_tone(row: ListedEpisode) -> str:
    if row["superseded"] or row["reward"] is None:
        return "faint"
    if row["reward"] >= 1 - 1e-9:
        return "good"
    if row["reward"] <= 0:
        return "bad"
    return ""


def _format_tokens(row: ListedEpisode) -> str:
    count = row["tokens"]
    if count is None:
        return ""
    if count < 100_000:
        return f"{count:,}"
    return compact(count)


def _format_field(name: Literal["attempt", "turns", "step"]) -> Callable[[ListedEpisode], str]:
    return lambda row: "" if row[name] is None else str(row[name])


EPISODE_COLUMNS: tuple[Column[ListedEpisode], ...] = (
    Column("task", "task", 14, lambda row: str(row["task"] or row["task_id"] or ""), most=120),
    Column("attempt", "try", 3, _format_field("attempt"), right=True),
    Column(
        "status",
        "status",
        10,
        _format_status,
        tone=lambda row: _TONES.get(_format_status(row), "faint"),
    ),
    Column("reward", "reward", 7, lambda row: number(row["reward"]), right=True, tone=_reward_tone),
    Column("turns", "turns", 5, _format_field("turns"), right=True),
    Column(
        "split",
        "split",
        6,
        lambda row: "greedy" if row["decoding"] == "greedy" else row["split"] or "",
    ),
    Column("tokens", "tokens", 6, _format_tokens, right=True),
    Column("seconds", "time", 7, lambda row: lasting(row["seconds"]), right=True),
    Column("step", "step", 4, _format_field("step"), right=True),
)
"""Columns in the order of the keys 1 to 9, which sort by them."""


def _format_cause(row: ListedEpisode) -> str:
    summary = one_line(row["error"] or "")
    cause = row["cause"] or ""
    if not cause or cause in summary:
        return summary
    if summary:
        return f"{cause}: {summary}"
    return cause


CAUSE_COLUMN = Column("cause", "cause", 20, _format_cause, most=160)
"""Cause of failure, for lists of failed episodes."""


def run_column(names: Mapping[str, str]) -> Column[ListedEpisode]:
    """Return the column of run names, for a list of several runs."""
    width = min(20, max(map(len, names.values())))
    return Column(
        "run_id", "run", width, lambda row: names.get(row["run_id"] or "", row["run_id"] or "")
    )


class UnfinishedRows:
    """`Rows` of unfinished episodes in memory, for a trace without finished ones."""

    def __init__(self, rows: Sequence[UnfinishedEpisode]) -> None:
        self._rows = rows
        self.of_all: int = rows[0]["of_all"] if rows else 0
        """Number of unfinished episodes, listed or not."""

    @property
    def count(self) -> int:
        return len(self._rows)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        return [row["episode_id"] for row in self._rows[start:stop]]

    def page(self, reader: TraceReader, offset: int, limit: int) -> Sequence[UnfinishedEpisode]:
        return self._rows[offset : offset + limit]
