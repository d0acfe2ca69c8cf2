"""`ajet work`: runs an agent here for a training at a swarm's server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from typer import Argument, Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_sdk.rollout.outcomes import pass_at_k, solved
from ajet_sdk.swarm.messages import EpisodeSplit
from ajet_sdk.swarm.work import WorkSummary
from ajet_sdk.swarm_worker import work as run_work
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.types import Episode
from ajet_tools.cli.arguments import (
    JUDGE_HELP,
    Conf,
    JobOptions,
    Tasks,
    split_arguments,
)
from ajet_tools.cli.result import HIDDEN, TextResult

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
    k: Annotated[
        int | None,
        Option("--attempts", "-k", min=1, show_default=False),
    ] = None,
    split: Annotated[
        EpisodeSplit, Option(help="val: one pass over --tasks, as a validation of the model.")
    ] = "train",
) -> WorkResult:
    """Run an agent here, for a training at a server (`ajet swarm start`), until that is finished.

    Agent, judge and tasks stay on this machine; the server answers the agent's calls and trains on
    them, with the key of AJET_SWARM_KEY. rollout.max_env_worker attempts run at once (8). Ctrl-C
    aborts what is running; the training goes on.

    Args:
        tasks: Tasks to make attempts at. Default: the server's.
        k: Attempts per task. Default: the server's rollout.num_repeat; for a validation 1.

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
    given = None if tasks is None else load_tasks(config).train
    summary = WorkSummary()
    stopped = None
    try:
        run_work(
            config,
            url,
            tasks=given,
            split=split,
            attempts=k,
            key=os.environ.get("AJET_SWARM_KEY"),
            say=partial(echo, err=True),
            summary=summary,
        )
    except BaseException as error:  # noqa: BLE001  what was done until then is printed before it
        stopped = error
    return WorkResult.of(summary, stopped)


def split_url(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Splits `[URL] [AGENT] [KEY=VALUE]...` into the server's URL, if it is given, and the rest."""
    if arguments and _URL.fullmatch(arguments[0]):
        return arguments[0], list(arguments[1:])
    return None, list(arguments)


@dataclass(frozen=True)
class WorkResult(TextResult):
    """What a worker has done, also if it was stopped."""

    episodes: int
    statuses: Mapping[str, int]
    reward: float | None
    pass_at: Mapping[int, float]
    tokens: Mapping[str, int]
    failures: Sequence[str]
    receipts: Sequence[Mapping[str, object]]
    is_validation: bool = field(metadata=HIDDEN)
    stopped: BaseException | None = field(metadata=HIDDEN)

    @classmethod
    def of(cls, summary: WorkSummary, stopped: BaseException | None = None) -> WorkResult:
        receipts = (each.receipt for each in summary.finished)
        return cls(
            episodes=len(summary.finished),
            statuses=summary.statuses,
            reward=summary.reward,
            pass_at=pass_at(summary.episodes),
            tokens=summary.tokens,
            failures=summary.failures,
            receipts=[receipt.model_dump() for receipt in receipts if receipt is not None],
            is_validation=all(episode.split == "val" for episode in summary.episodes),
            stopped=stopped,
        )

    @property
    def failure(self) -> BaseException | None:
        return self.stopped

    def lines(self) -> Iterator[str]:
        if not self.episodes:
            return
        statuses = ", ".join(f"{count} {status}" for status, count in self.statuses.items())
        reward = "" if self.reward is None else f"; mean reward {self.reward:.3f}"
        yield f"{self.episodes} episodes: {statuses}{reward}"
        if self.is_validation:
            for k, share in self.pass_at.items():
                yield f"pass@{k} {share:.3f} of the validation"
        if self.tokens:
            counts = sorted(self.tokens.items(), key=lambda item: -item[1])
            yield "tokens: " + ", ".join(f"{count:,} {outcome}" for outcome, count in counts)
        yield from self.failures


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
