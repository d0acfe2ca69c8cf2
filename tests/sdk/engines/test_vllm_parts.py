"""What can be said of vLLM's server without one: when it is used, its command line, its GPUs, its
log, its keeper."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from ajet_sdk.config.config import load_config
from ajet_sdk.config.schema import Lora
from ajet_sdk.engines.vllm import keeper as keeper_module
from ajet_sdk.engines.vllm.completions import choices_of
from ajet_sdk.engines.vllm.engine import gpus_for, samples_with_vllm, settings_of
from ajet_sdk.engines.vllm.server import Server, Settings, cause_in, command, environment
from ajet_sdk.errors import ConfigError, EngineError, EngineUnavailable
from ajet_sdk.learn.learner import ServedWeights
from ajet_sdk.protocols import Sampled
from tests.waiting import is_running, until

KEEPER = keeper_module.__file__


def settings(**changed: Any) -> Settings:
    given: dict[str, Any] = {
        "model": "m",
        "tokenizer": "m",
        "name": "m",
        "log": Path("vllm.log"),
        "gpus": (),
    }
    return Settings(**{**given, **changed})


def without_vllm(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "ajet_sdk.engines.vllm.engine.find_spec",
        lambda name: (object() if installed else None) if name == "vllm" else found(name),
    )


def test_asking_for_a_vllm_that_is_absent_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_vllm(monkeypatch, installed=False)
    config = load_config(values={"rollout": {"name": "vllm"}})
    with pytest.raises(ConfigError, match=r"ajet install vllm"):
        samples_with_vllm(config)
    assert not samples_with_vllm(load_config(values={}))


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"token_ids": [1, 2**31]}, EngineUnavailable, "token_ids"),
        (
            {"logprobs": {"token_logprobs": [-1.0, float("nan")]}},
            EngineUnavailable,
            "token_logprobs",
        ),
        (
            {"logprobs": {"token_logprobs": [-1.0]}},
            EngineUnavailable,
            "2 token ids and 1 log-probabilities",
        ),
        (
            {"logprobs": {"token_logprobs": [-1.0, None]}},
            EngineUnavailable,
            "returned no log-probability",
        ),
        ({"finish_reason": "abort"}, EngineUnavailable, "ended for 'abort'"),
        ({"token_ids": None}, EngineError, "0.11 or later"),
        ({"logprobs": None}, EngineError, "0.11 or later"),
    ],
)
def test_what_vllm_may_not_answer(
    changed: dict[str, Any], error: type[Exception], says: str
) -> None:
    sound = {
        "text": "a b",
        "token_ids": [1, 2],
        "logprobs": {"token_logprobs": [-1.0, -2.0]},
        "finish_reason": "stop",
    }
    [one, other] = choices_of({"choices": [{**sound, "stop_reason": None}]}, 3, 2)
    assert one == other == Sampled([1, 2], [-1.0, -2.0], "stop", 3)
    with pytest.raises(error, match=says):
        choices_of({"choices": [{**sound, **changed}]}, 3, 1)


def test_auto_takes_vllm_where_it_is_installed_and_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_vllm(monkeypatch, installed=True)
    for gpu in (True, False):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        assert samples_with_vllm(load_config(values={})) is gpu
        assert not samples_with_vllm(load_config(values={"rollout": {"name": "transformers"}}))
        assert not samples_with_vllm(load_config(values={"model": {"device": "cpu"}}))
        assert samples_with_vllm(load_config(values={"rollout": {"name": "vllm"}}))


@pytest.mark.parametrize(
    ("wanted", "count", "trainer", "expected"),
    [
        (1, 0, 0, ()),
        (1, 1, 0, (0,)),
        (1, 2, 0, (1,)),
        (1, 2, 1, (0,)),
        (2, 2, 0, (0, 1)),
        (3, 4, 1, (0, 2, 3)),
        (1, 4, None, (0,)),
    ],
)
def test_the_server_leaves_the_trainers_gpu_alone_where_it_can(
    wanted: int, count: int, trainer: int | None, expected: tuple[int, ...]
) -> None:
    assert gpus_for(wanted, count, trainer) == expected


def test_more_gpus_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, but there are 2"):
        gpus_for(4, 2, 0)


@pytest.mark.parametrize(
    ("count", "rollout", "share", "visible"),
    [(1, {}, "0.5", "0"), (2, {}, "0.85", "1"), (1, {"gpu_memory_utilization": 0.3}, "0.3", "0")],
)
def test_gpu_memory_is_shared_with_a_trainer(
    monkeypatch: pytest.MonkeyPatch, count: int, rollout: dict[str, Any], share: str, visible: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    config = load_config(values={"model": {"path": "some/model"}, "rollout": rollout})
    made = settings_of(
        config, "some/model", dtype="bfloat16", max_model_len=100, lora_rank=None, trained=True
    )
    line = command(made, "some/model", Path("s"))
    assert line[line.index("--gpu-memory-utilization") + 1] == share
    assert "--enforce-eager" not in line
    assert environment(made, {})["CUDA_VISIBLE_DEVICES"] == visible
    assert environment(made, {"CUDA_VISIBLE_DEVICES": "6,7"})["CUDA_VISIBLE_DEVICES"] == str(
        6 + int(visible)
    )


def test_keys_of_the_config_reach_the_command_line() -> None:
    rollout = {"tensor_parallel_size": 1, "max_num_seqs": 7, "max_env_worker": 30}
    config = load_config(
        values={"model": {"path": "a/b"}, "rollout": rollout, "trainer_common": {"seed": 5}}
    )
    made = settings_of(config, "a/b", dtype="float32", max_model_len=99, lora_rank=5, trained=True)
    line = command(made, "a/b", Path("s"))
    asked = {"--max-num-seqs": "7", "--max-model-len": "99", "--seed": "5", "--max-lora-rank": "8", "--uds": "s",
             "--dtype": "float32", "--served-model-name": "b", "--logprobs-mode": "processed_logprobs"}  # fmt: skip
    assert {flag: line[line.index(flag) + 1] for flag in asked} == asked
    assert "--enable-prefix-caching" in line and "--port" not in line
    free = load_config(values={"rollout": {"max_env_worker": 30}})
    assert (
        settings_of(
            free, "m", dtype="auto", max_model_len=9, lora_rank=None, trained=True
        ).max_num_seqs
        == 30
    )
    alone = load_config(values={"rollout": {"deterministic": True}})
    quiet = settings_of(alone, "m", dtype="auto", max_model_len=9, lora_rank=None, trained=True)
    assert quiet.max_num_seqs == 1 and not quiet.prefix_cache


def test_debug_has_a_port_of_its_own() -> None:
    config = load_config(values={"backbone": "debug", "debug": {"debug_vllm_port": 18123}})
    made = settings_of(config, "m", dtype="auto", max_model_len=9, lora_rank=None, trained=False)
    line = command(made, "m", Path("s"))
    assert (
        line[line.index("--port") + 1] == "18123" and line[line.index("--host") + 1] == "127.0.0.1"
    )
    assert line[line.index("--tensor-parallel-size") + 1] == "1"  # 4 by default, and no GPU here
    assert environment(made, {})["VLLM_SERVER_DEV_MODE"] == "0"


def test_what_the_user_has_set_for_vllm_stays() -> None:
    assert environment(settings(), {})["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert environment(settings(), {"VLLM_CPU_KVCACHE_SPACE": "8"})["VLLM_CPU_KVCACHE_SPACE"] == "8"


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineError, match=rf"127.0.0.1:{port} .*debug_vllm_port"):
            Server(settings(port=port, log=tmp_path / "vllm.log"), "m", tmp_path)


def test_the_cause_of_a_log_is_its_first_error_that_says_something() -> None:
    log = """\
(APIServer pid=3) INFO 11-21 22:16:03 [launcher.py:195] Route: /ping, Methods: POST
(APIServer pid=3) WARNING 11-21 22:16:03 [x.py:1] Could not import foo: ModuleNotFoundError: foo
(EngineCore pid=5) ERROR 11-21 22:16:53 [core.py:1063]     output = func(*args, **kwargs)
(EngineCore pid=5) ERROR 11-21 22:16:53 [core.py:1063] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB
(APIServer pid=3) Traceback (most recent call last):
(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
    assert cause_in(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"
    assert cause_in("api_server.py: error: unrecognized arguments: --uds").endswith(
        "unrecognized arguments: --uds"
    )
    assert cause_in("") == "it printed nothing"


def test_a_server_that_does_not_start_is_told_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here vLLM is a module that fails."""
    broken = tmp_path / "vllm" / "entrypoints" / "openai"
    broken.mkdir(parents=True)
    (broken / "api_server.py").write_text("raise ValueError('No supported CUDA device')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = Server(settings(log=tmp_path / "logs" / "vllm.log"), "m", tmp_path)
    with pytest.raises(
        EngineError,
        match=r"exit code 1; ValueError: No supported CUDA device\nLog file: .*vllm.log",
    ):
        asyncio.run(server.ready())
    asyncio.run(server.stop())


# The keeper


NEST = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
"""A server with a child, deaf to SIGTERM."""


def pids_in(file: Path) -> list[int]:
    until(file.exists)
    return [int(pid) for pid in file.read_text().split()]


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_text("much")
    told = tmp_path / "pids"
    parent = (
        f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, {KEEPER!r},"
        f" str(os.getpid()), {str(weights)!r}, '--', sys.executable, '-c', {NEST!r},"
        f" {str(told)!r}], start_new_session=True)\ntime.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", parent])
    pids = pids_in(told)
    assert all(map(is_running, pids))
    run.kill()
    run.wait()
    until(lambda: not any(map(is_running, pids)))
    until(lambda: not weights.exists())


def test_a_server_that_dies_takes_its_children_along_and_keeps_the_weights(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    told = tmp_path / "pids"
    line = [
        sys.executable,
        str(KEEPER),
        str(os.getpid()),
        str(weights),
        "--",
        sys.executable,
        "-c",
        NEST,
        str(told),
    ]
    keeper = subprocess.Popen(line, start_new_session=True)
    server, child = pids_in(told)
    os.kill(server, signal.SIGKILL)
    assert keeper.wait() == 128 + signal.SIGKILL
    until(lambda: not is_running(child))
    assert weights.exists()


# Weights


def model(tied: bool) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


class Tokenizer:
    name_or_path = ""

    def save_pretrained(self, place: Path) -> None:
        return


@pytest.mark.parametrize("sharded", [False, True])
def test_a_tied_output_embedding_is_written_apart(
    tmp_path: Path, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is a checkpoint of the same model whose output embedding is a weight of its
    own."""
    made = model(tied=True)
    served = ServedWeights(made, Tokenizer())
    assert served.differs
    if sharded:
        save = made.save_pretrained
        monkeypatch.setattr(
            made, "save_pretrained", lambda place: save(place, max_shard_size="1KB")
        )
    served.write(tmp_path / "v1")
    assert not json.loads((tmp_path / "v1" / "config.json").read_text())["tie_word_embeddings"]
    again = LlamaForCausalLM.from_pretrained(tmp_path / "v1")
    assert again.lm_head.weight is not again.model.embed_tokens.weight
    ids = torch.arange(10)[None]
    assert torch.equal(again(ids).logits, made(ids).logits)
    names = [name for file in (tmp_path / "v1").glob("*.safetensors") for name in load_file(file)]
    assert len(names) == len(set(names)) and "lm_head.weight" in names


def test_an_untied_model_is_served_from_where_it_lies(tmp_path: Path) -> None:
    served = ServedWeights(model(tied=False), Tokenizer())
    assert not served.differs and served.lora_rank is None


def test_an_adapter_that_vllm_cannot_add_is_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    odd = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", use_dora=True)
    assert ServedWeights(peft.get_peft_model(model(tied=False), plain), Tokenizer()).lora_rank == 4
    served = ServedWeights(peft.get_peft_model(model(tied=True), odd), Tokenizer())
    assert served.lora_rank is None and served.differs
    with torch.no_grad():
        for name, parameter in served.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    served.model.eval()
    served.write(tmp_path / "v1")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "v1").eval()
    ids = torch.arange(10)[None]
    assert torch.allclose(again(ids).logits, served.model(ids).logits, atol=1e-5)


def test_the_lora_section_makes_an_adapter_that_vllm_serves(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from ajet_sdk.engines.local.loading import load_model

    model(tied=True).save_pretrained(tmp_path)
    assert (
        ServedWeights(load_model(tmp_path, lora=Lora(enabled=True, r=3)), Tokenizer()).lora_rank
        == 3
    )
