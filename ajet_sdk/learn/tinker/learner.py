"""`TinkerLearner`: a model at a service with its sampler, trainer, checkpoints and exported
adapter."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from ajet_sdk.config.model_source import adapter_values, is_cached, named_model
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.fetch import fetched
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.tinker.sampler import TinkerSampler
from ajet_sdk.engines.tinker.sdk import SdkService, Session
from ajet_sdk.engines.tinker.service import Costs, wait
from ajet_sdk.errors import CheckpointError, ConfigError, TrainingError
from ajet_sdk.learn import checkpoint
from ajet_sdk.learn.tinker.scaling import measure_scaling
from ajet_sdk.learn.tinker.trainer import TinkerTrainer
from ajet_sdk.learn.trainer import TrainerSettings
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import new_id

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

_LR = 1e-4
"""Default learning rate: a service's models are large, and an adapter's best rate hardly depends on
the size (Schulman et al. 2025, "LoRA Without Regret")."""
_STATE = "tinker.json"
_TEXTS = (
    "The quick brown fox jumps over the lazy dog. 12 + 30 = 42.",
    '{"name": "search", "arguments": {"query": "weather in Oslo"}}',
    "def mean(values):\n    return sum(values) / len(values)\n",
)
"""Texts for comparing an adapter; the first also for measuring the service's scaling."""
_FAR = 0.3
"""Largest mean difference between two computations of an adapter, in nats per token."""


@dataclass(frozen=True)
class TinkerLearner:
    """A model at a service, with the methods of `learn.learner.Learner`."""

    config: Config
    session: Session
    service: SdkService
    engine: TokenEngine
    sampler: TinkerSampler
    trainer: TinkerTrainer
    tokenizer: HFTokenizer
    costs: Costs
    say: Callable[[str], None]

    @property
    def service_name(self) -> str:
        """Name of the service that trains."""
        return self.service.name

    def estimate(self, config: Config, *, steps: int, val_episodes: int) -> str:
        """Number of episodes; their cost is known after the first step."""
        stored = config.trainer_common.algorithm.stored
        if stored:
            per_step = 0
        else:
            per_step = config.data.train_batch_size * config.rollout.num_repeat
        return (
            f"{steps * per_step + val_episodes:,} episodes; time and cost are known after the first"
            " step"
        )

    def write(self, directory: Path) -> None:
        """Save weights and optimizer at the service, and their path in `directory`."""
        path = self.service.save(f"{directory.name.strip('.').partition('.')[0]}-{new_id()[:8]}")
        record = {"state": path, "updates": self.trainer.updates, "tokens": self.costs.tokens}
        (directory / _STATE).write_text(json.dumps(record, indent=1))

    def read(self, directory: Path) -> None:
        """Restore the state that `write` saved at the service. Raises CheckpointError,
        TrainingError."""
        path, self.trainer.updates, tokens = _kept(directory, "state")
        self.costs.resume(tokens)
        self.service.load(path)

    def remove(self, directory: Path) -> None:
        """Delete a checkpoint here and its state at the service."""
        with suppress(CheckpointError):  # a damaged one names nothing
            self._delete(_kept(directory, "state")[0])
        shutil.rmtree(directory)

    def _delete(self, path: str) -> None:
        """Delete weights at the service, which may refuse."""
        try:
            self.service.delete(path)
        except TrainingError as error:
            self.say(f"{error}; the service keeps it")

    def export(self, run: Path) -> Path:
        """Download the adapter to `adapter/` in peft's format and check it; if the service refuses,
        write its path."""
        path = self.service.keep_sampler(f"final-{new_id()[:8]}")
        self.say(f"the service keeps the adapter at {path}")
        fresh = run / f".adapter.{new_id()[:8]}"
        fresh.mkdir(parents=True)
        try:
            copy = self.service.download(f"adapter-{new_id()[:8]}", fresh)
        except TrainingError as error:
            self.say(f"{error}; sample from it there: ajet serve {path} (with TINKER_BASE_URL)")
        else:
            modules = complete_adapter(fresh, _base(self.config))
            self.tokenizer.hf.save_pretrained(fresh)
            self.say(f"adapter of {', '.join(modules)}: {self._compare(fresh)}")
            self._delete(copy)
        (fresh / _STATE).write_text(
            json.dumps({"sampler": path, "updates": self.trainer.updates}, indent=1)
        )
        with suppress(CheckpointError):  # an earlier adapter exists if a shorter run was resumed
            self._delete(_kept(run / "adapter", "sampler")[0])
        checkpoint.replace(fresh, run / "adapter")
        return run / "adapter"

    def _compare(self, adapter: Path) -> str:
        """Compare the adapter's log-probabilities with the service's, if the base model is on this
        machine.

        Raises CheckpointError if they differ too much.
        """
        base = _base(self.config)
        if not (Path(base).is_dir() or is_cached(base)):
            return f"not compared with the service, for {base} is not on this machine"
        texts = [self.tokenizer.encode(text) for text in _TEXTS]
        sampler = self.service.publish()
        futures = [sampler.logprobs(ids) for ids in texts]
        model = load_model(adapter, device="cpu", dtype="float32")
        gaps = []
        for ids, future in zip(texts, futures, strict=True):
            theirs = torch.from_numpy(
                wait(future, self.trainer.seconds, "log-probabilities", self.service)
            )
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, :-1].float()
            gaps.append(
                torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None])[:, 0] - theirs
            )
        off = torch.cat(gaps).abs()
        gap = float(off.mean())
        if gap > _FAR:
            raise CheckpointError(
                f"the adapter in {adapter} is not the one that the service samples from:"
                f" log-probabilities differ by {gap:.2f} in the mean"
            )
        return f"loaded, log-probabilities within {float(off.max()):.1e} of the service's"

    def metrics(self) -> Mapping[str, float]:
        return self.costs.metrics()

    def reason_to_stop(self) -> str:
        """A message if another step at the highest cost so far would exceed `max_cost`, else
        empty."""
        limit = self.config.tinker.max_cost
        if limit is None or self.costs.dollars + self.costs.step <= limit:
            return ""
        return (
            f"${self.costs.dollars:.2f} spent, and another step may cost ${self.costs.step:.2f} "
            f"(tinker.max_cost: {limit:g})"
        )


def _kept(directory: Path, kind: str) -> tuple[str, int, dict[str, int]]:
    """Reads a path at the service (`state` or `sampler`), with its updates and tokens. Raises
    CheckpointError."""
    try:
        record = json.loads((directory / _STATE).read_text())
        return str(record[kind]), int(record["updates"]), record.get("tokens", {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / _STATE} is incomplete or damaged: {error}") from error


async def open_tinker_learner(
    config: Config, steps: int, say: Callable[[str], None], costs: Costs
) -> TinkerLearner:
    """Open a session, create an adapter and measure the service's scaling. Raises ConfigError,
    TrainingError."""
    _check(config)
    return await asyncio.to_thread(_open, config, steps, say, costs)


def _open(config: Config, steps: int, say: Callable[[str], None], costs: Costs) -> TinkerLearner:
    base = _base(config)
    lr = config.trainer_common.optim.lr
    tokenizer = HFTokenizer(base)
    session = Session(config)
    try:
        service = SdkService(session)
        if lr is None:
            lr = _LR
            say(f"trainer_common.optim.lr is not set; using {lr:g}")
        settings = TrainerSettings.of(config, lr, steps)
        scaling = measure_scaling(service, tokenizer.encode(_TEXTS[0])[:12], session.stall)
        say(f"{session.name}: {config.model.path}, LoRA of rank {config.model.lora.r}; {scaling}")
        _price(costs, session, config.tinker.max_cost, say)
        trainer = TinkerTrainer(service, settings, scaling, costs, session.stall, tokenizer)
        if settings.loss.kl_coef:
            advice = "; without trainer_common.use_kl_loss the reference is not asked"
        else:
            advice = ""
        computed = (
            f"no such loss: its gradient is computed here, at about 1.5 times the compute{advice}"
        )
        say(
            f"the service has {computed}"
            if trainer.loss is None
            else f"the loss is the service's {trainer.loss[0]}"
        )
        limit = min(
            config.rollout.max_model_len, service.max_model_len or config.rollout.max_model_len
        )
        sampler = TinkerSampler(
            service.publish(),
            tokenizer,
            costs,
            model_name=config.model_name,
            max_model_len=limit,
            publish=service.publish,
            close=session.close,
        )
    except BaseException:
        session.close()
        raise
    engine = TokenEngine(
        sampler, tokenizer, tool_call_parser=config.model.tool_call_parser, rescored=False
    )
    return TinkerLearner(config, session, service, engine, sampler, trainer, tokenizer, costs, say)


def _price(costs: Costs, session: Session, limit: float | None, say: Callable[[str], None]) -> None:
    """Take prices from the service's bills if the config has none. Raises ConfigError for a limit
    without prices."""
    if costs.prices.known:
        return
    costs.prices = session.billed_rates(session.model)
    if costs.prices.known:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in costs.prices.model_dump().items())
        say(f"dollars per million tokens, by the service's bills of the last 14 days: {rates}")
    elif limit is not None:
        raise ConfigError(
            f"tinker.max_cost needs tinker.prices: {session.name} has no bills of {session.model}"
            " in the last 14 days that this API key may read"
        )


def _check(config: Config) -> None:
    """Raise ConfigError for settings that a service doesn't support."""
    common = config.trainer_common
    model = config.model
    algorithm = common.algorithm
    refused = {
        "model.path is not set: backbone tinker needs the service's name of the model": (
            not model.path
        ),
        "model.path is a LoRA adapter: a service starts from a whole model that it has": bool(
            model.path and adapter_values(config.resolve(model.path)) is not None
        ),
        "model.base_url: backbone tinker samples from the service that trains": bool(
            model.base_url
        ),
        "model.scripted: backbone tinker samples from the service that trains": bool(
            model.scripted
        ),
        "model.recipe: a service trains models that it has; set it to null (ajet.model.recipe=null)": bool(
            model.recipe
        ),
        "trainer_common.entropy_coef: a service gives no entropy; set it to 0": bool(
            common.entropy_coef
        ),
        "trainer_common.algorithm.teacher: with backbone tinker it must be an endpoint's URL": (
            algorithm.adv_estimator == "opd" and not algorithm.remote_teacher
        ),
        "trainer_common.algorithm.replay is not supported by backbone tinker": algorithm.replays,
    }
    if wrong := [setting for setting, holds in refused.items() if holds]:
        raise ConfigError("\n".join(wrong))


def _base(config: Config) -> str:
    """The directory of the base model if it is on this machine, else its name."""
    name = str(config.model.path)
    known = named_model(name)
    path = fetched(known) if known is not None else config.resolve(name)
    return str(path) if path is not None and path.exists() else name


def complete_adapter(directory: Path, base: str) -> list[str]:
    """Complete an adapter's config for peft; returns the modules that the adapter changes.

    Some servers leave `target_modules` empty, and peft then silently loads a part. Raises
    CheckpointError.
    """
    try:
        with safe_open(directory / "adapter_model.safetensors", framework="pt") as file:
            keys = list(file.keys())
        known: dict[str, object] = json.loads((directory / "adapter_config.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"the adapter that the service gave cannot be read: {error}"
        ) from error
    modules = sorted(
        {key.partition(".lora_")[0].rpartition(".")[2] for key in keys if ".lora_" in key}
    )
    if not modules:
        raise CheckpointError(
            f"the adapter that the service gave has no LoRA weights: {', '.join(keys[:3])}"
        )
    fixed = {**known, "target_modules": modules, "base_model_name_or_path": base}
    (directory / "adapter_config.json").write_text(json.dumps(fixed, indent=1))
    return modules
