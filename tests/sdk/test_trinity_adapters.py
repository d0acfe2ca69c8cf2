"""Adapters at an engine of Trinity: loaded and unloaded by vLLM's routes, and named by the calls
that they answer. The server here answers as vLLM 0.23 does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.backbones.trinity.adapters import load_adapter
from ajet_sdk.backbones.trinity.sampler import ServerSampler
from ajet_sdk.errors import EngineError, RequestRefused
from ajet_sdk.protocols import Sampled, Sampling
from tests.serving import replying, serving

BASE = "/models/base"


@dataclass
class VllmOfAdapters:
    """vLLM's routes for adapters and completions."""

    loses: bool = False
    """Whether an adapter is gone after it was loaded."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Paths by name."""
    answered: list[str] = field(default_factory=list)
    """The model of each completion."""

    def reply(self, path: str, headers: Any, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in (BASE, *self.adapters)]}
        if path == "/v1/load_lora_adapter":
            if not Path(body["lora_path"]).is_dir():
                return 404, {"error": {"message": "No adapter found", "code": 404}}
            if not self.loses:
                self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, "Success"
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            return 200, "Success"
        assert path == "/v1/completions"
        if body["model"] not in (BASE, *self.adapters):
            return 404, {"error": {"message": "The model does not exist.", "code": 404}}
        self.answered.append(body["model"])
        logprobs = {"tokens": ["token_id:5"], "token_logprobs": [-0.5], "top_logprobs": [{}]}
        choice = {
            "index": 0,
            "text": "x",
            "token_ids": [5],
            "logprobs": logprobs,
            "finish_reason": "length",
        }
        return 200, {"choices": [choice]}


@dataclass
class Wrapper:
    """The parts of Trinity's `ModelWrapper` that are read."""

    api_address: str
    enable_lora: bool = True
    api_key: str = "EMPTY"
    model_path: str = BASE

    @property
    async def model_version_async(self) -> int:
        return 41


class Tokens:
    eos_ids = frozenset({0})
    pictures = None


@pytest.fixture
def vllm() -> VllmOfAdapters:
    return VllmOfAdapters()


@pytest.fixture
def wrapper(vllm: VllmOfAdapters) -> Iterator[Wrapper]:
    with serving(replying(vllm.reply)) as url:
        yield Wrapper(url)


def load(wrapper: Any, directory: Path, version: int, kept: int = 2) -> list[int]:
    return asyncio.run(load_adapter(wrapper, directory, version, kept))


def sample(wrapper: Any, **settings: Any) -> Sampled:
    async def run() -> Sampled:
        sampler = ServerSampler(wrapper, "m", 16, Tokens())  # type: ignore[arg-type]
        try:
            (sampled,) = await sampler.sample([1, 2], Sampling(max_tokens=1, **settings), "session")
        finally:
            await sampler.aclose()
        return sampled

    return asyncio.run(run())


def test_a_call_names_the_newest_adapter_and_records_its_version(
    vllm: VllmOfAdapters, wrapper: Wrapper, tmp_path: Path
) -> None:
    assert sample(wrapper).policy_version == 0
    versions = []
    for version in (9, 10):
        load(wrapper, tmp_path, version)
        versions.append(sample(wrapper).policy_version)
    assert versions == [9, 10]
    assert vllm.answered[0] == BASE
    assert [int(name.rpartition("-")[2]) for name in vllm.answered[1:]] == [9, 10]


def test_without_an_adapter_the_version_is_that_of_trinitys_engine(
    vllm: VllmOfAdapters, wrapper: Wrapper, tmp_path: Path
) -> None:
    load(wrapper, tmp_path, 3)
    wrapper.enable_lora = False
    assert sample(wrapper).policy_version == 41
    assert vllm.answered == [BASE]


def test_old_versions_are_unloaded_and_named(
    vllm: VllmOfAdapters, wrapper: Wrapper, tmp_path: Path
) -> None:
    unloaded = [load(wrapper, tmp_path, version, kept=2) for version in (1, 2, 3, 6)]
    assert unloaded == [[], [], [1], [2, 3]]
    assert [int(name.rpartition("-")[2]) for name in vllm.adapters] == [6]


def test_a_version_that_is_loaded_is_not_loaded_again(
    vllm: VllmOfAdapters, wrapper: Wrapper, tmp_path: Path
) -> None:
    load(wrapper, tmp_path, 1)
    first = dict(vllm.adapters)
    load(wrapper, tmp_path / "elsewhere", 1)
    assert vllm.adapters == first


def test_an_adapter_without_files_is_an_error_that_names_both(
    wrapper: Wrapper, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=r"load_lora_adapter.*adapter-7.*404"):
        load(wrapper, tmp_path / "gone", 7)


def test_an_engine_that_does_not_list_the_adapter_is_an_error(
    vllm: VllmOfAdapters, wrapper: Wrapper, tmp_path: Path
) -> None:
    vllm.loses = True
    with pytest.raises(EngineError, match="adapter-7"):
        load(wrapper, tmp_path, 7)


def test_an_adapter_that_is_gone_is_not_replaced_by_the_base_model(
    vllm: VllmOfAdapters, wrapper: Wrapper, tmp_path: Path
) -> None:
    """It is unloaded between the look at the list and the call."""
    load(wrapper, tmp_path, 1)
    listed = vllm.reply

    def unloading(path: str, headers: Any, body: Any) -> tuple[int, Any]:
        answer = listed(path, headers, body)
        if path == "/v1/models":
            vllm.adapters.clear()
        return answer

    with serving(replying(unloading)) as url, pytest.raises(EngineError):
        sample(Wrapper(url))
    assert vllm.answered == []


def test_words_that_vllms_route_would_ignore_are_refused(
    vllm: VllmOfAdapters, wrapper: Wrapper
) -> None:
    """vLLM 0.23's completions have no `bad_words`, and ignore what they don't know."""
    with pytest.raises(RequestRefused) as refused:
        sample(wrapper, bad_words=("secret",))
    assert refused.value.parameter == "bad_words"
    assert vllm.answered == []
