"""The driver of the `verl` backbone: prepares the job, runs verl, collects results, completes the
ledger.

It writes the job to the checkpoint store, starts verl's trainer, reads the `Mailbox` and verl's
metrics file, and writes the run's metrics and the ledger's rows of trained tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.shared.driver import ClusterRun, check_installed, open_run
from ajet_sdk.backbones.shared.failure import failure_of
from ajet_sdk.backbones.shared.fit import check_shape
from ajet_sdk.backbones.shared.progress import Progress
from ajet_sdk.backbones.shared.steps import resume_at, saved_step
from ajet_sdk.backbones.shared.validation import validation_tasks
from ajet_sdk.backbones.verl.mapping import VerlPlace, check, to_verl
from ajet_sdk.backbones.verl.runner import write_job
from ajet_sdk.cluster.mailbox import open_mailbox
from ajet_sdk.errors import AjetError, ConfigError, TrainingError, first_line
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.reporting.results import TunedModel
from ajet_sdk.types import LedgerEntry, Task

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from ajet_sdk.cluster.mailbox import BatchMessage
    from ajet_sdk.protocols import Job
    from ajet_sdk.reporting.loggers import Loggers
    from ajet_sdk.trace.writer import TraceWriter


async def verl(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Train with verl on the Ray cluster of `job.ray`, or on a new one on this machine.

    Raises ConfigError before anything starts, and TrainingError with the first cause if verl fails
    or stops early, or the ledger does not balance.
    """
    check_installed("ray", "verl", "vllm")
    if find_spec("flash_attn") is None:
        raise ConfigError(
            "flash-attn is not installed, and verl 0.8 needs it to remove padding, whatever the"
            " attention. Install it with: pip install flash-attn --no-build-isolation"
        )
    with open_run(job, writer) as (sized, loggers, total):
        return await _Run(sized, writer, loggers, total).run()


class _Run(ClusterRun):
    async def run(self) -> TunedModel:
        job = self.job
        val = validation_tasks(self.job)
        check(job.config)  # before a model is made
        check_shape(job.config)
        place = await self.place(VerlPlace)
        mapping = to_verl(job.config, place)
        self.keep(mapping, "verl.yaml")
        config = validate_config(mapping)
        if job.resume:
            self.roll_back(resume_at(place.directory))
        if saved_step(place.directory) < self.total or (val and not self.is_validated()):
            await self._with_verl(config, place, val)
        self.close_books()
        done = saved_step(place.directory)
        if done < self.total:
            raise TrainingError(
                f"verl stopped after {done} of {self.total} steps and reported no error"
            )
        return self.result(self.export(_newest_model(place)))

    async def _with_verl(self, config: DictConfig, place: VerlPlace, val: Sequence[Task]) -> None:
        """Train and validate; only validate if all steps are trained."""
        job = self.job
        if saved_step(place.directory) >= self.total:
            config.trainer.val_before_train = config.trainer.val_only = True
        with self.cluster():
            write_job(place.job, job, val, place.model, self.traces)
            progress = VerlProgress(self.loggers, self.writer, job, val, self.total)
            directory = place.directory / "metrics"
            directory.mkdir(parents=True, exist_ok=True)
            metrics = (
                directory / f"{len(list(directory.glob('*.jsonl')))}.jsonl"
            )  # verl's logger truncates its file
            listening = asyncio.create_task(progress.listen(open_mailbox(job.run_id)))
            following = asyncio.create_task(progress.follow(metrics))
            try:
                await fit(config, metrics)
            finally:
                await progress.finish(listening)
                await following


def _newest_model(place: VerlPlace) -> Path:
    """The newest checkpoint in transformers format. Raises TrainingError if it is incomplete."""
    model = place.directory / f"global_step_{saved_step(place.directory)}" / "actor" / "huggingface"
    if not (model / "config.json").exists() or not any(model.glob("*.safetensors")):
        raise TrainingError(f"verl wrote no model to {model}")
    return model


_POLL_SECONDS = 1.0

_NAMES = {
    "actor/pg_loss": "train/loss",
    "actor/pg_clipfrac": "train/clip_fraction",
    "actor/ppo_kl": "train/approx_kl",
    "actor/grad_norm": "train/grad_norm",
    "actor/lr": "train/lr",
    "actor/kl_loss": "train/kl",
    "actor/entropy_loss": "train/entropy",
    "timing_s/gen": "time/rollout",
    "timing_s/update_actor": "time/train",
    "timing_s/step": "time/step",
}

_OTHERS = ("actor/", "perf/", "timing_s/", "response_length/", "prompt_length/")
"""Metrics with verl's own names. Its scores are left out, as they are advantages here."""


class VerlProgress(Progress):
    """Handles messages, and reads the file to which verl's `file` logger writes a line per step."""

    def __init__(
        self, loggers: Loggers, writer: TraceWriter, job: Job, val: Sequence[Task], total: int
    ) -> None:
        super().__init__(loggers, writer, job, val, total)
        self._batches: dict[int, BatchMessage] = {}

    async def follow(self, path: Path) -> None:
        """Read lines until `finish` is called, then the remaining ones."""
        offset = 0
        partial = b""
        while True:
            last = self._ended.is_set()
            fresh = await asyncio.to_thread(_read, path, offset)
            offset += len(fresh)
            *lines, partial = (partial + fresh).split(b"\n")
            for line in lines:
                self._line(json.loads(line))
            if last:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _line(self, record: Mapping[str, Any]) -> None:
        """Log the metrics of a finished step and add its trained tokens to the ledger."""
        step = int(record["step"])
        values = record["data"]
        if "training/global_step" not in values:
            return  # a validation, whose episodes arrive as messages
        metrics: dict[str, float] = {}
        batch = self._batches.pop(step, None)
        if batch is not None:
            metrics |= batch["metrics"]
            self._writer.put(*(LedgerEntry(**row) for row in batch["ledger"]))
        metrics |= {
            str(_NAMES.get(name, name)): float(value)
            for name, value in values.items()
            if isinstance(value, (int, float))
            and math.isfinite(value)
            and name.startswith((*_OTHERS, *_NAMES))
        }
        self._log_step(step, metrics)

    def _batch(self, message: BatchMessage) -> None:
        self._batches[int(message["step"])] = message
        for line in message["words"]:
            self._loggers.say(f"step {message['step']}: {line}")


def _read(path: Path, offset: int) -> bytes:
    """The content of the file from `offset`; empty if the file does not exist yet."""
    if not path.exists():
        return b""
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read()


def compose_config(mapping: Mapping[str, object]) -> DictConfig:
    """Merge the mapping into verl's default config. Raises ConfigError for unknown keys."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    with initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None
    ):
        base = compose("ppo_trainer")
    unknown = list(_unknown(mapping, OmegaConf.to_container(base)))
    if unknown:
        raise ConfigError(
            f"verl: unknown keys: {', '.join(unknown)} (to add a key that verl does not list, write"
            " +name)"
        )
    try:
        with open_dict(base):
            return OmegaConf.merge(base, OmegaConf.create(_without_plus(mapping)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"verl: {str(error).partition(chr(10))[0]}") from error


_OURS = {"ajet", "actor_rollout_ref.rollout.agent.agent_loop_manager_class"}
_FREE = ("mixed_precision",)
"""Keys of verl without defaults in its YAML files."""


def _unknown(mapping: Mapping[str, object], known: Mapping[str, Any], path: str = "") -> list[str]:
    unknown = []
    for name, value in mapping.items():
        here = f"{path}{name}"
        if here in _OURS or str(name).startswith("+") or name in _FREE:
            continue
        if name not in known:
            unknown.append(here)
        elif isinstance(value, Mapping) and isinstance(known[name], Mapping) and known[name]:
            unknown += _unknown(value, known[name], f"{here}.")
    return unknown


def _without_plus(mapping: Mapping[str, object]) -> dict[str, object]:
    return {
        str(name).removeprefix("+"): _without_plus(value) if isinstance(value, Mapping) else value
        for name, value in mapping.items()
    }


def validate_config(mapping: Mapping[str, object]) -> DictConfig:
    """Compose verl's config and validate it by verl's own checks. Raises ConfigError with their
    message."""
    from hydra.errors import InstantiationException
    from verl.experimental.reward_loop import migrate_legacy_reward_impl
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    config = migrate_legacy_reward_impl(compose_config(mapping))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_config(config, need_reference_policy(config), need_critic(config))
    except (
        ValueError,
        AssertionError,
        TypeError,
        NotImplementedError,
        InstantiationException,
    ) as error:
        raise ConfigError(f"verl rejected the config: {error.__cause__ or error}") from error
    return config


async def fit(config: DictConfig, metrics: Path) -> None:
    """Run verl's trainer to its end; it writes a line of metrics per step to `metrics`.

    Raises TrainingError with the first cause. The output of verl's processes is in Ray's logs.
    """
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
    from verl.trainer.main_ppo import TaskRunner

    variables = {**get_ppo_ray_runtime_env()["env_vars"], "VERL_FILE_LOGGER_PATH": str(metrics)}
    runner = (
        ray.remote(num_cpus=1)(TaskRunner).options(runtime_env={"env_vars": variables}).remote()
    )
    try:
        await runner.run.remote(config)
    except ray.exceptions.RayError as error:
        raise TrainingError(
            f"verl's trainer failed: {cause_of(error)} (its output is in Ray's logs)"
        ) from error
    finally:
        with contextlib.suppress(Exception):
            ray.kill(runner)  # its actors end with it


def cause_of(error: BaseException) -> str:
    """The first cause as text: ajet's own error, else Ray's report."""
    inner = error
    while isinstance(getattr(inner, "cause", None), BaseException):
        inner = inner.cause  # type: ignore[attr-defined]
    if isinstance(inner, AjetError):
        return first_line(inner)
    return str(failure_of(str(error)))
