"""A real server that trains a real model, killed at random moments under clients that are killed
too: no reward at a wrong attempt, no token without an outcome, nothing twice."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ajet
from ajet_sdk.errors import SwarmError
from ajet_sdk.trace.reader import episodes, ledger_balance, open_trace
from tests.tiny_models import save_tiny
from tests.waiting import until

pytestmark = pytest.mark.slow

CONFIG = """
ajet:
  experiment_name: kills
  experiment_dir: {directory}
  model: {{path: {model}}}
  data: {{train_batch_size: 2}}
  rollout:
    num_repeat: 4
    max_model_len: 256
    max_response_length_in_one_turn: 8
  swarm: {{grace: 5}}
  trainer_common:
    total_steps: {steps}
    save_freq: 1
    val_before_train: false
    test_freq: -1
    logger: []
"""

CLIENT = '''
"""Attempts at random tasks; the reward is a function of the episode, to be recognized."""
import json, random, sys, threading
import httpx
from ajet_sdk.errors import SwarmError, SwarmFinished
from ajet_sdk.swarm.client import SwarmClient
from tests.sdk.swarm.test_kills import reward_of

url, seed, log = sys.argv[1], int(sys.argv[2]), sys.argv[3]
swarm = SwarmClient(url, name=f"client {seed}")
lock = threading.Lock()

def work(draw):
    while True:
        task = f"task {draw.randrange(6)}"
        try:
            with swarm.episode(task={"task_id": task, "main_query": task}, idle_timeout=5.0) as episode:
                for turn in range(draw.randint(1, 3)):
                    httpx.post(
                        f"{episode.base_url}/chat/completions",
                        json={"model": episode.model, "messages": [{"role": "user", "content": f"Say {turn} {task}."}]},
                        headers={"authorization": f"Bearer {episode.api_key}"},
                        timeout=60.0,
                        trust_env=False,
                    ).raise_for_status()
                reward = reward_of(episode.id)
                episode.end(reward)
                with lock, open(log, "a") as file:
                    file.write(json.dumps({"id": episode.id, "task": task}) + "\\n")
        except SwarmFinished:
            return
        except (SwarmError, httpx.HTTPError):
            continue

threads = [threading.Thread(target=work, args=(random.Random(f"{seed}/{i}"),)) for i in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
'''


def reward_of(episode_id: str) -> float:
    """A reward by which its episode is recognized."""
    return int(episode_id[:6], 16) / 2**24


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Machines:
    """The processes of a test, each with a log."""

    def __init__(self, place: Path, steps: int) -> None:
        self.place, self.port = place, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        model = save_tiny(place / "model")
        self.config = place / "kills.yaml"
        text = CONFIG.format(directory=place / "record", model=model, steps=steps)
        self.config.write_text(text)
        self.client = place / "client.py"
        self.client.write_text(CLIENT)
        self.acknowledged = place / "acknowledged.jsonl"
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str, log: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
        with (self.place / log).open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, *command], stdout=file, stderr=file, env=environment
            )
        self.running.append(process)
        return process

    def start_server(self, *more: str) -> subprocess.Popen[bytes]:
        command = ("-m", "ajet", "swarm", "start", str(self.config), "--port", str(self.port))
        return self.start(*command, *more, log="server.log")

    def start_client(self, seed: int) -> subprocess.Popen[bytes]:
        command = (str(self.client), self.url, str(seed), str(self.acknowledged))
        return self.start(*command, log=f"client-{seed}.log")

    def stop(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()


def is_collecting(url: str) -> bool:
    try:
        return ajet.SwarmClient(url, patience=0).status().state == "collecting"
    except SwarmError:  # it does not listen yet
        return False


def steps_done(place: Path) -> int:
    log = (place / "server.log").read_text() if (place / "server.log").exists() else ""
    return log.count("  reward ")


@pytest.mark.usefixtures("audited")
@pytest.mark.parametrize(("steps", "server_kills", "client_kills"), [(6, 3, 6)])
def test_kills_of_server_and_clients_lose_and_double_nothing(
    tmp_path: Path, steps: int, server_kills: int, client_kills: int
) -> None:
    draw = random.Random(int(os.environ.get("AJET_TEST_SEED", "0")))
    machines = Machines(tmp_path, steps)
    try:
        server = machines.start_server()
        clients = [machines.start_client(seed) for seed in range(2)]
        # before it collects there may be no run that could be resumed
        until(lambda: is_collecting(machines.url))
        kills = ["server"] * server_kills + ["client"] * client_kills
        draw.shuffle(kills)
        for number, victim in enumerate(kills):
            seen, deadline = steps_done(tmp_path), time.monotonic() + 60
            while steps_done(tmp_path) == seen and time.monotonic() < deadline and number % 2:
                time.sleep(0.05)  # every second kill comes just after a step
            time.sleep(draw.uniform(0.0, 3.0))
            if server.poll() is not None:
                break
            if victim == "server":
                server.send_signal(signal.SIGKILL)
                server.wait()
                server = machines.start_server("--resume")
            else:
                clients.pop(draw.randrange(len(clients))).kill()
                clients.append(machines.start_client(100 + number))
        assert server.wait(300) == 0, (tmp_path / "server.log").read_text()
    finally:
        machines.stop()
    check_records(tmp_path)


def check_records(place: Path) -> None:
    """Each acknowledged end is recorded, with its own reward and task, and the ledger balances."""
    with open_trace(place / "record") as trace:
        [run_id] = trace.query("SELECT run_id FROM runs").column(0).to_pylist()
        assert not ledger_balance(trace, run_id)
        by_id = {e.episode_id: e for e in episodes(trace, run_id)}
        sql = "SELECT count(*) FROM ledger GROUP BY call_id, outcome HAVING count(*) > 1"
        assert not trace.query(sql).num_rows
    # also of the episodes that a kill of the server left open
    assert {re.sub(r"\d+", "", e.client or "") for e in by_id.values()} == {"client "}
    assert {e.task.task_id.partition(" ")[0] for e in by_id.values()} == {"task"}
    for line in (place / "acknowledged.jsonl").read_text().splitlines():
        told = json.loads(line)
        episode = by_id[told["id"]]
        assert episode.status == "succeeded" and episode.task.task_id == told["task"]
    for episode in by_id.values():
        if episode.status == "succeeded":
            assert episode.reward == pytest.approx(reward_of(episode.episode_id))
        else:
            assert not episode.rewards
