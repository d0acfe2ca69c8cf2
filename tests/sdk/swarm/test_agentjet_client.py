"""Programs written for AgentJet's swarm run unchanged at a server of ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet.copilot.job import AgentJetJob
from ajet.default_config.ajet_config_schema import (
    AjetTaskReader,
    HuggingfaceDatRepo,
    JsonlDatasetFile,
    JsonlTrainingFp,
)
from ajet.schema.task import Task, WorkflowOutput
from ajet.task_reader import HuggingFaceTaskReader, RouterTaskReader
from ajet.tuner_lib.as_oai_baseurl_apikey import OpenaiBaseUrlAndApiKey
from ajet.tuner_lib.experimental.interchange_utils import SwarmThrottlePolicy
from ajet.tuner_lib.experimental.swarm_client import (
    SwarmClient,
    auto_train_with_dataset,
    run_episodes_until_all_complete,
)
from ajet.utils.retry import retry_with_backoff
from ajet.utils.thread_executors import (
    BoundedThreadPoolExecutor,
    PeriodicDrainThreadPoolExecutor,
    TaskCountLimitedThreadPoolExecutor,
)
from ajet_sdk.errors import ConfigError, SwarmError
from ajet_sdk.swarm.agentjet import threads as agentjet_threads
from ajet_sdk.trace.reader import open_trace
from ajet_tools.cli.agentjet_swarm import READY, translated
from tests.sdk.swarm.served import Served, serve
from tests.tiny_models import save_tiny
from tests.waiting import until


def execute(task: Task, where: OpenaiBaseUrlAndApiKey, reward: float = 1.0) -> WorkflowOutput:
    """As the tutorials do: one request without a client library."""
    answer = httpx.post(
        f"{where.base_url}/chat/completions",
        json={"model": "any", "messages": [{"role": "user", "content": task.main_query}]},
        headers={"Authorization": f"Bearer {where.api_key}"},
        timeout=60,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["message"]["content"]
    return WorkflowOutput(reward=reward, metadata={"final_answer": content}, log_metrics={"n": 1})


TASKS = [Task(main_query=f"Say {word}.", task_id=word) for word in ("a", "b")]


def collected(server: Served, client: SwarmClient, rule: Any = None) -> list[Any]:
    done = server.begin()

    def rollout(task: Task) -> float:
        episode_uuid, where = client.begin_episode(60, throttle_policy=rule and rule(task))
        output = execute(task, where, float(task.task_id == "a"))
        client.end_episode(task, episode_uuid, output)
        return float(task.task_id == "a")

    rewards = run_episodes_until_all_complete([*TASKS, *TASKS], func=rollout)
    assert rewards == [1.0, 0.0, 1.0, 0.0]
    return done.result(10)


def policy(task: Task) -> SwarmThrottlePolicy:
    return SwarmThrottlePolicy(
        ratio=1.5, expected_batch_size=2, expected_num_repeat=2, current_task_id=task.task_id
    )


@pytest.mark.parametrize("rule", [None, policy], ids=["at the end", "throttled"])
def test_a_step_from_threads(tmp_path: Path, rule: Any) -> None:
    with serve(tmp_path) as server:
        client = SwarmClient(server.url)
        episodes = collected(server, client, rule)
        assert sorted(e.task.task_id for e in episodes) == ["a", "a", "b", "b"]
        assert {e.task.main_query for e in episodes} == {"Say a.", "Say b."}, "the whole task"
        assert {(e.task.task_id, e.reward) for e in episodes} == {("a", 1.0), ("b", 0.0)}
        assert episodes[0].output == {"final_answer": "yes, it is"}
        assert episodes[0].metrics["n"] == 1
        assert client.get_engine_status()[0] == "ENGINE.WEIGHT_SYNCING"
        server.train(1, episodes)
        assert client.get_global_step() == 1


def test_what_clients_look_at(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        client = SwarmClient(server.url)
        server.begin()
        episode_uuid, where = client.begin_episode(episode_type="train")
        assert (where.episode_uuid, client.can_continue_episode(episode_uuid)) == (
            episode_uuid,
            True,
        )
        execute(TASKS[0], where)
        stat = client.get_rollout_stat()
        assert (stat.completed_episodes, stat.completed_episode_target) == (0, 4)
        assert stat.running_episode_details is not None and len(stat.running_episode_details) == 1
        client.print_rollout_stat()
        [status] = client.get_episode_buffer()
        assert status.openai_api_key == "" and status.client_uuid == client.client_uuid
        assert client.server_experiment_dir() == str(tmp_path)
        client.abort_episode(episode_uuid)
        assert not client.can_continue_episode(episode_uuid)
        assert client.get_episode_buffer() == []
        with pytest.raises(RuntimeError, match="sync_train_code"):
            client.sync_train_code("code.zip")


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_what_is_no_reward_is_an_error_and_the_episode_stays_open(
    tmp_path: Path, reward: Any
) -> None:
    with serve(tmp_path) as server:
        client = SwarmClient(server.url)
        server.begin()
        episode_uuid, where = client.begin_episode()
        output = execute(TASKS[0], where)
        with pytest.raises(SwarmError):
            client.end_episode(TASKS[0], episode_uuid, WorkflowOutput(reward=reward))
        client.end_episode(TASKS[0], episode_uuid, output)
        client.end_episode(TASKS[0], episode_uuid, output)  # unknown by now: a warning


def test_an_end_that_comes_too_late_is_lost_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serve(tmp_path) as server:
        client = SwarmClient(server.url)
        server.begin()
        episode_uuid, where = client.begin_episode(discard_episode_timeout=0.2)
        output = execute(TASKS[0], where)
        until(lambda: not client.can_continue_episode(episode_uuid))
        client.end_episode(TASKS[0], episode_uuid, output)
        assert any(episode_uuid in record.message for record in caplog.records)
        assert server.ledger().get("abandoned", 0) > 0


def test_callbacks_are_called_as_an_update_begins(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        client = SwarmClient(server.url)
        called = threading.Event()
        client.add_entering_weight_sync_callback(called.set)
        collected(server, client)
        assert called.wait(10)


def test_a_client_agrees_to_train(tmp_path: Path) -> None:
    rule = "rollout_until_all_clients_agree_sync_weight"
    with serve(tmp_path, f"ajet.swarm_mode_sample_collection_method={rule}") as server:
        job = AgentJetJob(swarm_mode_sample_collection_method=rule, model="m")
        client = SwarmClient(server.url, agentjet_job=job)
        done = server.begin()
        episode_uuid, where = client.begin_episode()
        client.end_episode(TASKS[0], episode_uuid, execute(TASKS[0], where))
        assert client.agree_sync_weight()
        assert len(done.result(10)) == 1
        assert not client.agree_sync_weight(), "the step is being trained"
        with pytest.raises(ConfigError):
            SwarmClient(
                server.url,
                agentjet_job=AgentJetJob(
                    swarm_mode_sample_collection_method="rollout_until_finish_enough_tasks"
                ),
            ).agree_sync_weight()


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    client = SwarmClient("http://127.0.0.1:1")
    assert client.get_engine_status() == ("ENGINE.CANNOT_CONNECT", {})
    assert client.get_global_step() is None
    with pytest.raises(ConfigError):
        SwarmClient("http://gpu-box.invalid:1", auto_start_swarm_server=True)


# Jobs


def test_a_jobs_arguments_are_keys_of_its_config() -> None:
    job = AgentJetJob(
        experiment_name="math", project_name="swarm", logging="tensorboard", n_gpu=8, model="m",
        algorithm="grpo", num_repeat=4, batch_size=32, swarm_mode=True, max_env_worker=128,
        swarm_mode_sample_collection_method="rollout_until_finish_enough_non_dummy_tasks",
        max_prompt_length=3000, max_response_length=15000, max_response_length_in_one_turn=4096,
        max_model_len=18000, mini_batch_num=2, lora_rank=8, lora_alpha=16, lora_load_format="safetensors",
        lora_target_modules="all-linear", gpu_memory_utilization=0.85, lr=2e-5, nnodes=1,
    )  # fmt: skip
    config = job.config
    assert (config.rollout.num_repeat, config.data.train_batch_size) == (4, 32)
    assert (config.swarm.collect, config.model.lora.r, config.model.lora.enabled) == (
        "signal", 8, True,
    )  # fmt: skip
    assert (config.trainer_common.optim.lr, config.rollout.max_model_len) == (2e-5, 18000)
    assert (job.batch_size, job.num_repeat, job.lr) == (32, 4, 2e-5)
    job.config.ajet.rollout.vllm_tool_parser = "hermes"
    job.config.ajet.trainer_common.save_freq = 7
    assert job.config.ajet.trainer_common.save_freq == 7
    document = job.config.to_dict()
    assert document["ajet"]["model"]["tool_call_parser"] == "hermes"
    assert document["ajet"]["trainer_common"]["save_freq"] == 7
    with pytest.raises(TypeError, match="batch_size"):
        AgentJetJob(batchsize=3)
    with pytest.raises(ConfigError):
        job.config.ajet.rollout.num_repeats = 3
        _ = job.config
    assert not AgentJetJob(lora_rank=0).config.model.lora.enabled


def test_a_job_begins_with_a_file(tmp_path: Path) -> None:
    file = AgentJetJob(experiment_name="one", model="m", num_repeat=3).dump_job_as_yaml(
        tmp_path / "job.yaml"
    )
    job = AgentJetJob(base_yaml_config=file, batch_size=5)
    assert (job.config.rollout.num_repeat, job.config.data.train_batch_size) == (3, 5)
    assert job.config.experiment_name == "one"
    assert job.build_job_from_yaml(file)["ajet"]["rollout"]["num_repeat"] == 3
    new = AgentJetJob(experiment_name="one", ensure_new_experiment=True)
    assert new.config.experiment_name.startswith("one_")


# Readers and threads


def test_readers_of_tasks(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(
        '{"question": "1 + 1?", "answer": "2"}\n{"question": "2 + 2?", "answer": "4"}\n'
    )
    sources = JsonlDatasetFile(training=JsonlTrainingFp(file_path=str(file)))
    lines = RouterTaskReader("jsonl_dataset_file", AjetTaskReader(jsonl_dataset_file=sources))
    repo = HuggingfaceDatRepo(dataset_path=str(file))
    rows = HuggingFaceTaskReader(AjetTaskReader(huggingface_dat_repo=repo))
    for reader in (lines, rows):
        tasks = list(reader.generate_training_tasks())
        assert {task.main_query for task in tasks} == {"1 + 1?", "2 + 2?"}
        assert {task.metadata["answer"] for task in tasks} == {"2", "4"}
    dummies = RouterTaskReader(reader_type="random_dummy", reader_config=AjetTaskReader())
    numbers = [task.metadata["random_number"] for task in dummies.generate_training_tasks()]
    assert sorted(numbers) == list(range(1000))
    with pytest.raises(ConfigError):
        RouterTaskReader("random", AjetTaskReader())


def test_pools_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agentjet_threads, "FIRST_PAUSE", 0.001)
    tried: list[int] = []

    def fails_twice(task: int) -> int:
        tried.append(task)
        if tried.count(task) < 3:
            raise ValueError("not yet")
        return task

    pool = PeriodicDrainThreadPoolExecutor(workers=2, max_parallel=2, block_first_run=True)
    drained = [pool.submit_with_periodic_drain(fn=fails_twice, task=n)[1] for n in range(5)]
    pool.shutdown()
    assert drained == [[], [], [0, 1], [], [2, 3]]

    def never(task: int) -> int:
        tried.append(task)
        raise ValueError("never")

    assert run_episodes_until_all_complete([9], func=never) == [None]
    assert tried.count(9) == agentjet_threads.RETRIES + 1, "it ends"
    bounded = BoundedThreadPoolExecutor(max_workers=1, max_queue_size=1)
    assert [bounded.submit(abs, -n).result() for n in range(5)] == list(range(5))
    bounded.shutdown()
    groups = TaskCountLimitedThreadPoolExecutor(max_parallel_groups=1, max_workers=2)
    futures = [groups.submit_group(str(n), abs, []) for n in range(3)]
    futures += [groups.submit_group("x", lambda task: task, [{"task": n} for n in range(2)])]
    assert [f.result() for group in futures for f in group] == [0, 1]
    groups.on_entering_weight_sync()
    groups.shutdown()
    retried: list[int] = []

    @retry_with_backoff(max_retry=2, backoff_fn=lambda attempt: 0.0)
    def once() -> None:
        retried.append(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        once()
    assert len(retried) == 2


def test_the_commands_of_ajet_swarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert translated(["start", "--swarm-port=10087"]) == ["swarm", "start", "--port", "10087"]
    assert READY in capsys.readouterr().out
    file = AgentJetJob(experiment_name="one", model="m").dump_job_as_yaml(tmp_path / "job.yaml")
    assert translated(["start", "--conf", str(file), "--exp-dir", "saved"]) == [
        "swarm", "start", str(file), "ajet.experiment_dir=saved/one", "--port", "10086",
    ]  # fmt: skip
    for name in ("overwatch", "top"):
        assert translated([name, "--swarm-url", "http://h:1"]) == [
            "swarm", "watch", "http://h:1", "--interval", "2.0",
        ]  # fmt: skip


# A whole program


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[str]:
    program = "from ajet_tools.cli.agentjet_swarm import main; main()"
    command = [sys.executable, "-u", "-c", program, "start", "--swarm-port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        lines = iter(running.stdout.readline, "")
        assert any(READY in line for line in lines)
        assert any("waiting for one" in line for line in lines)
        reading = threading.Thread(target=lambda: list(lines))
        reading.start()
        yield f"http://localhost:{port}"
        running.terminate()
        reading.join()


class Dataset:
    """As a `RouterTaskReader` gives them."""

    def generate_training_tasks(self) -> Iterator[Task]:
        yield from TASKS


@pytest.mark.slow
def test_a_program_starts_trains_and_stops_a_server(tmp_path: Path, server: str) -> None:
    model = save_tiny(tmp_path / "model")
    job = AgentJetJob(
        experiment_name="math", algorithm="grpo", n_gpu=8, model=str(model), batch_size=2,
        num_repeat=2, logging="swanlab", backbone="verl", max_prompt_length=64,
        max_response_length=64, max_model_len=128, max_response_length_in_one_turn=4,
    )  # fmt: skip
    job.config.ajet.experiment_dir = str(tmp_path / "experiment")
    client = SwarmClient(server)
    assert client.get_engine_status()[0] == "ENGINE.OFFLINE"
    client.auto_sync_train_config_and_start_engine(job)
    rewards = {task.task_id: cycle((0.0, 1.0)) for task in TASKS}
    for step in (1, 2):
        auto_train_with_dataset(
            Dataset(),
            client,
            lambda task, where: execute(task, where, next(rewards[task.task_id])),
            local_grpo_n=2,
            remote_batch_size=2,
        )
        until(lambda step=step: client.get_global_step() == step)
    assert client.server_experiment_dir() == str(tmp_path / "experiment")
    client.stop_engine()
    assert client.get_engine_status()[0] == "ENGINE.OFFLINE"
    until(lambda: not (tmp_path / "experiment" / "gateway.json").exists())
    with open_trace(tmp_path / "experiment") as trace:
        rows = trace.query("SELECT outcome, sum(tokens) AS n FROM ledger GROUP BY 1").to_pylist()
        [versions] = trace.query("SELECT max(policy_version) AS n FROM calls").to_pylist()
    assert {row["outcome"] for row in rows} <= {"trained", "zero_advantage", "abandoned"}
    assert versions["n"] >= 1
