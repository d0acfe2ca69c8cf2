"""Models that take pictures: sampler, trainer and a plain pass of the model give the same
log-probabilities, over turns and in ragged batches, for four kinds of models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ajet_sdk.config.schema import Lora
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.engines.local.vision import Vision, check_vision, is_of_tower, vision_of
from ajet_sdk.errors import ConfigError
from ajet_sdk.learn.checkpoint import export
from ajet_sdk.learn.losses import policy_pass, score
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Ask, Sampling
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Call, Sample
from tests.tiny_vision import KINDS, image_part, picture, plain_pass, save_tiny_vision

pytestmark = pytest.mark.slow
SIZES = {"qwen3_vl": [(64, 64), (64, 32), (32, 64)], "qwen2_5_vl": [(64, 64), (64, 32), (32, 64)]}
GROUPS, ATTEMPTS, TURNS = 4, 3, 3
EXACT = 1e-5


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision(request.param, tmp_path_factory.mktemp(request.param))


def kind_of(place: Path) -> str:
    return str(load_model(place).config.model_type)


def seen(draw: np.random.Generator, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    size = sizes[int(draw.integers(len(sizes)))]
    return image_part(picture(int(draw.integers(5)), *size))


async def episode(
    engine: TokenEngine, kind: str, group: int, attempt: int, temperature: float
) -> list[Call]:
    """Three turns: no picture to two pictures at first, a new one after each turn."""
    draw = np.random.default_rng(group)
    sizes = SIZES.get(kind, [(64, 64)])
    first = [seen(draw, sizes) for _ in range(group % 3)]
    typed = "<|image_pad|><image><start_of_image>"
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [*first, {"type": "text", "text": f"Which move? {typed}"}]}
    ]
    calls = []
    for turn in range(TURNS):
        sampling = Sampling(
            temperature=temperature, max_tokens=4 + 3 * turn, seed=100 * group + attempt
        )
        asked = Ask(sampling, f"{group}/{attempt}", "a", messages=list(messages))
        answer = await engine.answer(asked)
        (choice,) = answer.choices
        calls.append(
            Call(
                episode_id=f"{group}/{attempt}",
                index=turn,
                prompt_ids=answer.prompt_ids,
                pictures=answer.pictures,
                output_ids=choice.output_ids,
                logprobs=choice.logprobs,
                sampling=sampling.as_dict(),
            )
        )
        role = "tool" if turn else "user"
        shown = [{"type": "text", "text": "up"}, seen(draw, sizes)]
        messages += [choice.message or {}, {"role": role, "content": shown}]
    return calls


def sampled(
    place: Path,
    model: Any,
    tokenizer: HFTokenizer,
    temperature: float = 1.0,
    suspended: bool = False,
) -> list[list[Call]]:
    async def run() -> list[list[Call]]:
        sampler = LocalSampler(model, tokenizer, model_name="m", max_model_len=2000)
        engine = TokenEngine(sampler, tokenizer)
        episodes = asyncio.gather(
            *(
                episode(engine, model.config.model_type, group, attempt, temperature)
                for group in range(GROUPS)
                for attempt in range(ATTEMPTS)
            )
        )
        try:
            while suspended and not episodes.done():
                async with sampler.exclusive():
                    pass
                await asyncio.sleep(0.01)
            return await episodes
        finally:
            await engine.aclose()

    return asyncio.run(run())


def sample_of(calls: list[Call]) -> Sample:
    merged = merge(place_all(calls))
    (line,) = merged.timelines  # 3 turns are one sequence
    mask = line.loss_mask.astype(np.float32)
    episode_id = calls[0].episode_id
    return Sample(timeline=line, episode_id=episode_id, group_id="g", reward=1.0, advantages=mask)


def test_replies_that_are_suspended_again_and_again_agree_with_a_plain_pass(place: Path) -> None:
    """Their pictures are computed once more each time."""
    tokenizer, model = HFTokenizer(place), load_model(place)
    for calls in sampled(place, model, tokenizer, suspended=True):
        for call in calls:
            expected = plain_pass(model, tokenizer, call)[:, 0].numpy()
            assert np.abs(expected - call.logprobs).max() < EXACT


def test_sampler_trainer_and_a_plain_pass_agree(place: Path) -> None:
    tokenizer, model = HFTokenizer(place), load_model(place)
    episodes = sampled(place, model, tokenizer)
    for calls in episodes:
        for call in calls:
            expected = plain_pass(model, tokenizer, call)[:, 0].numpy()
            assert np.abs(expected - call.logprobs).max() < EXACT
            assert not set(tokenizer.pictures.never_sampled) & set(call.output_ids.tolist())
    samples = [sample_of(calls) for calls in episodes]
    trainer = Trainer(model, TrainerSettings(lr=1e-3, micro_batch_tokens=4096), tokenizer)
    gaps = []
    with policy_pass(model), torch.no_grad():
        for _, batch in trainer._batches(samples, {}):
            scored = score(model, batch, entropy=False)
            gaps.append((scored.logprobs_N - batch.sampler_N).abs().max().item())
    assert max(gaps) < EXACT
    before = trainer.step(samples)["loss"]
    assert trainer.step(samples)["loss"] < before


def test_a_picture_matters(place: Path) -> None:
    """The control of the law above: with another picture of the same size the log-probabilities are
    far off."""
    tokenizer, model = HFTokenizer(place), load_model(place)
    call = sampled(place, model, tokenizer)[ATTEMPTS][-1]
    swapped = tuple(
        type(each)(
            each.start,
            each.end,
            picture(77, each.picture.width, each.picture.height),
            each.token_id,
        )
        for each in call.pictures
    )
    other = call.model_copy(update={"pictures": swapped})
    gap = (plain_pass(model, tokenizer, call) - plain_pass(model, tokenizer, other)).abs().max()
    assert gap > 100 * EXACT


def test_what_is_trained_is_what_the_config_says(place: Path) -> None:
    frozen = load_model(place, trains_tower=False)
    trained = {name for name, each in frozen.named_parameters() if each.requires_grad}
    assert trained and not any(map(is_of_tower, trained))
    whole = load_model(place)
    assert any(is_of_tower(name) for name, each in whole.named_parameters() if each.requires_grad)
    adapted = load_model(place, trains_tower=False, lora=Lora(enabled=True, r=2))
    names = {name for name, each in adapted.named_parameters() if each.requires_grad}
    assert names and not any(map(is_of_tower, names))


@pytest.mark.parametrize("trains_tower", [False, True])
def test_a_step_changes_the_tower_only_if_it_is_trained(place: Path, trains_tower: bool) -> None:
    tokenizer, model = HFTokenizer(place), load_model(place, trains_tower=trains_tower)
    samples = [sample_of(calls) for calls in sampled(place, model, tokenizer)]
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    Trainer(model, TrainerSettings(lr=1e-3), tokenizer).step(samples)
    changed = {name for name, each in model.named_parameters() if not each.equal(before[name])}
    tower = set(filter(is_of_tower, before))
    assert tower and changed - tower
    if trains_tower:
        assert len(changed & tower) > len(tower) / 2
    else:
        assert not changed & tower


@pytest.mark.parametrize("lora", [None, Lora(enabled=True, r=2)])
def test_an_exported_model_sees_the_same(place: Path, tmp_path: Path, lora: Lora | None) -> None:
    tokenizer, model = HFTokenizer(place), load_model(place, lora=lora)
    calls = sampled(place, model, tokenizer)
    Trainer(model, TrainerSettings(lr=1e-2), tokenizer).step([sample_of(each) for each in calls])
    written = export(tmp_path / "exported", model, tokenizer.hf)
    again = HFTokenizer(written)
    assert again.pictures is not None
    inner = model.get_base_model() if lora else model
    for call in sampled(place, load_model(written), again, temperature=0.0)[-1]:
        expected = plain_pass(inner, tokenizer, call)[:, 0].numpy()
        assert np.abs(expected - call.logprobs).max() < 10 * EXACT


def test_a_model_that_places_pictures_otherwise_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of a model that is loaded notices other pixels."""
    tokenizer, model = HFTokenizer(place), load_model(place)
    vision = vision_of(model, tokenizer)
    assert vision is not None
    check_vision(model, vision)
    real = Vision.arguments

    def negative(self: Vision, *given: Any, **more: Any) -> dict[str, torch.Tensor]:
        made = real(self, *given, **more)
        return {**made, "pixel_values": -made["pixel_values"]}

    monkeypatch.setattr(Vision, "arguments", negative)
    with pytest.raises(ConfigError):
        check_vision(model, vision)
