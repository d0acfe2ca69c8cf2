"""The settings of the policy objective, for the trainers of all backbones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ajet_sdk.config.trainer_schema import OBJECTIVE

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


def objective_of(config: Config) -> dict[str, Any]:
    """Fields of `learn.objective.LossSettings` for learning from rewards, as JSON."""
    common = config.trainer_common
    named = {key: getattr(common, key) for key in OBJECTIVE if key != "loss_type"}
    has_kl_loss = common.use_kl_loss and not common.algorithm.use_kl_in_reward
    return named | {
        "loss_length": common.loss_length or config.rollout.max_model_len,
        "kl_coef": common.kl_loss_coef if has_kl_loss else 0.0,
        "kl_type": common.kl_loss_type,
    }
