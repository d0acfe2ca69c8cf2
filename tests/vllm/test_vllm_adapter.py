"""A LoRA adapter on vLLM: loaded without a restart, of the version that each call names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ajet_sdk.config.schema import Lora
from ajet_sdk.protocols import Sampling

pytest.importorskip("vllm", reason="needs vLLM: just install-trinity")

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def adapted(trained_with: Callable[..., Any]) -> Any:
    return trained_with(Lora(enabled=True, r=4, alpha=8))


def test_an_adapter_is_sampled_with_as_it_is_trained(adapted: Any) -> None:
    server = adapted.sampler.pid

    async def body() -> None:
        before = None
        for version in (0, 1, 2):
            [one] = await adapted.sampler.sample(
                PROMPT, Sampling(temperature=0.7, max_tokens=40, seed=1), "s"
            )
            assert one.policy_version == version
            expected = adapted.logprobs(PROMPT, one.output_ids, 0.7)
            assert torch.allclose(torch.tensor(one.logprobs), expected, atol=1e-4)
            assert before is None or list(one.logprobs) != before
            before = list(one.logprobs)
            await adapted.move(0.1)

    asyncio.run(body())
    assert adapted.sampler.pid == server
