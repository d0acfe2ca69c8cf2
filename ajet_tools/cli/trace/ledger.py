"""`ajet trace ledger`: what became of every sampled token, and where calls did not merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import ProgressBar, visible
from ajet_sdk.trace.reader import ledger_balance
from ajet_tools.cli.result import HIDDEN, Result
from ajet_tools.cli.trace.options import Fitting, Newest, OfRun, Where
from ajet_tools.text import tables as render
from ajet_tools.text.clean import counted, one_line
from ajet_tools.trace import queries
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.filters import parse
from ajet_tools.trace.queries.runs import LedgerPart, LedgerTotal, with_shares
from ajet_tools.trace.splits import by_cause, splits_of

_UNBOOKED = 20
_WORST = 20


@dataclass(frozen=True)
class LedgerResult(Result):
    run_id: str
    status: str
    balanced: bool
    wrong: Sequence[str]
    """Calls whose tokens are not all booked."""
    outcomes: Sequence[LedgerTotal]
    filter: str | None = field(default=None, metadata=HIDDEN)

    paged = True

    @property
    def exit_code(self) -> int:
        """A run that goes on may have calls that are not booked yet."""
        return int(not self.balanced and self.status == "finished")

    def show(self, out: Console) -> None:
        if self.filter:
            out.print(
                f"of episodes that match {one_line(self.filter)}; the verdict is for the whole run",
                style="dim",
            )
        if self.outcomes:
            out.print(render.table(with_shares(self.outcomes), out.width, right=["share"]))
        else:
            out.print("no tokens in the ledger")
        out.print(_verdict(self.run_id, self.status, self.wrong), soft_wrap=True)
        for line in self.wrong[:_UNBOOKED]:
            out.print(f"  {visible(line)}", soft_wrap=True)
        if len(self.wrong) > _UNBOOKED:
            out.print(f"  and {len(self.wrong) - _UNBOOKED:,} more; --json lists all", style="dim")


@dataclass(frozen=True)
class SplitsResult(Result):
    episodes: int
    of: int
    """Episodes to examine; those beyond --limit were not."""
    timelines: int
    causes: Sequence[Mapping[str, object]]
    splits: Sequence[Mapping[str, object]]
    sampled: int = field(default=0, metadata=HIDDEN)
    """Sampled tokens."""

    paged = True

    def show(self, out: Console) -> None:
        counts = [
            counted(self.episodes, "episode"),
            counted(self.timelines, "timeline"),
            counted(self.sampled, "sampled token"),
            counted(len(self.splits), "split"),
        ]
        out.print(", ".join(counts))
        if self.episodes < self.of:
            out.print(
                f"newest {self.episodes:,} of {counted(self.of, 'episode')}; the others were not"
                " examined"
            )
        if not self.causes:
            return
        out.print(render.table(self.causes, out.width, title="\nby cause"))
        worst = sorted(self.splits, key=lambda split: -int(str(split["extra_tokens"])))[:_WORST]
        title = "\nmost expensive"
        if len(worst) < len(self.splits):
            title += f", {len(worst)} of {len(self.splits):,}; --json lists all"
        out.print(render.table([_shown(split) for split in worst], out.width, title=title))


def ledger(
    run: OfRun = None,
    path: Where = None,
    filter: Fitting = None,
    by: Annotated[LedgerPart | None, Option("--by", show_default=False)] = None,
    splits: Annotated[bool, Option("--splits")] = False,
    limit: Newest = None,
) -> LedgerResult | SplitsResult:
    """Show what became of every sampled token of a run, and whether the ledger balances.

    Exits with 1 if a finished run's ledger does not balance. With --splits, shows where calls did
    not merge into one timeline: the token, the cause and the cost.

    Args:
        by: One row per step, or per kind of task (as a swarm server names it), and outcome.
        splits: Show the splits of timelines instead.

    \b
    ajet trace ledger
    ajet trace ledger launcher_record/math --by step
    ajet trace ledger -f "step > 10 and 'werewolf' in agents" --splits
    """
    wanted = parse(filter) if filter else None
    reader, where, named_run = open_named(run, path)
    with reader, reader.steady():
        run_id = queries.find_run(reader, named_run)
        of_run = reader.of_run(run_id)
        if splits:
            ids = queries.episode_ids(of_run, run_id, filter=wanted)
            return _splits(of_run, where, ids, limit)
        [row] = queries.overview(of_run, run_id)
        totals = queries.ledger_totals(of_run, run_id, wanted, by=by)
        wrong = ledger_balance(of_run, run_id)
    return LedgerResult(
        run_id=run_id,
        status=row["status"],
        balanced=not wrong,
        wrong=wrong,
        outcomes=totals,
        filter=filter,
    )


def _splits(
    reader: TraceReader, where: Path, episode_ids: Sequence[str], limit: int | None
) -> SplitsResult:
    ids = episode_ids[:limit]
    with ProgressBar("merging episodes", len(ids)) as bar:
        splits, timelines, sampled = splits_of(reader, ids, where, bar.advance)
    rows: list[Mapping[str, object]] = []
    for episode_id, split in splits:
        rows.append({"episode_id": episode_id, **split.model_dump(mode="json")})
    return SplitsResult(
        episodes=len(ids),
        of=len(episode_ids),
        timelines=timelines,
        causes=by_cause([split for _, split in splits]),
        splits=rows,
        sampled=sampled,
    )


def _verdict(run_id: str, status: str, wrong: Sequence[str]) -> str:
    if not wrong:
        return f"run {run_id} ({status}): the ledger balances"
    if status == "finished":
        return (
            f"run {run_id} ({status}): the ledger does not balance for"
            f" {counted(len(wrong), 'call')}"
        )
    are = "is" if len(wrong) == 1 else "are"
    return (
        f"run {run_id} ({status}): {counted(len(wrong), 'call')} {are} missing in the ledger, at"
        " least in part"
    )


def _shown(split: Mapping[str, object]) -> dict[str, object]:
    ids = ("episode_id", "call_id", "parent_call_id")
    names = (*ids, "at_token", "extra_tokens", "cause", "hint")
    row = {name: split[name] for name in names}
    for name in ids:
        row[name] = str(row[name])[:12] if row[name] else row[name]
    return row
