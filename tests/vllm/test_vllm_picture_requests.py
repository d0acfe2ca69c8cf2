"""Requests with pictures as vLLM's own classes read them, and its own responses as we read them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.engines.prompts import PromptBuilder
from ajet_sdk.engines.vllm.completions import sampling_parameters
from ajet_sdk.engines.vllm.token_prompts import TokenPrompt, TokenPrompts
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.tokens.huggingface import HFTokenizer
from tests.tiny_vision import KINDS, image_part, picture, save_tiny_vision, text_part

protocol = pytest.importorskip(
    "vllm.entrypoints.scale_out.token_in_token_out.protocol",
    reason="needs vLLM 0.32: ajet install vllm",
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return HFTokenizer(save_tiny_vision(request.param, tmp_path_factory.mktemp("model")))


def prompt_of(tokenizer: HFTokenizer) -> TokenPrompt:
    said = [image_part(picture(1)), text_part("or"), image_part(picture(2)), text_part("?")]
    built = PromptBuilder(tokenizer).prompt([{"role": "user", "content": said}])
    return TokenPrompts(tokenizer, names_versions=False).prompt(built.ids, built.pictures)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.0, n=3, max_tokens=7),
        Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            n=2,
            seed=2**63 + 5,
            stop=("a", "b"),
            stop_token_ids=(9,),
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.2,
            logit_bias=((7, 3.0),),
            bad_words=("no",),
            min_tokens=2,
            top_logprobs=3,
        ),
        Sampling(grammar='start: "a"'),
    ],
)
def test_vllm_reads_what_is_meant(tokenizer: HFTokenizer, sampling: Sampling) -> None:
    prompt = prompt_of(tokenizer)
    assert tokenizer.pictures is not None
    never = tokenizer.pictures.never_sampled
    parameters = sampling_parameters(
        prompt.prompt_ids,
        sampling,
        model="m",
        max_model_len=500,
        eos_ids=tokenizer.eos_ids,
        drawn_from=1,
        never_sampled=never,
    )
    sent = json.dumps({**prompt.body(parameters), "model": "m"})
    read = protocol.GenerateRequest.model_validate_json(sent)
    assert read.token_ids == prompt.short_ids and read.return_token_ids
    assert [part["type"] for part in read.content_parts] == ["image_url"] * 2
    assert [part["url"] for part in read.content_parts] == [
        span.picture.url for span in prompt.spans
    ]
    assert {**dict(sampling.logit_bias), **dict.fromkeys(never, -100.0)} == (
        read.sampling_params.logit_bias
    )
    for name, value in parameters.items():  # unknown parameters are ignored there
        known = getattr(read.sampling_params, name)
        if name == "structured_outputs":
            assert known.grammar == sampling.grammar
        elif name == "top_k" and value == -1:
            assert known in (-1, 0)
        elif name == "logit_bias":
            continue
        else:
            assert known == value, name


def test_vllms_answer_is_read(tokenizer: HFTokenizer) -> None:
    prompt = prompt_of(tokenizer)
    likely = [protocol.GenerateLogProb(token_id=t, logprob=-t / 10, rank=t) for t in (5, 6)]
    content = [
        protocol.GenerateLogProbsContent(token_id=5, logprob=-0.5, rank=1, top_logprobs=likely)
    ]
    choice = protocol.GenerateTokensChoice(
        index=0,
        token_ids=[5],
        finish_reason="length",
        logprobs=protocol.GenerateLogProbs(content=content),
    )
    spans = [
        protocol.PlaceholderRangeInfo(offset=span.start, length=len(span)) for span in prompt.spans
    ]
    reply = protocol.GenerateTokensResponse(
        choices=[choice], prompt_token_ids=prompt.prompt_ids, mm_placeholders={"image": spans}
    ).model_dump()
    how = Sampling(top_logprobs=1)
    (made,) = TokenPrompts(tokenizer, names_versions=False).choices_of(reply, prompt, how, 3)
    assert made == Sampled([5], [-0.5], "length", 3, None, [[(5, -0.5)]])


def test_the_server_knows_the_option_of_its_route() -> None:
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    assert "enable_scale_out" in {field.name for field in fields(FrontendArgs)}
    assert Path(protocol.__file__).with_name("api_router.py").is_file()
