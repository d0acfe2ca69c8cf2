"""Samples and log-probabilities by the SDK, against the trainer's own passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from ajet_sdk.tokens.huggingface import HFTokenizer
from tests.tinker.servers import IDS, Server, datum, logprobs, train

PROMPT = types.ModelInput.from_ints(IDS[:5])


@pytest.fixture(scope="module")
def trainer(server: Server, service: Any) -> Any:
    """One that has learnt something."""
    trainer = train(service, server.model)
    for _ in range(3):
        trainer.forward_backward([datum()], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.02)).result()
    return trainer


@pytest.fixture(scope="module")
def sampler(trainer: Any) -> Any:
    return trainer.save_weights_and_get_sampling_client().result()


@pytest.mark.slow
def test_sampled_logprobs_are_the_trainers(trainer: Any, sampler: Any) -> None:
    reply = sampler.sample(PROMPT, 4, types.SamplingParams(max_tokens=12, seed=1)).result()
    assert len({one.sequence_id for one in reply.sequences}) == 4
    assert len({tuple(one.tokens) for one in reply.sequences}) == 4
    for one in reply.sequences:
        ids = [*IDS[:5], *one.tokens]
        np.testing.assert_allclose(logprobs(trainer, datum(ids))[0][4:], one.logprobs, atol=1e-5)
        assert one.stop_reason == ("length" if len(one.tokens) == 12 else "stop")
    again = sampler.sample(PROMPT, 4, types.SamplingParams(max_tokens=12, seed=1)).result()
    assert [one.tokens for one in again.sequences] == [one.tokens for one in reply.sequences]


def test_prompt_logprobs_are_one_a_token_and_none_for_the_first(trainer: Any, sampler: Any) -> None:
    values = sampler.compute_logprobs(types.ModelInput.from_ints(IDS)).result()
    assert len(values) == len(IDS)
    assert values[0] is None
    np.testing.assert_allclose(values[1:], logprobs(trainer)[0], atol=1e-5)
    last = sampler.compute_logprobs(
        types.ModelInput.from_ints(IDS), prompt_logprobs_last_n=3
    ).result()
    assert last[:-3] == [None] * (len(IDS) - 3)
    np.testing.assert_allclose(last[-3:], values[-3:], atol=1e-6)


def test_the_likeliest_tokens_of_a_prompt(sampler: Any) -> None:
    one = types.SamplingParams(max_tokens=1)
    reply = sampler.sample(
        PROMPT, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=300
    ).result()
    first, *others = reply.topk_prompt_logprobs
    assert first is None
    for token, value, top in zip(IDS[1:5], reply.prompt_logprobs[1:], others, strict=True):
        assert dict(top)[token] == pytest.approx(value, abs=1e-6)
        assert top == sorted(top, key=lambda pair: -pair[1])


def test_a_saved_sampler_keeps_its_weights(trainer: Any, service: Any, server: Server) -> None:
    path = trainer.save_weights_for_sampler("kept").result().path
    before = logprobs(trainer)[0]
    trainer.forward_backward([datum()], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
    kept = service.create_sampling_client(model_path=path).result()
    np.testing.assert_allclose(
        kept.compute_logprobs(types.ModelInput.from_ints(IDS)).result()[1:], before, atol=1e-5
    )
    base = service.create_sampling_client(base_model=str(server.model)).result()
    values = base.compute_logprobs(types.ModelInput.from_ints(IDS)).result()[1:]
    np.testing.assert_allclose(
        values, logprobs(train(service, server.model))[0], atol=1e-5
    )  # B begins at zero
    assert not np.allclose(values, before, atol=1e-2)


@pytest.mark.slow
def test_a_list_of_stops_takes_the_place_of_the_end_of_turn(sampler: Any, server: Server) -> None:
    end = min(HFTokenizer(str(server.model)).eos_ids)
    greedy = (
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=6, temperature=0.0))
        .result()
        .sequences[0]
    )
    wanted = greedy.tokens[2]
    cut = sampler.sample(
        PROMPT, 1, types.SamplingParams(max_tokens=6, temperature=0.0, stop=[wanted])
    ).result()
    assert cut.sequences[0].tokens == greedy.tokens[: greedy.tokens.index(wanted) + 1]
    assert cut.sequences[0].stop_reason == "stop"
    for seed in range(40):
        params = types.SamplingParams(max_tokens=200, temperature=3.0, seed=seed, stop=[])
        if end in (sampler.sample(PROMPT, 1, params).result().sequences[0].tokens)[:-1]:
            return
    pytest.fail("with stop=[] no reply went on behind the end of a turn")


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([1, 999_999], {}, "must be less than"),
        ([1] * 5000, {}, "--max-model-len"),
        (IDS, {"topk_sample_logprobs": 2}, "topk_sample_logprobs is not supported"),
    ],
)
def test_a_bad_request_is_refused(
    prompt: list[int], options: Any, words: str, sampler: Any
) -> None:
    with pytest.raises(tinker.RequestFailedError, match=words):
        sampler.sample(
            types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=2), **options
        ).result()


@pytest.mark.slow
def test_unnamed_weights_of_old_sessions_are_deleted(server: Server, service: Any) -> None:
    trainer = train(service, server.model)
    first = trainer.save_weights_and_get_sampling_client().result()
    for _ in range(17):
        last = trainer.save_weights_and_get_sampling_client().result()
    last.compute_logprobs(PROMPT).result()
    with pytest.raises(tinker.RequestFailedError, match="kept for the newest 16"):
        first.compute_logprobs(PROMPT).result()
