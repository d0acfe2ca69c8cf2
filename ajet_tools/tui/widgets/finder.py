"""Full-text search from a list: asks for a text, looks for it in a worker, and goes from hit to hit."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from textual import work
from textual.message import Message

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.search import Hit, search
from ajet_tools.tui.app import TraceApp
from ajet_tools.tui.widgets.prompt import Prompt

__all__ = ["Finder"]

_MOST = 10_000


@dataclass
class _Search:
    """One search: what it has found so far, by episode in the order of the trace."""

    needle: str
    hits: dict[str, list[Hit]] = field(default_factory=dict)
    count: int = 0
    done: int = 0
    of: int = 0
    running: bool = True
    stop: threading.Event = field(default_factory=threading.Event)

    def told(self) -> str:
        """How far it is and what it has found."""
        if self.count >= _MOST:
            found = f"the first {_MOST:,} hits"
        else:
            found = f"{self.count:,} {'hit' if self.count == 1 else 'hits'}"
        found = f"{found} in {len(self.hits):,} {'episode' if len(self.hits) == 1 else 'episodes'}"
        if self.running:
            return f"{found}, {self.done / self.of:.0%} searched, esc stops" if self.of else f"{found}, esc stops"
        return f"{found}{', stopped' if self.stop.is_set() and self.count < _MOST else ''}"


class Finder(Prompt):
    """The prompt of the search and what it found. `Changed` is posted whenever there is more to show."""

    app: TraceApp

    class Changed(Message):
        """Hits came, the search went on, or ended."""

    @dataclass
    class Went(Message):
        """A part of the trace was searched."""

        of: _Search
        hits: Sequence[Hit] = ()
        progress: tuple[int, int] | None = None

    def __init__(self) -> None:
        super().__init__("search", "a text in messages, outputs, tasks, errors", id="search")
        self._search: _Search | None = None

    @property
    def running(self) -> bool:
        return self._search is not None and self._search.running

    @property
    def found(self) -> frozenset[str]:
        """The episodes with hits."""
        return frozenset(self._search.hits) if self._search else frozenset()

    @property
    def said(self) -> str:
        return self._search.told() if self._search else ""

    def look_for(self, needle: str, run_id: str | None, within: Sequence[str] | None) -> None:
        """Search anew; what was found before is dropped."""
        self.drop()
        self._search = _Search(needle)
        self._look(self._search, run_id, within)
        self.post_message(self.Changed())

    def stop(self) -> None:
        """End the search; what it has found stays."""
        if self._search:
            self._search.stop.set()

    def drop(self) -> None:
        """End the search and forget what it found."""
        self.stop()
        self._search = None
        self.post_message(self.Changed())

    def on_unmount(self) -> None:
        self.stop()

    @work(group="search", exclusive=True)
    async def _look(self, wanted: _Search, run_id: str | None, within: Sequence[str] | None) -> None:
        waiting: list[Hit] = []

        def went(done: int, of: int) -> None:
            self.post_message(self.Went(wanted, tuple(waiting), (done, of)))
            waiting.clear()

        def look(reader: TraceReader) -> None:
            stopped = wanted.stop.is_set
            hits = search(reader, wanted.needle, run_id, within=within, progress=went, cancelled=stopped)
            for hit in islice(hits, _MOST):
                waiting.append(hit)
            self.post_message(self.Went(wanted, tuple(waiting)))

        try:
            await self.app.ask(look)
        finally:
            wanted.running = False
            self.post_message(self.Changed())

    def on_finder_went(self, event: Went) -> None:
        wanted = event.of
        if wanted is not self._search:
            return
        for hit in event.hits:
            wanted.hits.setdefault(hit.episode_id, []).append(hit)
            wanted.count += 1
        if event.progress:
            wanted.done, wanted.of = event.progress
        self.post_message(self.Changed())

    def hits_of(self, episode_id: str | None) -> Sequence[Hit]:
        """What was found in one episode."""
        return self._search.hits.get(episode_id or "", ()) if self._search else ()

    def step(self, rows: Mapping[str, int], cursor: int, by: int) -> int | None:
        """The next row (or, with -1, the one before) that has hits, round the end."""
        places = sorted(rows[id] for id in self.found if id in rows)
        beyond = [at for at in places if (at > cursor if by > 0 else at < cursor)]
        return (beyond or places)[0 if by > 0 else -1] if places else None
