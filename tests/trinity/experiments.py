"""Whole runs as a user starts them: `python -m ajet train` in a process of its own, over a project
on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import ajet_sdk
from ajet_sdk.backbones.shared.mapping import merged
from ajet_sdk.errors import TraceError
from ajet_sdk.trace.reader import open_trace

AGENT = Path(__file__).with_name("project_agent.py")
ROOT = Path(ajet_sdk.__file__).parent.parent
START = 600.0
"""Seconds that a run may take on a busy machine until it does what is waited for."""


@dataclass
class Experiment:
    """A project in a folder of its own, with an agent, tasks and a config, and the run that is
    started of it."""

    folder: Path
    model: Path
    questions: Sequence[str]
    config: Mapping[str, Any] = field(default_factory=dict)
    roots: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[bytes] | None = None

    @property
    def directory(self) -> Path:
        return self.folder / "experiment"

    @property
    def log(self) -> Path:
        return self.folder / "output.txt"

    def write(self) -> None:
        """Put the project on disk."""
        (self.folder / "agent.py").write_text(AGENT.read_text())
        (self.folder / "tasks.jsonl").write_text(
            "".join(json.dumps({"question": q}) + "\n" for q in self.questions)
        )
        (self.folder / "val.jsonl").write_text(json.dumps({"question": "turns held out"}) + "\n")
        ours = {
            "experiment_dir": str(self.directory),
            "backbone": "trinity",
            "model": {"path": str(self.model)},
            "task_reader": {"type": "jsonl_dataset_file",
                            "jsonl_dataset_file": {"training": {"file_path": "tasks.jsonl"}}},
            "task_judge": {"judge_protocol": "agent.py->length"},
            "data": {"train_batch_size": 2},
            "rollout": {"user_workflow": "agent.py->talk", "num_repeat": 4, "temperature": 1.0, "max_model_len": 512,
                        "max_response_length_in_one_turn": 6, "max_env_worker": 16, "min_sound_share": 0.2},
            "trainer_common": {"total_steps": 2, "save_freq": 1, "test_freq": 0, "use_kl_loss": False,
                               "n_gpus_per_node": 0, "optim": {"lr": 0.01, "warmup_steps": 0}, "logger": ["console"]},
        }  # fmt: skip
        document = {"ajet": merged(ours, self.config), **self.roots}
        (self.folder / "job.yaml").write_text(yaml.safe_dump(document))

    def start(self, *more: str) -> None:
        """Begin the run. Its processes bear a mark in their environment, by which they are
        found."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write()
        fixed = {"AJET_TEST_MARK": self.mark, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        environment = {**os.environ, **fixed, **self.environment}
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ajet", "train", "--conf", "job.yaml", *more],
                cwd=self.folder,
                env=environment,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def wait(self, seconds: float = START) -> int:
        """The exit code."""
        assert self.process is not None
        return self.process.wait(seconds)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, what: Callable[[], Any], seconds: float = START) -> Any:
        """Look until `what` is there, while the run goes on."""
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert self.process.poll() is None, f"the run ended before that:\n{self.output()}"
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain:\n{self.output()}"
            time.sleep(0.25)
        return found

    def query(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        """Rows of the experiment's trace, of all its files; none while there is no trace yet."""
        try:
            trace = open_trace(self.directory)
        except TraceError:
            return []
        with trace:
            return trace.query(sql, values).to_pylist()

    @property
    def run_id(self) -> str:
        return str(
            self.query("SELECT run_id FROM runs ORDER BY started_at DESC LIMIT 1")[0]["run_id"]
        )

    @property
    def trinity(self) -> Path:
        """Where Trinity keeps this run's job."""
        return self.directory / "checkpoint" / self.run_id / "trinity"

    def steps_saved(self) -> int:
        """The step of the newest checkpoint."""
        found = list(self.directory.glob("checkpoint/*/trinity/latest_checkpointed_iteration.txt"))
        return int(found[0].read_text() or 0) if found else 0

    def processes(self) -> dict[int, str]:
        """Every process that the run left or has, by id, with its command line."""
        needle, found = f"AJET_TEST_MARK={self.mark}".encode(), {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if needle in (place / "environ").read_bytes() and "Z" not in _state(place):
                    found[int(place.name)] = (
                        (place / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    )
            except (OSError, IndexError):
                continue
        return found

    def gone(self, seconds: float = 30.0) -> dict[int, str]:
        """What is still there some seconds after the end; nothing, where all is well."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left


def begin_on_devices(
    folder: Path,
    model: Path,
    questions: Sequence[str],
    cluster: Any,
    config: Mapping[str, Any],
    trinity: Mapping[str, Any],
    *more: str,
) -> Experiment:
    """Begin a run on the cluster of the fixture `gpus`, with the settings of GPUs."""
    on_cpu = {"synchronizer": {"sync_method": "memory"}}  # NCCL is what the CPU has not
    one = Experiment(
        folder,
        model,
        questions,
        config,
        {"trinity": merged(on_cpu, trinity)},
        environment={"PYTHONPATH": os.environ["PYTHONPATH"]},
        mark=os.environ["AJET_TEST_MARK"],
    )
    one.start("--with-ray-cluster", cluster.address, *more)
    return one


def kill_engines(one: Experiment) -> None:
    """Ray kills an actor's children, but not their children."""
    assert one.process is not None
    for pid, command in one.processes().items():
        if "vllm" in command or pid == one.process.pid:
            os.kill(pid, signal.SIGKILL)


def _state(place: Path) -> str:
    return (place / "stat").read_text().rpartition(")")[2].split()[0]
