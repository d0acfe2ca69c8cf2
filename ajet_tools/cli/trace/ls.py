"""`ajet trace ls`: lists runs, and the episodes of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Option

from ajet_sdk.reporting.output import ProgressBar
from ajet_tools.cli.result import HIDDEN, Result
from ajet_tools.cli.trace.options import Fitting, OfRun, Where
from ajet_tools.text import tables as render
from ajet_tools.text.clean import counted, short_ids
from ajet_tools.trace import queries
from ajet_tools.trace.compare.verdict import verdicts
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.episodes import ListedEpisode
from ajet_tools.trace.queries.experiments import Group, differing, seed_groups
from ajet_tools.trace.queries.filters import parse
from ajet_tools.trace.queries.listing import Listing, open_listing
from ajet_tools.trace.queries.runs import REWARDS

_CHUNK = 1000
_RUNS = 20


@dataclass(frozen=True)
class ListResult(Result):
    trace: Path
    runs: Sequence[Mapping[str, Any]]
    groups: Sequence[Group]
    run_id: str | None
    """The run whose episodes are listed."""
    count: int
    """Episodes that match."""
    of: int
    episodes: Sequence[ListedEpisode]
    listing: Listing = field(metadata=HIDDEN)

    paged = True

    def show(self, out: Console) -> None:
        out.print(str(self.trace), style="dim", soft_wrap=True)
        self._show_runs(out)
        if self.episodes:
            self._show_episodes(out)
        else:
            out.print(_none_of(self.listing))

    def _show_runs(self, out: Console) -> None:
        newest = self.runs[:_RUNS]
        ids = short_ids([run["run_id"] for run in self.runs])
        means = [name for name in REWARDS if any(run.get(name) is not None for run in newest)]
        columns = (*_RUN_COLUMNS[:6], *means, *_RUN_COLUMNS[6:])
        rows = [_row("run", ids[run["run_id"]], run, columns) for run in newest]
        out.print(render.table(rows, out.width))
        if means:
            meanings = "; ".join(f"{name}: {REWARDS[name]}" for name in means)
            out.print(meanings, style="dim", soft_wrap=True)
        if self.groups:
            seeds: list[dict[str, object]] = []
            for group in self.groups:
                row: dict[str, object] = {"runs": group.name, "seeds": len(group.runs)}
                row |= {group.of or "reward": group.mean, "low": group.low, "high": group.high}
                seeds.append(row)
            out.print(render.table(seeds, out.width, title="\nover seeds"))
        if len(self.runs) > _RUNS:
            earlier = counted(len(self.runs) - _RUNS, "earlier run")
            out.print(f"and {earlier}; --json lists all", style="dim")

    def _show_episodes(self, out: Console) -> None:
        listing = self.listing
        order = f"by {listing.sort}, {'largest' if listing.descending else 'smallest'} first"
        if (listing.sort, listing.descending) == ("ended_at", True):
            order = "latest first"
        matching = f"{self.of:,}"
        if self.count < self.of:
            matching = f"{self.count:,} of {self.of:,}"
        run = short_ids([run["run_id"] for run in self.runs]).get(self.run_id or "", "")
        title = f"\n{len(self.episodes):,} of {matching} episodes, run {run}, {order}"
        columns = [*_EPISODE_COLUMNS]
        if listing.sort not in (*_EPISODE_COLUMNS, "ended_at"):
            columns.insert(0, listing.sort)
        ids = short_ids([episode["episode_id"] for episode in self.episodes])
        rows = [_row("episode", ids[e["episode_id"]], e, columns) for e in self.episodes]
        out.print(render.table(rows, out.width, title=title))
        if len(self.episodes) < self.count:
            out.print("more with -n", style="dim")


def ls(
    run: OfRun = None,
    path: Where = None,
    filter: Fitting = None,
    sort: Annotated[
        str, Option(metavar="COLUMN", help="Sort by this column; -COLUMN sorts descending.")
    ] = "-ended_at",
    limit: Annotated[int, Option("--limit", "-n", min=1, help="Maximum number of episodes.")] = 20,
) -> ListResult:
    """List runs, and the episodes of one: filtered and sorted.

    A filter is what SQL has after WHERE (DuckDB's), over these columns: episode_id run_id group_id
    task_id task reward success status cause error split decoding step last_step attempt turns calls
    tokens prompt_tokens cost seconds latency started_at ended_at output unread_tool_calls
    cut_tool_calls version feedback metrics superseded, and the lists agents models tags finish_reasons
    outcomes. has('text') searches all text, and so does a filter without any operator; age() is the
    time since an episode ended, metric('name') a number of its own.

    Columns to sort by: started_at ended_at seconds reward tokens turns calls agents step attempt
    split decoding status cause error task task_id group_id episode_id run_id superseded.

    \b
    ajet trace ls
    ajet trace ls launcher_record/math -f "reward < 0.5 and status = 'succeeded'" --sort reward
    ajet trace ls -f "'werewolf' in agents and has('i am a villager')" -n 50
    ajet trace ls -f "age() < interval 2 hour"
    ajet trace ls --sort -tokens --json
    """
    wanted = parse(filter or "")
    reader, where, run = open_named(run, path)
    with reader, reader.steady():
        runs = queries.overview(reader)
        words = {run_id: verdict.word for run_id, verdict in verdicts(reader, runs).items()}
        judged = [{**run, "verdict": words[run["run_id"]]} for run in runs]
        seeds = seed_groups(runs, differing(reader, [run["run_id"] for run in runs]))
        chosen: str | None = None
        if run:
            chosen = queries.find_run(reader, run)
        elif runs:
            newest = max(runs, key=lambda of: of["episodes"] > 0)  # with episodes, if any has some
            chosen = newest["run_id"]
        with ProgressBar("searching") as bar:
            column = sort.removeprefix("-")
            largest = sort.startswith("-")
            listing = open_listing(reader, chosen, wanted, column, largest, progress=bar.update)
        count = min(listing.count, limit)
        episodes: list[ListedEpisode] = []
        for start in range(0, count, _CHUNK):
            episodes += listing.page(reader, start, min(_CHUNK, count - start))
    return ListResult(
        trace=where,
        runs=judged,
        groups=seeds,
        run_id=chosen,
        count=listing.count,
        of=listing.of,
        episodes=episodes,
        listing=listing,
    )


def _none_of(listing: Listing) -> str:
    if listing.of:
        return f"\nNo episode of {listing.of:,} matches the filter."
    return "\nNo episodes yet."


_RUN_COLUMNS = (
    "name",
    "status",
    "verdict",
    "episodes",
    "unsound",
    "last_step",
    "started_at",
    "backbone",
)
_EPISODE_COLUMNS = (
    "status",
    "reward",
    "step",
    "task",
    "turns",
    "tokens",
    "seconds",
    "cause",
    "attempt",
    "split",
    "decoding",
    "agents",
    "calls",
    "task_id",
)


def _row(
    kind: str, short: str, row: Mapping[str, object], columns: Sequence[str]
) -> dict[str, object]:
    return {kind: short, **{column: row[column] for column in columns if column != f"{kind}_id"}}
