"""One batch through the local loss and through verl's: the same loss, the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl, see CONTRIBUTING.md")

import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from ajet_sdk.backbones.verl import manager as _registers_the_estimator  # noqa: F401
from ajet_sdk.backbones.verl.backbone import compose_config
from ajet_sdk.backbones.verl.batches import training_rows
from ajet_sdk.backbones.verl.mapping import ESTIMATOR
from tests.oracle import CLOSE, TEMPERATURE, check_same, gradients, local_loss, sampled

from .configs import config_of, mapping_of

pytestmark = pytest.mark.usefixtures("no_flash_attention")


def verl_loss(model: Any, rows: DataProto, actor: Any) -> tuple[float, dict[str, Any]]:
    """As verl's trainer and worker: its advantages, its conversions, micro-batches, its loss.
    Leaves gradients."""
    rows.batch["old_log_probs"] = rows.batch["rollout_log_probs"]  # `apply_bypass_mode`
    rows.batch["token_level_rewards"] = rows.batch["rm_scores"]
    rows = compute_advantage(rows, adv_estimator=ESTIMATOR, config={})
    tokens, loss, said = int(rows.batch["response_mask"].sum()), 0.0, {}
    for part in rows.chunk(4):
        data = left_right_2_no_padding(part.to_tensordict())
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(rows))
        lines = data["input_ids"].unbind()
        logprobs, entropies = [], []
        for ids in lines:
            logits_TV = model(ids[None]).logits[0] / TEMPERATURE
            # verl's engines give the log-probability of the next token at each place; the last has
            # none
            everything = torch.log_softmax(logits_TV, -1)
            logprobs.append(everything.gather(1, torch.roll(ids, -1)[:, None])[:, 0])
            entropies.append(-(everything.exp() * everything).sum(-1))
        output = {"log_probs": torch.nested.as_nested_tensor(logprobs, layout=torch.jagged)}
        if actor.entropy_coeff:
            output["entropy"] = torch.nested.as_nested_tensor(entropies, layout=torch.jagged)
        one, said = ppo_loss(actor, output, data)
        one.backward()
        loss += float(one.detach())
    return loss, said


@pytest.mark.parametrize("more", [{}, {"entropy_coef": 0.05}])
@pytest.mark.parametrize("blanks", [0, 8])
def test_the_loss_of_verl_is_the_local_loss(
    model: Any, tmp_path: Path, more: dict[str, Any], blanks: int
) -> None:
    config = config_of(**more)
    samples = sampled(model)[1].samples
    ours = local_loss(model, samples, config), gradients(model)

    actor = omega_conf_to_dataclass(
        compose_config(mapping_of(config, tmp_path)).actor_rollout_ref.actor
    )
    rows = training_rows(samples, len(samples) + blanks, padding=0)
    check_same(ours, (verl_loss(model, rows, actor)[0], gradients(model)))


def test_the_batch_is_clipped_on_both_sides(model: Any, tmp_path: Path) -> None:
    actor = omega_conf_to_dataclass(
        compose_config(mapping_of(config_of(), tmp_path)).actor_rollout_ref.actor
    )
    _, said = verl_loss(model, training_rows(sampled(model)[1].samples, 24, padding=0), actor)
    assert any(
        float(metric.aggregate()) > 0.05 for name, metric in said.items() if "clipfrac" in name
    )
    model.zero_grad(set_to_none=True)


def test_the_loss_that_verl_names_bypass_mode_is_the_same(model: Any, tmp_path: Path) -> None:
    """verl's driver renames the loss in a copy of the config that its workers may or may not
    get."""
    config = compose_config(mapping_of(config_of(), tmp_path))
    samples = sampled(model)[1].samples
    found = []
    for mode in ("vanilla", "bypass_mode"):
        config.actor_rollout_ref.actor.policy_loss.loss_mode = mode
        config.actor_rollout_ref.actor.policy_loss.rollout_correction = (
            config.algorithm.rollout_correction
        )
        actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        found.append(
            (verl_loss(model, training_rows(samples, 24, padding=0), actor)[0], gradients(model))
        )
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, **CLOSE)
