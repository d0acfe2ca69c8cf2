"""`ajet trace rejudge`: re-scores stored episodes with another judge."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from typer import Option

from ajet_sdk.errors import QueryError
from ajet_sdk.judges.load import named_judge
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import ProgressBar
from ajet_tools.cli.arguments import JUDGE_HELP
from ajet_tools.cli.options import pick
from ajet_tools.cli.result import Result
from ajet_tools.cli.trace.options import Fitting, OfRun, Where
from ajet_tools.text import tables as render
from ajet_tools.text.clean import one_line
from ajet_tools.trace import queries
from ajet_tools.trace.decoding import run_config
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.filters import parse
from ajet_tools.trace.rejudge import Changes, compared_over, groups_of
from ajet_tools.trace.rejudge import rejudge as run_rejudge

_SHOWN = 10


@dataclass(frozen=True)
class RejudgeResult(Result):
    run_id: str
    judge: str
    changes: Changes

    @property
    def exit_code(self) -> int:
        verdicts = self.changes.verdicts
        return int(bool(verdicts) and all(verdict.cause for verdict in verdicts))

    def document(self) -> object:
        return {"run_id": self.run_id, **_changes_json(self.changes)}

    def show(self, out: Console) -> None:
        _print_changes(self.changes, self.run_id, self.judge, out)


def rejudge(
    judge: Annotated[str, Option(metavar="JUDGE", help=JUDGE_HELP)],
    run: OfRun = None,
    path: Where = None,
    filter: Fitting = None,
) -> RejudgeResult:
    """Re-score recorded episodes with another judge, and show how rewards, groups and advantages
    change.

    The judge gets `output`, `task`, its metadata and `episode`; `model` and `env` are not
    available. An episode on which it fails has no new reward (never 0). Nothing is written.

    \b
    ajet trace rejudge --judge agent.py:strict
    ajet trace rejudge launcher_record/math --judge math -f "split = 'val'" --json
    """
    reader, _, run = open_named(run, path)
    with reader:
        run_id = queries.find_run(reader, run)
        config = run_config(reader, run_id)
        new_judge = named_judge(judge, config)
        ids = _chosen(reader, run_id, filter)
        with ProgressBar("Judging", len(ids)) as bar:
            groups = groups_of(reader, run_id, ids, whole=compared_over(config))
            changes = asyncio.run(run_rejudge(groups, new_judge, config, progress=bar.advance))
    return RejudgeResult(run_id, judge, changes)


def _chosen(reader: TraceReader, run_id: str, filter: str | None) -> list[str]:
    """Returns the ids of the selected episodes, oldest first. Raises QueryError if there are
    none."""
    where = "true"
    parameters = list[object]()
    if filter:
        parsed = parse(filter)
        where = parsed.sql
        parameters = list(parsed.parameters)
    matches = rows(
        reader,
        f"""
        SELECT e.episode_id FROM episodes e
        WHERE ({where}) AND e.run_id = ? AND NOT e.superseded
        ORDER BY e.started_at, e.episode_id""",
        *parameters,
        run_id,
    )
    if not matches:
        narrowed = " that fits" if filter else ""
        raise QueryError(
            f"run {run_id} has no finished episode{narrowed}; `ajet trace ls` lists them"
        )
    return [row["episode_id"] for row in matches]


def _changes_json(changes: Changes) -> dict[str, object]:
    flipped = [v for v in changes.verdicts if v.flipped]
    return {
        "episodes": len(changes.verdicts),
        "compared": len(changes.both),
        "reward_before": changes.mean("before"),
        "reward_after": changes.mean("after"),
        "tasks": changes.by_task(),
        "changed": [
            pick(v, "episode_id", "task_id", "before", "after") for v in changes.most_changed()
        ],
        "groups": changes.groups(),
        "flipped": {
            "episodes": [v.episode_id for v in flipped],
            "tokens": sum(v.tokens for v in flipped),
        },
        "failures": [
            {"cause": cause, "episodes": [v.episode_id for v in group], "error": group[0].error}
            for cause, group in changes.failures.items()
        ],
        "skipped": changes.skipped,
    }


def _print_changes(changes: Changes, run_id: str, judge: str, out: Console) -> None:
    before = changes.mean("before")
    after = changes.mean("after")
    out.print(
        f"Run {run_id[:12]}, judged by {one_line(judge)}:"
        f" {render.counted(len(changes.verdicts), 'episode')}"
    )
    if before is not None and after is not None:
        change = f"{after - before:+.4g}"
        of = render.counted(len(changes.both), "episode")
        out.print(f"Mean reward {before:.4g} → {after:.4g} ({change}) over {of} with both")
    else:
        out.print("No episode has rewards from both judges.")
    _print_tables(changes, out)
    groups = changes.groups()
    if groups["groups"]:
        out.print(
            f"\nGroups with variance: {groups['before']} → {groups['after']} of {groups['groups']} "
            f"({groups['lost']} lose it, {groups['gained']} gain it)"
        )
    flipped = [v for v in changes.verdicts if v.flipped]
    tokens = render.counted(sum(v.tokens for v in flipped), "sampled token")
    out.print(
        f"Advantages that change sign: in {render.counted(len(flipped), 'episode')}, {tokens}"
    )
    for group in changes.failures.values():
        first = f"{group[0].error} (episode {group[0].episode_id[:12]})"
        out.print(
            one_line(f"The judge failed, {len(group)} × {first}", 400),
            style="yellow",
            soft_wrap=True,
        )
    for cause, count in changes.skipped.items():
        out.print(
            one_line(f"Not judged: {count} × {cause} (the workflow itself failed)"), style="dim"
        )


def _print_tables(changes: Changes, out: Console) -> None:
    tasks = [row for row in changes.by_task() if row["change"]]
    if tasks:
        rows = [{**row, "task_id": row["task_id"][:24]} for row in tasks[:_SHOWN]]
        title = f"\nby task, largest change first ({len(tasks)} changed)"
        out.print(render.table(rows, out.width, title=title))
    changed = changes.most_changed()
    if changed:
        rows = [
            {
                "episode": v.episode_id[:12],
                "task_id": v.task_id[:24],
                "attempt": v.attempt,
                "before": v.before,
                "after": v.after,
            }
            for v in changed[:_SHOWN]
        ]
        out.print(
            render.table(
                rows, out.width, title=f"\nepisodes, largest change first ({len(changed)} changed)"
            )
        )
