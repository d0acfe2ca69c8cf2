"""Backbone `tinker` with pictures against `ajet trainer serve`: the same log-probabilities and the
same training as of backbone `local`."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.config.schema import Lora, Prices
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.tinker.sampler import TinkerSampler
from ajet_sdk.engines.tinker.sdk import SdkService, Session
from ajet_sdk.engines.tinker.service import Costs
from ajet_sdk.learn.tinker.learner import complete_adapter
from ajet_sdk.learn.tinker.scaling import Scaling
from ajet_sdk.learn.tinker.trainer import TinkerTrainer
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.pictures import Picture, picture_of
from ajet_sdk.run import train
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Call
from tests.tinker.servers import Server
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

pytestmark = pytest.mark.slow
EXACT = 1e-5
EPISODES = 4


@pytest.fixture(
    scope="module",
    params=[*KINDS[:-1], pytest.param(KINDS[-1], marks=pytest.mark.long)],
)
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    place = tmp_path_factory.mktemp(request.param)
    with Server(save_tiny_vision(request.param, place / "model"), place / "state") as server:
        yield server


def as_webp(shown: Picture) -> Picture:
    """The same pixels, in a format that the API does not take."""
    file = io.BytesIO()
    shown.image().save(file, "WEBP", lossless=True)
    return picture_of(file.getvalue())


def two_turns(engine: TokenEngine, number: int) -> list[Call]:
    """Two turns with a new picture in each."""
    first, second = picture(10 * number), as_webp(picture(10 * number + 1))
    turns = [[image_part(shown), text_part("Which move?")] for shown in (first, second)]
    talk = conversation(engine, *turns, episode_id=str(number), max_tokens=4, seed=number)
    return asyncio.run(talk)


def adapter_of(service: SdkService, base: Path, place: Path) -> Any:
    """A copy of the service's adapter, on a model in this process."""
    place.mkdir()
    service.download(place.name, place)
    complete_adapter(place, str(base))
    return load_model(place, device="cpu", dtype="float32", lora=Lora(enabled=True))


def test_sampled_and_trained_as_by_backbone_local(seeing: Server, tmp_path: Path) -> None:
    base, tokenizer = seeing.model, HFTokenizer(seeing.model)
    config = load_config(
        values={
            "backbone": "tinker",
            "model": {"path": str(base), "lora": {"r": 4}},
            "tinker": {"base_url": seeing.url, "stall_timeout": 60},
        }
    )
    session = Session(config)
    try:
        service = SdkService(session)
        costs = Costs(Prices())
        sampler = TinkerSampler(
            service.publish(), tokenizer, costs, model_name="m", max_model_len=2000
        )
        engine = TokenEngine(sampler, tokenizer, rescored=False)
        here = adapter_of(service, base, tmp_path / "before")
        episodes = [two_turns(engine, number) for number in range(EPISODES)]
        for call in (call for calls in episodes for call in calls):
            expected = plain_pass(here.get_base_model(), tokenizer, call)[:, 0].numpy()
            assert np.abs(expected - call.logprobs).max() < EXACT
        advantages = np.linspace(-1.5, 1.5, EPISODES)
        samples = [
            sample_of(calls, float(advantage))
            for calls, advantage in zip(episodes, advantages, strict=True)
        ]
        settings = TrainerSettings(lr=1e-2)
        there = TinkerTrainer(service, settings, Scaling(), costs, 60, tokenizer)
        share = there._share(samples)
        gaps = [
            np.abs(scored - sample.timeline.logprobs[at]).max()
            for scored, sample, at in zip(there._forward(share), samples, share.at, strict=True)
        ]
        assert max(gaps) < EXACT
        reference = there.reference_logprobs(samples, {})
        assert all(torch.isfinite(values).all() for values in reference)
        remote = there.step(samples)
        local = Trainer(here, settings, tokenizer).step(samples)
        assert remote["loss"] == pytest.approx(local["loss"], abs=1e-5)
        assert remote["grad_norm"] == pytest.approx(local["grad_norm"], rel=1e-4)
        trained = adapter_of(service, base, tmp_path / "after")
        changed = 0.0
        before = adapter_of_files(tmp_path / "before")
        for (name, ours), (other, theirs) in zip(
            sorted(here.named_parameters()), sorted(trained.named_parameters()), strict=True
        ):
            assert name == other
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
            if name in before:
                changed = max(changed, float((ours.detach() - before[name]).abs().max()))
        assert changed > 1e-3
    finally:
        session.close()


def adapter_of_files(place: Path) -> dict[str, torch.Tensor]:
    model = load_model(place, device="cpu", dtype="float32", lora=Lora(enabled=True))
    return {name: value.detach() for name, value in model.named_parameters() if "lora_" in name}


@ajet.workflow
async def look(question: str, model: ajet.Model) -> str:
    shown = picture(len(question))
    said = [image_part(shown), {"type": "text", "text": question}]
    reply = await model.chat([{"role": "user", "content": said}])
    return reply["content"] or ""


@ajet.judge
def length(output: str) -> float:
    return len(output) / 10


def test_a_run_learns_from_pictures_at_a_service(seeing: Server, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(f'{{"question": "{word}"}}\n' for word in ("a", "bb", "ccc")))
    config = load_config(
        values={
            "experiment_name": "tiny",
            "experiment_dir": str(tmp_path / "experiment"),
            "backbone": "tinker",
            "model": {"path": str(seeing.model), "lora": {"r": 4}},
            "tinker": {"base_url": seeing.url, "stall_timeout": 60},
            "task_reader": {
                "type": "jsonl_dataset_file",
                "jsonl_dataset_file": {"training": {"file_path": str(tasks)}},
            },
            "data": {"train_batch_size": 2},
            "rollout": {
                "num_repeat": 4,
                "max_model_len": 200,
                "max_response_length_in_one_turn": 6,
            },
            "trainer_common": {
                "total_steps": 2,
                "test_freq": 0,
                "save_freq": 0,
                "use_kl_loss": True,
                "logger": [],
                "optim": {"lr": 0.01, "warmup_steps": 1},
            },
        }
    )
    tuned = train(config, workflow=look, judge=length)
    assert tuned.trained_tokens > 0
    with open_trace(config.directory) as reader:
        gaps = reader.query(
            "SELECT value FROM metrics WHERE name = 'train/logprob_gap_max' ORDER BY step"
        ).to_pylist()
        pictures = reader.query("SELECT count(*) AS n FROM pictures").to_pylist()
    assert gaps and max(row["value"] for row in gaps) < 1e-4
    assert pictures[0]["n"] >= 2
