"""What verl's client answers, as a sampler says it: why a reply ended, which weights it is of, what
went wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet_sdk.backbones.verl.runner import ClientSampler
from ajet_sdk.errors import EngineError, EngineUnavailable
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.tokens.huggingface import HFTokenizer


class Client:
    """Answers as it is told to, and keeps what it was asked."""

    def __init__(self, ids: list[int], **more: Any) -> None:
        self.answer = {"token_ids": ids, "log_probs": [-1.0] * len(ids), "stop_reason": "completed",
                       "extra_fields": {"global_steps": 4}, **more}  # fmt: skip
        self.asked: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        self.asked.append({"session": request_id, "prompt": prompt_ids, **sampling_params})
        if error := self.answer.get("error"):
            raise error
        return SimpleNamespace(**self.answer)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> HFTokenizer:
    return HFTokenizer(str(tiny))


def sampled(tokenizer: HFTokenizer, client: Client, **sampling: Any) -> list[Sampled]:
    sampler = ClientSampler(client, tokenizer, "model", 40)
    return asyncio.run(sampler.sample([1, 2, 3], Sampling(**sampling), "s"))


def test_what_is_asked_is_what_was_meant(tokenizer: HFTokenizer) -> None:
    client = Client([7, 8])
    (one,) = sampled(
        tokenizer, client, temperature=0.5, top_p=0.9, top_k=5, max_tokens=9, seed=2**63 + 5
    )
    assert one.policy_version == 4 and list(one.logprobs) == [-1.0, -1.0]
    assert client.asked == [
        {"session": "s", "prompt": [1, 2, 3], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_tokens": 9,
         "logprobs": True, "seed": 5}
    ]  # fmt: skip
    unlimited = Client([7])
    sampled(tokenizer, unlimited)
    assert unlimited.asked[0]["max_tokens"] == 37, "verl's own default would be another"


def test_several_choices_have_seeds_of_their_own(tokenizer: HFTokenizer) -> None:
    client = Client([7])
    assert len(sampled(tokenizer, client, n=3, seed=10)) == 3
    assert sorted(asked["seed"] for asked in client.asked) == [10, 11, 12]


def test_why_a_reply_ended(tokenizer: HFTokenizer) -> None:
    end = min(tokenizer.eos_ids)
    text = tokenizer.encode("maybe yes")
    assert (
        sampled(tokenizer, Client([*text, end]), max_tokens=len(text) + 1)[0].finish_reason
        == "stop"
    )
    assert sampled(tokenizer, Client(text), max_tokens=len(text))[0].finish_reason == "length"
    (truncate,) = sampled(tokenizer, Client(text), max_tokens=len(text), stop=("yes", "no"))
    assert (truncate.finish_reason, truncate.text, list(truncate.output_ids)) == (
        "stop",
        "maybe ",
        text,
    )
    (whole,) = sampled(tokenizer, Client([*text, end]), stop=("zzz",))
    assert whole.text is None


def test_what_goes_wrong_is_said(tokenizer: HFTokenizer) -> None:
    with pytest.raises(EngineUnavailable, match="ended the call for 'aborted'"):
        sampled(tokenizer, Client([], log_probs=None, stop_reason="aborted"))
    with pytest.raises(EngineError, match="calculate_log_probs"):
        sampled(tokenizer, Client([7], log_probs=None))
    with pytest.raises(EngineUnavailable, match="ValueError: no more room"):
        sampled(tokenizer, Client([], error=ValueError("no more room\nand a traceback")))
