"""Typed outputs from a client to the ledger: a real client, a gateway, a tiny model that is sampled
from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import openai
import pytest
import torch
from pydantic import BaseModel, Field
from transformers import Qwen3Config, Qwen3ForCausalLM

from ajet_sdk.backbones.shared.steps import samples_of
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.sampler import LocalSampler
from ajet_sdk.engines.scripted import ByteTokenizer, ScriptedEngine
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.types import Episode, Reward

TOKENIZER = ByteTokenizer()
USER: Any = [{"role": "user", "content": "Say where."}]
CALC: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
BIAS = {"258": -20, "260": -90, **{str(i): -100 for i in (34, *range(262, 272))}}
"""The model is random: it seldom thinks, seldom calls twice, and seldom begins a key."""


class Place(BaseModel):
    name: Literal["here", "there"]
    row: int = Field(ge=0, le=99)


@dataclass
class Setup:
    episode: OpenEpisode
    engine: TokenEngine

    @property
    def client(self) -> openai.OpenAI:
        return self.episode.model().openai()

    def samples(self, *, masks: bool, calls: Any = None) -> Any:
        """The batch of two attempts, of which this is the better one."""
        both = [
            Episode(
                episode_id=name,
                group_id="g",
                calls=calls or self.episode.calls,
                rewards=(Reward(value=value),),
            )
            for name, value in (("one", 1.0), ("two", 0.0))
        ]
        return samples_of(load_config(), both, TOKENIZER, masks=masks)


@pytest.fixture
def setup() -> Iterator[Setup]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER) + 10,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1500,
        initializer_range=0.4,
    )
    sampler = LocalSampler(
        Qwen3ForCausalLM(config).eval(), TOKENIZER, model_name="tiny", max_model_len=1500
    )
    engine = TokenEngine(sampler, TOKENIZER)
    with Gateway() as gateway:
        yield Setup(gateway.open(EpisodeSpec("one", engine, seed=1)), engine)


def test_parse_gives_the_pydantic_object_and_the_call_records_its_grammar(setup: Setup) -> None:
    reply = setup.client.chat.completions.parse(
        model="m", messages=USER, response_format=Place, logit_bias=BIAS
    )
    assert isinstance(reply.choices[0].message.parsed, Place)
    [call] = setup.episode.calls
    assert (
        "%json" in call.sampling["grammar"]
        and call.request["response_format"]["type"] == "json_schema"
    )
    assert call.logprobs is not None and (call.logprobs == 0).sum() > 5, "what the mask forced"


def test_streams_and_tools_and_what_vllm_adds(setup: Setup) -> None:
    create: Any = setup.client.chat.completions.create
    common = {"model": "m", "messages": USER, "logit_bias": BIAS}
    text = "".join(
        chunk.choices[0].delta.content or ""
        for chunk in create(
            **common, stream=True, response_format={"type": "json_object"}, max_tokens=300
        )
    )
    assert isinstance(json.loads(text), dict)
    for choice in ("required", {"type": "function", "function": {"name": "calc"}}):
        [called] = create(**common, tools=[CALC], tool_choice=choice).choices
        assert called.finish_reason == "tool_calls"
        assert set(json.loads(called.message.tool_calls[0].function.arguments)) == {"a"}
    chosen = create(**common, n=2, extra_body={"structured_outputs": {"choice": ["left", "right"]}})
    assert {one.message.content for one in chosen.choices} <= {"left", "right"}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format",
            "json_schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "response_format",
            'Unimplemented keys: ["uniqueItems"]',
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"tools": [CALC], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "names 'x', but tools has 'calc'",
        ),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex", "unclosed group"),
        (
            {"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}},
            "guided_choice",
            "cannot be combined",
        ),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"min_tokens": 3}},
            "min_tokens",
            "structured output",
        ),
    ],
)
def test_what_cannot_be_compiled_is_one_400_that_names_it(
    setup: Setup, body: dict[str, Any], param: str, said: str
) -> None:
    create: Any = setup.client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as raised:
        create(model="m", messages=USER, **body)
    assert raised.value.param == param and said in str(raised.value)


def test_only_what_the_trainer_can_mask_is_trained(setup: Setup) -> None:
    create: Any = setup.client.chat.completions.create
    create(model="m", messages=USER, logit_bias=BIAS, extra_body={"guided_choice": ["yes", "no"]})
    [call] = setup.episode.calls
    assert {row.outcome for row in setup.samples(masks=True).ledger} == {"trained"}
    assert {row.outcome for row in setup.samples(masks=False).ledger} == {"unmaskable"}
    assert call.output_ids is not None
    changed = call.output_ids.copy()
    changed[0] = ord("q")
    retokenised = (call.model_copy(update={"output_ids": changed}),)
    batch = setup.samples(masks=True, calls=retokenised)
    assert {row.outcome for row in batch.ledger} == {"unmaskable"} and not batch.samples


def test_a_call_outside_of_the_allowed_tools_is_text_and_a_script_is_not_checked() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    said = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [other]}}
    with Gateway() as gateway:
        episode = gateway.open(EpisodeSpec("one", ScriptedEngine(lambda ask: said)))
        create: Any = episode.model().openai().chat.completions.create
        common = {"model": "m", "messages": USER, "tools": [CALC, other]}
        assert create(**common, tool_choice=allowed).choices[0].message.tool_calls
        allowed["allowed_tools"]["tools"] = [CALC]  # type: ignore[index]
        assert create(**common, tool_choice=allowed).choices[0].message.content == said
        assert (
            create(**common, response_format={"type": "json_object"}).choices[0].message.tool_calls
        )
        assert all("grammar" not in call.sampling for call in episode.calls)
