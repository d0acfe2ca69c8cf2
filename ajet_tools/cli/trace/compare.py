"""`ajet trace compare`: compares runs by their configs and results, also task by task, or two.

`ajet trace explain`: explains what changed at a step of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from ajet_sdk.errors import ConfigError, QueryError
from ajet_sdk.protocols import TraceReader
from ajet_tools.cli.result import HIDDEN, Result
from ajet_tools.cli.trace.diff import Decoding, EpisodePairResult, RunPairResult, Split, compare_two
from ajet_tools.cli.trace.options import Where
from ajet_tools.text import tables as render
from ajet_tools.text.clean import one_line
from ajet_tools.trace import queries
from ajet_tools.trace.compare.explain import Explanation, explain, lines_of
from ajet_tools.trace.compare.runs import RunComparison, compare_runs, run_tables, task_tables
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.experiments import (
    Group,
    TaskReward,
    leaderboard,
    run_names,
    task_rewards,
)
from ajet_tools.trace.queries.runs import RunOverview

_RUNS = 30


@dataclass(frozen=True)
class RunsResult(Result):
    """Many runs: their settings and rewards."""

    trace: Path
    runs: Sequence[Mapping[str, Any]]
    groups: Sequence[Group]
    names: Mapping[str, str] = field(default_factory=dict, metadata=HIDDEN)

    paged = True

    def show(self, out: Console) -> None:
        comparison = RunComparison(self.runs, self.groups, self.names)
        for part in run_tables(comparison, out.width):
            out.print(part, soft_wrap=isinstance(part, Text))


@dataclass(frozen=True)
class TasksResult(Result):
    """Tasks by runs: the mean rewards of the last step."""

    trace: Path
    runs: Mapping[str, str]
    rewards: Sequence[TaskReward]

    paged = True

    def show(self, out: Console) -> None:
        for part in task_tables(self.rewards, self.runs, out.width):
            out.print(part)


@dataclass(frozen=True)
class TaskResult(Result):
    """One task: who solves it best, and runs by steps."""

    trace: Path
    runs: Mapping[str, str]
    task_id: str
    task: str
    leaderboard: Sequence[Mapping[str, Any]]
    rewards: Sequence[Mapping[str, object]]

    paged = True

    def show(self, out: Console) -> None:
        out.print(render.table(self.leaderboard, out.width, title=one_line(self.task, 100)))
        out.print(render.table(self.rewards, out.width, title="\nby step"))


def compare(
    targets: Annotated[
        list[str] | None, Argument(metavar="[A B] [PATH [PATH]]", show_default=False)
    ] = None,
    tasks: Annotated[
        bool, Option("--by-task", help="Tasks by runs: the mean rewards of the last step.")
    ] = False,
    task: Annotated[str | None, Option(metavar="TASK")] = None,
    split: Annotated[Split | None, Option()] = None,
    decoding: Annotated[Decoding | None, Option()] = None,
) -> RunsResult | TasksResult | TaskResult | EpisodePairResult | RunPairResult:
    """Compare the runs in and below a directory: what differs in their configs, and how they did.
    Or compare two: two episodes message by message, two runs or steps by their rewards.

    Of many runs, the newest 30: those that differ by their seed only are one group, with the mean of their last
    rewards and its 95 % interval; below six runs, the least and the greatest. Tasks are compared by
    validations, else by training.

    Two runs are compared by a sign-flip permutation test of the mean difference, paired by task;
    below six tasks no p-value is given.

    Args:
        targets: A directory of runs; or two episodes or runs, by id, name or path (RUN@STEP too), and their trace,
            or that of A and that of B.
        task: One task, by id or a part of its text: who solves it best, and runs by steps.
        split: Of two runs: the split to compare. Default: the last validation of both.
        decoding: Of two runs: the decoding to compare. Default: sampled attempts, if both have any.

    \b
    ajet trace compare launcher_record/lr-sweep
    ajet trace compare launcher_record --by-task
    ajet trace compare launcher_record --task "30+94"
    ajet trace compare 3f2a91 77ab03
    ajet trace compare 9d1c 41e0 launcher_record/math --json
    ajet trace compare launcher_record/math@0 launcher_record/math@40
    """
    if targets is not None and len(targets) > 1:
        if len(targets) > 4:
            raise ConfigError("name two episodes or runs, and at most two traces after them")
        a, b, *traces = targets
        return compare_two(a, b, [Path(trace) for trace in traces], split, decoding)
    reader, where, _ = open_named(targets[0] if targets else None)
    with reader, reader.steady():
        runs = queries.overview(reader)
        if task is not None:
            return _compare_task(reader, where, runs, task)
        runs = runs[:_RUNS]
        if tasks:
            names = run_names(runs)
            return TasksResult(where, names, task_rewards(reader, [*names]))
        compared = compare_runs(reader, runs)
    return RunsResult(where, compared.runs, compared.groups, compared.names)


def _compare_task(
    reader: TraceReader, where: Path, runs: Sequence[RunOverview], task: str
) -> TaskResult:
    """Compares all runs on one task: ranking, and mean reward by step."""
    names = run_names(runs)
    task_id, text = _named_task(task_rewards(reader, [*names]), task)
    table = leaderboard(reader, runs, task_id)
    rewards: dict[int | None, dict[str, float | None]] = {}
    for row in task_rewards(reader, [*names], task_id):
        rewards.setdefault(row["step"], {})[row["run_id"]] = row["reward"]
    by_step: list[Mapping[str, object]] = []
    for step in sorted(rewards):  # type: ignore[type-var]
        of_runs = {standing["run"]: rewards[step].get(standing["run_id"]) for standing in table}
        by_step.append({"step": step, **of_runs})
    return TaskResult(where, names, task_id, text, table, by_step)


def _named_task(rewards: Sequence[TaskReward], task: str) -> tuple[str, str]:
    """Returns id and text of a task, given its id or a part of its text. Raises QueryError."""
    fitting = {row["task_id"]: row["task"] for row in rewards if row["task_id"] == task}
    fitting = fitting or {
        row["task_id"]: row["task"] for row in rewards if task.lower() in row["task"].lower()
    }
    if len(fitting) != 1:
        listed = "; ".join(one_line(text, 40) for text in [*fitting.values()][:5])
        raise QueryError(
            f"several tasks fit {task!r}: {listed}"
            if fitting
            else f"no task of these runs fits {task!r}"
        )
    return fitting.popitem()


@dataclass(frozen=True)
class ExplainResult(Result):
    explanation: Explanation

    paged = True

    def document(self) -> object:
        return asdict(self.explanation)

    def show(self, out: Console) -> None:
        for line in lines_of(self.explanation):
            out.print(line, soft_wrap=True)


def explain_(
    run: Annotated[str, Argument(metavar="RUN", help="A run, by its id, name or path.")] = ".",
    path: Where = None,
    step: Annotated[
        int | None, Option(min=0, help="Default: largest change of reward.", show_default=False)
    ] = None,
) -> ExplainResult:
    """Say what changed at a step of a run, against the step or validation before, with the episodes
    behind it.

    Tasks that fell and rose, and where their attempts part; groups without signal, failures,
    splits, length, tool calls, entropy, KL, a judge of weight 0 that falls while the reward rises.
    What did not change is left out.

    \b
    ajet trace explain launcher_record/math
    ajet trace explain launcher_record/math --step 20
    ajet trace explain 9d1c launcher_record --json
    """
    reader, where, meant = open_named(run, path)
    with reader, reader.steady():
        explanation = explain(reader, queries.find_run(reader, meant), step, where)
    return ExplainResult(explanation)
