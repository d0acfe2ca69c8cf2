"""Losses, gradients and steps against torch: the same adapter in peft, the sum written out, torch's
own AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

from tests.tinker.servers import IDS, Server, datum, logprobs, train

SHORT = [5, 9, 13, 5, 21]
ADAM = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 0.5, "weight_decay": 0.01}
"""With this `eps` a step is nearly the gradient itself, so that its size shows."""


def rl(ids: list[int], shift: float) -> types.Datum:
    size = len(ids) - 1
    return datum(
        ids, logprobs=np.linspace(-6, -4, size) + shift, advantages=np.linspace(-1, 2, size)
    )


def fetch(service: Any, trainer: Any, name: str, place: Path) -> Path:
    """The trainer's adapter, by the SDK's own way to download it."""
    path = trainer.save_weights_external(name).result().path
    urls = service.create_rest_client().get_external_weights_urls(path).result().urls
    place.mkdir()
    for file, url in urls.items():
        (place / file).write_bytes(httpx.get(url).raise_for_status().content)
    return place


def load(model: Path, adapter: Path) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True).eval()


def torch_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([ids[:-1]])).logits[0]
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def written_out(
    loss: str, config: dict[str, float], new: torch.Tensor, given: dict[str, torch.Tensor]
) -> torch.Tensor:
    """The API's documented losses."""
    if loss == "cross_entropy":
        return -(new * given["weights"]).sum()
    ratio, advantages = (new - given["logprobs"]).exp(), given["advantages"]
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "dro":
        return -(
            new * advantages - 0.5 * config.get("beta", 0.05) * (new - given["logprobs"]) ** 2
        ).sum()
    low, high = (0.8, 1.2) if loss == "ppo" else (0.0, 4.0)
    clipped = ratio.clamp(
        config.get("clip_low_threshold", low), config.get("clip_high_threshold", high)
    )
    if loss == "ppo":
        return -torch.minimum(ratio * advantages, clipped * advantages).sum()
    return -(clipped.detach() * new * advantages).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "config", "clip"),
    [
        ("cross_entropy", {}, 0.0),
        ("cross_entropy", {}, 0.05),
        ("importance_sampling", {}, 0.0),
        ("ppo", {}, 0.0),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}, 0.0),
        ("cispo", {}, 0.0),
        ("dro", {"beta": 0.3}, 0.0),
    ],
)
def test_two_passes_and_a_step_are_torchs(
    loss: str, config: dict[str, float], clip: float, server: Server, service: Any, tmp_path: Path
) -> None:
    trainer = train(service, server.model)
    trainer.forward_backward(
        [datum()], "cross_entropy"
    ).result()  # so that B of the adapter is not zero
    trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
    before = fetch(service, trainer, "before", tmp_path / "before")
    state = trainer.save_state("before").result().path
    trainer = service.create_training_client_from_state(state).result()  # with a fresh optimizer

    weights = np.linspace(-0.5, 1.5, len(IDS) - 1)
    requests = [[datum(weights=weights)], [datum(SHORT), datum(SHORT)]]
    if loss != "cross_entropy":
        requests = [[rl(IDS, 0.0)], [rl(SHORT, -0.4), rl(SHORT, 0.3)]]
    futures = [trainer.forward_backward(data, loss, config or None) for data in requests]
    trainer.optim_step(types.AdamParams(**ADAM, grad_clip_norm=clip)).result()
    sums = [future.result().metrics["loss:sum"] for future in futures]
    after = load_file(
        fetch(service, trainer, "after", tmp_path / "after") / "adapter_model.safetensors"
    )

    model = load(server.model, before)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(
        parameters,
        lr=0.1,
        betas=(ADAM["beta1"], ADAM["beta2"]),
        eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
    )
    expected = []
    for data in requests:
        total = torch.zeros(())
        for one in data:
            ids = [*one.model_input.to_ints(), int(one.loss_fn_inputs["target_tokens"].data[-1])]
            given = {name: torch.tensor(value.data) for name, value in one.loss_fn_inputs.items()}
            total = total + written_out(loss, config, torch_logprobs(model, ids), given)
        total.backward()
        expected.append(float(total.detach()))
    if clip:
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip))
        assert norm > clip
    optimiser.step()
    assert sums == pytest.approx(expected, rel=1e-5, abs=1e-5)
    mine = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert mine.keys() == after.keys()
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, mine[name], rtol=1e-5, atol=1e-5)


def test_a_custom_loss_has_its_own_gradient(server: Server, service: Any) -> None:
    def squared(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return 0.1 * sum((one**2).sum() for one in logprobs), {"mine:sum": 1.0}

    custom, plain = (train(service, server.model) for _ in range(2))
    scored = logprobs(plain)[0]
    done = custom.forward_backward_custom([datum()], squared)
    custom.optim_step(types.AdamParams(**ADAM)).result()
    assert done.result().metrics["loss:sum"] == pytest.approx(
        0.1 * float((scored**2).sum()), rel=1e-5
    )
    plain.forward_backward(
        [datum(weights=-0.2 * scored)], "cross_entropy"
    ).result()  # the chain rule by hand
    plain.optim_step(types.AdamParams(**ADAM)).result()
    np.testing.assert_allclose(logprobs(custom)[0], logprobs(plain)[0], atol=1e-5)
    assert not np.allclose(logprobs(custom)[0], scored, atol=1e-4)


def test_peft_loads_the_adapter_to_the_same_logprobs(
    server: Server, service: Any, tmp_path: Path
) -> None:
    trainer = train(service, server.model)
    for _ in range(3):
        trainer.forward_backward([datum()], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
    model = load(server.model, fetch(service, trainer, "out", tmp_path / "out"))
    with torch.no_grad():
        np.testing.assert_allclose(
            torch_logprobs(model, IDS).numpy(), logprobs(trainer)[0], atol=1e-5
        )
    assert model.peft_config[
        "default"
    ].target_modules  # named, or peft would load a part of it in silence


@pytest.mark.parametrize(
    ("data", "loss", "config", "words"),
    [
        ([datum()], "gspo", None, "forward_backward_custom"),
        ([datum()], "ppo", None, "takes no input 'weights'"),
        ([datum(advantages=np.ones(len(IDS) - 1))], "ppo", None, "lacks the input 'logprobs'"),
        ([rl(IDS, 0.0)], "ppo", {"epsilon": 0.1}, "no parameter 'epsilon'"),
        ([datum(weights=np.ones(3))], "cross_entropy", None, "3 values for 16 tokens"),
        (
            [datum(), datum([1, 2, 999_999])],
            "cross_entropy",
            None,
            "datum 1 has the token id 999999",
        ),
        ([datum(weights=np.full(len(IDS) - 1, np.nan))], "cross_entropy", None, "not finite"),
        ([datum([7] * 5000)], "cross_entropy", None, "--max-model-len"),
    ],
)
def test_bad_data_is_refused_with_what_to_do(
    data: list[types.Datum], loss: Any, config: Any, words: str, server: Server, service: Any
) -> None:
    trainer = train(service, server.model)
    before = logprobs(trainer)[0]
    good, bad = (
        trainer.forward_backward([datum()], "cross_entropy"),
        trainer.forward_backward(data, loss, config),
    )
    step = trainer.optim_step(types.AdamParams(learning_rate=0.1))
    with pytest.raises(tinker.RequestFailedError, match=words):
        bad.result()
    with pytest.raises(
        tinker.RequestFailedError, match="no step was made"
    ):  # and not one with half of the gradient
        step.result()
    good.result()
    np.testing.assert_array_equal(logprobs(trainer)[0], before)
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert not np.array_equal(logprobs(trainer)[0], before)
