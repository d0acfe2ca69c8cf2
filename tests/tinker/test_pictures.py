"""Pictures by the Tinker SDK: samples, log-probabilities and training of a model that sees."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from PIL import Image
from tinker import types

from ajet_sdk.tokens.huggingface import HFTokenizer
from tests.tinker.servers import Server, train
from tests.tiny_vision import picture, save_tiny_vision

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("seeing")
    with Server(save_tiny_vision("qwen3_vl", place / "model"), place / "state") as server:
        yield server


def image(data: bytes, tokens: int | None = 16) -> types.ImageChunk:
    return types.ImageChunk(data=data, format="png", expected_tokens=tokens)


def shown(model: Path, data: bytes, after: list[int] | None = None) -> types.ModelInput:
    tokenizer = HFTokenizer(model)
    before = tokenizer.encode("<|im_start|>user\n<|vision_start|>")
    behind = tokenizer.encode("<|vision_end|>Which move?<|im_end|>\n<|im_start|>assistant\n")
    text = types.EncodedTextChunk
    chunks = [text(tokens=before), image(data), text(tokens=[*behind, *(after or [])])]
    return types.ModelInput(chunks=chunks)


def datum(model: Path, data: bytes, reply: list[int]) -> types.Datum:
    given = shown(model, data, reply[:-1])
    size = given.length
    weights = np.zeros(size, np.float32)
    weights[size - len(reply) :] = 1
    targets = np.zeros(size, np.int64)
    targets[size - len(reply) :] = reply
    return types.Datum(
        model_input=given, loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )


def test_a_model_is_trained_on_pictures_that_it_samples_from(seeing: Server) -> None:
    model, files = seeing.model, [picture(0).data, picture(1).data]
    trainer = train(seeing.client(), model)
    reply = HFTokenizer(model).encode("up<|im_end|>")
    other = HFTokenizer(model).encode("down<|im_end|>")
    data = [datum(model, files[0], reply), datum(model, files[1], other)]
    for _ in range(60):
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    for file, words in zip(files, (reply, other), strict=True):
        greedy = types.SamplingParams(max_tokens=len(words), temperature=0.0)
        answer = sampler.sample(shown(model, file), 1, greedy).result().sequences[0]
        assert answer.tokens == words  # the same text: only the picture tells them apart
        trained = trainer.forward([datum(model, file, words)], "cross_entropy").result()
        values = trained.loss_fn_outputs[0]["logprobs"].to_numpy()[-len(words) :]
        np.testing.assert_allclose(answer.logprobs, values, atol=1e-5)
        whole = sampler.compute_logprobs(shown(model, file, words)).result()
        np.testing.assert_allclose(whole[-len(words) :], values, atol=1e-5)


def test_pictures_that_do_not_fit_are_refused(seeing: Server) -> None:
    model, file = seeing.model, picture(0).data
    sampler = seeing.client().create_sampling_client(base_model=str(model))
    one = types.SamplingParams(max_tokens=1)
    image_token = HFTokenizer(model).pictures.token_id
    bitmap = io.BytesIO()
    Image.new("RGB", (8, 8)).save(bitmap, "BMP")
    for chunk in (
        image(file, 17),
        image(b"no picture"),
        image(bitmap.getvalue()),
        types.EncodedTextChunk(tokens=[image_token]),
    ):
        with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError)):
            sampler.sample(types.ModelInput(chunks=[chunk]), 1, one).result()
