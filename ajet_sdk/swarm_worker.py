"""`ajet work` and `ajet train --swarm`: runs an agent here for a training at a swarm's server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.shared.steps import total_steps
from ajet_sdk.config.api_keys import placeholder_keys
from ajet_sdk.config.config import plain_yaml
from ajet_sdk.errors import ConfigError, SwarmError, TrainingError
from ajet_sdk.reporting.output import echo
from ajet_sdk.rollout.event_loop import run_to_end
from ajet_sdk.run import check_signatures, find_judge, find_workflow
from ajet_sdk.swarm.client import AsyncSwarmClient
from ajet_sdk.swarm.core import PATIENCE
from ajet_sdk.swarm.messages import EpisodeSplit
from ajet_sdk.swarm.work import Work, WorkSummary
from ajet_sdk.swarm.worker import Worker
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.types import Task

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

RECENTLY = 60.0
"""Seconds since its last request for which a client is taken to be at work."""
CONCURRENCY = 8
"""Attempts at once, unless the config or an option says otherwise."""

OF_THE_CLIENT = (
    ("task_reader",),
    ("task_judge",),
    ("experiment_dir",),
    ("rollout", "user_workflow"),
    ("rollout", "max_env_worker"),
    ("rollout", "runner"),
    ("model", "recipe"),
)
"""Keys of a config that its client reads: they name code, files and services beside it."""
BETWEEN_LOOKS = 0.5
"""Seconds between two looks at a server that loads its model."""


def work(
    config: Config,
    url: str | None,
    *,
    workflow: Callable[..., object] | None = None,
    judge: Any = None,
    tasks: Sequence[Task] | None = None,
    split: EpisodeSplit = "train",
    attempts: int | None = None,
    concurrency: int | None = None,
    key: str | None = None,
    name: str | None = None,
    patience: float = PATIENCE,
    say: Callable[[str], None] = echo,
    summary: WorkSummary | None = None,
) -> WorkSummary:
    """Run an agent for the training at `url` until that is finished, or `tasks` of a validation are
    done.

    Args:
        config: the agent's settings; those of the training are the server's.
        url: the server's; None: AJET_SWARM_URL.
        workflow, judge: replace those of the config.
        tasks: attempts are made at these; None: at the server's.
        split: `val`: the attempts are a validation at the server's step, one pass over the tasks.
        attempts: attempts at each task; None: the server's `rollout.num_repeat`; of `val` 1.
        concurrency: attempts at once; None: `rollout.max_env_worker` if it is set, else 8.
        key, name, patience: of `SwarmClient`.
        say: is called with lines of progress.
        summary: is filled as episodes end, for a caller that is interrupted.

    Raises:
        ConfigError, SignatureError, TaskError: before the first episode.
        SwarmError: the server refuses the key, or is away for longer than `patience` seconds.
        TrainingError: the agent fails each time.
    """
    workflow = find_workflow(config, workflow)
    config, judge = find_judge(config, judge)
    check_signatures(workflow, judge, tasks or (), config)
    swarm = AsyncSwarmClient(url, key, name, patience=patience)
    plan = Work(
        config=config,
        workflow=workflow,
        judge=judge,
        tasks=tasks,
        split=split,
        attempts=attempts,
        concurrency=_concurrency(config, concurrency),
    )

    async def begin() -> Work:
        return plan

    return _run(swarm, begin, say, summary)


def train_at(
    config: Config,
    url: str | None,
    *,
    key: str | None = None,
    name: str | None = None,
    patience: float = PATIENCE,
    say: Callable[[str], None] = echo,
    summary: WorkSummary | None = None,
) -> WorkSummary:
    """Train at a swarm's server with the agent, the judge and the tasks of a config here.

    A server that is offline gets the config and is started, with an owner's key; otherwise this
    joins its training. Raises as `work`.
    """
    workflow = find_workflow(config, None)
    config, judge = find_judge(config, None)
    sets = load_tasks(config)
    check_signatures(workflow, judge, [*sets.train, *sets.val], config)
    swarm = AsyncSwarmClient(url, key, name, patience=patience)
    plan = Work(
        config=config,
        workflow=workflow,
        judge=judge,
        tasks=sets.train,
        concurrency=_concurrency(config, None),
        val_tasks=sets.val,
    )

    async def begin() -> Work:
        status = await swarm.status()
        if status.state != "offline":
            say(f"joining the training {status.name or 'that runs'} at {swarm.url}, by its config")
            others = any(client.last_seen < RECENTLY for client in status.clients)
            return replace(plan, val_tasks=()) if others else plan
        await swarm.arun(
            swarm.requests.configure(config_for_server(config, len(sets.train), plan.targets))
        )
        try:
            await swarm.start()
        except SwarmError as error:
            if error.code != "not_offline":  # another client was faster: join it
                raise
        await _wait_for_model(swarm)
        say(f"started the training at {swarm.url}")
        return plan

    return _run(swarm, begin, say, summary)


async def _wait_for_model(swarm: AsyncSwarmClient) -> None:
    """Wait until a started server has its model. Raises TrainingError if it could not begin."""
    while True:
        status = await swarm.status()
        if status.state == "offline" and status.failure:
            raise TrainingError(f"the server at {swarm.url} did not start: {status.failure}")
        if status.state != "booting":
            return
        await asyncio.sleep(BETWEEN_LOOKS)


def config_for_server(config: Config, tasks: int, targets: Sequence[str] | None = None) -> str:
    """The YAML of a config without the parts of its client.

    `tasks` is the number of training tasks, from which the number of steps follows; `targets` are
    those that the agent names, which separate models are made for.
    """
    if config.backbone == "debug":
        raise ConfigError("backbone debug trains nothing; a server needs another backbone")
    values = config.model_dump(mode="json", exclude_unset=True)
    for *sections, last in OF_THE_CLIENT:
        section: Any = values
        for name in sections:
            section = section.get(name) or {}
        section.pop(last, None)
    common = values.setdefault("trainer_common", {})
    common["total_steps"] = total_steps(config, tasks)
    if targets is not None and config.rollout.trained_models == "separate":
        values["rollout"]["trainable_targets"] = list(targets)
    return plain_yaml({"ajet": values})


def _concurrency(config: Config, asked: int | None) -> int:
    if asked is not None:
        return asked
    if config.is_set("rollout.max_env_worker"):
        return config.rollout.max_env_worker
    return CONCURRENCY


def _run(
    swarm: AsyncSwarmClient,
    begin: Callable[[], Awaitable[Work]],
    say: Callable[[str], None],
    summary: WorkSummary | None,
) -> WorkSummary:
    summary = WorkSummary() if summary is None else summary

    async def run() -> None:
        try:
            worker = Worker(swarm, await begin(), say, summary)
            await worker.run()
            await worker.refresh()
        finally:
            await asyncio.shield(swarm.aclose())

    with placeholder_keys():
        run_to_end(run())
    return summary
