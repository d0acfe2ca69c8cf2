"""Samples with pictures as verl's rows: through verl's own conversions, the model sees what the
sampler saw."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs verl, see CONTRIBUTING.md")

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.rollout.utils import qwen2_5_vl_dedup_image_tokens
from verl.workers.utils.padding import left_right_2_no_padding

from ajet_sdk.backbones.verl.batches import training_rows
from ajet_sdk.backbones.verl.runner import ClientSampler, takes_pictures
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.errors import EngineUnavailable
from ajet_sdk.protocols import Sampling
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Call, Sample
from tests.tiny_vision import (
    conversation,
    image_part,
    picture,
    sample_of,
    save_tiny_vision,
    text_part,
)

EXACT = 1e-5


class Seeing:
    """A model that takes pictures, and what it sampled."""

    def __init__(self, kind: str, place: Path) -> None:
        path = save_tiny_vision(kind, place)
        self.tokenizer, self.model = HFTokenizer(path), load_model(path).eval()
        sampler = LocalSampler(self.model, self.tokenizer, model_name="m", max_model_len=2000)
        engine = TokenEngine(sampler, self.tokenizer)

        async def run() -> list[list[Call]]:
            try:
                talks = [
                    conversation(engine, *turns, episode_id=str(number), seed=number)
                    for number, turns in enumerate(TALKS)
                ]
                return await asyncio.gather(*talks)
            finally:
                await engine.aclose()

        self.calls = asyncio.run(run())
        self.samples = [sample_of(calls) for calls in self.calls]


TALKS: list[list[list[dict[str, Any]]]] = [
    [[image_part(picture(1)), text_part("Which move?")], [text_part("up"), image_part(picture(2))]],
    [[text_part("Which move?")], [text_part("down")]],
    [[image_part(picture(3, 64, 32)), image_part(picture(4, 32, 64)), text_part("left")]],
]
"""Two pictures of one size, none, and two of other sizes."""


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(request.param, tmp_path_factory.mktemp(request.param))


def rows_of(seeing: Seeing, samples: Sequence[Sample], count: int) -> Any:
    return training_rows(samples, count, 0, seeing.tokenizer.pictures)


@pytest.mark.usefixtures("no_flash_attention")
@pytest.mark.parametrize("part", [1, 2, 4])
def test_the_model_sees_in_verl_what_it_saw_as_it_sampled(seeing: Seeing, part: int) -> None:
    """In micro-batches of several sizes, by the engine's own preparation of inputs, padded."""
    rows = rows_of(seeing, seeing.samples, 4)
    scored: list[np.ndarray[Any, Any]] = []
    for few in rows.chunk(4 // part):
        data = left_right_2_no_padding(few.to_tensordict())
        tu.assign_non_tensor(data, use_remove_padding=False, temperature=1.0)
        inputs, _ = FSDPEngineWithLMHead.prepare_model_inputs(SimpleNamespace(), data)
        inputs.pop("images_seqlens", None)  # verl counts its operations by it
        with torch.no_grad():
            logits = seeing.model(**inputs, use_cache=False).logits
        ids = inputs["input_ids"]
        values = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        scored += [row.numpy() for row in values]
    for sample, values in zip(seeing.samples, scored, strict=False):
        at = np.flatnonzero(sample.timeline.loss_mask)
        assert np.abs(values[at - 1] - sample.timeline.logprobs[at]).max() < EXACT


def test_the_inputs_are_those_that_verl_makes(seeing: Seeing) -> None:
    """Positions and sizes, by verl's agent loop over the model's own function."""
    rows = rows_of(seeing, seeing.samples, 4)
    assert rows.batch["position_ids"].shape[1] == 4
    shown = seeing.tokenizer.pictures
    assert shown is not None
    text = seeing.model.config.video_token_id
    processor = SimpleNamespace(
        get_rope_index=seeing.model.model.get_rope_index,
        image_token_id=shown.token_id,
        video_token_id=text,
    )
    for at in range(len(seeing.samples)):
        mask, inputs = (
            rows.batch["attention_mask"][at],
            rows.non_tensor_batch["multi_modal_inputs"][at],
        )
        seen = mask.bool()
        ids = rows.batch["input_ids"][at][seen][None]
        given = {**inputs, "mm_token_type_ids": True}
        expected = AgentLoopWorker._compute_position_ids(
            SimpleNamespace(processor=processor), ids, torch.ones_like(ids), given
        )
        assert torch.equal(rows.batch["position_ids"][at][:, seen], expected[0])
        if inputs:
            assert inputs["images_seqlens"].sum() == len(inputs["pixel_values"])
            assert len(inputs["image_grid_thw"]) == len(seeing.samples[at].timeline.pictures)
    assert [bool(inputs) for inputs in rows.non_tensor_batch["multi_modal_inputs"]] == [
        True,
        False,
        True,
        False,
    ]


class Client:
    """verl's client as far as it is asked: it keeps the request and answers some ids."""

    def __init__(self, output_ids: list[int]) -> None:
        self.output_ids = output_ids
        self.asked: dict[str, Any] = {}

    async def generate(self, request_id: str, **asked: Any) -> Any:
        self.asked = asked
        return SimpleNamespace(
            token_ids=self.output_ids,
            log_probs=[-1.0] * len(self.output_ids),
            stop_reason="completed",
            extra_fields={"global_steps": 2},
        )


def test_one_placeholder_and_the_decoded_picture_are_sent(seeing: Seeing) -> None:
    client = Client([20, 21])
    sampler = ClientSampler(client, seeing.tokenizer, "m", 500)
    assert sampler.takes_pictures
    call = seeing.calls[2][0]
    asyncio.run(sampler.sample(call.prompt_ids.tolist(), Sampling(), "s", call.pictures))
    shown = seeing.tokenizer.pictures
    assert shown is not None
    assert client.asked["prompt_ids"].count(shown.token_id) == 2
    assert [image.size for image in client.asked["image_data"]] == [(64, 32), (32, 64)]
    bias = client.asked["sampling_params"]["logit_bias"]
    assert bias == dict.fromkeys(shown.never_sampled, -100.0)
    whole = SimpleNamespace(
        image_processor=type("Qwen2VLImageProcessor", (), {})(),
        image_token_id=shown.token_id,
        video_token_id=-1,
    )
    sent = client.asked["prompt_ids"]
    assert qwen2_5_vl_dedup_image_tokens(sent, whole) == sent
    assert qwen2_5_vl_dedup_image_tokens(call.prompt_ids.tolist(), whole) == sent


def test_a_sampled_image_token_is_refused(seeing: Seeing) -> None:
    shown = seeing.tokenizer.pictures
    assert shown is not None
    sampler = ClientSampler(Client([20, shown.token_id]), seeing.tokenizer, "m", 500)
    with pytest.raises(EngineUnavailable):
        asyncio.run(sampler.sample([1, 2, 3], Sampling(), "s"))


def test_models_without_positions_in_three_dimensions_are_left_out(tmp_path: Path) -> None:
    assert not takes_pictures(HFTokenizer(save_tiny_vision("idefics3", tmp_path)))
