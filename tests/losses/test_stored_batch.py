"""One stored batch through `local`, `tinker` and TRL: the same loss and the same gradient, to 1e-5.

An adapter that has moved away from its start is at `ajet trainer serve`, in a module of peft for
the local trainer, and in another for TRL's loss. The server's gradient is read from its optimizer:
with a first beta of 0 the first moment is the gradient. Needs TRL (CONTRIBUTING.md has the
commands); where it is absent, this is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs trl")
pytest.importorskip("tinker", reason="needs the SDK of the Tinker API")

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

from ajet_sdk.config.config import load_config
from ajet_sdk.config.schema import Prices
from ajet_sdk.engines.tinker.sdk import SdkService, Session
from ajet_sdk.engines.tinker.service import Adam, Costs, Datum
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.tinker.learner import complete_adapter
from ajet_sdk.learn.tinker.scaling import Scaling
from ajet_sdk.learn.tinker.trainer import TinkerTrainer
from ajet_sdk.learn.trainer import Trainer, TrainerSettings, trainable_parameters
from ajet_sdk.types import Sample, Span, Timeline
from tests.losses.test_losses_of_peers import B, Stored, T, settings_of, trl_loss
from tests.tinker.servers import IDS, Server
from tests.tiny_models import VLLMS, save_tiny

WORDS = 60
"""Ids are drawn below it."""


@dataclass(frozen=True)
class Place:
    """A server with an adapter, and the same adapter on disk."""

    server: Server
    session: Session
    state: str
    model: Path
    adapter: Path

    def module(self) -> Any:
        base = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(base, str(self.adapter), is_trainable=True).eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    os.environ |= {"TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-tests"}
    folder = tmp_path_factory.mktemp("stored")
    model, adapter = save_tiny(folder / "model", VLLMS), folder / "adapter"
    with Server(model, folder / "state") as server:
        values = {
            "model": {"path": str(model), "lora": {"r": 4}},
            "tinker": {"base_url": server.url},
        }
        session = Session(load_config(values={"ajet": values}))
        service = SdkService(session)
        for _ in range(2):  # so that neither matrix of the adapter is zero
            service.forward_backward(
                [Datum(IDS, np.ones(len(IDS) - 1, np.float32))], "cross_entropy"
            )
            service.optim_step(Adam(lr=0.05)).result(60)
        adapter.mkdir()
        service.download("adapter", adapter)
        complete_adapter(adapter, str(model))
        yield Place(server, session, service.save("start"), model, adapter)
        session.close()


def logprobs(module: Any, sample: Sample) -> torch.Tensor:
    """Of the sampled tokens."""
    ids = torch.from_numpy(np.array(sample.timeline.token_ids))
    scored = (
        module(input_ids=ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    )
    return scored[torch.from_numpy(np.array(sample.timeline.loss_mask[1:]))]


def stored_batch(module: Any) -> tuple[list[Sample], Stored]:
    """Replies of another policy, with ratios on both sides of the bounds: as samples, and as TRL's
    matrices."""
    draw, samples = np.random.default_rng(3), []
    policy, sampled, reference = (torch.zeros(B, T, dtype=torch.float64) for _ in range(3))
    mask, advantages = (
        torch.zeros(B, T, dtype=torch.float64),
        torch.tensor([1.5, -0.7, 0.4, -1.1, 0.9, -0.2]).double(),
    )
    for row, size in enumerate([9, 4, 1, 7, 5, 2]):
        prompt = int(draw.integers(2, 12))
        places = np.arange(prompt + size) >= prompt
        line = Timeline(
            agent="default",
            token_ids=draw.integers(3, WORDS, prompt + size),
            loss_mask=places,
            logprobs=np.zeros(prompt + size),
            call_ids=(f"c{row}",),
            spans=(Span(call_id=f"c{row}", start=prompt, end=prompt + size),),
        )
        sample = Sample(
            timeline=line,
            episode_id=f"e{row}",
            group_id="g",
            reward=0.0,
            advantages=np.where(places, float(advantages[row]), 0.0),
        )
        with torch.no_grad():
            new = logprobs(module, sample)
            with module.disable_adapter():
                reference[row, :size] = logprobs(module, sample)
        moved = np.zeros(prompt + size, np.float32)
        moved[places] = np.minimum(new.numpy() + draw.normal(0, 0.3, size), 0.0)
        line = line.model_validate({**dict(line), "logprobs": moved})
        samples.append(sample.model_copy(update={"timeline": line}))
        policy[row, :size], sampled[row, :size] = new, torch.from_numpy(moved[places])
        mask[row, :size] = 1
    return samples, Stored(policy, sampled, sampled, reference, advantages, mask)


def of_local(
    place: Place, samples: list[Sample], settings: TrainerSettings
) -> tuple[float, torch.Tensor]:
    module = place.module()
    trainer = Trainer(module, settings)
    if (
        trainer.reference is not None
    ):  # the model that a run at the service starts from, without an adapter
        with torch.no_grad():
            for name, parameter in trainer.reference.named_parameters():
                if "lora_B" in name:
                    parameter.zero_()
    loss = trainer.step(samples)["loss"]
    return loss, torch.cat(
        [trainer.optimizer.state[p]["exp_avg"].flatten() for p in trainable_parameters(module)]
    )


def of_tinker(
    place: Place, samples: list[Sample], settings: TrainerSettings, name: str
) -> tuple[float, torch.Tensor]:
    service = SdkService(place.session)
    service.load(place.state)
    loss = TinkerTrainer(service, settings, Scaling(), Costs(Prices()), 60.0).step(samples)["loss"]
    run, kind, checkpoint = service.save(name).removeprefix("tinker://").split("/")
    file = place.server.state / run.replace(":", "_") / kind / checkpoint / "optimiser.pt"
    moments = torch.load(file, weights_only=True)["state"]
    return loss, torch.cat([moments[i]["exp_avg"].flatten() for i in sorted(moments)])


def of_trl(
    place: Place,
    samples: list[Sample],
    batch: Stored,
    loss: LossSettings,
    name: str,
    more: dict[str, Any],
) -> tuple[float, torch.Tensor]:
    module = place.module()
    rows = [torch.nn.functional.pad(logprobs(module, sample), (0, T))[:T] for sample in samples]
    value = trl_loss(batch, loss, name, **more)(torch.stack(rows).double())
    value.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in trainable_parameters(module)])
    return float(value.detach()), gradient


@pytest.mark.parametrize(
    ("named", "use_kl_loss", "theirs", "more"),
    [
        ("grpo", False, "grpo", {}),
        ("grpo", True, "grpo", {}),
        ("dapo", False, "dapo", {}),
        ("dr_grpo", False, "dr_grpo", {}),
        ("sapo", False, "sapo", {}),
        ("gspo", False, "grpo", {"importance_sampling_level": "sequence"}),
        ("cispo", False, "cispo", {"epsilon_high": 5.0}),
    ],
)
def test_a_stored_batch_has_one_loss_and_one_gradient(
    place: Place, named: str, use_kl_loss: bool, theirs: str, more: dict[str, Any]
) -> None:
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3} if named == "gspo" else {}
    loss = settings_of(named, use_kl_loss=use_kl_loss, **bounds)
    settings = TrainerSettings(lr=1e-3, betas=(0.0, 0.95), warmup_steps=0, grad_clip=1e6, loss=loss)
    samples, batch = stored_batch(place.module())
    local_loss, local_gradient = of_local(place, samples, settings)
    assert local_gradient.norm() > 1e-3
    for peer_loss, peer_gradient in (
        of_tinker(place, samples, settings, f"{named}-{use_kl_loss}"),
        of_trl(place, samples, batch, loss, theirs, more),
    ):
        assert peer_loss == pytest.approx(local_loss, abs=1e-5)
        assert (peer_gradient - local_gradient).norm() < 1e-5 * local_gradient.norm()
