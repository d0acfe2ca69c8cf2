"""`ajet trace ls` and `show`: inspect a trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text
from typer import Argument, Option

from ajet_sdk.dialects.message_parts import without_pictures
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import ProgressBar, visible
from ajet_sdk.types import Call
from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.cli.pandas_import import leave_pandas_out
from ajet_tools.cli.result import HIDDEN, Result
from ajet_tools.cli.trace.options import Fitting, OfRun, Where, WhereOrRun
from ajet_tools.text import tables as render
from ajet_tools.text.clean import counted, one_line, short_ids
from ajet_tools.text.tables import paged
from ajet_tools.trace import queries
from ajet_tools.trace.compare.verdict import verdicts
from ajet_tools.trace.episode.blocks import (
    Block,
    branch_title,
    call_blocks,
    conversation_blocks,
    overview_blocks,
)
from ajet_tools.trace.episode.overview import read_overview, summarize
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.episodes import ListedEpisode
from ajet_tools.trace.queries.experiments import Group, differing, seed_groups
from ajet_tools.trace.queries.filters import parse
from ajet_tools.trace.queries.listing import Listing, open_listing
from ajet_tools.trace.queries.records import records_of
from ajet_tools.trace.queries.runs import REWARDS, RunOverview

_CHUNK = 1000
_RUNS = 20
_FIRST, _LAST = 10, 30
"""Calls of a long conversation to show, at its start and end."""
_SPOKEN = ("messages", "input", "prompt", "system", "instructions")
"""Parts of a request that are shown as messages."""
_LONGEST = 4000
"""Maximum characters of a message to show."""


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
    page: int
    episodes: Sequence[ListedEpisode]
    listing: Listing = field(metadata=HIDDEN)
    start: int = field(default=0, metadata=HIDDEN)
    """Number of episodes on the pages before."""

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
        last = self.start + len(self.episodes)
        title = f"\nepisodes {self.start + 1:,} to {last:,} of {matching}, run {run}, {order}"
        is_shown = listing.sort in (*_EPISODE_COLUMNS, "ended_at")
        columns = _EPISODE_COLUMNS if is_shown else (listing.sort, *_EPISODE_COLUMNS)
        ids = short_ids([episode["episode_id"] for episode in self.episodes])
        rows = [_row("episode", ids[e["episode_id"]], e, columns) for e in self.episodes]
        out.print(render.table(rows, out.width, title=title))
        if last < self.count:
            out.print(f"more with --page {self.page + 1}, or -n", style="dim")


def ls(
    path: WhereOrRun = None,
    run: OfRun = None,
    filter: Fitting = None,
    sort: Annotated[
        str, Option(metavar="COLUMN", help="Sort by this column; -COLUMN sorts descending.")
    ] = "-ended_at",
    page: Annotated[int, Option(min=1, help="Page number.")] = 1,
    limit: Annotated[int, Option("--limit", "-n", min=1, help="Episodes per page.")] = 20,
) -> ListResult:
    """List runs, and the episodes of one: filtered, sorted, in pages.

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
    ajet trace ls -f "'werewolf' in agents and has('i am a villager')" -n 50 --page 2
    ajet trace ls -f "age() < interval 2 hour"
    ajet trace ls --sort -tokens --json
    """
    wanted = parse(filter or "")
    leave_pandas_out()
    reader, where, run = open_named(run, path)
    with reader, reader.steady():
        runs = queries.overview(reader)
        words = {run_id: verdict.word for run_id, verdict in verdicts(reader, runs).items()}
        judged = [{**run, "verdict": words[run["run_id"]]} for run in runs]
        seeds = seed_groups(runs, differing(reader, [run["run_id"] for run in runs]))
        newest = max(
            runs, key=lambda of: of["episodes"] > 0, default=None
        )  # the newest with episodes, if any
        chosen = queries.find_run(reader, run) if run else newest and newest["run_id"]
        with ProgressBar("searching") as bar:
            column, largest = sort.removeprefix("-"), sort.startswith("-")
            listing = open_listing(reader, chosen, wanted, column, largest, progress=bar.update)
        start = (page - 1) * limit
        stop = min(listing.count, start + limit)
        chunks = (
            listing.page(reader, at, min(_CHUNK, stop - at)) for at in range(start, stop, _CHUNK)
        )
        episodes = [row for chunk in chunks for row in chunk]
    return ListResult(
        trace=where,
        runs=judged,
        groups=seeds,
        run_id=chosen,
        count=listing.count,
        of=listing.of,
        page=page,
        episodes=episodes,
        listing=listing,
        start=start,
    )


def _none_of(listing: Listing) -> str:
    if listing.count:
        return f"\nThere are only {listing.count:,} episodes; this page does not exist."
    return (
        f"\nNo episode of {listing.of:,} matches the filter."
        if listing.of
        else "\nNo episodes yet."
    )


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


def show(
    id: Annotated[
        str,
        Argument(metavar="ID", help="A run, an episode or a call, by a unique prefix of its id."),
    ],
    path: Where = None,
    full: Annotated[bool, Option("--full", help="Show every call and message in full.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show an episode's conversation, rewards and ledger, a whole call, or a run with its metrics.

    Long episodes show their first and last calls, long messages their beginning; --full shows
    everything.

    \b
    ajet trace show 3f2a91
    ajet trace show 3f2a91 launcher_record/math --json
    ajet trace show 3f2a91 --full | grep calculator
    """
    reader, _, meant = open_named(id, path)
    with reader:
        target = queries.find(reader, meant or queries.find_run(reader, None))
        if as_json:
            print_json(
                {"run": _run_json, "episode": _episode_json, "call": _call_json}[target.kind](
                    reader, target.id
                )
            )
            return
        with paged() as out:
            show = {"run": _show_run, "episode": _show_episode, "call": _show_call}[target.kind]
            show(reader, target.id, out, full)


def _run_row(reader: TraceReader, run_id: str) -> RunOverview:
    return queries.overview(reader, run_id)[0]


def _run_json(reader: TraceReader, run_id: str) -> Mapping[str, object]:
    metrics, totals = queries.metrics(reader, run_id), queries.ledger_totals(reader, run_id)
    return {**_run_row(reader, run_id), "metrics": metrics, "ledger": totals}


def _show_run(reader: TraceReader, run_id: str, out: Console, full: bool) -> None:
    row = _run_row(reader, run_id)
    out.print(
        render.fields(
            (name, value)
            for name, value in row.items()
            if name not in ("causes", "rewards", "reward_of")
        )
    )
    metrics, totals = queries.metrics(reader, run_id), queries.ledger_totals(reader, run_id)
    if metrics:
        out.print(render.table(metrics, out.width, title="\nmetrics, last value"))
    if totals:
        out.print(render.table(totals, out.width, title="\nledger"))


def _episode_json(reader: TraceReader, episode_id: str) -> Mapping[str, object]:
    [record] = records_of(reader, [episode_id], whole=True)
    episode, place = (
        record.episode,
        {call.call_id: i for i, call in enumerate(record.episode.calls)},
    )
    unended = {} if record.ended else {"run_id": "", "status": None, "ended_at": None}
    booked = sorted(
        record.ledger, key=lambda entry: (place.get(entry.call_id, len(place)), entry.outcome)
    )
    ledger = [{"call_id": e.call_id, "outcome": e.outcome, "tokens": e.tokens} for e in booked]
    return {
        **episode.model_dump(mode="json"),
        **unended,
        "reward": episode.reward,
        "ledger": ledger,
    }


def _show_episode(reader: TraceReader, episode_id: str, out: Console, full: bool) -> None:
    """Prints an episode as the viewer does, without repeated messages."""
    overview = read_overview(reader, episode_id)
    out.print(summarize(overview))
    _print_blocks(out, overview_blocks(overview), full)
    printed: set[tuple[str, str]] = set()
    for number, branch in enumerate(overview.tree.branches):
        if len(overview.tree.branches) > 1:
            out.print(Rule(Text(visible(branch_title(branch))), align="left"))
        blocks = list(_new_blocks(conversation_blocks(overview, number), printed))
        printed.update((block.title, block.text) for block in blocks)
        cut = branch.chain[_FIRST:-_LAST] if not full and len(branch.chain) > _FIRST + _LAST else ()
        last = next(
            (n for n, block in enumerate(blocks) if cut and block.call_id in branch.chain[-_LAST:]),
            0,
        )
        _print_blocks(out, (block for block in blocks[:last] if block.call_id not in cut), full)
        if cut:
            out.print(
                f"{counted(len(cut), 'call')} left out here; --full shows all\n", style="yellow"
            )
        _print_blocks(out, blocks[last:], full)


def _new_blocks(blocks: Iterable[Block], printed: Set[tuple[str, str]]) -> Iterator[Block]:
    """Skips messages at the beginning of a conversation that were printed before."""
    begins = True
    for block in blocks:
        begins = (
            begins
            and not block.facts
            and (block.message is None or (block.title, block.text) in printed)
        )
        if block.message is None or not begins:
            yield block


def _print_blocks(out: Console, blocks: Iterable[Block], full: bool) -> None:
    for block in blocks:
        most = None if full else _LONGEST
        out.print(block.render(markdown=False, unfolded=True, most=most, whole="--full shows all"))


def _call_record(reader: TraceReader, call_id: str) -> tuple[Call, list[str]]:
    [record] = records_of(reader, [queries.episode_of_call(reader, call_id)], whole=True)
    [call] = [call for call in record.episode.calls if call.call_id == call_id]
    return call, [
        f"{entry.outcome}: {entry.tokens}" for entry in record.ledger if entry.call_id == call_id
    ]


def _call_json(reader: TraceReader, call_id: str) -> Mapping[str, object]:
    call, booked = _call_record(reader, call_id)
    times = {"started_at": call.started_at, "ended_at": call.ended_at}
    return {**call.model_dump(mode="json"), **times, "ledger": booked or None}


def _show_call(reader: TraceReader, call_id: str, out: Console, full: bool) -> None:
    call, booked = _call_record(reader, call_id)
    sent = {name: value for name, value in call.request.items() if name not in _SPOKEN}
    request = without_pictures(sent)
    logprob = (
        None if call.logprobs is None or not len(call.logprobs) else float(call.logprobs.sum())
    )
    out.print(
        render.fields(
            [
                ("call", call.call_id),
                ("episode", call.episode_id),
                ("extends", call.parent_call_id),
                ("agent", " ".join(filter(None, (call.agent, call.target_tag)))),
                ("phase", call.phase),
                ("trainable", call.trainable),
                ("log-probability", None if logprob is None else f"{logprob:.4f} in all"),
                ("sampling", json.dumps(call.sampling, ensure_ascii=False)),
                (
                    "request",
                    (
                        json.dumps(request, ensure_ascii=False)
                        if full
                        else one_line(request, _LONGEST)
                    ),
                ),
                ("started", call.started_at),
                ("ended", call.ended_at),
                ("ledger", ", ".join(booked)),
            ]
        )
    )
    _print_blocks(out, call_blocks(read_overview(reader, call.episode_id), call_id), full)
