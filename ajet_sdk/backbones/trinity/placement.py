"""Splits the GPUs of a Trinity run between engines and trainer, which gets whole machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


def engines(config: Config) -> int:
    """Number of engines: as configured, else the most that leave half of the GPUs for training."""
    if config.rollout.n_vllm_engine:
        return config.rollout.n_vllm_engine
    total = config.trainer_common.nnodes * config.trainer_common.n_gpus_per_node
    fitting = _fitting(config)
    half = [n for n in fitting if 2 * n * config.rollout.tensor_parallel_size <= total]
    return max(half, default=next(iter(fitting), 1))


def trainer_gpus(config: Config, count: int | None = None) -> int:
    """GPUs left for training beside `count` engines, by default those of the config."""
    common = config.trainer_common
    count = engines(config) if count is None else count
    return common.nnodes * common.n_gpus_per_node - count * config.rollout.tensor_parallel_size


def misplaced(config: Config) -> str | None:
    """An error message if engines, GPUs and machines do not fit, with numbers that do; None if they
    fit."""
    common = config.trainer_common
    size = config.rollout.tensor_parallel_size
    fitting = _fitting(config)
    count = engines(config)
    training = trainer_gpus(config)
    if count in fitting:
        return None
    machines = f"{common.nnodes} × {common.n_gpus_per_node} GPUs"
    if common.nnodes * common.n_gpus_per_node == 1:
        return f"no GPU is left for training: {machines}; with one GPU use backbone local or verl"
    if not fitting:
        return (
            f"rollout.tensor_parallel_size: {size} of {machines} per engine leaves the trainer no"
            " whole machines divisible into groups of"
            " trainer_common.ulysses_sequence_parallel_size"
            f" ({common.ulysses_sequence_parallel_size}), for any number of engines"
        )
    if training < 1:
        trouble = "no GPU is left for training"
    elif training > common.n_gpus_per_node and training % common.n_gpus_per_node:
        trouble = f"the remaining {training} are not whole machines"
    else:
        trouble = f"ulysses_sequence_parallel_size does not divide the remaining {training}"
    return (
        f"rollout.n_vllm_engine: {count} × {size} of {machines} sample, and {trouble}; set it to "
        f"{', '.join(map(str, fitting))}, or null"
    )


def _fitting(config: Config) -> list[int]:
    """Numbers of engines that leave the trainer whole machines, or a part of a single one; empty on
    a CPU.

    An engine must fit on one machine or take whole machines; otherwise it would leave GPUs idle,
    which Trinity counts as the trainer's.
    """
    common = config.trainer_common
    size = config.rollout.tensor_parallel_size
    machine = common.n_gpus_per_node
    if not machine or (common.nnodes > 1 and machine % size and size % machine):
        return []
    counts = []
    for count in range(1, common.nnodes * machine // size + 1):
        training = trainer_gpus(config, count)
        whole = training > 0 and (training < machine or training % machine == 0)
        if whole and training % common.ulysses_sequence_parallel_size == 0:
            counts.append(count)
    return counts
