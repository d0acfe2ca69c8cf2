"""What samples from a training service: replies end where the request says, and say which weights
sampled them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ajet_sdk.config.schema import Prices
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.engines.tinker.sampler import TinkerSampler
from ajet_sdk.engines.tinker.sdk import SdkWeights
from ajet_sdk.engines.tinker.service import Continued, Costs
from ajet_sdk.errors import CheckpointError, ContextOverflow, EngineUnavailable, RequestRefused
from ajet_sdk.learn.tinker.learner import complete_adapter
from ajet_sdk.protocols import Sampled, Sampling

TOKENIZER = ByteTokenizer()


class Echoing:
    """Weights that continue any prompt with one text, as a service would whose stop rules are not
    ours."""

    def __init__(self, text: str, stopped: bool) -> None:
        self.ids, self.stopped = TOKENIZER.encode(text), stopped
        self.asked: dict[str, Any] = {}

    async def sample(self, prompt_ids: Sequence[int], count: int, **asked: Any) -> list[Continued]:
        self.asked = asked
        ids = self.ids[: asked["max_tokens"]]
        return [Continued(ids, [-0.5] * len(ids), self.stopped)] * count


def sampler(weights: Any, **more: Any) -> TinkerSampler:
    return TinkerSampler(
        weights, TOKENIZER, Costs(Prices()), model_name="m", max_model_len=64, **more
    )


def sample(one: TinkerSampler, sampling: Sampling) -> list[Sampled]:
    return asyncio.run(one.sample([1, 2, 3], sampling, "s"))


def test_a_reply_ends_at_a_stop_string_and_at_the_end_of_a_turn() -> None:
    [cut] = sample(sampler(Echoing("yes. STOP and more", False)), Sampling(stop=("STOP",)))
    assert (cut.text, cut.finish_reason) == ("yes. ", "stop")
    assert len(cut.output_ids) == len(cut.logprobs) == len(TOKENIZER.encode("yes. STOP"))
    end = min(TOKENIZER.eos_ids)
    weights = Echoing("", False)
    weights.ids = [*TOKENIZER.encode("ab"), end, *TOKENIZER.encode("cd")]
    [ended] = sample(sampler(weights), Sampling())
    assert (
        list(ended.output_ids) == weights.ids[:3]
        and ended.finish_reason == "stop"
        and ended.text is None
    )
    assert weights.asked["stop"] == sorted(TOKENIZER.eos_ids)
    [whole] = sample(sampler(Echoing("abcdef", False)), Sampling(max_tokens=4))
    assert len(whole.output_ids) == 4 and whole.finish_reason == "length"


def test_calls_say_which_weights_sampled_them() -> None:
    published = Echoing("new", True)
    one = sampler(Echoing("old", True), publish=lambda: published)

    async def scenario() -> list[Sampled]:
        replies = await one.sample([1], Sampling(), "s")
        async with one.exclusive():
            one.policy_version = 1
            replies += await one.sample(
                [1], Sampling(), "s"
            )  # before the block ends: the weights that there were
        return replies + await one.sample([1], Sampling(), "s")

    said = [
        (TOKENIZER.decode(list(r.output_ids)), r.policy_version) for r in asyncio.run(scenario())
    ]
    assert said == [("old", 0), ("old", 0), ("new", 1)]


def test_what_the_api_has_no_parameter_for_is_refused() -> None:
    one = sampler(Echoing("x", True))
    for sampling, named in (
        (Sampling(min_p=0.1), "min_p"),
        (Sampling(grammar="root"), "structured output"),
    ):
        with pytest.raises(RequestRefused, match=named):
            sample(one, sampling)
    with pytest.raises(ContextOverflow, match="64"):
        asyncio.run(one.sample([1] * 64, Sampling(), "s"))


def test_an_adapter_names_the_modules_that_it_changes(tmp_path: Path) -> None:
    names = [f"base_model.model.model.layers.{i}.{module}.lora_{side}.weight"
             for i in (0, 1) for module in ("self_attn.q_proj", "mlp.up_proj") for side in "AB"]  # fmt: skip
    save_file(
        {name: np.zeros((2, 2), np.float32) for name in names},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "target_modules": None}))
    assert complete_adapter(tmp_path, "org/base") == ["q_proj", "up_proj"]
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written == {
        "r": 2,
        "target_modules": ["q_proj", "up_proj"],
        "base_model_name_or_path": "org/base",
    }
    save_file({"weight": np.zeros(2, np.float32)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="no LoRA weights"):
        complete_adapter(tmp_path, "org/base")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        complete_adapter(tmp_path, "org/base")


@pytest.mark.parametrize(
    ("reasons", "fault"),
    [(["stop", "abort"], "'abort', which is no end"), (["stop"], "1 samples of 2"), ([], "0 sam")],
)
def test_a_sample_that_is_none_is_a_fault_and_no_short_reply(
    reasons: list[str], fault: str
) -> None:
    tinker = pytest.importorskip("tinker")
    answer = SimpleNamespace(
        sequences=[SimpleNamespace(tokens=[5], logprobs=[-1.0], stop_reason=r) for r in reasons]
    )
    future: Future[Any] = Future()
    future.set_result(answer)
    session: Any = SimpleNamespace(
        tinker=tinker, name="the service", stall=30.0, errors=(tinker.TinkerError,)
    )
    weights = SdkWeights(session, SimpleNamespace(sample=lambda *_: future))
    asked = weights.sample(
        [1], 2, max_tokens=4, temperature=1.0, top_p=1.0, top_k=-1, seed=None, stop=[0]
    )
    with pytest.raises(EngineUnavailable, match=fault):
        asyncio.run(asked)
