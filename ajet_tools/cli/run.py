"""`ajet run` scores an agent over tasks; `ajet baseline` scores it before training and advises how
to train it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from typer import Option

from ajet_sdk import run as sdk
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import ProgressBar, echo
from ajet_sdk.reporting.results import Report
from ajet_sdk.tasks.load import load_tasks
from ajet_tools.cli.arguments import (
    AgentAndOverrides,
    AgentOptions,
    HeldOutTasks,
    MostTasks,
    Tasks,
    WithLogview,
    split_arguments,
)
from ajet_tools.cli.options import AsJson, pick, print_json
from ajet_tools.cli.viewer import logview

_NEARLY_ALL = 0.95
"""pass@1 above which little is left to learn."""
_FEW = 0.25
"""With a smaller share of tasks with signal, most attempts of a step are useless."""
_MANY = 64
"""Number of unsuccessful attempts from which a task set is likely beyond the model."""


def run(
    arguments: AgentAndOverrides = None,
    *,
    tasks: Tasks = None,
    answering: AgentOptions,
    k: Annotated[int, Option("--attempts", "-k", min=1, help="Attempts per task, for pass@k.")] = 1,
    limit: MostTasks = None,
    with_logview: WithLogview = False,
    as_json: AsJson = False,
) -> None:
    """Run an agent over tasks and score it; nothing is trained.

    \b
    ajet run agent.py:solve --judge agent.py:exact --tasks tasks.jsonl \\
      --base-url http://127.0.0.1:8000/v1 --model NAME -k 4
    ajet run agent.py:solve --judge math --tasks tasks.jsonl --model PATH
    ajet run agent.py:solve --judge exact --tasks tasks.jsonl \\
      --scripted replies.py:reply --limit 3
    """
    agent, overrides = split_arguments(arguments or [])
    if answering.conf is None and agent is None:
        raise ConfigError(
            "no agent given: name it (agent.py:solve) or pass a config file (--conf FILE)"
        )
    if answering.conf is None and tasks is None:
        raise ConfigError("no tasks given: pass --tasks tasks.jsonl")
    # named tasks replace the validation tasks of the config file
    unread = {"task_reader.jsonl_dataset_file.validation": {"file_path": None} if tasks else None}
    config = answering.config(agent, overrides, tasks=tasks, more=unread)
    with logview(config.directory, with_logview):
        sets = load_tasks(config)
        chosen = (sets.train if tasks is not None or not sets.val else sets.val)[:limit]
        with ProgressBar("Episodes", len(chosen) * k, quiet=as_json) as bar:
            report = sdk.run(config, tasks=chosen, k=k, on_episode=lambda episode: bar.advance())
    if as_json:
        print_json(_as_json(report))
    else:
        echo(str(report))
    raise typer.Exit(0 if report.reward is not None else 1)


def _as_json(report: Report) -> dict[str, object]:
    return {
        **pick(report, "run_id", "directory", "reward", "pass_at", "failures", "notices"),
        "tasks": [
            {
                "task_id": score.task.task_id,
                "main_query": score.task.main_query,
                **pick(score, "reward", "solved", "failed"),
                "episodes": [
                    pick(
                        episode, "episode_id", "attempt", "status", "reward", "is_success", "error"
                    )
                    for episode in score.episodes
                ],
            }
            for score in report.tasks
        ],
    }


def baseline(
    arguments: AgentAndOverrides = None,
    *,
    tasks: Tasks = None,
    val_tasks: HeldOutTasks = None,
    answering: AgentOptions,
    k: Annotated[int, Option("--attempts", "-k", min=2, help="Attempts per task, for pass@k.")] = 8,
    limit: Annotated[
        int, Option("--limit", "-n", min=1, help="Maximum number of tasks of each set.")
    ] = 32,
    as_json: AsJson = False,
) -> None:
    """Score an agent on training and held-out tasks before it is trained, and say how to train it.

    A task has signal if its attempts differ in reward: reinforcement learning learns from those
    tasks only. Exit code 1 if no attempt has a reward.

    \b
    ajet baseline agent.py:solve --judge exact --tasks tasks.jsonl \\
      --val-tasks val.jsonl --model PATH
    ajet baseline --conf job.yaml -k 16 --limit 64
    ajet baseline --conf job.yaml --base-url http://127.0.0.1:8000/v1 --model NAME
    """
    agent, overrides = split_arguments(arguments or [])
    if answering.conf is None and (agent is None or tasks is None):
        raise ConfigError(
            "name an agent (agent.py:solve) and --tasks tasks.jsonl, or pass a config file (--conf"
            " FILE)"
        )
    more = (
        {"task_reader.jsonl_dataset_file.validation": {"file_path": None}}
        if tasks and not val_tasks
        else {}
    )
    config = answering.config(agent, overrides, tasks=tasks, val_tasks=val_tasks, more=more)
    if not config.is_set("rollout.temperature"):
        config = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"temperature": 1.0})}
        )
    sets = load_tasks(config)
    reports: dict[str, Report] = {}
    for name, of in (("training", sets.train), ("held-out", sets.val)):
        chosen = of[:limit]
        if chosen:
            with ProgressBar(f"{name} episodes", len(chosen) * k, quiet=as_json) as bar:
                reports[name] = sdk.score_tasks(
                    config,
                    chosen,
                    k=k,
                    of_validation=name == "held-out",
                    on_episode=lambda episode: bar.advance(),
                )
    scored = any(report.reward is not None for report in reports.values())
    if as_json:
        summaries = {
            name: {
                **pick(report, "run_id", "reward", "pass_at", "failures", "notices"),
                "tasks": len(report.tasks),
                "with_signal": _count_with_signal(report),
                "failed": sum(score.failed for score in report.tasks),
            }
            for name, report in reports.items()
        }
        print_json({**summaries, "next": advice(reports)})
    else:
        echo("\n".join(_baseline_table(reports, k)))
        for name, report in reports.items():
            for line in (*report.failures, *report.notices):
                echo(f"{name}: {line}")
        echo("\nNext: " + "\n      ".join(advice(reports)))
        echo(f"Traces are in {config.directory}")
    raise typer.Exit(0 if scored else 1)


def _count_with_signal(report: Report) -> int:
    return sum(
        len({e.reward for e in score.episodes if e.reward is not None}) > 1
        for score in report.tasks
    )


def _baseline_table(reports: Mapping[str, Report], k: int) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("", "tasks", "reward", "pass@1", f"pass@{k}", "with signal", "failed")
    ]
    for name, report in reports.items():
        shown = [f"{report.pass_at[n]:.3f}" if n in report.pass_at else "-" for n in (1, k)]
        reward = "-" if report.reward is None else f"{report.reward:.3f}"
        failed = f"{sum(score.failed for score in report.tasks)} of {len(report.episodes)}"
        signal = f"{_count_with_signal(report)} of {len(report.tasks)}"
        rows.append((name, str(len(report.tasks)), reward, *shown, signal, failed))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def advice(reports: Mapping[str, Report]) -> list[str]:
    """Returns advice from the scores of training tasks and held-out tasks, if any."""
    train, held_out = reports["training"], reports.get("held-out")
    if train.reward is None:
        return ["make the agent run: no attempt has a reward. See the failures above"]
    first, best, signal = (
        train.pass_at.get(1, 0.0),
        max(train.pass_at.values(), default=0.0),
        _count_with_signal(train),
    )
    steps = [_first_step(train, first, best, signal)]
    if held_out is None:
        steps.append(
            "pass --val-tasks: without held-out tasks nothing shows whether what is learnt carries"
            " over"
        )
    elif best and held_out.pass_at and not max(held_out.pass_at.values()):
        steps.append(
            "the held-out tasks are never solved, the training tasks are: they are harder or of"
            " another kind, so expect no gain there unless training tasks like them are added"
            " (`ajet dataset expand`)"
        )
    return steps


def _first_step(train: Report, first: float, best: float, signal: int) -> str:
    attempts, count = len(train.episodes), len(train.tasks)
    always = sum(score.solved == len(score.episodes) for score in train.tasks)
    alike = f"{always} always solved, {count - signal - always} never"
    if first >= _NEARLY_ALL:
        return f"harder tasks: {first:.0%} of attempts solve theirs already"
    if not signal and always:
        return (
            f"no task has signal ({alike}), so reinforcement learning has nothing to learn from:"
            " raise --temperature (attempts sampled alike cannot differ), or add tasks of medium"
            " difficulty (`ajet dataset calibrate`)"
        )
    if not signal:
        sure = (
            f" ({attempts} attempts are few: confirm it with a larger -k)"
            if attempts < _MANY
            else ""
        )
        return (
            "demonstrations, easier tasks or a larger model: no attempt solved its task, so"
            f" reinforcement learning has nothing to learn from{sure}. Train on demonstrations"
            " first (ajet.trainer_common.algorithm=sft), or let the judge give partial credit"
        )
    if signal < _FEW * count:
        more = (
            ""
            if best > 0.5
            else "; demonstrations (ajet.trainer_common.algorithm=sft) bring more within reach"
        )
        return (
            f"select tasks first (`ajet dataset calibrate`): {signal} of {count} have signal"
            f" ({alike}){more}"
        )
    return (
        f"reinforcement learning (`ajet train`): {signal} of {count} tasks have signal; what"
        f" pass@{train.k} solves and pass@1 does not ({best:.3f} against {first:.3f}) is what it"
        " can reach soon"
    )
