"""What every backbone of a cluster does in the driver: its size, the model, the learning rate, the exported model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from ajet_sdk.config import Config
    from ajet_sdk.protocols import Job
    from ajet_sdk.types import Call

__all__ = ["check_installed", "export", "learning_rate", "model_to_train", "sized"]


def check_installed(*packages: str) -> None:
    """Raises MissingExtra for the first that is not there."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(package, "trinity")


async def model_to_train(job: Job, say: Callable[[str], None]) -> str:
    """The directory of the model, from the root, or a hub's name; made first where a recipe makes it."""
    from ajet_sdk.learn.probe import Probe
    from ajet_sdk.learn.recipe import build_recipe, wants_recipe

    config = job.config
    if not config.model.path:
        raise ConfigError(
            f"model.path is not set: the {config.backbone} backbone needs a directory or a hub name to train"
        )
    if wants_recipe(config):
        path = await build_recipe(config, Probe(config, job.workflow, job.judge, job.train), say)
    else:
        path = config.resolve(config.model.path)
    return str(path.resolve()) if path.exists() else str(path)


def learning_rate(config: Config, model: str, say: Callable[[str], None]) -> float:
    """The one that is given, or one by the number of the model's parameters."""
    from ajet_sdk.learn.trainer import default_lr

    lr = config.trainer_common.optim.lr
    if lr is None:
        parameters = _parameters(model)
        lr = default_lr(parameters, lora=False)
        say(f"trainer_common.optim.lr is not given: {lr:g}, by the model's {parameters:,} parameters")
    return lr


def sized(job: Job) -> Config:
    """The config, with the machines and GPUs that there are where it does not say how many to use."""
    config, common = job.config, job.config.trainer_common
    if config.is_set("trainer_common.n_gpus_per_node"):
        return config
    from ajet_sdk.cluster import LOCAL, cluster

    if (job.ray or LOCAL) == LOCAL:
        import torch

        nodes = [torch.cuda.device_count()]
    else:
        with cluster(job.ray or LOCAL, quiet=True) as joined:
            nodes = [int(node.gpus) for node in joined.nodes() if node.alive]
    gpus = [count for count in nodes if count]
    found = {"n_gpus_per_node": min(gpus, default=0)}
    if not config.is_set("trainer_common.nnodes"):
        found["nnodes"] = max(1, len(gpus))
    return config.model_copy(update={"trainer_common": common.model_copy(update=found)})


def export(found: Path, target: Path, calls: Sequence[Call] = ()) -> float | None:
    """Copy a checkpoint in the format of transformers to `target`, whole and proven to load, or not at all.

    Returns and raises what `check_export` does; `calls` are those that the final weights sampled.
    """
    from ajet_sdk.learn.reload import check_export

    draft = target.with_name(f"{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(found, draft, ignore=shutil.ignore_patterns("*.pt"))
    gap = check_export(draft, calls)
    shutil.rmtree(target, ignore_errors=True)
    draft.replace(target)
    return gap


def _parameters(model: str) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    except (OSError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise ConfigError(f"model.path: no causal language model can be loaded from {model}: {cause}") from error
    return sum(p.numel() for p in whole.parameters())
