"""Plans a run on a cluster before it starts: whether the model fits the GPUs, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.fit import GB, Fit, divisors, fit
from ajet_sdk.backbones.shared.model_shape import ModelShape
from ajet_sdk.backbones.trinity.placement import engines, misplaced, trainer_gpus
from ajet_sdk.errors import ConfigError

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

_LOCAL = "ajet_sdk.backbones.shared.fit_local"
"""Loaded where it is used: it needs torch, and the plan of a cluster only a config.json."""
USUAL_MEMORY = 80 * GB
"""Of a GPU of a cluster (A100, H100), where it is not known."""
_MOST_NODES = 16
Changes = Mapping[str, object]
"""Values by path of a config key."""
_CHECKPOINTING = {"model.gradient_checkpointing": True}
_LORA = {"model.lora.enabled": True}
_BOTH = {**_LORA, **_CHECKPOINTING}
_SHORTER = (16_384, 8_192, 4_096, 2_048)


def plan(
    config: Config,
    shape: ModelShape,
    memory: float = USUAL_MEMORY,
    longest: int | None = None,
) -> Fit:
    """How a run of backbone trinity, verl or local fits GPUs of `memory` bytes; `longest`: see
    `fit`.

    Raises ConfigError for another backbone.
    """
    if config.backbone == "local":
        made: Fit = import_module(_LOCAL).fit_local(config, shape, memory, longest)
        return made
    common = config.trainer_common
    total = common.nnodes * common.n_gpus_per_node
    if config.backbone == "verl":
        return fit(
            config,
            shape,
            memory,
            engines=max(1, total // config.rollout.tensor_parallel_size),
            trainer_gpus=total,
            colocated=True,
            longest=longest,
        )
    if config.backbone != "trinity":
        raise ConfigError(
            f"backbone {config.backbone} has no plan; name another one: --backbone local, trinity or"
            " verl"
        )
    made = fit(
        config,
        shape,
        memory,
        engines=engines(config),
        trainer_gpus=trainer_gpus(config),
        longest=longest,
    )
    wrong = misplaced(config)
    if wrong is not None:
        made.problems.append(wrong)
    return made


def mend(
    config: Config, shape: ModelShape, memory: float, longest: int | None = None
) -> Changes | None:
    """The smallest changes with which a run fits: to parallel sizes, then offloading, then more
    machines; lengths at most as many as the model's positions. None if none is found."""
    shorter: dict[str, object] = {}
    if shape.context is not None and config.rollout.max_model_len > shape.context:
        shorter["rollout.max_model_len"] = shape.context
        config = with_changes(config, shorter)
    if config.backbone == "local":
        candidates = _smaller(config, longest)
    else:
        candidates = _candidates(config, shape)
    for changes in candidates:
        changed = with_changes(config, changes)
        if not plan(changed, shape, memory, longest).problems:
            return {**shorter, **changes}
    return None


def _smaller(config: Config, longest: int | None) -> Iterator[Changes]:
    """What makes a run on one device smaller, the smallest change first."""
    yield from (_CHECKPOINTING, _LORA, _BOTH)
    if longest is not None:  # conversations were recorded, and are as long as they are
        return
    shorter = [n for n in _SHORTER if n < config.rollout.max_model_len]
    for changes in (_CHECKPOINTING, _BOTH):
        for length in shorter:
            yield {**changes, "rollout.max_model_len": length}


def _candidates(config: Config, shape: ModelShape) -> Iterator[Changes]:
    common = config.trainer_common
    rollout = config.rollout
    nodes = [n for n in (1, 2, 3, 4, 6, 8, 12, _MOST_NODES) if n >= common.nnodes]
    sizes = [size for size in divisors(shape.heads) if size in (1, 2, 4, 8)]
    parallel = sorted(sizes, key=lambda size: size != rollout.tensor_parallel_size)
    ulysses = sorted(sizes, key=lambda size: size != common.ulysses_sequence_parallel_size)
    for count, offload, sequence, tensor in product(nodes, (0, 1, 2), ulysses, parallel):
        changes: dict[str, object] = {
            "trainer_common.nnodes": count,
            "trainer_common.ulysses_sequence_parallel_size": sequence,
            "rollout.tensor_parallel_size": tensor,
            "rollout.n_vllm_engine": None,
        }
        if offload:
            changes["trainer_common.fsdp_config.optimizer_offload"] = True
        if offload == 2:
            changes["trainer_common.fsdp_config.param_offload"] = True
        different = {path: value for path, value in changes.items() if _at(config, path) != value}
        yield different
        if config.backbone != "trinity":
            continue
        total = count * common.n_gpus_per_node
        by_balance = sorted(range(1, total // tensor), key=lambda n: abs(2 * n * tensor - total))
        for number in by_balance:
            yield {**different, "rollout.n_vllm_engine": number}


def with_changes(config: Config, changes: Changes) -> Config:
    """The config with other values; they are not validated."""
    for path, value in changes.items():
        names = path.split(".")
        config = _replaced(config, names, value)
    return config


def _replaced(section: Config, names: list[str], value: object) -> Config:
    name, *rest = names
    new = value if not rest else _replaced(getattr(section, name), rest, value)
    return section.model_copy(update={name: new})


def _at(config: Config, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
