"""`ajet trace replay rejudge`: what a workflow and a judge make of stored episodes when they are run again."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import typer

from ajet_sdk.config.config import Config
from ajet_sdk.config.objects import load_object
from ajet_sdk.errors import ConfigError, QueryError
from ajet_sdk.judges.load import named_judge
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import visible
from ajet_sdk.reporting.progress_bar import ProgressBar
from ajet_tools.cli.arguments import JUDGE_HELP
from ajet_tools.cli.options import AsJson, pick, print_json
from ajet_tools.cli.trace.options import Fitting, OfRun, Where, WhereOrRun
from ajet_tools.text import tables as render
from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import diff_text
from ajet_tools.trace import queries
from ajet_tools.trace.compare.requests import Difference
from ajet_tools.trace.decoding import run_config
from ajet_tools.trace.locate import open_located, open_named
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.filters import parse
from ajet_tools.trace.rerun.rejudge import Changes, compared_over, groups_of
from ajet_tools.trace.rerun.rejudge import rejudge as run_rejudge
from ajet_tools.trace.rerun.replay import Replay, recorded_episode
from ajet_tools.trace.rerun.replay import replay as run_replay

app = typer.Typer(add_completion=False)

_SHOWN = 10


@app.command()
def replay(
    id: Annotated[str, typer.Argument(metavar="ID", help="An episode, by a unique prefix of its id.")],
    path: Where = None,
    workflow: Annotated[
        str | None,
        typer.Option("--workflow", "-w", metavar="AGENT", help="file.py:function. Default: the run's workflow."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Time limit of the workflow in seconds.")
    ] = 120.0,
    debug: Annotated[
        str, typer.Option("--debug", metavar="TAGS", help="Stop at ajet.bp(tag) for these tags, joined by |.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Run an episode's workflow again with the recorded replies, and check that it makes the same calls.

    No model and no judge is called, and nothing is written. Exits with 1 if the calls differ.

    \b
    ajet trace replay 3f2a91
    ajet trace replay 3f2a91 launcher_record/math --workflow agent.py:solve
    ajet trace replay 3f2a91 --debug look
    """
    reader, _ = open_located(path)
    with reader:
        recorded = recorded_episode(reader, queries.find(reader, id, "episode").id)
        config = run_config(reader, recorded.run_id)
    agent = _workflow(workflow, config)
    tags = [tag for tag in debug.split("|") if tag]
    result = asyncio.run(run_replay(recorded, agent, config, timeout=timeout, debug_tags=tags))
    if as_json:
        print_json(_replay_json(result))
    else:
        _print_replay(result)
    if not result.same:
        raise typer.Exit(1)


def _workflow(given: str | None, config: Config) -> object:
    recorded = config.rollout.user_workflow
    name = given or recorded
    if not name:
        raise ConfigError("the run recorded no workflow; pass --workflow file.py:function")
    try:
        return load_object(name) if given else config.load(name)
    except ConfigError as error:
        if given:
            raise
        raise ConfigError(
            f"{error}\nThis is the workflow that the run recorded; pass its current location with --workflow "
            "file.py:function"
        ) from error


def _replay_json(result: Replay) -> dict[str, object]:
    return {
        "episode_id": result.recorded.episode_id,
        **pick(result, "same", "same_output", "requests", "requests_now", "error"),
        "output": result.replayed.output,
        "differences": [
            pick(difference, "kind", "agent", "position", "call_id", "parts", "lines")
            for difference in result.differences
        ],
    }


def _print_replay(result: Replay) -> None:
    out = render.console()
    if result.differences:
        out.print(_difference_title(result.differences[0]), style="bold")
        out.print(diff_text(result.differences[0].lines))
        kinds = [difference.kind for difference in result.differences]
        parts = [f"{kinds.count(kind)} {kind}" for kind in ("changed", "missing", "extra") if kind in kinds]
        out.print(
            f"\nThe workflow makes different calls: {', '.join(parts)} ({result.requests} recorded, "
            f"{result.requests_now} now). --json lists all differences."
        )
    else:
        out.print(f"No difference: {render.counted(result.requests, 'call')}.")
    if result.error is not None:
        out.print(visible(f"The workflow failed in the replay, but not in the run: {result.error}"), style="red")
    if not result.same_output:
        out.print("The output differs:")
        out.print(f"- {one_line(result.recorded.output, 400)}\n+ {one_line(result.replayed.output, 400)}")


def _difference_title(difference: Difference) -> str:
    agent = f" of agent {difference.agent}" if difference.agent != "default" else ""
    place = f"Request {difference.position + 1}{agent}"
    if difference.kind == "missing":
        return one_line(f"{place}, call {(difference.call_id or '')[:12]}, is no longer made:")
    if difference.kind == "extra":
        return one_line(f"{place} is new:")
    called = (difference.call_id or "")[:12]
    return one_line(f"{place}, call {called}, differs in {', '.join(difference.parts)}:")


@app.command()
def rejudge(
    judge: Annotated[str, typer.Option("--judge", metavar="JUDGE", help=JUDGE_HELP)],
    path: WhereOrRun = None,
    run: OfRun = None,
    filter: Fitting = None,
    split: Annotated[
        Literal["train", "val", "trial"] | None, typer.Option("--split", help="Only these episodes.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Maximum number of episodes judged concurrently.")
    ] = 8,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout", min=0.1, metavar="SECONDS", help="Time limit of a judgement, in seconds. Default: the run's."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Re-score recorded episodes with another judge, and show how rewards, groups and advantages change.

    The judge gets `output`, `task`, its metadata and `episode`; `model` and `env` are not available. An episode on
    which it fails has no new reward (never 0). Nothing is written.

    \b
    ajet trace rejudge --judge agent.py:strict
    ajet trace rejudge launcher_record/math --judge math --split val --json
    """
    reader, _, run = open_named(run, path)
    with reader:
        run_id = queries.find_run(reader, run)
        config = run_config(reader, run_id)
        new_judge = named_judge(judge, config)
        ids = _chosen(reader, run_id, filter, split)
        with ProgressBar("Judging", len(ids)) as bar:
            groups = groups_of(reader, run_id, ids, whole=compared_over(config))
            work = run_rejudge(groups, new_judge, config, parallel=concurrency, timeout=timeout, progress=bar.advance)
            changes = asyncio.run(work)
    if as_json:
        print_json({"run_id": run_id, **_changes_json(changes)})
    else:
        _print_changes(changes, run_id, judge)
    if changes.verdicts and all(verdict.cause for verdict in changes.verdicts):
        raise typer.Exit(1)


def _chosen(reader: TraceReader, run_id: str, filter: str | None, split: str | None) -> list[str]:
    """The ids of the selected episodes, oldest first. Raises QueryError if there are none."""
    where, parameters = "true", list[object]()
    if filter:
        parsed = parse(filter)
        where, parameters = parsed.sql, list(parsed.parameters)
    matches = rows(
        reader,
        f"""
        SELECT e.episode_id FROM episodes e
        WHERE ({where}) AND e.run_id = ? AND NOT e.superseded AND (?::VARCHAR IS NULL OR e.split = ?)
        ORDER BY e.started_at, e.episode_id""",
        *parameters,
        run_id,
        split,
        split,
    )
    if not matches:
        narrowed = " that fits" if filter or split else ""
        raise QueryError(f"run {run_id} has no finished episode{narrowed}; `ajet trace ls` lists them")
    return [row["episode_id"] for row in matches]


def _changes_json(changes: Changes) -> dict[str, object]:
    flipped = [v for v in changes.verdicts if v.flipped]
    return {
        "episodes": len(changes.verdicts),
        "compared": len(changes.both),
        "reward_before": changes.mean("before"),
        "reward_after": changes.mean("after"),
        "tasks": changes.by_task(),
        "changed": [pick(v, "episode_id", "task_id", "before", "after") for v in changes.most_changed()],
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


def _print_changes(changes: Changes, run_id: str, judge: str) -> None:
    out = render.console()
    before, after = changes.mean("before"), changes.mean("after")
    out.print(f"Run {run_id[:12]}, judged by {one_line(judge)}: {render.counted(len(changes.verdicts), 'episode')}")
    if before is not None and after is not None:
        change = f"{after - before:+.4g}"
        of = render.counted(len(changes.both), "episode")
        out.print(f"Mean reward {before:.4g} → {after:.4g} ({change}) over {of} with both")
    else:
        out.print("No episode has rewards from both judges.")
    _print_tables(changes)
    groups = changes.groups()
    if groups["groups"]:
        out.print(
            f"\nGroups with variance: {groups['before']} → {groups['after']} of {groups['groups']} "
            f"({groups['lost']} lose it, {groups['gained']} gain it)"
        )
    flipped = [v for v in changes.verdicts if v.flipped]
    tokens = render.counted(sum(v.tokens for v in flipped), "sampled token")
    out.print(f"Advantages that change sign: in {render.counted(len(flipped), 'episode')}, {tokens}")
    for group in changes.failures.values():
        first = f"{group[0].error} (episode {group[0].episode_id[:12]})"
        out.print(one_line(f"The judge failed, {len(group)} × {first}", 400), style="yellow", soft_wrap=True)
    for cause, count in changes.skipped.items():
        out.print(one_line(f"Not judged: {count} × {cause} (the workflow itself failed)"), style="dim")


def _print_tables(changes: Changes) -> None:
    out = render.console()
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
        out.print(render.table(rows, out.width, title=f"\nepisodes, largest change first ({len(changed)} changed)"))
