"""`rollout.name: vllm` end to end: a training run with a server that is killed in it, and the debug
backbone."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.vllm.engine import has_token_route
from ajet_sdk.errors import AjetError
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from ajet_tools.trace.files.audit import audit
from ajet_tools.trace.files.check import check
from tests.tiny_vision import image_part, picture, save_tiny_vision, text_part

pytest.importorskip("vllm", reason="needs vLLM: just install-trinity")


@ajet.judge
def length(output: str) -> float:
    """Something that differs between attempts of an untrained model."""
    return len(output) / 10


def config(tmp_path: Path, model: Path, backbone: str, **sections: Any) -> Config:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(json.dumps({"question": f"Say {w}."}) + "\n" for w in ("yes", "no", "maybe", "so"))
    )
    held_out = tmp_path / "val.jsonl"
    held_out.write_text(json.dumps({"question": "Say never."}) + "\n")
    files = {"training": {"file_path": str(tasks)}, "validation": {"file_path": str(held_out)}}
    return load_config(
        values={
            "experiment_dir": str(tmp_path / "experiment"),
            "backbone": backbone,
            "model": {"path": str(model)},
            "task_reader": {"type": "jsonl_dataset_file", "jsonl_dataset_file": files},
            "data": {"train_batch_size": 2},
            "rollout": {
                "name": "vllm",
                "num_repeat": 4,
                "temperature": 0.8,
                "max_model_len": 256,
                "max_response_length_in_one_turn": 12,
            },
            "trainer_common": {
                "total_steps": 3,
                "val_pass_n": 1,
                "val_tasks": 1,
                "test_freq": 0,
                "use_kl_loss": False,
                "optim": {"lr": 0.01, "warmup_steps": 1},
            },
            **sections,
        }
    )


def rows(config: Config, sql: str) -> list[dict[str, Any]]:
    with open_trace(config.directory) as reader:
        return list(reader.query(sql).to_pylist())


@pytest.fixture
def servers(children: Callable[[int], list[int]]) -> Callable[[], list[int]]:
    """vLLM's processes below this one."""

    def found() -> list[int]:
        keepers = [
            pid
            for pid in children(os.getpid())
            if b"keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return [server for keeper in keepers for server in children(keeper)]

    return found


@pytest.fixture
def trained(tiny: Path, tmp_path: Path, servers: Any) -> Config:
    """Three steps, in the third of which the server dies under a call."""
    calls: list[str] = []

    @ajet.workflow
    async def talk(question: str, model: ajet.Model) -> str:
        calls.append(question)
        if len(calls) == 20:
            [server] = servers()
            os.kill(server, signal.SIGKILL)
        reply = await model.chat([{"role": "user", "content": question}])
        said = reply["content"] or ""
        again = [{"role": "user", "content": question}, reply, {"role": "user", "content": "Sure?"}]
        return said + str((await model.chat(again))["content"])

    made = config(tmp_path, tiny, "local")
    tuned = train(made, workflow=talk, judge=length)
    assert tuned.path is not None and (tuned.path / "model.safetensors").is_file()
    return made


def test_a_training_run_samples_with_vllm_and_outlives_its_server(
    trained: Config, servers: Any
) -> None:
    versions = rows(trained, "SELECT step, policy_version AS v, count(*) AS n FROM calls_full JOIN episodes "
                             "USING (episode_id) WHERE split = 'train' GROUP BY ALL ORDER BY step, v")  # fmt: skip
    assert [(row["step"], row["v"]) for row in versions] == [(1, 0), (2, 1), (3, 2)]
    assert {
        row["status"] for row in rows(trained, "SELECT status FROM episodes WHERE split = 'train'")
    } == {"succeeded"}
    gaps = rows(trained, "SELECT value FROM metrics WHERE name = 'train/logprob_gap_max'")
    assert len(gaps) == 3 and all(row["value"] < 1e-3 for row in gaps)
    assert check(trained.directory) == []  # the ledger balances, among the rest
    assert {row["outcome"] for row in rows(trained, "SELECT outcome FROM ledger")} >= {
        "trained",
        "evaluation",
    }
    said = "".join(
        file.read_text()
        for file in (trained.directory / "logs").glob("*.log")
        if file.name != "vllm.log"
    )
    assert "vLLM crashed (killed by signal 9" in said and "(1 of 3)" in said
    assert not list(trained.directory.glob("vllm-*")) and servers() == []


@ajet.workflow
async def endless(question: str, model: ajet.Model) -> str:
    """Its reply takes longer than a step of training."""
    sampled = await model.chat([{"role": "user", "content": question}], ignore_eos=True)
    return str(sampled["content"])


@pytest.mark.skipif(not has_token_route(), reason="needs vLLM 0.32 or later")
def test_weights_change_under_replies_that_are_being_sampled(tiny: Path, tmp_path: Path) -> None:
    """The audit recomputes each token's log-probability with the weights of its own version."""
    rollout = {
        "name": "vllm",
        "num_repeat": 4,
        "max_model_len": 2000,
        "max_response_length_in_one_turn": 1500,
        "max_staleness": 1,
    }
    trainer = {
        "total_steps": 3,
        "test_freq": 0,
        "save_freq": 1,
        "keep_checkpoints": 10,
        "use_kl_loss": False,
        "optim": {"lr": 0.01, "warmup_steps": 1},
    }
    made = config(tmp_path, tiny, "local", rollout=rollout, trainer_common=trainer)
    train(made, workflow=endless, judge=length)
    spanning = rows(made, "SELECT len(output_ids) AS n FROM calls WHERE len(weight_updates) > 0")
    assert spanning and {row["n"] for row in spanning} == {1500}
    assert check(made.directory) == []
    audited = audit(made.directory / "trace.duckdb", weights=True)
    assert (audited.differs, audited.unchecked) == ((), ())


def test_debug_samples_with_vllm_at_its_port(tiny: Path, tmp_path: Path, servers: Any) -> None:
    import httpx

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    models: list[str] = []

    @ajet.workflow
    async def talk(question: str, model: ajet.Model) -> str:
        models.extend(
            one["id"] for one in httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        )
        return str((await model.chat([{"role": "user", "content": question}]))["content"])

    made = config(tmp_path, tiny, "debug", debug={"debug_vllm_port": port})
    tuned = train(made, workflow=talk, judge=length)
    assert models == ["tiny", "tiny"]
    assert all(
        call.policy_version is None and call.logprobs is not None
        for e in tuned.episodes
        for call in e.calls
    )
    assert servers() == []


def test_a_server_that_cannot_start_is_one_message(
    tiny: Path, tmp_path: Path, servers: Any
) -> None:
    """Here its model's weights are broken: the run ends with what vLLM says and where its log
    is."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(
            file.read_bytes() if file.suffix != ".safetensors" else b"nothing"
        )
    made = config(tmp_path, broken, "debug", debug={"debug_vllm_port": 18473})

    @ajet.workflow
    async def talk(question: str) -> str:
        return question

    with pytest.raises(
        AjetError,
        match=r"(?s)vLLM did not start: exit code 1; struct.error: unpack.*\nLog file: .*vllm.log",
    ):
        train(made, workflow=talk, judge=length)
    assert (made.directory / "logs" / "vllm.log").stat().st_size > 1000
    assert servers() == []


@pytest.mark.skipif(not has_token_route(), reason="needs vLLM 0.32 or later")
def test_a_run_learns_from_pictures(tmp_path: Path) -> None:
    """Idefics 3, which vLLM loads without torchvision."""

    @ajet.workflow
    async def look(question: str, model: ajet.Model) -> str:
        said: list[dict[str, Any]] = []
        for turn in range(2):
            seen = [image_part(picture(len(question) + turn)), text_part(question)]
            said.append({"role": "user", "content": seen})
            said.append(await model.chat(said))
        return str(said[-1]["content"])

    asked = config(tmp_path, save_tiny_vision("idefics3", tmp_path / "model"), "local")
    train(asked, workflow=look, judge=length)
    gaps = rows(asked, "SELECT step, value FROM metrics WHERE name = 'train/logprob_gap_max'")
    assert {row["step"] for row in gaps} == {1, 2, 3}
    assert max(row["value"] for row in gaps) < 1e-4
    (shown,) = rows(asked, "SELECT count(*) AS n FROM calls WHERE json_array_length(pictures) = 2")
    assert shown["n"] >= 3 * 2 * 4
