"""Starts, watches and stops Trinity's explorer and trainer.

Trinity's own launcher reports success when a stage fails, as its loops log the error and return.
Here the end of each stage is checked against the expected number of steps, and the first error in
the logs becomes the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import re
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ajet_sdk.backbones.shared.failure import failure_of
from ajet_sdk.backbones.shared.nodes import Placement
from ajet_sdk.backbones.shared.steps import saved_step
from ajet_sdk.backbones.trinity.adapters import versions_in_use
from ajet_sdk.engines.vllm.server import maximum_rank
from ajet_sdk.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from trinity.common.config import Config as TrinityConfig
    from trinity.common.config import InferenceModelConfig

    from ajet_sdk.backbones.trinity.actors import SteadyExplorer, WholeBatchTrainer

T = TypeVar("T")

_ACTORS = "ajet_sdk.backbones.trinity.actors"
"""Loaded once Trinity is known to be installed."""
_POLL_SECONDS = 2.0
"""Seconds between two checks of the logs while both run."""
_ERROR_SECONDS = 40.0
"""Time limit for the trainer's next step after the explorer has ended, if the logs have an
error."""
_STEP_SECONDS = 3600.0
"""The same if the logs have no error, as a step of a large model takes long."""
_ENDING = 30.0


def parse_config(mapping: dict[str, object]) -> TrinityConfig:
    """Make Trinity's Config from the mapping. Raises ConfigError for an unknown key or a wrong
    type."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from trinity.common.config import Config

    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(mapping))
        config: TrinityConfig = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        text = str(error).partition("\n")[0]
        raise ConfigError(
            f"trinity: {text} (at {getattr(error, 'full_key', None) or 'its root'})"
        ) from error
    auxiliary = {
        f"auxiliary_models[{at}]": model
        for at, model in enumerate(config.explorer.auxiliary_models)
    }
    for role, model in {"rollout_model": config.explorer.rollout_model, **auxiliary}.items():
        _check_engine_arguments(model, f"trinity: explorer.{role}")
    return config


_PASSED_BY_TRINITY = (
    "model",
    "worker_cls",
    "distributed_executor_backend",
    "override_generation_config",
    "disable_log_stats",
    "logprobs_mode",
    "async_scheduling",
    "weight_transfer_config",
)
"""Arguments of vLLM's engine that Trinity sets itself, besides keys of its rollout model."""


def _check_engine_arguments(model: InferenceModelConfig, prefix: str) -> None:
    """Raise ConfigError for an extra argument that Trinity passes to vLLM itself, which would be a
    TypeError there."""
    for name in model.extra_engine_args:
        if hasattr(model, name):
            raise ConfigError(
                f"{prefix}.extra_engine_args.{name}: Trinity sets this itself; set {name} beside"
                " extra_engine_args"
            )
        if name in _PASSED_BY_TRINITY:
            raise ConfigError(
                f"{prefix}.extra_engine_args.{name}: Trinity sets this itself; remove it"
            )


@contextmanager
def environment(**added: str) -> Iterator[None]:
    """Set environment variables of this process within the block."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def validate_config(mapping: dict[str, object]) -> TrinityConfig:
    """Parse the mapping, validate and complete it by Trinity's own validators, and set the number
    of ranks.

    Raises ConfigError with the validators' message.
    """
    from trinity.common.constants import SyncStyle

    config = parse_config(mapping)
    style = config.synchronizer.sync_style
    if style == SyncStyle.FULLY_ASYNC:
        # Trinity refuses validation tasks in this style, in which it would validate a mixture of
        # policies; our explorer validates one policy.
        config.synchronizer.sync_style = SyncStyle.TRAINER_DRIVEN
    try:
        with environment(TRINITY_LOG_LEVEL="ERROR"), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "DEPRECATED", FutureWarning
            )  # of the Tinker SDK for Trinity
            config = config.check_and_update()
    except (ValueError, AssertionError, RuntimeError, ImportError, OSError) as error:
        raise ConfigError(f"Trinity rejected the config: {error}") from error
    config.synchronizer.sync_style = style
    ranks = _ranks(config)
    config.algorithm.advantage_fn_args["multiple_of"] = ranks
    config.algorithm.sample_strategy_args["ranks"] = ranks
    sampler = config.explorer.rollout_model
    if sampler.enable_lora:
        # Trinity has one place, of the adapter's own rank, which vLLM may not know as a maximum.
        sampler.lora_kwargs["max_loras"] = versions_in_use(config)
        sampler.lora_kwargs["max_lora_rank"] = maximum_rank(sampler.lora_kwargs["max_lora_rank"])
    return config


def _ranks(config: TrinityConfig) -> int:
    """Number of GPUs, or groups of GPUs that share a sequence or the model, over which the trainer
    splits a batch.

    It follows from Trinity's validated config, including the root `trinity:`.
    """
    trainer = config.trainer
    gpus = config.cluster.trainer_gpu_num
    if trainer.trainer_type != "verl" or not gpus:
        return 1
    sizes = {"ulysses_sequence_parallel_size": trainer.ulysses_sequence_parallel_size}
    if trainer.trainer_strategy.startswith("megatron"):
        names = (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )
        sizes = {f"megatron.{name}": getattr(trainer.megatron, name) for name in names}
    together = math.prod(sizes.values())
    if gpus % together:
        setting = ", ".join(f"trinity.trainer.{name}: {size}" for name, size in sizes.items())
        raise ConfigError(
            f"{setting} does not divide the {gpus} GPUs that train beside the engines"
        )
    return int(gpus // together)


async def explore_and_train(config: TrinityConfig, updates: Callable[[], int]) -> None:
    """Run explorer and trainer to their end. `updates()` is the number of training steps reported
    to the driver.

    The trainer's last checkpoint tells its final step, as messages may be delayed. Raises
    TrainingError with the first cause and its log if one of them dies, stops early, or makes no
    progress.
    """
    from trinity.common.constants import SyncMethod
    from trinity.manager.synchronizer import Synchronizer

    ours = import_module(_ACTORS)
    logs = Path(config.log.save_dir)
    async with (
        _actors(config, ours.SteadyExplorer, ours.WholeBatchTrainer) as (explorer, trainer),
        _raise_ray_errors(logs) as placement,
    ):
        await _all(explorer.prepare.remote(), trainer.prepare.remote())
        await placement.add(_named_actors(config))
        nccl = config.synchronizer.sync_method == SyncMethod.NCCL
        if nccl:
            await Synchronizer.get_actor(
                namespace=config.ray_namespace
            ).coordinate_weight_sync_setup.remote()
            await _all(explorer.sync_weight.remote(), trainer.sync_weight.remote())
        else:  # in this order: the explorer of a resumed run would take the initial weights at once
            await trainer.sync_weight.remote()
            await explorer.sync_weight.remote()
        exploring = asyncio.ensure_future(_with_engines(explorer.explore.remote(), config))
        training = asyncio.ensure_future(_wait_for(trainer.train.remote()))
        try:
            await _until_ended(exploring, training, updates, config.trainer.total_steps, logs)
        finally:
            exploring.cancel()
            training.cancel()
    done = saved_step(Path(config.checkpoint_job_dir))
    if done < config.trainer.total_steps:
        raise TrainingError(_stop_message("trainer", done, config.trainer.total_steps, logs))


async def explore_only(config: TrinityConfig) -> None:
    """Explore (mode `explore`) or evaluate checkpoints (mode `bench`) without training. Raises
    TrainingError."""
    logs = Path(config.log.save_dir)
    async with _actors(config, import_module(_ACTORS).SteadyExplorer) as (explorer,):
        async with _raise_ray_errors(logs) as placement:
            await explorer.prepare.remote()
            await placement.add(_named_actors(config))
            if config.mode == "bench":
                await _with_engines(explorer.benchmark.remote(), config)
                return
            await explorer.sync_weight.remote()
            await _with_engines(explorer.explore.remote(), config)
        message = first_error(logs)
        if message:
            raise TrainingError(f"Trinity's explorer failed: {message}")


def last_checkpoint(config: TrinityConfig) -> TrinityConfig:
    """The config for evaluating the last checkpoint of a trained job."""
    from trinity.common.constants import SyncMethod

    config = copy.deepcopy(config)
    config.mode = "bench"
    config.synchronizer.sync_method = SyncMethod.CHECKPOINT  # there is no trainer
    config.explorer.rollout_model.sync_method = SyncMethod.CHECKPOINT
    config.explorer.name = "validator"
    config.explorer.bench_on_latest_checkpoint = True
    config.explorer.eval_on_startup = False
    return config


async def _with_engines(exploring: Awaitable[object], config: TrinityConfig) -> None:
    """Wait for the explorer. Raises Ray's error if one of its engines dies and the explorer does
    not end.

    Trinity does not restart engines: each episode that uses the dead one fails, and the trainer
    waits for samples. An explorer that ends shuts its engines down shortly before its call returns.
    """
    explored = asyncio.ensure_future(_wait_for(exploring))
    watching = asyncio.ensure_future(_until_dead(_engines(config)))
    try:
        await asyncio.wait({explored, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not explored.done():
            await asyncio.wait({explored}, timeout=_ENDING)
        await (explored if explored.done() else watching)
    finally:
        explored.cancel()
        watching.cancel()


def _named_actors(config: TrinityConfig) -> dict[str, ActorHandle]:
    """The actors of a job by their names: explorer, trainer, synchronizer, engines, and others."""
    import ray
    from ray.util import list_named_actors

    actors = {}
    for actor in list_named_actors(all_namespaces=True):
        if actor["namespace"] == config.ray_namespace:
            with contextlib.suppress(ValueError):  # it has just ended
                actors[actor["name"]] = ray.get_actor(actor["name"], namespace=config.ray_namespace)
    return actors


def _engines(config: TrinityConfig) -> list[ActorHandle]:
    """The actors of the policy's engines and of auxiliary models'."""
    return [actor for name, actor in _named_actors(config).items() if "_model_" in name]


async def _until_dead(engines: Sequence[ActorHandle]) -> None:
    """Raise Ray's error of the first engine that dies; temporarily unavailable ones are checked
    again."""
    import ray

    while True:
        with contextlib.suppress(ray.exceptions.ActorUnavailableError):
            await _all(*(engine.__ray_ready__.remote() for engine in engines))
        await asyncio.sleep(_POLL_SECONDS)


async def _until_ended(
    exploring: asyncio.Future[None],
    training: asyncio.Future[None],
    updates: Callable[[], int],
    total: int,
    logs: Path,
) -> None:
    done_at = None
    seen = -1
    clock = asyncio.get_running_loop().time
    while not training.done():
        await asyncio.wait(
            {training, exploring} if not exploring.done() else {training}, timeout=_POLL_SECONDS
        )
        heard = updates()
        if exploring.done() and not training.done():
            exploring.result()
            if done_at is None or heard != seen:
                done_at = clock()
                seen = heard
            if clock() - done_at > (_ERROR_SECONDS if first_error(logs) else _STEP_SECONDS):
                raise TrainingError(_stop_message("explorer", heard, total, logs))
    training.result()
    updates()  # raises if too few episodes of a step were sound


def _stop_message(who: str, steps: int, total: int, logs: Path) -> str:
    message = first_error(logs)
    return (
        f"Trinity's {who} stopped after {steps} of {total} steps:"
        f" {message or f'its logs in {logs} show no error'}"
    )


@asynccontextmanager
async def _raise_ray_errors(logs: Path) -> AsyncIterator[Placement]:
    """Convert Ray's errors to TrainingError, with the first cause: a lost node, a dead process,
    else an error in the logs."""
    import ray

    placement = Placement()
    try:
        yield placement
    except ray.exceptions.RayError as error:
        failure = failure_of(str(error))
        message = await placement.loss(error)
        if not message and not failure.died:
            message = first_error(logs) or ""
        raise TrainingError(
            f"Trinity failed: {message or f'{failure} (Trinity logs to {logs})'}"
        ) from error


@asynccontextmanager
async def _actors(
    config: TrinityConfig, *kinds: type[SteadyExplorer | WholeBatchTrainer]
) -> AsyncIterator[tuple[ActorHandle, ...]]:
    """Start the actors of a job; shut them down at the end, or kill them, to free their GPUs."""
    import ray

    before = _placement_groups()
    for leftover in _synchronizer(
        config
    ):  # of a killed driver; it would end with that driver's actors
        ray.kill(leftover)
    actors = tuple(kind.get_actor(config) for kind in kinds)
    try:
        yield actors
    finally:
        ending = [asyncio.ensure_future(_wait_for(actor.shutdown.remote())) for actor in actors]
        await asyncio.wait(ending, timeout=_ENDING)
        for task in ending:
            task.cancel()
            if task.done() and not task.cancelled():
                task.exception()  # retrieved, as a dead actor cannot shut down
        for actor in (*actors, *_synchronizer(config)):
            with contextlib.suppress(Exception):
                ray.kill(actor)
        with contextlib.suppress(Exception):  # the cluster may have ended
            _free(_placement_groups() - before)


def _synchronizer(config: TrinityConfig) -> tuple[ActorHandle, ...]:
    """The actor that transfers weights, which no process owns; empty without one or without a
    cluster."""
    import ray

    try:
        return (ray.get_actor("synchronizer", namespace=config.ray_namespace),)
    except (ValueError, ray.exceptions.RayError):
        return ()


def _placement_groups() -> set[str]:
    """Ids of this job's placement groups. Ray keeps those of dead actors until the job ends."""
    import ray
    from ray.util.placement_group import placement_group_table

    job = ray.get_runtime_context().get_job_id()
    present = (
        name for name, group in placement_group_table().items() if group["state"] != "REMOVED"
    )
    return {name for name in present if name.endswith(job)}


def _free(placement_groups: set[str]) -> None:
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for name in placement_groups:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(name)))


async def _wait_for(reference: Awaitable[T]) -> T:
    return await reference


async def _all(*references: Awaitable[object]) -> None:
    """Wait for all; the first error is raised at once, since the others may wait for the failed
    one."""
    waiting = [asyncio.ensure_future(_wait_for(reference)) for reference in references]
    try:
        await asyncio.gather(*waiting)
    finally:
        for future in waiting:
            future.cancel()


_ERROR = re.compile(r"^ERROR (\d\d-\d\d \d\d:\d\d:\d\d) \[(.*?)\] ?(.*)$")


def first_error(logs: Path) -> str | None:
    """The earliest error in Trinity's logs: its message, the exception, and the log's path. None
    without errors."""
    earliest: tuple[str, str] | None = None
    for log in sorted(logs.rglob("*.log")) if logs.is_dir() else ():
        with log.open(encoding="utf-8", errors="replace") as lines:
            block: list[str] = []
            at = logger = ""
            for line in lines:
                match = _ERROR.match(line.rstrip())
                if block and (match is None or (match[1], match[2]) != (at, logger)):
                    break
                if match:
                    at = match[1]
                    logger = match[2]
                    block.append(match[3])
        if block and (earliest is None or at < earliest[0]):
            earliest = at, f"{_summary(block)} (log: {log})"
    return earliest[1] if earliest else None


def _summary(block: list[str]) -> str:
    """The message of an error, and the cause in its traceback."""
    doing, traceback, report = (
        "\n".join(block).strip().partition("Traceback (most recent call last):")
    )
    doing = " ".join(doing.split()).rstrip(": ")
    if not traceback:
        return doing
    failure = str(failure_of(report))
    return f"{doing}: {failure}" if doing else failure
