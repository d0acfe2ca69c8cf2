"""`ajet work`: runs an agent here for a training at a swarm's server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from typer import Argument, Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_sdk.rollout.outcomes import pass_at_k, solved
from ajet_sdk.swarm.core import PATIENCE
from ajet_sdk.swarm.messages import EpisodeSplit
from ajet_sdk.swarm.work import WorkSummary
from ajet_sdk.swarm_worker import work as run_work
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.types import Episode
from ajet_tools.cli.arguments import (
    JUDGE_HELP,
    Conf,
    JobOptions,
    MostTasks,
    Tasks,
    split_arguments,
)
from ajet_tools.cli.options import AsJson, print_json

_URL = re.compile(r"\w+://.*|[\w.-]+:\d+/?|\[[\da-fA-F:]+\]:\d+/?")
"""A URL, or host and port."""


def work(
    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="URL AGENT KEY=VALUE",
            help="The server (default: AJET_SWARM_URL), the agent, and overrides.",
        ),
    ] = None,
    *,
    conf: Conf = None,
    judge: Annotated[str | None, Option(help=JUDGE_HELP)] = None,
    tasks: Tasks = None,
    limit: MostTasks = None,
    k: Annotated[
        int | None,
        Option("--attempts", "-k", min=1, show_default=False),
    ] = None,
    concurrency: Annotated[
        int | None, Option(min=1, show_default=False, help="Attempts at once. Default: 8.")
    ] = None,
    split: Annotated[
        EpisodeSplit, Option(help="val: one pass over --tasks, as a validation of the model.")
    ] = "train",
    name: Annotated[
        str | None, Option(show_default=False, help="Who and where, shown to people.")
    ] = None,
    key_env: str = "AJET_SWARM_KEY",
    patience: Annotated[
        float, Option(min=0, help="Seconds to wait for a server that is away.")
    ] = PATIENCE,
    as_json: AsJson = False,
) -> None:
    """Run an agent here, for a training at a server (`ajet swarm start`), until that is finished.

    Agent, judge and tasks stay on this machine; the server answers the agent's calls and trains on
    them. Ctrl-C aborts what is running; the training goes on.

    Args:
        tasks: Tasks to make attempts at. Default: the server's.
        k: Attempts per task. Default: the server's rollout.num_repeat; for a validation 1.
        key_env: Environment variable with the server's key for workers.

    \b
    ajet work http://gpu-box:10086 agent.py:solve --judge exact --tasks tasks.jsonl
    ajet work gpu-box:10086 agent.py:solve --judge agent.py:exact
    ajet work gpu-box:10086 agent.py:solve --judge exact --tasks val.jsonl --split val -k 4
    """
    url, rest = split_url(arguments or [])
    agent, overrides = split_arguments(rest)
    if conf is None and agent is None:
        raise ConfigError(
            "no agent given: name it (ajet work URL agent.py:solve) or pass a config file (--conf"
            " FILE)"
        )
    if split == "val" and tasks is None:
        raise ConfigError("a validation needs its tasks: pass --tasks val.jsonl")
    config = JobOptions(conf, judge).config(agent, overrides, tasks=tasks)
    given = None if tasks is None else load_tasks(config).train[:limit]
    with shown_summary(as_json) as summary:
        run_work(
            config,
            url,
            tasks=given,
            split=split,
            attempts=k,
            concurrency=concurrency,
            key=os.environ.get(key_env),
            name=name,
            patience=patience,
            say=lambda line: echo(line, err=as_json),
            summary=summary,
        )


def split_url(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Splits `[URL] [AGENT] [KEY=VALUE]...` into the server's URL, if it is given, and the rest."""
    if arguments and _URL.fullmatch(arguments[0]):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


@contextmanager
def shown_summary(as_json: bool) -> Iterator[WorkSummary]:
    """Prints what a worker has done, also if it is interrupted."""
    summary = WorkSummary()
    try:
        yield summary
    finally:
        if as_json:
            print_json(_as_json(summary))
        elif summary.finished:
            echo("\n".join(_lines(summary)))


def _lines(summary: WorkSummary) -> list[str]:
    episodes = summary.episodes
    statuses = ", ".join(f"{count} {status}" for status, count in summary.statuses.items())
    if summary.reward is None:
        reward = ""
    else:
        reward = f"; mean reward {summary.reward:.3f}"
    lines = [f"{len(episodes)} episodes: {statuses}{reward}"]
    if all(episode.split == "val" for episode in episodes):
        shares = pass_at(episodes)
    else:
        shares = {}
    for k, share in shares.items():
        lines.append(f"pass@{k} {share:.3f} of the validation")
    if summary.tokens:
        counts = sorted(summary.tokens.items(), key=lambda item: -item[1])
        lines.append("tokens: " + ", ".join(f"{count:,} {outcome}" for outcome, count in counts))
    return lines + summary.failures


def pass_at(episodes: Sequence[Episode]) -> dict[int, float]:
    """pass@1 and pass@k of the validation episodes, over their tasks."""
    by_task = dict[str, list[Episode]]()
    for episode in episodes:
        if episode.split == "val" and not episode.infrastructure:
            by_task.setdefault(episode.task.task_id, []).append(episode)
    if not by_task:
        return {}
    most = min(len(attempts) for attempts in by_task.values())
    shares = dict[int, float]()
    for k in sorted({1, most}):
        scores = [pass_at_k(len(made), sum(map(solved, made)), k) for made in by_task.values()]
        shares[k] = sum(scores) / len(scores)
    return shares


def _as_json(summary: WorkSummary) -> dict[str, object]:
    return {
        "episodes": len(summary.finished),
        "statuses": summary.statuses,
        "reward": summary.reward,
        "pass_at": pass_at(summary.episodes),
        "tokens": summary.tokens,
        "failures": summary.failures,
        "receipts": [
            each.receipt.model_dump() for each in summary.finished if each.receipt is not None
        ],
    }
