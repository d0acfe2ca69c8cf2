"""Parts of the list of episodes: full-text search in a worker, columns, rows of unfinished
episodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from rich.text import Text
from textual import work
from textual.message import Message

from ajet_sdk.protocols import TraceReader
from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import number
from ajet_tools.trace.queries.episodes import ListedEpisode, UnfinishedEpisode
from ajet_tools.trace.queries.search import Hit, search
from ajet_tools.tui.trace.screen import TraceViewer
from ajet_tools.tui.widgets.lines import Prompt
from ajet_tools.tui.widgets.listing import ListingTable
from ajet_tools.tui.widgets.listing_rows import Column, step_to

_MAX_HITS = 10_000


@dataclass
class _Search:
    """A search with its hits so far, by episode."""

    needle: str
    hits: dict[str, list[Hit]] = field(default_factory=dict)
    count: int = 0
    done: int = 0
    of: int = 0
    running: bool = True
    stop: threading.Event = field(default_factory=threading.Event)

    def describe(self) -> str:
        """Progress and number of hits."""
        if self.count >= _MAX_HITS:
            summary = f"the first {_MAX_HITS:,} hits"
        else:
            summary = f"{self.count:,} {'hit' if self.count == 1 else 'hits'}"
        summary = (
            f"{summary} in {len(self.hits):,} {'episode' if len(self.hits) == 1 else 'episodes'}"
        )
        if self.running:
            return (
                f"{summary}, {self.done / self.of:.0%} searched, esc stops"
                if self.of
                else f"{summary}, esc stops"
            )
        return f"{summary}{', stopped' if self.stop.is_set() and self.count < _MAX_HITS else ''}"


class Finder(Prompt):
    """Search prompt and hits. Posts `Changed` after progress."""

    app: TraceViewer

    class Changed(Message):
        """The search has new hits or progress, or has ended."""

    @dataclass
    class Progress(Message):
        """Hits and progress of a part of the trace."""

        of: _Search
        hits: Sequence[Hit] = ()
        progress: tuple[int, int] | None = None

    def __init__(self) -> None:
        super().__init__(
            "search", "a text in messages, outputs, tasks, errors", back=ListingTable, id="search"
        )
        self._search: _Search | None = None

    @property
    def running(self) -> bool:
        return self._search is not None and self._search.running

    @property
    def matched(self) -> frozenset[str]:
        """Episodes with hits."""
        return frozenset(self._search.hits) if self._search else frozenset()

    @property
    def summary(self) -> str:
        return self._search.describe() if self._search else ""

    def start(self, needle: str, run_id: str | None, within: Sequence[str] | None) -> None:
        """Start a search, and drop earlier hits."""
        self.clear()
        self._search = _Search(needle)
        self._run_search(self._search, run_id, within)
        self.post_message(self.Changed())

    def stop(self) -> None:
        """Stop the search, and keep its hits."""
        if self._search:
            self._search.stop.set()

    def clear(self) -> None:
        """Stop the search, and drop its hits."""
        self.stop()
        self._search = None
        self.post_message(self.Changed())

    def on_unmount(self) -> None:
        self.stop()

    @work(group="search", exclusive=True)
    async def _run_search(
        self, wanted: _Search, run_id: str | None, within: Sequence[str] | None
    ) -> None:
        waiting: list[Hit] = []

        def report(done: int, of: int) -> None:
            self.post_message(self.Progress(wanted, tuple(waiting), (done, of)))
            waiting.clear()

        def run(reader: TraceReader) -> None:
            stopped = wanted.stop.is_set
            hits = search(
                reader, wanted.needle, run_id, within=within, progress=report, cancelled=stopped
            )
            for hit in islice(hits, _MAX_HITS):
                waiting.append(hit)
            self.post_message(self.Progress(wanted, tuple(waiting)))

        try:
            await self.app.ask(run)
        finally:
            wanted.running = False
            self.post_message(self.Changed())

    def on_finder_progress(self, event: Progress) -> None:
        wanted = event.of
        if wanted is not self._search:
            return
        for hit in event.hits:
            wanted.hits.setdefault(hit.episode_id, []).append(hit)
            wanted.count += 1
        if event.progress:
            wanted.done, wanted.of = event.progress
        self.post_message(self.Changed())

    def status_parts(self, episode_id: str | None) -> Iterator[Text]:
        """Yield the total of hits, and the first hit of an episode."""
        if self.summary:
            yield Text(self.summary)
        if here := self.hits_of(episode_id):
            snippet = Text(here[0].snippet)
            snippet.stylize("bold underline", here[0].start, here[0].end)
            more = f" (and {len(here) - 1:,} here)" if len(here) > 1 else ""
            yield Text(f"{here[0].where}: ") + snippet + Text(more)

    def hits_of(self, episode_id: str | None) -> Sequence[Hit]:
        """Return the hits of an episode."""
        return self._search.hits.get(episode_id or "", ()) if self._search else ()

    def step(self, rows: Mapping[str, int], cursor: int, by: int) -> int | None:
        """Return the next row with hits (previous with -1), wrapping around."""
        return step_to(sorted(rows[id] for id in self.matched if id in rows), cursor, by)


_TONES = {
    "succeeded": "",
    "failed": "bad",
    "timeout": "warn",
    "aborted": "warn",
    "superseded": "faint",
}


def _format_status(row: ListedEpisode) -> str:
    return "superseded" if row["superseded"] else row["status"] or "unended"


def _reward_tone(row: ListedEpisode) -> str:
    if row["superseded"] or row["reward"] is None:
        return "faint"
    return "good" if row["reward"] >= 1 - 1e-9 else "bad" if row["reward"] <= 0 else ""


def _format_tokens(row: ListedEpisode) -> str:
    count = row["tokens"]
    if count is None:
        return ""
    return (
        f"{count:,}"
        if count < 100_000
        else f"{count / 1000:.1f}k"
        if count < 10_000_000
        else f"{count / 1e6:.1f}M"
    )


def _format_seconds(row: ListedEpisode) -> str:
    seconds = row["seconds"]
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, remaining = divmod(round(seconds), 60)
    return (
        f"{minutes}m {remaining:02d}s" if minutes < 100 else f"{minutes // 60}h {minutes % 60:02d}m"
    )


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
    Column("seconds", "time", 7, _format_seconds, right=True),
    Column("step", "step", 4, _format_field("step"), right=True),
)
"""Columns in the order of the keys 1 to 9, which sort by them."""


def _format_cause(row: ListedEpisode) -> str:
    summary = one_line(row["error"] or "")
    cause = row["cause"] or ""
    return summary if not cause or cause in summary else f"{cause}: {summary}" if summary else cause


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
        self._at = {row["episode_id"]: i for i, row in enumerate(rows)}

    @property
    def count(self) -> int:
        return len(self._rows)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        return [row["episode_id"] for row in self._rows[start:stop]]

    def position(self, episode_id: str) -> int | None:
        return self._at.get(episode_id)

    def page(self, reader: TraceReader, offset: int, limit: int) -> Sequence[UnfinishedEpisode]:
        return self._rows[offset : offset + limit]
