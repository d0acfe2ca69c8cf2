"""One batch through the local loss and through Trinity's: the same loss, the same gradients.

Letters of shapes: B sequences, P the longest prompt, R the longest response, T tokens of one
sequence.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

import numpy as np
import torch
from trinity.common.experience import Experience
from trinity.utils.log import get_logger

from ajet_sdk.backbones.trinity.batches import GivenAdvantages, weigh
from ajet_sdk.backbones.trinity.launch import parse_config
from ajet_sdk.backbones.trinity.mapping import TrinityPlace, to_trinity
from ajet_sdk.backbones.trinity.workflow import to_experience
from ajet_sdk.config.config import load_config
from ajet_sdk.config.objective import objective_of
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.trainer_service.data import Batch
from ajet_sdk.trainer_service.inputs import ModelInput
from ajet_sdk.trainer_service.policies import BaseModel, Lora, Policy, prompt_scores
from ajet_sdk.types import Sample
from tests.oracle import LOSSES, TEMPERATURE, check_same, gradients, local_loss, sampled


def config_of(gpus: int, tmp_path: Path, **terms: Any) -> tuple[Any, dict[str, Any]]:
    """A config of ours, and what Trinity gets of it."""
    config = load_config(
        values={
            "backbone": "trinity",
            "experiment_name": "oracle",
            "model": {"path": "org/model"},
            "rollout": {"temperature": TEMPERATURE},
            "trainer_common": {
                "n_gpus_per_node": gpus,
                "use_kl_loss": False,
                "clip_ratio_low": 0.1,
                **terms,
            },
        }
    )
    place = TrinityPlace(
        run_id="r",
        model="org/model",
        steps=4,
        lr=1e-3,
        checkpoints=tmp_path,
        tasks=tmp_path / "tasks",
    )
    return config, to_trinity(config, place)


def stored(model: Any) -> tuple[list[Sample], list[Experience]]:
    """A batch of samples, and as Trinity's experiences."""
    episodes, batch = sampled(model)
    by_id = {episode.episode_id: episode for episode in episodes}
    return list(batch.samples), [
        to_experience(s, by_id[s.episode_id], i) for i, s in enumerate(batch.samples)
    ]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return load_model(tiny, dtype="float32", device="cpu").eval()


def test_the_batch_has_what_could_go_wrong(model: Any) -> None:
    samples, _ = stored(model)
    signs = {
        bool(value > 0)
        for sample in samples
        for value in sample.advantages[sample.timeline.loss_mask]
    }
    assert signs == {True, False}
    assert {sample.timeline.agent for sample in samples} == {"default", "critic"}
    assert len({int(sample.timeline.loss_mask.sum()) for sample in samples}) > 3, (
        "sequences weigh differently"
    )
    assert len(samples) > 16, "forks are timelines of their own"


KL = {"use_kl_loss": True, "kl_loss_coef": 0.3}
TERMS = [*LOSSES, {**KL, "entropy_coef": 0.05}, {**KL, **LOSSES[1]}]


def aggregation_of(config: Any) -> tuple[Any, int]:
    """As `WholeSteps` gets it."""
    arguments = objective_of(config)
    return arguments["loss_aggregation"], arguments["loss_length"]


@pytest.mark.parametrize("terms", TERMS)
def test_the_loss_of_verls_route_is_the_local_loss(
    tiny: Path, model: Any, tmp_path: Path, terms: dict[str, Any]
) -> None:
    """Trinity's padding for verl, and its loss over our terms, as verl's engine calls it: the
    losses of micro-batches are added up on each rank, and the ranks averaged."""
    pytest.importorskip("verl", reason="needs verl: just install-trinity")
    from trinity.trainer.verl.losses import TrinityPolicyLoss
    from trinity.trainer.verl.utils import to_data_proto

    config, mapping = config_of(4, tmp_path, **terms)
    reference, policy = model, moved(tiny)
    samples, experiences = stored(policy)
    ours = local_loss(policy, samples, config, reference), gradients(policy)

    ranks = 3  # of the four GPUs one samples; `launch` tells Trinity's parts so
    kept, _ = GivenAdvantages(multiple_of=ranks).process(experiences)
    assert len(kept) % ranks == 0
    weigh(kept, ranks, *aggregation_of(config))
    proto = to_data_proto(kept, 0, policy, get_logger("oracle"))
    proto.batch["old_log_probs"] = proto.batch["rollout_log_probs"]
    width = proto.batch["prompts"].shape[1]
    if "use_kl_loss" in terms:
        with torch.no_grad():
            logits_BRV = padded_logits(reference, proto.batch)[:, width - 1 : -1]
        proto.batch["ref_log_prob"] = picked(logits_BRV, proto.batch["responses"])
    whole = proto.to_tensordict()
    loss_fn = TrinityPolicyLoss(parse_config(mapping).algorithm)
    total, clipped = 0.0, 0.0
    for rank in range(ranks):
        rows = torch.arange(rank, len(kept), ranks)
        for part in rows.split(3):
            micro = whole[part]
            logits_BTV = padded_logits(policy, micro)
            seen = micro["attention_mask"].bool()
            following = torch.roll(micro["input_ids"], -1, 1)
            lengths = seen.sum(1).tolist()
            logprobs = picked(logits_BTV, following)
            every = torch.log_softmax(logits_BTV, -1)
            entropy = -(every.exp() * every).sum(-1)
            output = {
                name: torch.nested.as_nested_tensor(
                    list(value[seen].split(lengths)), layout=torch.jagged
                )
                for name, value in (("log_probs", logprobs), ("entropy", entropy))
            }
            loss, said = loss_fn(output, micro)
            (loss / ranks).backward()
            total, clipped = (
                total + float(loss.detach()) / ranks,
                clipped + said["actor/pg_clipfrac"],
            )
    assert clipped > 0.05 or terms.get("clip_type") in ("soft", "none") or "ratio_base" in terms
    check_same(ours, (total, gradients(policy)))


def padded_logits(model: Any, batch: Any) -> torch.Tensor:
    positions = batch["position_ids"]
    return (
        model(
            batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions
        ).logits
        / TEMPERATURE
    )


def picked(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]


def moved(tiny: Path) -> Any:
    """The model some updates later: else it does not diverge from the first."""
    model = load_model(tiny, dtype="float32", device="cpu").eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def as_input(ids: list[int]) -> ModelInput:
    return ModelInput(np.asarray(ids, np.int32))


@pytest.mark.parametrize("terms", [*LOSSES, KL, {**KL, **LOSSES[2]}])
def test_the_loss_of_the_route_without_gpus_is_the_local_loss(
    tiny: Path, tmp_path: Path, terms: dict[str, Any]
) -> None:
    """Trinity's own loss function of its Tinker trainer over its own inputs, and the learner's
    passes, between which the SDK turns the gradient of the loss into weights."""
    pytest.importorskip("tinker", reason="needs the Tinker SDK: just install-trinity")
    trainer = importlib.import_module("trinity.trainer.tinker.tinker_trainer")
    config, mapping = config_of(0, tmp_path, **terms)
    reference = load_model(tiny, dtype="float32", device="cpu").eval()
    base = BaseModel(str(tiny), device="cpu", temperature=TEMPERATURE)
    policy = Policy(base, Lora(rank=4, train_unembed=False))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter += 0.1 * torch.randn_like(parameter)
    samples, experiences = stored(policy.module)
    ours = local_loss(policy.module, samples, config, reference), gradients(policy.module)

    kept, _ = GivenAdvantages().process(experiences)
    weigh(kept, 1, *aggregation_of(config))
    wrapper = object.__new__(
        trainer.TinkerTrainerWrapper
    )  # its constructor asks for Ray, which the loss does not need
    wrapper.config, wrapper.logger = parse_config(mapping), get_logger("oracle")
    wrapper._init_algorithm()
    data, prompts, wrapper.model_inputs_list = trainer.to_tinker_input(kept, wrapper.logger)
    for prompt, inputs in zip(prompts, wrapper.model_inputs_list, strict=True):
        scores = prompt_scores(base, base.model, as_input(prompt.to_ints()), 0, None)
        inputs["ref_logprob"] = torch.from_numpy(scores.logprobs_T)[-len(inputs["action_mask"]) :]
    given = [as_input(datum.model_input.to_ints()) for datum in data]
    targets = [np.asarray(datum.loss_fn_inputs["target_tokens"].data, np.int64) for datum in data]
    nothing = [np.zeros(len(row.ids), np.float32) for row in given]
    logprobs, _ = policy.score(
        Batch("cross_entropy", {}, given, targets, nothing, nothing), backward=False
    )
    leaves = [torch.from_numpy(row).requires_grad_() for row in logprobs]
    loss, said = wrapper._loss_func(data, leaves)
    loss.backward()
    if not terms:
        assert said["actor/pg_clipfrac"] > 0.05
    weights = [-leaf.grad.numpy() for leaf in leaves if leaf.grad is not None]
    policy.score(Batch("cross_entropy", {}, given, targets, weights, nothing), backward=True)
    check_same(ours, (float(loss.detach()), gradients(policy.module)))
