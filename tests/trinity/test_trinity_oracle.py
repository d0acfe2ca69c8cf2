"""One batch through the local loss and through Trinity's: the same loss, the same gradients.

Letters of shapes: B sequences, P the longest prompt, R the longest response, T tokens of one sequence.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

import numpy as np
import torch
from trinity.common.experience import Experience
from trinity.utils.log import get_logger

import ajet_sdk
from ajet_sdk.backbones.trinity.batches import GivenAdvantages, _share, _weigh
from ajet_sdk.backbones.trinity.cpu import learner as learning
from ajet_sdk.backbones.trinity.cpu.learner import Learner, Sequences
from ajet_sdk.backbones.trinity.launch import parse_config
from ajet_sdk.backbones.trinity.mapping import TrinityPlace, to_trinity
from ajet_sdk.backbones.trinity.workflow import to_experience
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.learn.trainer import TrainerSettings
from ajet_sdk.types import Sample
from tests.oracle import TEMPERATURE, check_same, gradients, local_loss, sampled

SHIMS = Path(ajet_sdk.__file__).parent / "backbones" / "trinity" / "cpu" / "shims"


def config_of(gpus: int, tmp_path: Path, **terms: Any) -> tuple[Any, dict[str, Any]]:
    """A config of ours, and what Trinity gets of it."""
    config = load_config(
        values={
            "backbone": "trinity",
            "experiment_name": "oracle",
            "model": {"path": "org/model"},
            "rollout": {"temperature": TEMPERATURE},
            "trainer_common": {"n_gpus_per_node": gpus, "use_kl_loss": False, "clip_ratio_low": 0.1, **terms},
        }
    )
    place = TrinityPlace(
        run_id="r", model="org/model", steps=4, lr=1e-3, checkpoints=tmp_path, tasks=tmp_path / "tasks"
    )
    return config, to_trinity(config, place)


def stored(model: Any) -> tuple[list[Sample], list[Experience]]:
    """A batch of samples, and as Trinity's experiences."""
    episodes, batch = sampled(model)
    by_id = {episode.episode_id: episode for episode in episodes}
    return list(batch.samples), [to_experience(s, by_id[s.episode_id], i) for i, s in enumerate(batch.samples)]


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return load_model(tiny, dtype="float32", device="cpu").eval()


def test_the_batch_has_what_could_go_wrong(model: Any) -> None:
    samples, _ = stored(model)
    signs = {bool(value > 0) for sample in samples for value in sample.advantages[sample.timeline.loss_mask]}
    assert signs == {True, False}
    assert {sample.timeline.agent for sample in samples} == {"default", "critic"}
    assert len({int(sample.timeline.loss_mask.sum()) for sample in samples}) > 3, "sequences weigh differently"
    assert len(samples) > 16, "forks are timelines of their own"


TERMS = [{}, {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coef": 0.05}]


@pytest.mark.parametrize("terms", TERMS)
def test_the_loss_of_verls_route_is_the_local_loss(
    tiny: Path, model: Any, tmp_path: Path, terms: dict[str, Any]
) -> None:
    """Trinity's padding for verl, and its loss over our terms, as verl's engine calls it: the losses of micro-batches
    are added up on each rank, and the ranks averaged."""
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
    _share(kept, ranks)
    proto = to_data_proto(kept, 0, policy, get_logger("oracle"))
    proto.batch["old_log_probs"] = proto.batch["rollout_log_probs"]
    width = proto.batch["prompts"].shape[1]
    if terms:
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
                name: torch.nested.as_nested_tensor(list(value[seen].split(lengths)), layout=torch.jagged)
                for name, value in (("log_probs", logprobs), ("entropy", entropy))
            }
            loss, said = loss_fn(output, micro)
            (loss / ranks).backward()
            total, clipped = total + float(loss.detach()) / ranks, clipped + said["actor/pg_clipfrac"]
    assert clipped > 0.05
    check_same(ours, (total, gradients(policy)))


def padded_logits(model: Any, batch: Any) -> torch.Tensor:
    positions = batch["position_ids"]
    return (
        model(batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions).logits / TEMPERATURE
    )


def picked(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]


def moved(tiny: Path, model: Any = None) -> Any:
    """The model some updates later: else it does not diverge from the first."""
    model = model or load_model(tiny, dtype="float32", device="cpu").eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("terms", TERMS)
def test_the_loss_of_the_route_without_gpus_is_the_local_loss(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terms: dict[str, Any]
) -> None:
    """Trinity's own loss function of its tinker trainer over its own inputs, which takes a mean over sequences of their
    means, and our learner, which adds the KL and entropy terms."""
    trainer = tinker_trainer(monkeypatch)
    monkeypatch.setattr(learning, "_MICRO_BATCH_TOKENS", 128)
    config, mapping = config_of(0, tmp_path, **terms)
    reference, learner = load_model(tiny, dtype="float32"), Learner(tiny, TEMPERATURE, TrainerSettings.of(config, 1, 4))
    moved(tiny, learner.model)
    samples, experiences = stored(learner.model)
    ours = local_loss(learner.model, samples, config, reference), gradients(learner.model)

    algorithm = mapping["algorithm"]
    kept, _ = GivenAdvantages().process(experiences)
    assert algorithm["sample_strategy_args"]["by_sequence"]
    _weigh(kept)
    wrapper = object.__new__(trainer.TinkerTrainerWrapper)  # its constructor asks for Ray, which the loss does not need
    wrapper.config, wrapper.logger = parse_config(mapping), get_logger("oracle")
    wrapper._init_algorithm()
    data, _, wrapper.model_inputs_list = trainer.to_tinker_input(kept, wrapper.logger)
    for inputs in wrapper.model_inputs_list:
        inputs["ref_logprob"] = torch.zeros(len(inputs["action_mask"]))
    lengths = [len(one.tokens) - 1 for one in kept]
    logprobs_N = torch.from_numpy(
        learner.forward(
            Sequences(
                lengths_B=np.array(lengths),
                ids_N=np.concatenate([one.tokens[:-1].numpy() for one in kept]).astype(np.int64),
                targets_N=np.concatenate([one.tokens[1:].numpy() for one in kept]).astype(np.int64),
                needed_N=np.concatenate([np.asarray(datum.loss_fn_inputs["weights"]) != 0 for datum in data]),
            )
        )
    )
    leaves = [part.clone().requires_grad_() for part in logprobs_N.split(lengths)]
    loss, said = wrapper._loss_func(data, leaves)
    loss.backward()
    assert said["actor/pg_clipfrac"] > 0.05
    learner.backward(torch.cat([leaf.grad for leaf in leaves]).numpy())
    check_same(ours if not terms else (float(loss.detach()), ours[1]), (float(loss.detach()), gradients(learner.model)))


def tinker_trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trinity's module, over our stand-in for the package that it imports."""
    monkeypatch.syspath_prepend(str(SHIMS))
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tinker"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("trinity.trainer.tinker.tinker_trainer")
