"""The models of other agents (opponents and debug models), which are opened once per run and never
trained.

`opponent` and `debug_models` name them; `source_of` resolves the names. Weights are sampled by
transformers in this process; larger models can be served elsewhere and named by their endpoint.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING

from ajet_sdk.config.model_source import (
    SEPARATE,
    checkpoint_base,
    first_model,
    saved_steps,
    steps_of_experiment,
)
from ajet_sdk.config.schema import ModelSource
from ajet_sdk.engines.open import open_engine, ready
from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from ajet_sdk.config.config import Config
    from ajet_sdk.protocols import Answer, Ask, Engine

POLICY = "policy"
"""The current policy, answering without being trained."""

_OWN = "checkpoint"
_MOVING = ("latest", "any")
_OPEN = 6
"""Idle models that stay open; the least recently used is closed first."""


def source_of(
    named: str | ModelSource,
    config: Config,
    *,
    run_id: str = "",
    step: int = 0,
    draw: random.Random | None = None,
) -> ModelSource | None:
    """Resolve an entry of `opponent` or `debug_models`; None for the policy.

    `run_id` and `step` are those of the episode, for `checkpoint@latest` and `checkpoint@any`;
    `draw` chooses a step of the latter. Raises ConfigError if the checkpoint, directory or endpoint
    does not exist.
    """
    if isinstance(named, ModelSource):
        path = named.path and str(
            config.resolve(named.path) if config.resolve(named.path).exists() else named.path
        )
        return named.model_copy(update={"path": path})
    if named == POLICY:
        return None
    experiment, at, which = named.rpartition("@")
    if at and experiment == _OWN:
        return _weights(config, *_own_checkpoint(named, which, config, run_id, step, draw))
    if at and (which.isdigit() or which == "latest"):
        directory = config.resolve(experiment)
        directory = directory if directory.is_dir() else config.directory.parent / experiment
        return _weights(
            config,
            named,
            _pick(named, which, steps_of_experiment(directory / "checkpoint"), directory),
        )
    directory = config.resolve(named)
    if any(
        (directory / name).is_file() for name in ("config.json", "adapter_config.json", SEPARATE)
    ):
        return _weights(config, directory.name, str(directory))
    base_url = config.model.base_url or os.environ.get("OPENAI_BASE_URL")
    if not base_url:
        raise ConfigError(
            f"no endpoint is known for the model {named!r}: set OPENAI_BASE_URL and OPENAI_API_KEY,"
            " or model.base_url in the config. To play against a checkpoint, name checkpoint@STEP,"
            " EXPERIMENT@STEP or a model's directory"
        )
    return ModelSource(name=named, base_url=base_url, api_key_env=config.model.api_key_env)


def _own_checkpoint(
    named: str, which: str, config: Config, run_id: str, step: int, draw: random.Random | None
) -> tuple[str, str]:
    """Name and path of a checkpoint of the config's experiment; step 0 is the initial model."""
    if which == "0":
        return named, first_model(config)
    base = checkpoint_base(config)
    if (
        which not in _MOVING or not step
    ):  # a number means an earlier run, as this run has no checkpoints yet
        path = _pick(
            named,
            "latest" if which in _MOVING else which,
            steps_of_experiment(base, but=run_id),
            base,
        )
        return named, path
    saved = {0: None, **{s: p for s, p in saved_steps(base / run_id).items() if s < step}}
    if which == "any":
        chosen = (draw or random.Random(step)).choice([*saved])
    else:
        chosen = max(saved)
    return f"{_OWN}@{chosen}", str(saved[chosen] or first_model(config))


def _pick(named: str, which: str, steps: dict[int, Path], directory: Path) -> str:
    if steps and which == "latest":
        return str(steps[max(steps)])
    if which.isdigit() and int(which) in steps:
        return str(steps[int(which)])
    if steps:
        there = f"has the steps {', '.join(map(str, steps))}"
    else:
        there = "has no checkpoint"
    if steps:
        hint = "; trainer_common.keep_checkpoints and save_freq set which ones a run keeps"
    else:
        hint = ""
    raise ConfigError(f"there is no checkpoint {named}: {directory} {there}{hint}")


def _weights(config: Config, name: str, path: str) -> ModelSource:
    update = {"path": path, "name": name, "recipe": None, "base_url": None, "scripted": None}
    return config.model.model_copy(update=update)


def check_frozen(config: Config, *, training: bool) -> None:
    """Raise ConfigError if a model for other agents does not exist.

    In a `training`, checkpoint@latest and checkpoint@any refer to the run itself, else to an
    earlier run.
    """
    rollout = config.rollout
    for named in (
        *(rollout.opponent or ()),
        *(rollout.val_kwargs.opponent or ()),
        *rollout.debug_models.values(),
    ):
        moving = (
            isinstance(named, str)
            and named.startswith(f"{_OWN}@")
            and named.rpartition("@")[2] in _MOVING
        )
        if moving and config.backbone in ("trinity", "verl"):
            raise ConfigError(
                f"rollout.opponent: {named} needs backbone local; {config.backbone} stores"
                " checkpoints in another format. Name checkpoint@0, policy, a directory, or a"
                " model served at an endpoint"
            )
        if moving and training:  # refers to the run that is about to begin
            continue
        try:
            source_of(named, config)
        except ConfigError as error:
            if not moving:
                raise
            raise ConfigError(
                f"{error}. Train first, or name another opponent for this run:"
                " ajet.rollout.opponent=policy, checkpoint@0, or a directory with a model"
            ) from None
    for key in rollout.debug_models:
        if not key:
            raise ConfigError(
                "rollout.debug_models: a key must be a target tag, an agent or a model's name"
                " (got '')"
            )


def before_training(config: Config) -> Config:
    """The config for episodes while a recipe makes the model: the policy replaces the initial model
    as an opponent."""

    def now(named: str | ModelSource) -> str | ModelSource:
        is_policy = isinstance(named, str) and named in (
            f"{_OWN}@0",
            *(f"{_OWN}@{word}" for word in _MOVING),
        )
        return POLICY if is_policy else named

    rollout = config.rollout
    if rollout.opponent is None:
        opponent = None
    else:
        opponent = [now(model) for model in rollout.opponent]
    models = {key: now(model) for key, model in rollout.debug_models.items()}
    return config.model_copy(
        update={
            "rollout": rollout.model_copy(update={"opponent": opponent, "debug_models": models})
        }
    )


class FrozenModel:
    """An engine that is opened on use and may be closed in between."""

    def __init__(self, of: FrozenModels, config: Config) -> None:
        self.model = config.model_name
        self.last_use = self.waiting = 0
        """Count at its last use; number of calls that wait for it."""
        self._of = of
        self._config = config
        self.engine: Engine | None = None
        """None while closed."""
        self._opening = asyncio.Lock()

    async def open(self) -> Engine:
        """The engine, loaded if needed. Raises ConfigError, EngineError."""
        async with self._opening:
            if self.engine is None:
                await self._of.make_room(self)
                engine = await asyncio.to_thread(open_engine, self._config)
                await ready(engine)
                self.engine = engine
            return self.engine

    async def answer(self, ask: Ask) -> Answer:
        self._of.count += 1
        self.last_use = self._of.count
        self.waiting = self.waiting + 1
        try:
            return await (self.engine or await self.open()).answer(ask)
        finally:
            self.waiting -= 1

    @property
    def takes_pictures(self) -> bool | None:
        return None if self.engine is None else self.engine.takes_pictures

    async def count(self, ask: Ask) -> int:
        return await (await self.open()).count(ask)

    def forget(self, episode_id: str) -> None:
        if self.engine is not None:
            self.engine.forget(episode_id)

    async def aclose(self) -> None:
        """Close it; the next call opens it again."""
        engine = self.engine
        self.engine = None
        if engine is not None:
            await engine.aclose()


class FrozenModels:
    """The frozen models of a run by their source, for use in one event loop."""

    def __init__(self) -> None:
        self.count = 0
        """Calls so far."""
        self._models: dict[str, FrozenModel] = {}

    def get(self, source: ModelSource, config: Config) -> FrozenModel:
        key = source.model_dump_json()
        if key not in self._models:
            rollout = config.rollout.model_copy(update={"name": "transformers"})
            self._models[key] = FrozenModel(
                self, config.model_copy(update={"model": source, "rollout": rollout})
            )
        return self._models[key]

    async def make_room(self, wanted: FrozenModel) -> None:
        """Close the least recently used models above the limit."""
        idle = [
            model
            for model in self._models.values()
            if model.engine and model is not wanted and not model.waiting
        ]
        for model in sorted(idle, key=lambda model: model.last_use)[
            : max(0, len(idle) - _OPEN + 1)
        ]:
            await model.aclose()

    async def aclose(self) -> None:
        for model in self._models.values():
            await model.aclose()
