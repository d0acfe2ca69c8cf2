"""A planned attempt at a task, and the random choice of its trained seats and other models.

The attempts of a group share this choice, since their advantages compare them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ajet_sdk.agent.decorators import spec_of
from ajet_sdk.agent.workflow import is_workflow_class, make_workflow
from ajet_sdk.engines.frozen import FrozenModels, check_frozen, source_of
from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import Engine
from ajet_sdk.types import Task

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.config.rollout_schema import Rollout
    from ajet_sdk.config.schema import ModelSource


@dataclass(frozen=True)
class Attempt:
    """A planned attempt at a task. Attempts at the same position of a batch share `group_id`."""

    task: Task
    run_id: str = ""
    group_id: str = ""
    attempt: int = 0
    step: int = 0
    split: Literal["train", "val", "trial"] = "train"
    seed: int | None = None
    """Mixed into the seed of every call; None leaves calls without their own seed unseeded."""
    group_seed: int = 0
    """Random seed of the group's opponent and seats."""
    must_call: bool = False
    """Whether an attempt without a call to a model fails, as in training."""
    retry: int = 0
    """Number of earlier tries, which infrastructure faults ended."""
    episode_id: str = ""
    """The id that a swarm's server gave; empty: a new one."""
    check: Callable[[str], None] | None = None
    """Called with the episode's id after the workflow; raises if the output must not be judged."""


def named_targets(rollout: Rollout, workflow: object) -> list[str] | None:
    """The targets to train that the config or the workflow names; None: all agents."""
    named: Sequence[str] | None = rollout.trainable_targets
    if named is None and is_workflow_class(workflow):
        named = make_workflow(workflow).trainable_targets
    elif named is None and workflow is not None:
        named = spec_of(workflow, "workflow").trainable_targets
    return None if named is None else list(dict.fromkeys(named))


def draw_seats(
    rollout: Rollout, workflow_targets: Sequence[str] | None, group_seed: int
) -> list[str] | None:
    """Choose the policy's targets: those of the config, else the workflow's; if `trained_seats` is
    set, that many.

    None means every agent. Raises ConfigError if there are too few.
    """
    targets = rollout.trainable_targets or workflow_targets
    if rollout.trained_seats is None:
        return None if targets is None else list(targets)
    if targets is None or len(targets) < rollout.trained_seats:
        raise ConfigError(
            f"rollout.trained_seats: {rollout.trained_seats} targets are chosen from"
            " trainable_targets, which "
            + (
                "is empty: list the target tags that the policy may play"
                if not targets
                else f"has {len(targets)}"
            )
        )
    drawn = random.Random(f"{group_seed}/seats").sample(list(targets), rollout.trained_seats)
    return [target for target in targets if target in drawn]


def draw_models(
    config: Config, attempt: Attempt, policy: Engine, frozen: FrozenModels
) -> tuple[dict[str, Engine], Engine | None]:
    """The other models of an episode, by agent, target tag or debug name, and a random opponent
    from the population. Raises as `source_of` does."""
    rollout = config.rollout
    population = (
        rollout.val_kwargs.opponent if attempt.split == "val" else None
    ) or rollout.opponent
    draw = random.Random(f"{attempt.group_seed}/opponent")
    if population:
        opponent = frozen_model(draw.choice(population), config, attempt, policy, frozen, draw)
    else:
        opponent = None
    models = {
        name: frozen_model(model, config, attempt, policy, frozen, draw)
        for name, model in rollout.debug_models.items()
    }
    return models, opponent


def frozen_model(
    named: str | ModelSource,
    config: Config,
    attempt: Attempt,
    policy: Engine,
    frozen: FrozenModels,
    draw: random.Random | None = None,
) -> Engine:
    """Opens the engine of a model named in config or code. Raises ConfigError if there is none."""
    source = source_of(named, config, run_id=attempt.run_id, step=attempt.step, draw=draw)
    return policy if source is None else frozen.get(source, config)


def check_models(config: Config, workflow: object, *, training: bool) -> None:
    """Raise ConfigError for a missing model or too few seats."""
    check_frozen(config, training=training)
    spec = make_workflow(workflow) if is_workflow_class(workflow) else spec_of(workflow, "workflow")
    draw_seats(config.rollout, spec.trainable_targets, 0)


def seed_of(*parts: object) -> int:
    """Derives a 48-bit seed from the parts, the same on every machine."""
    return int.from_bytes(
        hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest(), "big"
    )
