"""Typed outputs: replies are of the grammar, and the trainer scores them under the mask that they
were drawn under."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.learn.batches import collate
from ajet_sdk.learn.losses import score
from ajet_sdk.learn.objective import LossSettings
from ajet_sdk.learn.trainer import Trainer, TrainerSettings
from ajet_sdk.protocols import Answer, Ask, Sampling
from ajet_sdk.types import Sample, Span, Timeline

TOKENIZER = ByteTokenizer()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 0, "maximum": 99},
                    "b": {"enum": ["x", "yy"]},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "look")
]


def model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER) + 10,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.4,
    )
    return Qwen3ForCausalLM(config).eval()


POLICY = model()
BIAS = ((258, -20.0), (260, -90.0), *((i, -100.0) for i in range(262, 272)))


def ask(options: dict[str, Any], seed: int, **sampling: Any) -> Ask:
    """A request that seldom thinks and seldom calls twice: the model is random."""
    how = Sampling(seed=seed, logit_bias=BIAS, **{"max_tokens": 200, **sampling})
    tools = TOOLS if "tool_choice" in options else None
    return Ask(how, "e", f"agent-{seed}", [{"role": "user", "content": "go"}], None, tools, options)


def answers(*asks: Ask) -> list[Answer]:
    async def main() -> list[Answer]:
        sampler = LocalSampler(POLICY, TOKENIZER, model_name="tiny", max_model_len=1000)
        engine = TokenEngine(sampler, TOKENIZER)
        try:
            return await asyncio.gather(*map(engine.answer, asks))
        finally:
            await engine.aclose()

    return asyncio.run(main())


def schema(**properties: Any) -> dict[str, Any]:
    form = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": form}}
    }


NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
WORD = {"type": "string", "pattern": "^[a-f]{1,6}$"}
LISTS = {"type": "array", "items": NUMBER, "maxItems": 3}
NESTED = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/inner"}]}
OPTIONS: dict[str, dict[str, Any]] = {
    "numbers": schema(a=NUMBER, b=NUMBER),
    "text and list": schema(word=WORD, list=LISTS, flag={"type": "boolean"}),
    "choice": {"guided_choice": ["yes", "no", "never"]},
    "regex": {"structured_outputs": {"regex": r"[a-c]{2,5}-\d{3}"}},
    "grammar": {"guided_grammar": 'start: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/'},
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": {"type": "function", "function": {"name": "look"}}},
}


def trained(answer: Answer, call_id: str = "c") -> Sample:
    [choice] = answer.choices
    assert (
        answer.prompt_ids is not None
        and choice.output_ids is not None
        and choice.logprobs is not None
    )
    ids = np.array([*answer.prompt_ids, *choice.output_ids])
    start = len(answer.prompt_ids)
    mask = np.arange(len(ids)) >= start
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[mask] = choice.logprobs
    line = Timeline(
        agent="default",
        token_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        call_ids=(call_id,),
        spans=(Span(call_id=call_id, start=start, end=len(ids)),),
    )
    return Sample(
        timeline=line, episode_id="e", group_id="g", reward=0.0, advantages=np.where(mask, 1.0, 0.0)
    )


def check(kind: str, answer: Answer) -> None:
    """The reply is of the language, read without the grammar."""
    import re

    [choice] = answer.choices
    message = choice.message or {}
    text = message.get("content") or ""
    if kind in ("required", "named"):
        assert choice.finish_reason == "tool_calls" and message["tool_calls"]
        for call in message["tool_calls"]:
            assert call["function"]["name"] in (("look",) if kind == "named" else ("add", "look"))
            arguments = json.loads(call["function"]["arguments"])
            assert 0 <= arguments["a"] <= 99 and arguments["b"] in ("x", "yy")
    elif kind == "choice":
        assert text in ("yes", "no", "never")
    elif kind == "regex":
        assert re.fullmatch(r"[a-c]{2,5}-\d{3}", text)
    elif kind == "grammar":
        assert re.fullmatch(r"\d{1,3}(\+\d{1,3}){1,3}", text)
    else:
        value = json.loads(text)
        assert set(value) == set(
            OPTIONS[kind]["response_format"]["json_schema"]["schema"]["properties"]
        )
    assert choice.output_ids is not None and choice.output_ids[-1] in TOKENIZER.eos_ids


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_a_reply_is_of_its_grammar_and_the_trainer_gives_it_the_probability_that_it_was_drawn_with(
    temperature: float,
) -> None:
    asks = [
        ask(options, seed, temperature=temperature, top_p=0.9 if seed % 2 else 1.0)
        for seed, options in enumerate(OPTIONS.values())
    ]
    found = answers(*asks)
    for kind, answer in zip(OPTIONS, found, strict=True):
        check(kind, answer)
    trainer = Trainer(
        model(),
        TrainerSettings(lr=1e-3, loss=LossSettings(kl_coef=0.1, entropy_coef=0.1)),
        TOKENIZER,
    )
    samples = [trained(answer, str(i)) for i, answer in enumerate(found)]
    how = {
        str(i): Sampling.of({**one.sampling.as_dict(), "grammar": answer.grammar})
        for i, (one, answer) in enumerate(zip(asks, found, strict=True))
    }
    told = trainer.step(samples, how)
    assert (
        told["logprob_gap_max"] < 1e-4
        and told["clip_share"] == 0
        and told["kl"] == pytest.approx(0.0, abs=1e-6)
    )
    assert np.isfinite(told["grad_norm"]) and told["entropy"] >= 0


def test_a_token_that_the_mask_forced_has_log_probability_0_and_no_gradient() -> None:
    [answer] = answers(ask({"guided_choice": ["forced"]}, 3))
    [choice] = answer.choices
    assert choice.logprobs == [0.0] * 7, "six letters and the end of the turn"
    trainer = Trainer(model(), TrainerSettings(lr=1e-3), TOKENIZER)
    how = Sampling.of({**ask({}, 3).sampling.as_dict(), "grammar": answer.grammar})
    assert trainer.step([trained(answer)], {"c": how})["grad_norm"] == 0


def test_without_the_mask_the_trainer_would_score_otherwise() -> None:
    asked = ask(OPTIONS["numbers"], 5)
    [answer] = answers(asked)
    sample = trained(answer)
    free = score(
        POLICY, collate([sample], {"c": asked.sampling}, "cpu", TOKENIZER), entropy=False
    ).logprobs_N
    recorded = sample.timeline.logprobs[sample.timeline.loss_mask]
    assert np.abs(free.detach().numpy() - recorded).max() > 0.5


def test_a_request_without_a_constraint_is_sampled_as_before_beside_one_with_it() -> None:
    plain = ask({"response_format": {"type": "text"}, "tool_choice": "auto"}, 1, max_tokens=30)
    [alone] = answers(plain)
    [beside, typed] = answers(plain, ask(OPTIONS["numbers"], 2))
    assert list(alone.choices[0].output_ids or ()) == list(beside.choices[0].output_ids or ())
    assert alone.grammar == "" and typed.grammar
