"""`ajet run`: run an agent over tasks and score it."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from ajet_sdk import run as sdk
from ajet_sdk.config.config import Config
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_sdk.reporting.progress_bar import ProgressBar
from ajet_sdk.reporting.results import Report
from ajet_sdk.tasks.load import load_tasks
from ajet_tools.cli.arguments import AgentAndOverrides, AgentOptions, MostTasks, Tasks, WithLogview, split_arguments
from ajet_tools.cli.options import AsJson, expand_options, pick, print_json
from ajet_tools.cli.viewer import logview

app = typer.Typer(add_completion=False)


@app.command()
@expand_options
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
        raise ConfigError("no agent given: name it (agent.py:solve) or pass a config file (--conf FILE)")
    if answering.conf is None and tasks is None:
        raise ConfigError("no tasks given: pass --tasks tasks.jsonl")
    # the tasks that are named are all there is: a file's validation tasks are others
    unread = {"task_reader.jsonl_dataset_file.validation": {"file_path": None} if tasks else None}
    config = answering.config(agent, overrides, tasks=tasks, more=unread)
    with logview(config.directory, with_logview):
        report = _score(config, k, limit, named=tasks is not None, quiet=as_json)
    if as_json:
        print_json(_as_json(report))
    else:
        echo(str(report))
    raise typer.Exit(0 if report.reward is not None else 1)


def _score(config: Config, k: int, limit: int | None, *, named: bool, quiet: bool) -> Report:
    sets = load_tasks(config)
    tasks = sets.train if named or not sets.val else sets.val
    tasks = tasks[:limit]
    with ProgressBar("Episodes", len(tasks) * k, quiet=quiet) as bar:
        return sdk.run(config, tasks=tasks, k=k, on_episode=lambda episode: bar.advance())


def _as_json(report: Report) -> dict[str, object]:
    return {
        **pick(report, "run_id", "directory", "reward", "pass_at", "failures", "notices"),
        "tasks": [
            {
                "task_id": score.task.task_id,
                "main_query": score.task.main_query,
                **pick(score, "reward", "solved", "failed"),
                "episodes": [
                    pick(episode, "episode_id", "attempt", "status", "reward", "is_success", "error")
                    for episode in score.episodes
                ],
            }
            for score in report.tasks
        ],
    }
