"""`train()` and `run()`: open a run, dispatch on the backbone's name, and close it.

A run owns `launcher_record/{experiment_name}/`:
`config.yaml trace.duckdb logs/ metrics/ checkpoint/`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.agent.workflow import check_signature
from ajet_sdk.config.api_keys import placeholder_keys
from ajet_sdk.engines.fetch import with_fetched_model
from ajet_sdk.engines.open import at_endpoint, open_engine, ready
from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.judges.load import load_judge, with_judge
from ajet_sdk.learn.recipe import wants_recipe, with_model
from ajet_sdk.protocols import Engine, Job
from ajet_sdk.reporting.html import progress_in_cell
from ajet_sdk.reporting.output import ProgressBar
from ajet_sdk.reporting.results import Report, TaskScore, TunedModel
from ajet_sdk.rollout.attempts import Attempt, check_models, seed_of
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.rollout.event_loop import call_to_end, run_to_end
from ajet_sdk.rollout.outcomes import untrained_entries
from ajet_sdk.session import Session
from ajet_sdk.swarm.host import SwarmHost
from ajet_sdk.tasks.load import TaskSets, load_tasks, open_growth
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Task, new_id

if TYPE_CHECKING:
    from ajet_sdk.agent.workflow import BaseJudge
    from ajet_sdk.config.config import Config
    from ajet_sdk.protocols import Judge
    from ajet_sdk.tasks.load import GivenTasks

log = logging.getLogger("ajet")


_BACKBONES = {
    "debug": "ajet_sdk.backbones.debug.debug",
    "local": "ajet_sdk.backbones.local.local",
    "tinker": "ajet_sdk.backbones.tinker.tinker",
    "trinity": "ajet_sdk.backbones.trinity.backbone.trinity",
    "verl": "ajet_sdk.backbones.verl.backbone.verl",
}


@placeholder_keys()
def train(
    config: Config,
    *,
    workflow: Callable[..., object] | None = None,
    judge: Judge | BaseJudge | str | None = None,
    tasks: GivenTasks | None = None,
    val_tasks: GivenTasks | None = None,
    resume: bool = False,
    debug_tags: Sequence[str] = (),
    ray: str | None = None,
    swarm: SwarmHost | None = None,
) -> TunedModel:
    """Train the model behind a workflow with the backbone that the config names.

    Args:
        config: the settings; `load_config` reads them from a file.
        workflow: a decorated function or a `Workflow`, in place of the config's `rollout.user_workflow`.
        judge: a judge, or a name such as `llm:FILE`, in place of the config's `task_judge`.
        tasks: the tasks to train on, in place of those of `task_reader`: dicts or `Task`s, a DataFrame, a
            `datasets.Dataset`, or a path.
        val_tasks: the held-out tasks, in the same forms.
        resume: continue the newest run in the experiment's directory.
        debug_tags: the tags of `bp` at which to stop, with `backbone: debug`.
        ray: the address of the Ray cluster, or `local` to start one here for the length of the run; None where the
            backbone needs none.
        swarm: the server whose clients run the episodes, in place of a workflow here.

    Returns:
        The checkpoint and its training metrics.

    Raises:
        ConfigError: a setting is wrong; before the first episode, as are the next two.
        SignatureError: the workflow or the judge has a parameter that nothing fills.
        TaskError: the tasks cannot be read.
        TraceLocked: another run is writing to the experiment's directory.
        TrainingError: the run stopped, or its ledger does not balance.
    """
    check_config(config)
    backbone = _backbone(config.backbone)
    if swarm is not None:
        return _train_for(swarm, config, backbone, tasks, val_tasks, resume, ray)
    sets = load_tasks(config, tasks, val_tasks)
    if (
        workflow is not None
        or config.rollout.user_workflow
        or sets.val
        or not config.trainer_common.algorithm.stored
    ):
        workflow = find_workflow(config, workflow)
        check_models(config, workflow, training=config.backbone != "debug")
    config, judge = find_judge(config, judge)
    check_signatures(workflow, judge, [*sets.train, *sets.val], config)
    if config.backbone not in ("debug", "tinker"):  # which may send the model's name to a service
        config = _fetch_model(config)
    with Session(config, resume=resume, code=(workflow, judge)) as session:
        job = Job(
            config=config,
            workflow=workflow,
            judge=judge,
            train=sets.train,
            val=sets.val,
            run_id=session.run.run_id,
            directory=config.directory,
            resume=resume,
            debug_tags=frozenset(debug_tags),
            ray=ray,
            growth=open_growth(config, session.run.run_id),
        )
        tuned = run_to_end(backbone(job, session.gateway, session.writer), session.record_signal)
        session.check_ledger()
    return tuned


def _train_for(
    swarm: SwarmHost,
    config: Config,
    backbone: Callable[[Job, Gateway, TraceWriter], Coroutine[object, None, TunedModel]],
    tasks: GivenTasks | None,
    val_tasks: GivenTasks | None,
    resume: bool,
    ray: str | None,
) -> TunedModel:
    """Train on the episodes of a server's clients; see `train`."""
    if config.backbone in ("debug", "verl"):
        raise ConfigError(
            f"backbone {config.backbone} samples its own episodes; a swarm server trains with"
            " `local`, `tinker` or `trinity`"
        )
    if config.trainer_common.algorithm.stored:
        raise ConfigError(
            "trainer_common.algorithm.adv_estimator: a swarm trains on its clients' episodes, and"
            f" {config.trainer_common.algorithm.adv_estimator} on stored ones"
        )
    sets = TaskSets([], [])
    if tasks is not None or config.is_set("task_reader"):
        sets = load_tasks(config, tasks, val_tasks)
    workflow = judge = None
    if wants_recipe(config):  # which measures its model with the agent
        workflow = find_workflow(config, None)
        config, judge = find_judge(config, None)
    if config.backbone != "tinker":  # which may send the model's name to a service
        config = _fetch_model(config)
    with Session(config, resume=resume, gateway=swarm.gateway) as session:
        job = Job(
            config=config,
            workflow=workflow,
            judge=judge,
            train=sets.train,
            val=sets.val,
            run_id=session.run.run_id,
            directory=config.directory,
            resume=resume,
            ray=ray,
            swarm=swarm,
        )
        tuned = run_to_end(backbone(job, session.gateway, session.writer), session.record_signal)
        session.check_ledger()
    return tuned


async def train_async(config: Config, **options: Any) -> TunedModel:
    """Awaitable `train`, which doesn't block the caller's event loop. Cancelling it stops the run
    as Ctrl-C does.

    Args:
        config: as of `train`.
        options: the keyword arguments of `train`.

    Returns:
        As `train`.
    """
    return await call_to_end(partial(train, config, **options))


def check_config(config: object) -> None:
    """Raises ConfigError for settings that were not read as a config, such as a dict or the path of
    a file."""
    if not isinstance(config, Mapping | str | Path):
        return
    if isinstance(config, Mapping):
        call = "ajet.load_config(values=...)"
    else:
        call = "ajet.load_config(PATH)"
    raise ConfigError(
        f"config must be a Config, which {call} reads and checks (got {type(config).__name__})"
    )


def _backbone(
    name: str,
) -> Callable[[Job, Gateway, TraceWriter], Coroutine[object, None, TunedModel]]:
    module, _, function = _BACKBONES[name].rpartition(".")
    os.environ.setdefault(
        "THP_MEM_ALLOC_ENABLE", "1"
    )  # read as torch loads: page-aligned blocks leave smaller gaps
    try:
        return getattr(import_module(module), function)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("ajet_sdk", "ajet"):
            raise
        raise MissingExtra(
            str(error.name), {"verl": "trinity", "debug": "local"}.get(name, name)
        ) from error


def find_workflow(config: Config, workflow: Callable[..., object] | None) -> Callable[..., object]:
    if workflow is not None:
        return workflow
    if not config.rollout.user_workflow:
        raise ConfigError(
            "no agent is named: set rollout.user_workflow (file.py->name), or pass workflow="
        )
    loaded: Callable[..., object] = config.load(config.rollout.user_workflow)
    return loaded


def find_judge(config: Config, judge: Judge | BaseJudge | str | None) -> tuple[Config, Any]:
    """Return the judge, and the config with the section of a judge given by name: the run records
    what judged."""
    if isinstance(judge, str):
        config = with_judge(config, judge)
        return config, load_judge(config)
    if judge is not None:
        return config, judge(config) if isinstance(judge, type) else judge
    return config, load_judge(config)


def _fetch_model(config: Config) -> Config:
    with ProgressBar("Fetching the model", lines=True) as bar:
        return with_fetched_model(config, bar.show)


def check_signatures(
    workflow: Callable[..., object] | None, judge: object, tasks: Sequence[Task], config: Config
) -> None:
    """Check against a task of each shape, so that a missing key is reported before the first
    episode."""
    shapes = {
        (frozenset(task.metadata), bool(task.main_query), task.env_type): task
        for task in reversed(tasks)
    }
    for task in shapes.values() if workflow is not None else ():
        check_signature(workflow, judge, task, config)


@placeholder_keys()
def run(
    config: Config,
    *,
    workflow: Callable[..., object] | None = None,
    judge: Judge | BaseJudge | str | None = None,
    tasks: GivenTasks | None = None,
    k: int = 1,
    on_episode: Callable[[Episode], None] | None = None,
) -> Report:
    """Run a workflow k times on every task and score it, without training.

    The agent's sampling parameters apply unless the config sets them.

    Args:
        config: the settings; `load_config` reads them from a file.
        workflow: a decorated function or a `Workflow`, in place of the config's `rollout.user_workflow`.
        judge: a judge, or a name such as `llm:FILE`, in place of the config's `task_judge`.
        tasks: rows such as `{"question": …, "answer": …}` or `Task`s, a DataFrame, a `datasets.Dataset`, or a path;
            None: the config's validation tasks, or else its training tasks.
        k: number of attempts at each task.
        on_episode: called with each episode when it has ended.

    Returns:
        The score, by task and overall.

    Raises:
        ConfigError: a setting is wrong, or k > 1 with greedy sampling.
        SignatureError: the workflow or the judge has a parameter that nothing fills.
        TaskError: the tasks cannot be read.
        TraceLocked: another run is writing to the experiment's directory.
    """
    check_config(config)
    sets = load_tasks(config, tasks)
    return score_tasks(
        config,
        sets.val or sets.train,
        workflow,
        judge,
        k=k,
        of_validation=bool(sets.val),
        on_episode=on_episode,
    )


def score_tasks(
    config: Config,
    tasks: Sequence[Task],
    workflow: Callable[..., object] | None = None,
    judge: Judge | BaseJudge | str | None = None,
    *,
    k: int = 1,
    of_validation: bool = False,
    on_episode: Callable[[Episode], None] | None = None,
    wrap: Callable[[Engine], Engine] | None = None,
    check: Callable[[str], None] | None = None,
) -> Report:
    """`run` over loaded tasks; `of_validation` marks them as held out in the trace.

    `wrap` replaces the opened engine; `check` is that of `Attempt`.
    """
    if k < 1:
        raise ConfigError(f"k must be at least 1 (got {k})")
    if k > 1 and config.is_set("rollout.temperature") and config.rollout.temperature == 0:
        raise ConfigError(
            f"pass@{k} of greedy sampling says no more than pass@1: set rollout.temperature above 0"
        )
    on_episode = on_episode or progress_in_cell(len(tasks) * k)
    with open_run(config, workflow, judge, tasks, of_validation=of_validation) as opened:
        opened.wrap = wrap or opened.wrap
        attempts = [replace(attempt, check=check) for attempt in _attempts(config, tasks, k)]

        async def attempt_all() -> list[Episode]:
            try:
                return await opened.attempt(attempts, on_episode)
            finally:
                await opened.aclose()

        episodes = run_to_end(attempt_all(), opened.session.record_signal)
    for episode in episodes:
        episode.is_traced_in(config.directory)
    failure_reward = config.rollout.failure_reward
    by_task = tuple(
        TaskScore(task, tuple(episodes[i * k : i * k + k]), failure_reward)
        for i, task in enumerate(tasks)
    )
    return Report(opened.run_id, config.directory, by_task, k)


async def run_async(config: Config, **options: Any) -> Report:
    """Awaitable `run`, which doesn't block the caller's event loop. Cancelling it stops the run as
    Ctrl-C does.

    Args:
        config: as of `run`.
        options: the keyword arguments of `run`.

    Returns:
        As `run`.
    """
    return await call_to_end(partial(run, config, **options))


def _attempts(config: Config, tasks: Sequence[Task], k: int) -> list[Attempt]:
    attempts = []
    for position, task in enumerate(tasks):
        group_id = new_id()
        group_seed = seed_of(config.trainer_common.seed, position)
        for attempt in range(k):
            digest = hashlib.blake2b(
                f"{config.trainer_common.seed}/{position}/{attempt}".encode(), digest_size=4
            )
            if config.is_seeded:
                seed = int.from_bytes(digest.digest(), "big")
            else:
                seed = None
            attempts.append(Attempt(task, "", group_id, attempt, 0, "val", seed, group_seed))
    return attempts


@contextmanager
def open_run(
    config: Config,
    workflow: Callable[..., object] | None = None,
    judge: Judge | BaseJudge | str | None = None,
    tasks: Sequence[Task] = (),
    *,
    of_validation: bool = False,
) -> Iterator[OpenRun]:
    """Open a run for attempts on demand, at tasks that need not be known in advance.

    Args:
        workflow, judge: replace those of the config.
        tasks: tasks to check the signatures against.
        of_validation: marks the tasks as the config's validation tasks in the trace.

    Nothing is trained. Raises as `train` does.
    """
    with placeholder_keys():
        config = at_endpoint(config)
        workflow = find_workflow(config, workflow)
        config, judge = find_judge(config, judge)
        check_signatures(workflow, judge, tasks, config)
        check_models(config, workflow, training=False)
        config = _fetch_model(config)
        with Session(
            config, backbone="run", code=(workflow, judge), of_validation=of_validation
        ) as session:
            yield OpenRun(session, workflow, judge, tasks)
            session.check_ledger()


class OpenRun:
    """An agent with its judge and model; call `aclose` in the event loop of the attempts."""

    def __init__(
        self,
        session: Session,
        workflow: Callable[..., object] | None,
        judge: object,
        tasks: Sequence[Task],
    ) -> None:
        self.session = session
        self._workflow = workflow
        self._judge = judge
        self._tasks = tasks
        self.wrap: Callable[[Engine], Engine] = lambda engine: engine
        """Replaces the opened engine."""
        rollout = session.config.rollout
        names = [
            n for n in ("temperature", "top_p", "top_k") if session.config.is_set(f"rollout.{n}")
        ]
        sampling = {name: getattr(rollout, name) for name in names}
        self._sampling = (
            SamplingOverride(**sampling) if sampling and rollout.sampling == "run" else None
        )
        self._opening: asyncio.Task[Engine] | None = None

    @property
    def run_id(self) -> str:
        return self.session.run.run_id

    async def attempt(
        self, attempts: Sequence[Attempt], on_episode: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """Run and record attempts; returns episodes in the same order. Raises as `run_batch`."""

        def finished(episode: Episode) -> None:
            self.session.writer.put(*untrained_entries(episode))
            if on_episode is not None:
                on_episode(episode)

        return await run_batch(
            self._workflow,
            self._judge,
            [replace(attempt, run_id=self.run_id) for attempt in attempts],
            engine=await self._engine(),
            gateway=self.session.gateway,
            config=self.session.config,
            writer=self.session.writer,
            sampling=self._sampling,
            on_episode=finished,
        )

    async def check(self) -> None:
        """Open the model before the first attempt, in the same event loop. Raises as
        `open_engine`."""
        await self._engine()

    async def _engine(self) -> Engine:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return await self._opening

    async def _open(self) -> Engine:
        engine = open_engine(
            await with_model(self.session.config, (self._workflow, self._judge, self._tasks))
        )
        try:
            await ready(engine)
            return self.wrap(engine)
        except BaseException:
            await engine.aclose()
            raise

    async def aclose(self) -> None:
        if self._opening is not None:
            [opened] = await asyncio.gather(self._opening, return_exceptions=True)
            if not isinstance(opened, BaseException):
                await opened.aclose()
