"""`ajet trace ledger`: what became of every sampled token, and where calls did not merge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import ProgressBar, visible
from ajet_sdk.trace.reader import ledger_balance
from ajet_sdk.types import Split
from ajet_tools.cli.options import AsJson, pick, print_json
from ajet_tools.cli.trace.options import Fitting, Newest, NoPager, OfRun, WhereOrRun
from ajet_tools.text import tables as render
from ajet_tools.text.clean import counted, one_line
from ajet_tools.text.tables import paged
from ajet_tools.trace import queries
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.filters import parse
from ajet_tools.trace.queries.runs import LedgerTotal
from ajet_tools.trace.splits import by_cause, splits_of

_UNBOOKED = 20
_WORST = 20


def ledger(
    path: WhereOrRun = None,
    run: OfRun = None,
    filter: Fitting = None,
    by_step: Annotated[bool, Option("--by-step", help="One row per step and outcome.")] = False,
    splits: Annotated[bool, Option("--splits")] = False,
    limit: Newest = None,
    no_pager: NoPager = False,
    as_json: AsJson = False,
) -> None:
    """Show what became of every sampled token of a run, and whether the ledger balances.

    Exits with 1 if a finished run's ledger does not balance. With --splits, shows where calls did
    not merge into one timeline: the token, the cause and the cost.

    Args:
        splits: Show the splits of timelines instead.

    \b
    ajet trace ledger
    ajet trace ledger launcher_record/math --by-step
    ajet trace ledger -f "step > 10 and 'werewolf' in agents" --splits
    """
    wanted = parse(filter) if filter else None
    reader, where, named_run = open_named(run, path)
    with reader:
        run_id = queries.find_run(reader, named_run)
        if splits:
            ids = queries.episode_ids(reader, run_id, filter=wanted)
            _show_splits(reader, where, ids, limit, no_pager, as_json)
            return
        [row] = [row for row in queries.overview(reader) if row["run_id"] == run_id]
        totals = queries.ledger_totals(reader, run_id, wanted, by_step=by_step)
        wrong = ledger_balance(reader, run_id)
    status = row["status"]
    if as_json:
        print_json(
            {
                "run_id": run_id,
                "status": status,
                "balanced": not wrong,
                "wrong": wrong,
                "outcomes": totals,
            }
        )
    else:
        _print_ledger(totals, _verdict(run_id, status, wrong), wrong, filter, no_pager)
    if wrong and status == "finished":
        raise typer.Exit(1)


def _print_ledger(
    totals: Sequence[LedgerTotal],
    verdict: str,
    wrong: Sequence[str],
    filter: str | None,
    no_pager: bool,
) -> None:
    tokens = sum(row["tokens"] for row in totals) or 1
    rows = [{**row, "share": f"{row['tokens'] / tokens:.1%}"} for row in totals]
    with paged(no_pager) as out:
        if filter:
            out.print(
                f"of episodes that match {one_line(filter)}; the verdict is for the whole run",
                style="dim",
            )
        out.print(
            render.table(rows, out.width, right=["share"]) if rows else "no tokens in the ledger"
        )
        out.print(verdict, soft_wrap=True)
        for line in wrong[:_UNBOOKED]:
            out.print(f"  {visible(line)}", soft_wrap=True)
        if len(wrong) > _UNBOOKED:
            out.print(f"  and {len(wrong) - _UNBOOKED:,} more; --json lists all", style="dim")


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


def _show_splits(
    reader: TraceReader,
    where: Path,
    episode_ids: Sequence[str],
    limit: int | None,
    no_pager: bool,
    as_json: bool,
) -> None:
    ids = episode_ids[:limit]
    with ProgressBar("merging episodes", len(ids)) as bar:
        splits, timelines, sampled = splits_of(reader, ids, where, bar.advance)
    causes = by_cause([split for _, split in splits])
    if as_json:
        rows = [
            {"episode_id": episode_id, **split.model_dump(mode="json")}
            for episode_id, split in splits
        ]
        print_json(
            {
                "episodes": len(ids),
                "of": len(episode_ids),
                "timelines": timelines,
                "causes": causes,
                "splits": rows,
            }
        )
        return
    with paged(no_pager) as out:
        counts = (
            (len(ids), "episode"),
            (timelines, "timeline"),
            (sampled, "sampled token"),
            (len(splits), "split"),
        )
        out.print(", ".join(render.counted(count, noun) for count, noun in counts))
        if len(ids) < len(episode_ids):
            out.print(
                f"newest {len(ids):,} of {render.counted(len(episode_ids), 'episode')}; the others were not"
                " examined"
            )
        if causes:
            out.print(render.table(causes, out.width, title="\nby cause"))
            worst = sorted(splits, key=lambda pair: -pair[1].extra_tokens)[:_WORST]
            shown = [_shown(episode_id, split) for episode_id, split in worst]
            of_all = (
                f", {len(shown)} of {len(splits):,}; --json lists all"
                if len(shown) < len(splits)
                else ""
            )
            out.print(render.table(shown, out.width, title=f"\nmost expensive{of_all}"))


def _shown(episode_id: str, split: Split) -> dict[str, object]:
    ids = {
        "episode_id": episode_id,
        "call_id": split.call_id,
        "parent_call_id": split.parent_call_id,
    }
    short = {name: id and id[:12] for name, id in ids.items()}
    return {**short, **pick(split, "at_token", "extra_tokens", "cause", "hint")}
