"""Penalties, bias, forbidden words and least lengths: what they mean, and that the trainer scores
what was sampled."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from ajet_sdk.dialects.openai_chat import CHAT, TEXT, read_sampling
from ajet_sdk.engines.chat import TokenEngine, refuse_processing
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.errors import RequestRefused
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.types import Sample, Span, Timeline

TOKENIZER = ByteTokenizer()
EOS = min(TOKENIZER.eos_ids)
PROMPT = TOKENIZER.encode("abcabd ax")


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.4,
    )
    return Qwen3ForCausalLM(config).eval()


POLICY = model()


def sample(*ways: Sampling) -> list[Sampled]:
    async def main() -> list[Sampled]:
        sampler = LocalSampler(POLICY, TOKENIZER, model_name="tiny", max_model_len=128)
        try:
            replies = await asyncio.gather(
                *(sampler.sample(PROMPT, how, f"s{i}") for i, how in enumerate(ways))
            )
        finally:
            await sampler.aclose()
        return [reply for reply, *_ in replies]

    return asyncio.run(main())


def defined(how: Sampling, reply: Sampled, policy: Any = None) -> list[float]:
    """The log-probabilities by the definition of each parameter, a token at a time."""
    ids = [*PROMPT, *reply.output_ids]
    with torch.no_grad():
        logits_TV = (
            (policy or POLICY)(input_ids=torch.tensor([ids]))
            .logits[0, len(PROMPT) - 1 : -1]
            .double()
        )
    found = []
    for at, row in enumerate(logits_TV):
        output = list(reply.output_ids[:at])
        for word in how.bad_words:
            *before, last = TOKENIZER.encode(word)
            if output[len(output) - len(before) :] == before:
                row[last] = -torch.inf
        if at < how.min_tokens:
            row[[*how.stop_token_ids, EOS]] = -torch.inf
        for token, bias in how.logit_bias:
            row[token] += bias
        for token in {*PROMPT, *output}:
            row[token] *= how.repetition_penalty if row[token] < 0 else 1 / how.repetition_penalty
        for token, count in Counter(output).items():
            row[token] -= how.frequency_penalty * count + how.presence_penalty
        row = row / (how.temperature or 1.0)
        shares = torch.softmax(row, -1)
        row[shares < how.min_p * shares.max()] = -torch.inf
        found.append(float(torch.log_softmax(row, -1)[reply.output_ids[at]]))
    return found


def trained(how: Sampling, reply: Sampled) -> Sample:
    ids = np.array([*PROMPT, *reply.output_ids])
    mask = np.arange(len(ids)) >= len(PROMPT)
    logprobs = np.zeros(len(ids))
    logprobs[mask] = reply.logprobs
    line = Timeline(
        agent="default",
        token_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        call_ids=("c",),
        spans=(Span(call_id="c", start=len(PROMPT), end=len(ids)),),
    )
    return Sample(
        timeline=line, episode_id="e", group_id="g", reward=0.0, advantages=np.where(mask, 1.0, 0.0)
    )


ways = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.3]),
    max_tokens=st.just(14),
    seed=st.integers(0, 2**20),
    min_p=st.sampled_from([0.0, 0.02]),
    frequency_penalty=st.sampled_from([0.0, 0.9, -0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    logit_bias=st.sampled_from([(), ((97, 6.0), (98, -100.0))]),
    bad_words=st.sampled_from([(), ("a", "bc")]),
    min_tokens=st.sampled_from([0, 5]),
    stop_token_ids=st.sampled_from([(), (100, 101)]),
)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(ways)
def test_a_reply_is_drawn_as_its_parameters_define_and_the_trainer_gives_it_the_same_probability(
    how: Sampling,
) -> None:
    [reply] = sample(how)
    greedy = replace(how, min_p=0.0) if how.temperature == 0 else how
    np.testing.assert_allclose(reply.logprobs, defined(greedy, reply), atol=1e-4)
    assert Sampling.of(how.as_dict()) == how, "what is recorded says it all"
    trainer = Trainer(
        model(),
        TrainerSettings(lr=1e-3, loss=LossSettings(kl_coef=0.1, entropy_coef=0.1)),
        TOKENIZER,
    )
    told = trainer.step([trained(how, reply)], {"c": Sampling.of(how.as_dict())})
    assert told["logprob_gap_max"] < 1e-4 and told["kl"] == pytest.approx(0.0, abs=1e-6)
    assert np.isfinite(told["grad_norm"]) and told["clip_share"] == 0


def test_requests_side_by_side_keep_their_own_parameters() -> None:
    plain, biased = (
        Sampling(max_tokens=8, seed=1),
        Sampling(max_tokens=8, seed=1, logit_bias=((65, 100.0),)),
    )
    alone, [*together] = sample(plain), sample(plain, biased, plain)
    assert together[0].output_ids == together[2].output_ids == alone[0].output_ids
    assert together[1].output_ids == [65] * 8


def test_a_forced_token_has_no_gradient() -> None:
    how = Sampling(
        max_tokens=3, logit_bias=tuple((i, -torch.inf) for i in range(len(TOKENIZER)) if i != 65)
    )
    [reply] = sample(how)
    assert reply.output_ids == [65] * 3 and reply.logprobs == [0.0] * 3
    trainer = Trainer(model(), TrainerSettings(lr=1e-3), TOKENIZER)
    assert trainer.step([trained(how, reply)], {"c": how})["grad_norm"] == 0


def test_ends_of_a_reply() -> None:
    bias = ((EOS, 100.0),)
    [ended, ignored, stopped] = sample(
        Sampling(max_tokens=6, logit_bias=bias),
        Sampling(max_tokens=6, logit_bias=bias, ignore_eos=True),
        Sampling(max_tokens=6, logit_bias=((70, 100.0),), stop_token_ids=(70,), min_tokens=2),
    )
    assert (list(ended.output_ids), ended.finish_reason) == ([EOS], "stop")
    assert (list(ignored.output_ids), ignored.finish_reason) == ([EOS] * 6, "length")
    assert (
        stopped.finish_reason == "stop"
        and list(stopped.output_ids).index(70) == 2 == len(stopped.output_ids) - 1
    )
    [early] = sample(Sampling(max_tokens=6, logit_bias=((70, 100.0),), stop=("FF",), min_tokens=3))
    assert (list(early.output_ids), early.text) == (
        [70] * 5,
        "FFF",
    ), "a stop string counts behind the least length"


def test_a_trainer_that_cannot_rebuild_them_has_them_refused() -> None:
    refuse_processing(Sampling(0.5, 0.9, 3, 10, ("x",), 7, 2))
    for name, value in {
        "min_p": 0.1,
        "logit_bias": ((5, 1.0),),
        "presence_penalty": 0.5,
        "min_tokens": 3,
    }.items():
        fields: dict[str, Any] = {name: value}
        with pytest.raises(RequestRefused, match=f"{name}=.*backbone local"):
            refuse_processing(Sampling(**fields))


def test_alternatives_are_the_most_likely_tokens_of_the_distribution_drawn_from() -> None:
    how = Sampling(max_tokens=6, seed=3, top_logprobs=4, temperature=0.7, frequency_penalty=0.5)
    many, few, plain = sample(
        how, replace(how, top_logprobs=9, top_k=2), replace(how, top_logprobs=0)
    )
    assert many.top is not None and few.top is not None and plain.top is None
    assert plain.output_ids == many.output_ids and [len(place) for place in many.top] == [4] * 6
    for place, logprob, token in zip(many.top, many.logprobs, many.output_ids, strict=True):
        assert [value for _, value in place] == sorted((value for _, value in place), reverse=True)
        assert dict(place).get(token, logprob) == pytest.approx(logprob)
        for other, value in place:
            forced = Sampled([*many.output_ids[: many.top.index(place)], other], [], "stop", 0)
            assert defined(how, forced)[-1] == pytest.approx(value, abs=1e-4)
    assert [len(place) for place in few.top] == [2] * 6, "what could not be drawn is no alternative"


def test_alternatives_reach_the_client() -> None:
    async def main() -> list[Any]:
        sampler = LocalSampler(POLICY, TOKENIZER, model_name="tiny", max_model_len=128)
        engine = TokenEngine(sampler, TOKENIZER)
        found = []
        for dialect, body in (
            (
                CHAT,
                {
                    "messages": [{"role": "user", "content": "x"}],
                    "logprobs": True,
                    "top_logprobs": 3,
                },
            ),
            (TEXT, {"prompt": "x", "logprobs": 3}),
        ):
            body = {**body, "max_tokens": 4, "seed": 1}
            ask = dialect.ask(body, "e", "a")
            found.append(
                dialect.completion(await engine.answer(ask), ask, "1")["choices"][0]["logprobs"]
            )
        await engine.aclose()
        return found

    chat, text = asyncio.run(main())
    assert [len(entry["top_logprobs"]) for entry in chat["content"]] == [3] * len(chat["content"])
    assert all(
        len({tuple(one["bytes"]) for one in entry["top_logprobs"]}) == 3
        for entry in chat["content"]
    )
    assert all(1 < len(place) <= 3 for place in text["top_logprobs"])
    with pytest.raises(RequestRefused, match="at most 20"):
        read_sampling({"logprobs": 21})
