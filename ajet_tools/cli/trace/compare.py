"""`ajet trace compare`: compares runs by their configs and results, also task by task, or two.

`ajet trace explain`: explains what changed at a step of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ajet_sdk.errors import ConfigError, QueryError
from ajet_sdk.protocols import TraceReader
from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.cli.trace.diff import Decoding, Split, compare_two
from ajet_tools.cli.trace.options import NoPager, Where
from ajet_tools.text import tables as render
from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import paged
from ajet_tools.trace import queries
from ajet_tools.trace.compare.explain import explain, lines_of
from ajet_tools.trace.locate import open_named
from ajet_tools.trace.queries.experiments import (
    TaskReward,
    by_task,
    differing,
    groups,
    leaderboard,
    run_names,
    task_rewards,
)
from ajet_tools.trace.queries.runs import REWARDS, RunOverview, steps_of

_TASKS = 40
_RUNS = 30


def compare(
    targets: Annotated[
        list[str] | None, Argument(metavar="[A B] [PATH]", show_default=False)
    ] = None,
    limit: Annotated[int | None, Option("--limit", "-n", min=2, show_default=False)] = None,
    tasks: Annotated[
        bool, Option("--by-task", help="Tasks by runs: the mean rewards of the last step.")
    ] = False,
    task: Annotated[str | None, Option(metavar="TASK")] = None,
    path_b: Annotated[
        Path | None, Option(metavar="PATH", help="The trace of B, if it is another one.")
    ] = None,
    split: Annotated[Split | None, Option()] = None,
    decoding: Annotated[Decoding | None, Option()] = None,
    no_pager: NoPager = False,
    as_json: AsJson = False,
) -> None:
    """Compare the runs in and below a directory: what differs in their configs, and how they did.
    Or compare two: two episodes message by message, two runs or steps by their rewards.

    Of many runs: those that differ by their seed only are one group, with the mean of their last
    rewards and its 95 % interval; below six runs, the least and the greatest. Tasks are compared by
    validations, else by training.

    Two runs are compared by a sign-flip permutation test of the mean difference, paired by task;
    below six tasks no p-value is given.

    Args:
        targets: A directory of runs; or two episodes or runs, by id, name or path (RUN@STEP too), and their trace.
        limit: Only the newest N runs. Default: 30, with --task all.
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
        if len(targets) > 3:
            raise ConfigError("name two episodes or runs, and at most one trace after them")
        a, b, *rest = targets
        path = Path(rest[0]) if rest else None
        compare_two(a, b, path, path_b, split, decoding, as_json)
        return
    path = Path(targets[0]) if targets else None
    reader, where, _ = open_named(None, path)
    with reader:
        runs = queries.overview(reader)[: limit or (_RUNS if task is None else None)]
        names = run_names(runs)
        if task is not None:
            _compare_task(reader, where, runs, task, no_pager, as_json)
            return
        if tasks:
            rewards = task_rewards(reader, [*names])
            if as_json:
                print_json({"trace": str(where), "runs": names, "rewards": rewards})
                return
            table = _by_task(rewards, names)
            with paged(no_pager) as out:
                out.print(render.table(table[:_TASKS], out.width))
                if len(table) > _TASKS:
                    out.print(
                        f"and {len(table) - _TASKS:,} more, which differ less; --json has all",
                        style="dim",
                    )
            return
        settings = differing(reader, [run["run_id"] for run in runs])
    grouped = groups(runs, settings)
    if as_json:
        rows = [{**run, "settings": settings[run["run_id"]]} for run in runs]
        print_json(
            {"trace": str(where), "runs": rows, "groups": [asdict(group) for group in grouped]}
        )
        return
    short = _short([key for values in settings.values() for key in values])
    means = [name for name in REWARDS if any(run.get(name) is not None for run in runs)]
    with paged(no_pager) as out:
        rows = [
            {
                "run": names[run["run_id"]],
                **{short[k]: v for k, v in settings[run["run_id"]].items()},
            }
            | {name: run.get(name) for name in means}
            | {"status": run["status"], "step": steps_of(run)}
            for run in runs
        ]
        out.print(render.table(rows, out.width))
        out.print(
            "; ".join(f"{name}: {REWARDS[name]}" for name in means), style="dim", soft_wrap=True
        )
        if len(grouped) < len(runs):
            seeds = [
                {short[key]: value for key, value in group.settings.items()}
                | {
                    "runs": len(group.runs),
                    group.of or "reward": group.mean,
                    "low": group.low,
                    "high": group.high,
                }
                for group in grouped
            ]
            out.print(render.table(seeds, out.width, title="\nover seeds"))
            out.print(
                "low, high: 95 % interval from six runs on, else the least and the greatest",
                style="dim",
            )


def _short(keys: Sequence[str]) -> dict[str, str]:
    """Shortens keys to their last part, if that is unique."""
    last = {key: key.rpartition(".")[2] for key in keys}
    return {
        key: name if [*last.values()].count(name) == 1 else key.removeprefix("ajet.")
        for key, name in last.items()
    }


def _by_task(rewards: Sequence[TaskReward], names: Mapping[str, str]) -> list[dict[str, object]]:
    """Returns a row per task with a column per run, at the last step, by decreasing difference."""
    table = by_task(rewards, "run_id")
    shown = [run_id for run_id in names if any(run_id in row.rewards for row in table)]
    return [
        {
            "task": one_line(row.task, 60),
            **{names[run_id]: row.rewards.get(run_id) for run_id in shown},
        }
        for row in table
    ]


def _compare_task(
    reader: TraceReader,
    where: Path,
    runs: Sequence[RunOverview],
    task: str,
    no_pager: bool,
    as_json: bool,
) -> None:
    """Compares all runs on one task: ranking, and mean reward by step."""
    names = run_names(runs)
    task_id, text = _named_task(task_rewards(reader, [*names]), task)
    table, history = leaderboard(reader, runs, task_id), task_rewards(reader, [*names], task_id)
    called = {standing["run_id"]: standing["run"] for standing in table}
    at = {(row["step"], row["run_id"]): row["reward"] for row in history}
    by_step = [
        {"step": step, **{name: at.get((step, run_id)) for run_id, name in called.items()}}
        for step in sorted({step for step, _ in at})
    ]
    if as_json:
        known = {"trace": str(where), "runs": names, "task_id": task_id, "task": text}
        print_json({**known, "leaderboard": table, "rewards": by_step})
        return
    with paged(no_pager) as out:
        out.print(render.table(table, out.width, title=one_line(text, 100)))
        out.print(render.table(by_step, out.width, title="\nby step"))


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


def explain_(
    run: Annotated[str, Argument(metavar="RUN", help="A run, by its id, name or path.")] = ".",
    path: Where = None,
    step: Annotated[
        int | None, Option(min=0, help="Default: largest change of reward.", show_default=False)
    ] = None,
    no_pager: NoPager = False,
    as_json: AsJson = False,
) -> None:
    """Say what changed at a step of a run, against the step or validation before, with the episodes
    behind it.

    Tasks that fell and rose, and where their attempts part; groups without signal, failures,
    splits, length, tool calls, entropy, KL, signs that the judge is gamed, what the advantages
    pushed up and down. What did not change is left out.

    \b
    ajet trace explain launcher_record/math
    ajet trace explain launcher_record/math --step 20
    ajet trace explain 9d1c launcher_record --json
    """
    reader, where, meant = open_named(run, path)
    with reader:
        explanation = explain(reader, queries.find_run(reader, meant), step, where)
    if as_json:
        print_json(asdict(explanation))
        return
    with paged(no_pager) as out:
        for line in lines_of(explanation):
            out.print(line, soft_wrap=True)
