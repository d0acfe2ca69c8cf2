"""`train()` and `run()`: the one place that opens a run, dispatches on the backbone's name, and closes it.

A run owns `launcher_record/{experiment_name}/`: `config.yaml trace.duckdb logs/ metrics/ checkpoint/`. `serve()` is at
home in `serving`, the job class in `job`.

Where users' code runs: in threads of this process, or in worker processes of a Ray cluster (`rollout.runner`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import yaml

from ajet_sdk.agent.workflow import check_signature
from ajet_sdk.capture.hooks import ensure_api_key, installed
from ajet_sdk.cluster.code import package_code
from ajet_sdk.cluster.ray import LOCAL, RayCluster, cluster
from ajet_sdk.config.config import plain_yaml
from ajet_sdk.engines.open import at_endpoint, open_engine, ready
from ajet_sdk.engines.sampling import SamplingOverride
from ajet_sdk.errors import AjetError, ConfigError, MissingExtra, TrainingError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.judges.load import load_judge, named_judge
from ajet_sdk.learn.recipe import with_model
from ajet_sdk.protocols import Job
from ajet_sdk.reporting.html import progress_in_cell
from ajet_sdk.reporting.loggers import log_file
from ajet_sdk.reporting.results import Report, TaskScore, TunedModel
from ajet_sdk.rollout.attempts import Attempt, check_models, seed_of
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.rollout.event_loop import call_to_end, run_to_end
from ajet_sdk.rollout.outcomes import untrained_entries
from ajet_sdk.rollout.threads import Workers
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.trace.reader import ledger_balance, open_trace
from ajet_sdk.trace.secret_keys import masked
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Run, Task, new_id, now

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.tasks.given import GivenTasks

__all__ = ["make_workers", "open_cluster", "run", "run_async", "train", "train_async"]

log = logging.getLogger("ajet")


@contextmanager
def open_cluster(config: Config, ray: str | None, *objects: Any) -> Iterator[RayCluster | None]:
    """The cluster that the run's own code runs on, with the code of `objects` (workflow, judge); None: threads do.

    `ray` is as in `Job`; without it the cluster that Ray itself would take (RAY_ADDRESS, which its job launcher sets),
    else a Ray of our own. Raises as `cluster` does.
    """
    if config.rollout.runner != "ray" or config.backbone not in ("debug", "local"):
        yield None  # the other backbones spread the agents themselves
        return
    address = ray or os.environ.get("RAY_ADDRESS") or LOCAL
    if ray is None and address == LOCAL:
        log.warning("rollout.runner: ray without --with-ray-cluster: starting a Ray on this machine, for this run")
    beside = [config.source.parent] if config.source is not None else []
    package = package_code(*objects, beside=beside, leave_out=[config.directory])
    with cluster(address, package=package) as joined:
        nodes = [node for node in joined.nodes() if node.alive]
        cpus = sum(node.cpus for node in nodes)
        log.info("Ray at %s: %d CPUs on %d node%s", joined.address, cpus, len(nodes), "s" if len(nodes) > 1 else "")
        yield joined


def make_workers(config: Config, joined: RayCluster | None) -> Workers:
    """The workers of a run."""
    limit = config.rollout.max_env_worker
    if joined is None:
        return Workers(limit)
    workers: Workers = import_module(_PROCESSES).RayWorkers(limit, joined)
    return workers


_PROCESSES = "ajet_sdk.rollout.processes"
"""Loaded only where Ray runs the agents: it imports Ray."""

_BACKBONES = {
    "debug": "ajet_sdk.backbones.debug.debug",
    "local": "ajet_sdk.backbones.local.local",
    "trinity": "ajet_sdk.backbones.trinity.backbone.trinity",
    "verl": "ajet_sdk.backbones.verl.backbone.verl",
}


def train(
    config: Config,
    *,
    workflow: Any = None,
    judge: Any = None,
    tasks: GivenTasks | None = None,
    val_tasks: GivenTasks | None = None,
    resume: bool = False,
    debug_tags: Sequence[str] = (),
    ray: str | None = None,
) -> TunedModel:
    """Train the model behind a workflow with the backbone that the config names, and return the result.

    `workflow` and `judge` stand in for those that the config names by class path (a judge may be a name such as
    `llm:FILE`), `tasks` (to train on) and `val_tasks` for those of its `task_reader`: dicts or Tasks, a DataFrame, a
    `datasets.Dataset`, or a path. `resume` goes on with the newest run of the experiment's directory. `ray` is the Ray
    cluster to use: its address, `local` for one that is started here and ended with the run, None where the backbone
    needs none.

    Raises ConfigError, SignatureError and TaskError before the first episode, TraceLocked where another run owns the
    directory, TrainingError where the run stops or its ledger does not balance.
    """
    backbone = _backbone(config.backbone)
    ensure_api_key()
    sets = load_tasks(config, tasks, val_tasks)
    if workflow is not None or config.rollout.user_workflow or sets.val or not config.trainer_common.algorithm.stored:
        workflow = _find_workflow(config, workflow)
        check_models(config, workflow, training=config.backbone != "debug")
    judge = _find_judge(config, judge)
    _check_signatures(workflow, judge, [*sets.train, *sets.val], config)
    if debug_tags and config.rollout.runner == "ray":
        log.warning("With breakpoints the agent runs in this process; rollout.runner is ignored")
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"runner": "thread"})})
    with _Session(config, resume=resume, ray=ray, code=(workflow, judge)) as session:
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
        )
        tuned = run_to_end(backbone(job, session.gateway, session.writer))
        session.check_ledger()
    return tuned


async def train_async(config: Config, **options: Any) -> TunedModel:
    """`train`, to be awaited: the caller's event loop goes on meanwhile. Cancelling it stops the run as Ctrl-C does.

    `options` are the keyword arguments of `train`.
    """
    return await call_to_end(partial(train, config, **options))


def _backbone(name: str) -> Callable[[Job, Gateway, TraceWriter], Coroutine[Any, Any, TunedModel]]:
    module, _, function = _BACKBONES[name].rpartition(".")
    try:
        return getattr(import_module(module), function)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("ajet_sdk", "ajet"):
            raise
        raise MissingExtra(str(error.name), "trinity" if name in ("trinity", "verl") else "local") from error


def _find_workflow(config: Config, given: Any) -> Any:
    if given is not None:
        return given
    if not config.rollout.user_workflow:
        raise ConfigError("no agent is named: set rollout.user_workflow (file.py->name), or pass workflow=")
    return config.load(config.rollout.user_workflow)


def _find_judge(config: Config, given: Any) -> Any:
    if isinstance(given, str):
        return named_judge(given, config)
    if given is not None:
        return given(config) if isinstance(given, type) else given
    return load_judge(config)


def _check_signatures(workflow: Any, judge: Any, tasks: Sequence[Task], config: Config) -> None:
    """Check against one task of each shape, so that a row without a key is found before the first episode."""
    shapes = {(frozenset(task.metadata), bool(task.main_query), task.env_type): task for task in reversed(tasks)}
    for task in shapes.values() if workflow is not None else ():
        check_signature(workflow, judge, task, config)


class _Session:
    """One run from its row in `runs` to its final status: directory, log file, trace, gateway, capture, workers."""

    def __init__(
        self,
        config: Config,
        *,
        resume: bool = False,
        backbone: str | None = None,
        ray: str | None = None,
        code: tuple[Any, ...] = (),
    ) -> None:
        self.config = config
        self.backbone = backbone or config.backbone
        self.resume = resume
        self.ray = ray
        self.code = code
        """What the agent's code can be found by, where it runs on other machines."""
        self._stack = ExitStack()

    def __enter__(self) -> _Session:
        directory = self.config.directory
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts, replies and rewards are nobody else's
        for name in ("logs", "metrics", "checkpoint"):
            (directory / name).mkdir(exist_ok=True, mode=0o700)
        with ExitStack() as stack:
            joined = stack.enter_context(open_cluster(self.config, self.ray, *self.code))
            self.writer: TraceWriter = stack.enter_context(TraceWriter(directory / "trace.duckdb"))
            self.run = self._run()
            stack.enter_context(log_file(directory / "logs" / f"{self.run.run_id}.log"))
            (directory / "config.yaml").touch(mode=0o600)
            (directory / "config.yaml").write_text(_plain_yaml(self.config), encoding="utf-8")
            self.writer.put(self.run)
            self.gateway = stack.enter_context(Gateway(self.writer, host=joined.host if joined else "127.0.0.1"))
            stack.enter_context(installed())
            stack.enter_context(make_workers(self.config, joined))
            self._stack = stack.pop_all()
        return self

    def _run(self) -> Run:
        config = self.config
        fields: dict[str, Any] = {
            "name": config.experiment_name,
            "config": masked(
                {
                    "ajet": config.model_dump(mode="json"),
                    **config.roots.plain(),
                    **({"config_file": str(config.source)} if config.source else {}),  # paths in it are beside it
                },
                "***",
            ),
            "backbone": self.backbone,
        }
        if not self.resume:
            return Run(**fields)
        sql = "SELECT run_id, started_at FROM runs WHERE backbone = ? ORDER BY started_at DESC LIMIT 1"
        newest = self.writer.query(sql, [self.backbone]).to_pylist()
        if not newest:
            raise ConfigError(
                f"there is nothing to resume in {config.directory}: its trace has no run of backbone {self.backbone}"
            )
        return Run(**fields, **newest[0])

    def check_ledger(self) -> None:
        """Raise TrainingError where the tokens of the ledger do not add up to those that were sampled."""
        self.writer.flush()
        trace = open_trace(self.config.directory)  # processes of a cluster have files of their own
        try:
            wrong = ledger_balance(trace, self.run.run_id)
        finally:
            trace.close()
        if wrong:
            more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise TrainingError(
                f"the ledger of run {self.run.run_id} does not balance:\n  " + "\n  ".join(wrong[:10]) + more
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        status, text = "finished", None
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            status, text = "interrupted", "stopped by Ctrl-C"
        elif error is not None:
            status, text = "failed", f"{type(error).__name__}: {error}"
            log.error("The run failed: %s", text, extra={"raised": True})  # for the file: the caller has the error
        try:
            self.writer.put(self.run.model_copy(update={"status": status, "ended_at": now(), "error": text}))
        except AjetError as lost:
            if error is None:
                raise
            log.error("The run's status could not be recorded: %s", lost)
        finally:
            self._stack.close()


def _plain_yaml(config: Config) -> str:
    return plain_yaml(masked(yaml.safe_load(config.dump_yaml()), "***"))


def run(
    config: Config,
    *,
    workflow: Any = None,
    judge: Any = None,
    tasks: GivenTasks | None = None,
    k: int = 1,
    on_episode: Callable[[Episode], None] | None = None,
    ray: str | None = None,
) -> Report:
    """Run a workflow k times on every task and score it; nothing is trained, the traces are kept.

    `tasks` are rows as a file of tasks has them (`{"question": …, "answer": …}`) or Tasks, a DataFrame, a
    `datasets.Dataset`, or a path; without them the config's validation tasks are taken, or else its training tasks. The
    agent's own sampling holds where the config gives none. `ray` is as in `train`.

    Raises ConfigError where k > 1 is asked of greedy sampling, and as `train` does.
    """
    if k < 1:
        raise ConfigError(f"k must be at least 1 (got {k})")
    if k > 1 and config.is_set("rollout.temperature") and config.rollout.temperature == 0:
        raise ConfigError(f"pass@{k} of greedy sampling says no more than pass@1: set rollout.temperature above 0")
    ensure_api_key()
    config = at_endpoint(config)
    workflow, judge = _find_workflow(config, workflow), _find_judge(config, judge)
    sets = load_tasks(config, tasks)
    chosen = sets.val or sets.train
    _check_signatures(workflow, judge, chosen, config)
    check_models(config, workflow, training=False)
    on_episode = on_episode or progress_in_cell(len(chosen) * k)
    with _Session(config, backbone="run", ray=ray, code=(workflow, judge)) as session:
        episodes = run_to_end(
            _score(session, workflow, judge, _attempts(config, chosen, session.run.run_id, k), on_episode)
        )
        session.check_ledger()
    for episode in episodes:
        episode.is_traced_in(config.directory)
    by_task = tuple(TaskScore(task, tuple(episodes[i * k : i * k + k])) for i, task in enumerate(chosen))
    return Report(session.run.run_id, config.directory, by_task, k)


async def run_async(config: Config, **options: Any) -> Report:
    """`run`, to be awaited: the caller's event loop goes on meanwhile. Cancelling it stops the run as Ctrl-C does.

    `options` are the keyword arguments of `run`.
    """
    return await call_to_end(partial(run, config, **options))


def _attempts(config: Config, tasks: Sequence[Task], run_id: str, k: int) -> list[Attempt]:
    seeded = not config.model.base_url or config.is_set("trainer_common.seed")
    made = []
    for position, task in enumerate(tasks):
        group_id, group_seed = new_id(), seed_of(config.trainer_common.seed, position)
        for attempt in range(k):
            text = f"{config.trainer_common.seed}/{position}/{attempt}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") if seeded else None
            made.append(Attempt(task, run_id, group_id, attempt, 0, "val", seed, group_seed))
    return made


async def _score(
    session: _Session,
    workflow: Any,
    judge: Any,
    attempts: Sequence[Attempt],
    on_episode: Callable[[Episode], None] | None,
) -> list[Episode]:
    def finished(episode: Episode) -> None:
        session.writer.put(*untrained_entries(episode))
        if on_episode is not None:
            on_episode(episode)

    rollout = session.config.rollout
    given = {n: getattr(rollout, n) for n in ("temperature", "top_p", "top_k") if session.config.is_set(f"rollout.{n}")}
    engine = open_engine(await with_model(session.config, (workflow, judge, [one.task for one in attempts])))
    try:
        await ready(engine)
        return await run_batch(
            workflow,
            judge,
            attempts,
            engine=engine,
            gateway=session.gateway,
            config=session.config,
            writer=session.writer,
            sampling=SamplingOverride(**given) if given and rollout.sampling == "run" else None,
            on_episode=finished,
        )
    finally:
        await engine.aclose()
