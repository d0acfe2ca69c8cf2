"""A real vLLM server with pictures: it samples after what the trainer sees, also with new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from ajet_sdk.config.schema import Lora
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.vllm.engine import has_token_route
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.types import Call
from tests.tiny_vision import (
    KINDS,
    conversation,
    image_part,
    picture,
    plain_pass,
    sample_of,
    save_tiny_vision,
    text_part,
)

from .conftest import Trained

pytest.importorskip("vllm", reason="needs vLLM: ajet install vllm")

pytestmark = pytest.mark.skipif(not has_token_route(), reason="needs vLLM 0.32 or later")
EXACT = 1e-5
WITHOUT_TORCHVISION = ("idefics3",)
"""Kinds whose processor and model vLLM loads without torchvision. Its Gemma 3 asks for the tokens of
a published tokenizer and is left out."""


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "gemma3"])
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    if request.param not in WITHOUT_TORCHVISION:
        try:
            import_module("torchvision")
        except (ImportError, RuntimeError):  # a build for CUDA beside a torch for CPUs
            pytest.skip("vLLM needs a torchvision that runs beside this torch")
    place = save_tiny_vision(request.param, tmp_path_factory.mktemp(request.param))
    made = Trained(place, tmp_path_factory.mktemp("experiment"))
    yield made
    asyncio.run(made.sampler.aclose())


def calls_of(seeing: Trained) -> list[Call]:
    engine = TokenEngine(seeing.sampler, seeing.tokenizer)
    turns = [
        [image_part(picture(1)), text_part("Which move? <|image_pad|>"), image_part(picture(2))],
        [text_part("up")],
        [text_part("left"), image_part(picture(3))],
    ]
    return asyncio.run(conversation(engine, *turns))


def gaps(seeing: Trained, calls: list[Call]) -> list[float]:
    model = seeing.model.get_base_model() if seeing.sampler.settings.lora_rank else seeing.model
    found = []
    for call in calls:
        expected = plain_pass(model, seeing.tokenizer, call)[:, 0].numpy()
        found.append(float(np.abs(expected - call.logprobs).max()))
    return found


def test_the_server_sees_what_the_trainer_sees(seeing: Trained) -> None:
    calls = calls_of(seeing)
    assert [len(call.pictures) for call in calls] == [2, 2, 3]
    assert max(gaps(seeing, calls)) < EXACT


def test_new_weights_are_sampled_from(seeing: Trained) -> None:
    calls = calls_of(seeing)
    trainer = Trainer(seeing.model, TrainerSettings(lr=1e-2), seeing.tokenizer)

    async def update() -> None:
        async with seeing.sampler.exclusive():
            trainer.step([sample_of(calls)])
            seeing.sampler.policy_version = 1

    asyncio.run(update())
    assert min(gaps(seeing, calls)) > 100 * EXACT, "the weights have changed"
    assert max(gaps(seeing, calls_of(seeing))) < EXACT


def test_a_new_adapter_is_sampled_from(tmp_path: Path) -> None:
    place = save_tiny_vision("idefics3", tmp_path / "model")
    made = Trained(place, tmp_path / "experiment", Lora(enabled=True, r=4))
    try:
        calls = calls_of(made)
        asyncio.run(made.move(0.1))
        assert min(gaps(made, calls)) > 100 * EXACT, "the adapter has changed"
        assert max(gaps(made, calls_of(made))) < EXACT
    finally:
        asyncio.run(made.sampler.aclose())


def test_a_prompt_without_pictures_is_sampled_without_image_tokens(seeing: Trained) -> None:
    engine = TokenEngine(seeing.sampler, seeing.tokenizer)
    talk = conversation(engine, [text_part("Which move?")], max_tokens=30)
    calls = asyncio.run(talk)
    assert max(gaps(seeing, calls)) < EXACT
