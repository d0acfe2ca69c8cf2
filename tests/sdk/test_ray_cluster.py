"""A Ray that is started and ended, or joined; whole programs on it; training by episodes that ran
elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import psutil
from ray.cluster_utils import Cluster

from ajet_sdk.cluster.code import CodePackage
from ajet_sdk.cluster.ray import cluster
from ajet_sdk.config.config import load_config
from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
    "OPENAI_API_KEY": "sk",
}

AGENT = """
import os, time
from pathlib import Path
import ajet
from openai import OpenAI

client = OpenAI()

@ajet.workflow
def solve(question: str) -> str:
    reply = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": question}])
    return reply.choices[0].message.content

@ajet.workflow
def forever(question: str, flag: str) -> str:
    solve(question)
    Path(flag).touch()
    time.sleep(600)

@ajet.workflow
async def talk(question: str, model: ajet.Model) -> ajet.WorkflowOutput:
    reply = await model.chat([{"role": "user", "content": question}])
    text = reply["content"] or ""
    return ajet.WorkflowOutput(reward=len(text) / 10, log_metrics={"pid": os.getpid()})

@ajet.judge
def exact(output: str, answer: str) -> float:
    return float(output == answer)
"""
REPLIES = "def reply(ask):\n    return ask.body['messages'][-1]['content'].strip('?')\n"
START = """
job = ajet.AjetJob(backbone="debug", experiment_name="e")
job.set("model.scripted", "replies.py->reply")
job.set("rollout.runner", "ray")
job.set_workflow(solve).set_judge(exact).set_data(type="jsonl", dataset_path="tasks.jsonl")
tuned = job.tune(ray="local")
print("reward", tuned.metrics["debug/reward"])
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "replies.py").write_text(REPLIES)
    rows = [
        {"question": f"{i}?", "answer": f"{i}", "flag": str(tmp_path / "flag")} for i in range(2)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bystander() -> Iterator[Cluster]:
    """A cluster of somebody else on this machine."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield made
    made.shutdown()


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "address", ["ray://127.0.0.1:10001", "somewhere", "http://127.0.0.1:6379", "host:port"]
)
def test_an_address_of_another_kind_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="takes the HOST:PORT"), cluster(address):
        pass


def test_a_cluster_that_is_not_there_is_told_in_seconds() -> None:
    started, report = time.monotonic(), r"no Ray cluster answers at 127\.0\.0\.1:9.*--with-ray"
    with pytest.raises(ConfigError, match=report), cluster("127.0.0.1:9"):
        pass
    assert time.monotonic() - started < 10


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r'pip install "ajet\[ray\]"'), cluster("local"):
        pass


def test_a_ray_of_our_own_carries_code_to_a_subprocess_and_ends(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-carried")
    monkeypatch.setenv("NOT_CARRIED", "1")
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    code = (
        "import ray; ray.init(logging_level='ERROR')\n"
        "@ray.remote\n"
        "def there():\n"
        "    import replies, os\n"
        "    return [replies.__file__, os.environ.get('OPENAI_API_KEY')]\n"
        "print(*ray.get(there.remote()))"
    )
    with cluster("local", package=CodePackage((project,), (project,)), num_cpus=1) as joined:
        assert joined.started
        assert [node.cpus for node in joined.nodes()] == [1]
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd="/",
            env={**ENVIRONMENT, **joined.environment()},
            capture_output=True,
            text=True,
            timeout=300,
        )
        ours = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert done.returncode == 0, done.stderr
    file, key = done.stdout.split()
    assert not Path(file).is_relative_to(project)
    assert key == "sk-carried"
    assert ours
    assert psutil.wait_procs(ours, timeout=300)[1] == []


def test_a_program_brings_its_own_functions(project: Path) -> None:
    """The workflow stands in the program itself, with a client at its top that cannot be
    pickled."""
    (project / "program.py").write_text(
        AGENT + 'if __name__ == "__main__":\n' + START.replace("\n", "\n    ")
    )
    done = python("program.py", cwd=project)
    assert done.returncode == 0, done.stderr
    assert "reward 1.0" in done.stdout


def test_a_program_without_a_main_guard_is_told(project: Path) -> None:
    (project / "program.py").write_text(AGENT + START)
    done = python("program.py", cwd=project)
    assert done.returncode != 0
    assert 'if __name__ == "__main__"' in done.stdout + done.stderr


def test_ctrl_c_ends_what_was_started_and_nothing_else(project: Path, bystander: Cluster) -> None:
    command = [
        "-m",
        "ajet",
        "run",
        "agent.py:forever",
        "--judge",
        "agent.py:exact",
        "--tasks",
        "tasks.jsonl",
    ]
    process = subprocess.Popen(
        [sys.executable, *command, "--scripted", "replies.py:reply", "ajet.rollout.runner=ray"],
        cwd=project,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 150
    while (
        not (project / "flag").exists() and time.monotonic() < deadline and process.poll() is None
    ):
        time.sleep(0.2)
    started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert len(started) > 3, said
    assert psutil.wait_procs(started, timeout=300)[1] == []
    with cluster(bystander.address) as joined:
        assert [node.alive for node in joined.nodes()] == [True]
    with open_trace(next((project / "launcher_record").iterdir()) / "trace.duckdb") as trace:
        assert trace.query("SELECT status FROM runs").to_pylist() == [{"status": "interrupted"}]
        assert trace.query("SELECT count(*) AS n FROM calls").to_pylist()[0]["n"] >= 1


def test_a_model_learns_from_episodes_that_ran_elsewhere(project: Path, bystander: Cluster) -> None:
    pytest.importorskip("torch")
    from tests.tiny_models import save_tiny

    save_tiny(project / "tiny")
    values: dict[str, Any] = {
        "experiment_name": "tiny",
        "backbone": "local",
        "model": {"path": str(project / "tiny")},
        "task_reader": {
            "type": "jsonl_dataset_file",
            "jsonl_dataset_file": {"training": {"file_path": str(project / "tasks.jsonl")}},
        },
        "data": {"train_batch_size": 2},
        "rollout": {
            "runner": "ray", "num_repeat": 4, "temperature": 1.0, "max_model_len": 128, "max_env_worker": 4,
            "max_response_length_in_one_turn": 6, "user_workflow": f"{project}/agent.py->talk",
        },
        "trainer_common": {"total_steps": 2, "val_before_train": False, "use_kl_loss": False, "logger": ["console"]},
    }  # fmt: skip
    tuned = train(
        load_config(values={"ajet": values}), ray=bystander.address
    )  # raises where the ledger is off
    assert tuned.path is not None
    assert (tuned.path / "model.safetensors").is_file()
    with open_trace(Path("launcher_record/tiny/trace.duckdb")) as trace:
        episodes = trace.query("SELECT metrics, status FROM episodes").to_pylist()
        outcomes = {
            r["outcome"] for r in trace.query("SELECT DISTINCT outcome FROM ledger").to_pylist()
        }
    assert len(episodes) == 16
    assert {e["status"] for e in episodes} == {"succeeded"}
    pids = {json.loads(e["metrics"])["pid"] for e in episodes}
    assert os.getpid() not in pids
    assert len(pids) <= 4
    assert "trained" in outcomes
