"""vLLM's engine as Trinity's own model class asks for it, with what we map; only the engine's start
is left out."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
from ajet_sdk.backbones.trinity.launch import parse_config, validate_config
from ajet_sdk.backbones.trinity.mapping import TrinityPlace, to_trinity
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError

pytest.importorskip(
    "vllm.entrypoints.chat_utils",
    reason="needs vLLM 0.23, see CONTRIBUTING.md",
    exc_type=ImportError,
)
vllm = pytest.importorskip("vllm")
trinitys = pytest.importorskip("trinity.common.models.vllm_model")


class Started(Exception):
    """The engine would start now."""


@pytest.mark.parametrize("has_adapter", [False, True])
def test_trinitys_model_takes_the_engines_arguments(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_adapter: bool
) -> None:
    """`prepare` is Trinity's, and the arguments are vLLM's own class: a key given twice or unknown
    is a TypeError."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0")  # set back afterwards
    asked: list[Any] = []

    def start(arguments: Any) -> Any:
        asked.append(arguments)
        raise Started

    monkeypatch.setattr(vllm.AsyncLLMEngine, "from_engine_args", start)
    config = load_config(
        values={
            "ajet": {
                "backbone": "trinity",
                "experiment_name": "job",
                "model": {
                    "path": str(tiny),
                    "dtype": "float32",
                    "lora": {"enabled": has_adapter, "r": 24},
                },
                "rollout": {
                    "max_model_len": 512,
                    "max_num_seqs": 24,
                    "gpu_memory_utilization": 0.6,
                    "temperature": 0.7,
                },
                "trainer_common": {"n_gpus_per_node": 8, "seed": 11},
            }
        }
    )
    place = TrinityPlace(
        run_id="r", model=str(tiny), steps=3, lr=1e-6, checkpoints=tmp_path, tasks=tmp_path
    )
    model = validate_config(to_trinity(config, place)).explorer.rollout_model
    with pytest.raises(Started):
        asyncio.run(trinitys.vLLMRolloutModel(model).prepare())
    (arguments,) = asked
    known = {field.name for field in dataclasses.fields(vllm.AsyncEngineArgs)}
    assert set(model.extra_engine_args) <= known
    assert arguments.logprobs_mode == "processed_logprobs", (
        "of the distribution that is really sampled from"
    )
    assert (arguments.model, arguments.dtype, arguments.seed) == (str(tiny), "float32", 11)
    assert (arguments.max_model_len, arguments.max_num_seqs) == (512, 24)
    assert (arguments.tensor_parallel_size, arguments.gpu_memory_utilization) == (1, 0.6)
    engine = arguments.create_engine_config()
    assert engine.model_config.logprobs_mode == "processed_logprobs", "vLLM takes them"
    if has_adapter:
        assert (engine.lora_config.max_lora_rank, engine.lora_config.max_loras) == (32, 2)
        assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    else:
        assert engine.lora_config is None


def test_an_argument_that_trinity_gives_itself_is_refused_at_the_desk() -> None:
    """Every keyword of Trinity's own call, as its source has it."""
    source = ast.parse(Path(trinitys.__file__).read_text())
    (call,) = (
        node
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "vllm.AsyncEngineArgs"
    )
    names = [keyword.arg for keyword in call.keywords if keyword.arg]
    assert len(names) > 20
    for name in names:
        with pytest.raises(ConfigError, match=rf"extra_engine_args\.{name}: "):
            parse_config({"explorer": {"rollout_model": {"extra_engine_args": {name: 1}}}})
    parse_config(
        {"explorer": {"rollout_model": {"extra_engine_args": {"max_num_batched_tokens": 4096}}}}
    )
