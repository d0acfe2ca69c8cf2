"""Runs an attempt at a task to a finished `Episode`, or a batch of attempts concurrently.

A crash, a time-out, a refused call or an invalid reward is recorded on the episode, and other
episodes continue. Only errors that end the run are raised: too many abandoned calls, a
misconfigured endpoint, a cancellation.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel

from ajet_sdk.agent.agentscope import arguments as tuner_arguments
from ajet_sdk.agent.agentscope import is_output, plain
from ajet_sdk.agent.context import ActiveEpisode, current_episode
from ajet_sdk.agent.decorators import bind, collected, spec_of
from ajet_sdk.agent.workflow import (
    AjetTuner,
    WorkflowOutput,
    WorkflowTask,
    is_workflow_class,
    make_workflow,
)
from ajet_sdk.capture.hooks import installed
from ajet_sdk.capture.unattributed import outlived
from ajet_sdk.config.api_keys import placeholder_keys
from ajet_sdk.environments.client import GymEnv
from ajet_sdk.errors import EpisodeTimeout, NoCalls, TrainingError, UnattributedCall
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.gateway.recorder import RunningEpisode
from ajet_sdk.judges.call import workflow_task
from ajet_sdk.judges.rewards import check_names, numbers, returned
from ajet_sdk.protocols import Engine
from ajet_sdk.rollout.attempts import Attempt, draw_seats
from ajet_sdk.rollout.judging import (
    Member,
    groups_of,
    judge_episode,
    verdict_on_stopped,
)
from ajet_sdk.rollout.outcomes import (
    RETRY,
    WITHOUT_CALLS,
    EpisodeFault,
    fault_of_calls,
    untrained_entries,
    write_trajectory,
)
from ajet_sdk.rollout.place import Here, Place
from ajet_sdk.rollout.threads import Workers, current_workers
from ajet_sdk.secret_keys import LEAVES, without
from ajet_sdk.trace.encoding import storable
from ajet_sdk.types import Call, Episode, Event, new_id, now

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.trace.writer import TraceWriter


log = logging.getLogger("ajet")

_LISTED = 5
"""Requests listed in the error of an episode without calls."""
T = TypeVar("T")


async def run_episode(
    workflow: object,
    judge: object,
    attempt: Attempt,
    *,
    engine: Engine,
    gateway: Gateway,
    config: Config,
    writer: TraceWriter | None = None,
    sampling: SamplingOverride | None = None,
    member: Member | None = None,
) -> Episode:
    """Run a workflow once, judge it, write the finished episode to `writer`, and return it.

    `workflow` is a decorated function or a `Workflow` class, `judge` a decorated function or a
    `BaseJudge`. `sampling` overrides the agent's parameters in trainable calls. `member` is the
    attempt's membership in a group with a group judge. Faults of the agent, the judge, the
    environment or the engine are not raised: see `Episode.status`, `cause` and `infrastructure`.

    Raises TrainingError if more calls than `rollout.max_env_worker` were abandoned,
    EndpointMisconfigured for a wrong key, URL or model of an endpoint.
    """

    async def record(episode: Episode) -> None:
        if writer is None:
            return
        writer.put(episode)
        if config.trainer_common.save_trajectory_as_json_file:
            await asyncio.to_thread(write_trajectory, writer.path.parent, episode)

    place = Here(engine, gateway, config, sampling)
    return await run_at(workflow, judge, attempt, record, place=place, config=config, member=member)


async def run_at(
    workflow: object,
    judge: object,
    attempt: Attempt,
    record: Callable[[Episode], Awaitable[None]],
    *,
    place: Place,
    config: Config,
    member: Member | None = None,
) -> Episode:
    """As `run_episode`, with calls that are answered at `place`.

    `record` is awaited with the finished episode, also if the attempt is cancelled.
    """
    with workers_of(config) as workers:
        running = EpisodeRunner(workflow, judge, attempt, place, config, workers, member)
        try:
            await running.run()
        finally:
            await asyncio.shield(running.close())
            await record(running.episode)
        return running.episode


@contextmanager
def workers_of(config: Config) -> Iterator[Workers]:
    """Provides the run's workers, or temporary ones, with capture hooks installed."""
    present = current_workers.get()
    with (
        placeholder_keys(),
        installed(),
        (
            Workers(config.rollout.max_env_worker) if present is None else nullcontext(present)
        ) as workers,
    ):
        yield workers


@dataclass
class EpisodeRunner:
    """A running episode. Users' code runs in `workers`."""

    workflow: object
    judge: object
    attempt: Attempt
    place: Place
    config: Config
    workers: Workers
    member: Member | None = None
    env: GymEnv | None = None
    opened: RunningEpisode | None = None

    def __post_init__(self) -> None:
        a = self.attempt
        self.task = a.task
        episode_id = a.episode_id or new_id()
        self.episode = Episode(
            episode_id=episode_id,
            run_id=a.run_id,
            group_id=a.group_id or episode_id,
            attempt=a.attempt,
            step=a.step,
            split=a.split,
            decoding=self.place.decoding,
            task=a.task,
            status="aborted",
            error="the run was stopped during this episode",
            cause="Aborted",
            metrics={RETRY: float(a.retry)} if a.retry else {},
        )

    async def run(self) -> None:
        """Run the workflow, then the judge; the result is `episode`."""
        try:
            name, timeout, function = await self._prepare()
            output = await self._act(name, timeout, function)
            assert self.opened is not None
            verdict = verdict_on_stopped(self.opened.stopped, self.config) or returned(output, name)
            if verdict is None:
                verdict = await judge_episode(self, output)
            self._raise_fault_of_environment()
            if any((reward.agent, reward.call_id) != (None, None) for reward in verdict.rewards):
                check_names(verdict.rewards, self.opened.calls, self.opened.agents)
            self.settle(status="succeeded", error=None, cause=None, rewards=verdict.rewards)
            self.settle(metrics={**self.episode.metrics, **verdict.metrics})
            self.settle(**self.place.with_rewards_of_replies(self.episode, self.opened.calls))
            if verdict.is_success is not None:
                self.settle(is_success=verdict.is_success)
        except TrainingError:
            raise
        except Exception as error:  # noqa: BLE001  the one boundary: an episode's fault is data
            if isinstance(error, EpisodeFault):
                fault = error
            else:
                fault = EpisodeFault(error)
            self.settle(**fault.fields, metrics={**self.episode.metrics, **fault.metrics})
            if fault.misconfigured is not None:
                raise fault.misconfigured from None

    def settle(self, **fields: object) -> None:
        self.episode = self.episode.model_copy(update=fields)

    async def close(self) -> None:
        """Revoke the episode's keys, release its environment and complete the record."""
        calls: tuple[Call, ...] = ()
        if self.opened is not None:
            calls = await self.opened.finish()
            self.settle(events=tuple(self.opened.events))
            self._hide(self.opened.secrets)
        if self.env is not None:
            limit = self.config.rollout.judge_timeout
            await self.workers.call(self.env.release, {}, timeout=limit, label="env.release")
        metrics = {**self.episode.metrics, **self.place.metrics(self.episode, calls)}
        self.settle(calls=calls, metrics=metrics, ended_at=now())

    def _hide(self, secrets: Collection[str]) -> None:
        """Remove keys that a server repeated to the agent from what the agent made of it."""
        if secrets:
            error, output = without([self.episode.error, self.episode.output], secrets)
            events = [without(event.model_dump(), secrets) for event in self.episode.events]
            self.settle(error=error, output=output, events=tuple(map(Event.model_validate, events)))

    # Before

    async def _prepare(self) -> tuple[str, float | None, Callable[..., object]]:
        """Opens the episode and its environment. Returns the workflow's name, time limit and
        call."""
        if is_workflow_class(self.workflow):
            instance = make_workflow(self.workflow)
            instance.trainable_targets = self._targets(instance.trainable_targets)
            self.opened = opened = self._open(
                None, uses_handle=True
            )  # the tuner has the targets, which may change
            await self._enter_environment()
            tuner = AjetTuner(
                self.config,
                opened.model(),
                lambda: instance.trainable_targets,
                lambda: opened.context_overflow,
                self._debug_model,
            )
            return (
                instance.name,
                None,
                functools.partial(instance.execute, self.attempt_task(), tuner),
            )
        spec = spec_of(self.workflow, "workflow")
        self.opened = self._open(self._targets(spec.trainable_targets), spec.uses_handle)
        if "env" in spec.parameters:
            await self._enter_environment()
        arguments = bind(spec, self.task, self.reserved_arguments(self.opened, self.workflow))
        return spec.name, spec.timeout, functools.partial(collected(spec.function), **arguments)

    def _targets(self, workflow_targets: Sequence[str] | None) -> list[str] | None:
        """The policy's targets in this episode, from the config or else the workflow."""
        return draw_seats(self.config.rollout, workflow_targets, self.attempt.group_seed)

    def _open(self, targets: Sequence[str] | None, uses_handle: bool) -> RunningEpisode:
        return self.place.open(self.attempt, self.episode.episode_id, targets, uses_handle)

    async def _enter_environment(self) -> None:
        service = self.config.task_reader.env_service
        if not self.config.task_reader.has_environment(self.task.env_type):
            return
        self.env = GymEnv(
            service.env_url, self.task.env_type or service.env_type, self.task.task_id
        )
        outcome = await self.workers.call(
            self.env.create,
            {},
            timeout=self.config.rollout.judge_timeout,
            label="the creation of the environment",
        )
        if outcome.error is not None:
            raise EpisodeFault(outcome.error)
        if outcome.value and not self.task.init_messages:
            self.task = self.task.model_copy(update={"init_messages": outcome.value})

    def reserved_arguments(
        self, opened: RunningEpisode, function: object, output: object = None
    ) -> dict[str, object]:
        """Values of the reserved parameters of a workflow or judge; `function` is None for an
        object."""
        arguments: dict[str, object] = {
            "task": self.task,
            "model": opened.model(),
            "episode": self.episode,
        }
        if function is None:
            spec = None
        else:
            spec = spec_of(function, "judge" if opened.judged else "workflow")
        if spec is not None and spec.tuner_names:
            arguments |= tuner_arguments(
                spec.parameters, self.task, opened.model, self.config, output
            )
        if self.env is not None:
            arguments["env"] = self.env
        return arguments

    def attempt_task(self) -> WorkflowTask:
        """The task for `execute` and `compute_reward`."""
        return workflow_task(
            self.task, self.episode, tokenizer=self.place.tokenizer, gym_env=self.env
        )

    def _debug_model(self, name: str) -> object:
        return self.place.open_debug_model(name, self.attempt)

    # During

    async def _act(
        self, name: str, timeout: float | None, function: Callable[..., object]
    ) -> object:
        """Runs the workflow. Raises EpisodeFault, also for failed calls that the workflow
        ignored."""
        opened = self.opened
        assert opened is not None
        token = current_episode.set(opened.active)
        try:
            outcome = await self.workers.call(
                function,
                {},
                timeout=timeout or self.config.rollout.timeout,
                label=f"workflow {name}",
            )
        finally:
            current_episode.reset(token)
        self.settle(output=await self._output(outcome.value, name))
        await opened.update(outcome.error)
        late = isinstance(outcome.error, EpisodeTimeout)
        if not late:
            await self._check_senders(opened)
        if opened.stopped is None or late:
            fault = fault_of_calls(opened, outcome.error)
        else:
            fault = None
        if fault is not None:
            raise fault
        self._raise_fault_of_environment()
        if self.attempt.must_call and not any(call.phase == "rollout" for call in opened.calls):
            raise NoCalls(
                f"workflow {name} returned without a call to a model."
                f" {_seen_instead(opened.active)} {WITHOUT_CALLS}"
            )
        if self.attempt.check is not None:
            self.attempt.check(self.episode.episode_id)
        if isinstance(outcome.value, WorkflowOutput):
            self.settle(
                metrics=numbers(outcome.value.log_metrics), is_success=outcome.value.is_success
            )
        elif is_output(outcome.value):
            self.settle(metrics=numbers(outcome.value.metrics or {}))
        return outcome.value

    async def _check_senders(self, opened: RunningEpisode) -> None:
        """Fails the episode if its calls may be those of other episodes, sent by a worker that they
        share."""
        left = await opened.senders_left()
        if left:
            error = outlived(activity.name for activity in left)
            if self.config.rollout.on_uncaptured == "warn":
                log.warning("%s", error)
            else:
                opened.fail(error)

    async def _output(self, value: object, name: str) -> object:
        """Converts the output to JSON; methods of users' objects run in a worker.

        Raises EpisodeFault if they fail.
        """
        if type(value) in LEAVES:
            return value
        timeout = self.config.rollout.judge_timeout
        outcome = await self.workers.call(
            _stored, {"value": value}, timeout=timeout, label=f"the output of {name} as JSON"
        )
        if outcome.error is not None:
            raise EpisodeFault(outcome.error)
        return outcome.value

    def _raise_fault_of_environment(self) -> None:
        """Raises EpisodeFault if the environment failed and agent and judge ignored it."""
        if self.env is not None and self.env.fault is not None:
            raise EpisodeFault(self.env.fault)


def _seen_instead(active: ActiveEpisode) -> str:
    """What an episode without calls did instead, as far as it is seen from this process."""
    if not active.others:
        return "ajet saw it send no request."
    listed = list(active.others)[:_LISTED]
    if len(active.others) > _LISTED:
        more = f" and {len(active.others) - _LISTED} more"
    else:
        more = ""
    return f"ajet saw other requests: {', '.join(listed)}{more}."


def _stored(value: object) -> object:
    try:
        return storable(_plain(value))
    except RecursionError:  # it contains itself
        return storable(value)


def _plain(value: object) -> object:
    """Converts ajet's models in an output to plain JSON."""
    value = plain(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


async def run_batch(
    workflow: object,
    judge: object,
    attempts: Sequence[Attempt],
    *,
    engine: Engine,
    gateway: Gateway,
    config: Config,
    writer: TraceWriter | None = None,
    sampling: SamplingOverride | None = None,
    on_episode: Callable[[Episode], None] | None = None,
    room: asyncio.Semaphore | None = None,
) -> list[Episode]:
    """Run attempts, at most `rollout.max_env_worker` at once; returns their episodes in order.

    Batches that run at the same time share that limit by one `room`.
    After an infrastructure fault an attempt is repeated as a new episode, up to
    `rollout.max_retries` times. The last episode is returned; the trace has the others, with their
    tokens in the ledger as `failed`. `on_episode` is called for each returned episode as it
    finishes. Raises as `run_episode` does, and TrainingError for calls that cannot be attributed to
    an episode: the others of the batch may lack them.
    """
    room = room or asyncio.Semaphore(config.rollout.max_env_worker)
    groups = groups_of((attempt.group_id for attempt in attempts), judge)

    async def run_attempt(attempt: Attempt) -> Episode:
        await room.acquire()
        with ExitStack() as place:
            place.callback(room.release)
            group = groups.get(attempt.group_id)
            member = None if group is None else Member(group, place.close)
            remaining = config.rollout.max_retries
            while True:
                episode = await run_episode(
                    workflow,
                    judge,
                    attempt,
                    engine=engine,
                    gateway=gateway,
                    config=config,
                    writer=writer,
                    sampling=sampling,
                    member=member,
                )
                if episode.cause == UnattributedCall.__name__:
                    raise TrainingError(
                        "the agent's calls cannot be attributed to its episodes (episode"
                        f" {episode.episode_id}). {episode.error}"
                    )
                # Attempts that were judged as a group are not repeated separately.
                if not (episode.infrastructure and remaining) or (
                    group is not None and group.judged
                ):
                    break
                if writer is not None:
                    writer.put(
                        *untrained_entries(
                            episode, "failed" if episode.split == "train" else "evaluation"
                        )
                    )
                remaining -= 1
                attempt = replace(attempt, retry=attempt.retry + 1)
            if group is not None:
                group.leave()
            if on_episode is not None:
                on_episode(episode)
            return episode

    with workers_of(config):
        return await all_of([asyncio.create_task(run_attempt(attempt)) for attempt in attempts])


async def all_of(tasks: list[asyncio.Task[T]]) -> list[T]:
    """Awaits all tasks. The first error cancels the others and is raised when they have ended.

    Each is cancelled once, also if this is cancelled: a second time would interrupt how it ends.
    """
    if not tasks:
        return []
    done: set[asyncio.Task[T]] = set()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    errors = [task.exception() for task in tasks if task in done and not task.cancelled()]
    for error in errors:
        if error is not None:
            raise error
    return [task.result() for task in tasks]
