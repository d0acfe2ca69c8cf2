"""Many runs side by side: settings and rewards, tasks by runs, and rewards by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ajet_sdk.protocols import TraceReader
from ajet_tools.text import tables
from ajet_tools.text.clean import one_line
from ajet_tools.trace.queries.experiments import (
    Group,
    TaskReward,
    by_task,
    differing,
    groups,
    run_names,
    task_rewards,
)
from ajet_tools.trace.queries.runs import REWARDS, RunOverview, steps_of

_TASKS = 40


@dataclass(frozen=True)
class RunComparison:
    runs: Sequence[Mapping[str, Any]]
    """Their overviews, each with the settings in which they differ."""
    groups: Sequence[Group]
    """Runs that differ by their seed only."""
    names: Mapping[str, str]


def compare_runs(reader: TraceReader, runs: Sequence[RunOverview]) -> RunComparison:
    settings = differing(reader, [run["run_id"] for run in runs])
    rows = [{**run, "settings": settings[run["run_id"]]} for run in runs]
    return RunComparison(rows, groups(runs, settings), run_names(runs))


def run_tables(comparison: RunComparison, width: int) -> Iterator[RenderableType]:
    """Formats the runs and, where seeds differ, the groups over seeds."""
    runs = comparison.runs
    short = _short([*runs[0]["settings"]] if runs else [])  # every run has the same keys
    means = [name for name in REWARDS if any(run.get(name) is not None for run in runs)]
    rows: list[dict[str, object]] = []
    for run in runs:
        row: dict[str, object] = {"run": comparison.names[run["run_id"]]}
        row |= {short[key]: value for key, value in run["settings"].items()}
        row |= {name: run.get(name) for name in means}
        row |= {"status": run["status"], "step": steps_of(run)}  # type: ignore[arg-type]
        rows.append(row)
    yield tables.table(rows, width)
    yield Text("; ".join(f"{name}: {REWARDS[name]}" for name in means), style="dim")
    if len(comparison.groups) == len(runs):
        return
    seeds: list[dict[str, object]] = []
    for group in comparison.groups:
        row = {short[key]: value for key, value in group.settings.items()}
        row |= {"runs": len(group.runs), group.of or "reward": group.mean}
        row |= {"low": group.low, "high": group.high}
        seeds.append(row)
    yield tables.table(seeds, width, title="\nover seeds")
    note = "low, high: 95 % interval from six runs on, else the least and the greatest"
    yield Text(note, style="dim")


def _short(keys: Sequence[str]) -> dict[str, str]:
    """Shortens keys to their last part, if that is unique."""
    last = {key: key.rpartition(".")[2] for key in keys}
    counts = [*last.values()]
    short: dict[str, str] = {}
    for key, name in last.items():
        short[key] = name if counts.count(name) == 1 else key.removeprefix("ajet.")
    return short


def task_tables(
    rewards: Sequence[TaskReward], names: Mapping[str, str], width: int, title: str = ""
) -> Iterator[RenderableType]:
    """Formats tasks by runs at their last step, or by the steps of a single run; largest
    difference first."""
    rows = by_task(rewards, "run_id" if len(names) > 1 else "step")
    known = set[str | int]().union(*(row.rewards for row in rows))
    columns: list[str | int] = [run_id for run_id in names if run_id in known]
    if len(names) == 1:
        columns = sorted(known)
    table: list[dict[str, object]] = []
    for row in rows[:_TASKS]:
        cells: dict[str, object] = {"task": one_line(row.task, 60)}
        for column in columns:
            cells[names.get(str(column), f"step {column}")] = row.rewards.get(column)
        table.append(cells)
    yield tables.table(table, width, title=title)
    if len(rows) > _TASKS:
        more = len(rows) - _TASKS
        yield Text(f"and {more:,} more, which differ less; --json has all", style="dim")


def step_rows(rewards: Sequence[TaskReward], names: Mapping[str, str]) -> list[dict[str, object]]:
    """Returns a row per step with the mean reward of each run, over all its attempts."""
    totals: dict[int, dict[str, tuple[float, int]]] = {}
    for row in rewards:
        runs = totals.setdefault(row["step"], {})
        total, attempts = runs.get(row["run_id"], (0.0, 0))
        added = row["reward"] * row["attempts"]
        runs[row["run_id"]] = (total + added, attempts + row["attempts"])
    rows: list[dict[str, object]] = []
    for step in sorted(totals):
        cells: dict[str, object] = {"step": step}
        for run_id, name in names.items():
            total, attempts = totals[step].get(run_id, (0.0, 0))
            cells[name] = total / attempts if attempts else None
        rows.append(cells)
    return rows


def side_by_side(
    reader: TraceReader, runs: Sequence[RunOverview], width: int
) -> Iterator[RenderableType]:
    """Formats all views of some runs; of one run, its tasks by steps."""
    names = run_names(runs)
    rewards = task_rewards(reader, [*names])
    if len(runs) > 1:
        yield from run_tables(compare_runs(reader, runs), width)
        yield tables.table(step_rows(rewards, names), width, title="\nmean reward by step")
    yield from task_tables(rewards, names, width, title="\ntasks, largest difference first")
