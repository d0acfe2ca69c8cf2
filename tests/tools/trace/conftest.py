"""Processes of one run on several nodes, each with a trace file and a gateway of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

_NODE = """
import os, sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Metric, Reward, Run, Task, now

directory, name = Path(sys.argv[1]), sys.argv[2]
file = "trace.duckdb" if name == "head" else f"trace-{name}-{os.getpid()}.duckdb"
writer = TraceWriter(directory / file)
gateway = Gateway(writer).start()
print("ready", flush=True)
run = Run(run_id="run1", name="cluster", backbone="trinity")


def call(episode, index, prompt, output, messages):
    return Call(call_id=f"{episode}-c{index}", episode_id=episode, index=index, agent=name, policy_version=index,
                request={"messages": messages}, started_at=now(), ended_at=now(), prompt_ids=prompt, output_ids=output,
                response={"choices": [{"message": {"role": "assistant", "content": f"reply {index} of {episode}"}}]},
                logprobs=[-0.5] * len(output))


for line in sys.stdin:
    word, *rest = line.split()
    if word == "run":
        writer.put(run.model_copy(update={"status": rest[0]} | ({"ended_at": now()} if rest[0] != "running" else {})))
    elif word == "episode":
        id, step, reward = rest[0], int(rest[1]), float(rest[2])
        first = [{"role": "user", "content": f"question of {id}"}]
        reply = {"role": "assistant", "content": f"reply 0 of {id}"}
        writer.put(call(id, 0, [1, 2], [3, 4], first))
        writer.put(call(id, 1, [1, 2, 3, 4, 5], [6], [*first, reply, {"role": "user", "content": "go on"}]))
        writer.put(Episode(episode_id=id, run_id="run1", group_id=f"g{step}", step=step, started_at=now(),
                           ended_at=now(), rewards=(Reward(value=reward),), task=Task(main_query=f"question of {id}")))
    elif word == "call":
        writer.put(call(rest[0], 0, [1, 2], [3, 4], [{"role": "user", "content": f"question of {rest[0]}"}]))
    elif word == "book":
        for index, tokens in ((0, 2), (1, 1)):
            writer.put(LedgerEntry(run_id="run1", step=int(rest[1]), episode_id=rest[0],
                                   call_id=f"{rest[0]}-c{index}", outcome="trained", tokens=tokens))
    elif word == "metric":
        writer.put(Metric(run_id="run1", step=int(rest[0]), name="train/reward", value=float(rest[1])))
    elif word == "supersede":
        writer.supersede("run1", int(rest[0]))
    writer.flush()
    print("done", flush=True)
gateway.close()
writer.close()
"""


class Node:
    """One process of a run; what it is told is in its file when `tell` returns."""

    def __init__(self, directory: Path, name: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NODE, str(directory), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._await("ready")

    def _await(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def tell(self, *lines: str) -> None:
        assert self._process.stdin is not None
        for line in lines:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            self._await("done")

    def end(self) -> None:
        """In good order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait() == 0

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[str], Node]]:
    """Starts a process of a run whose experiment is `tmp_path`; `head` writes trace.duckdb."""
    nodes: list[Node] = []

    def start(name: str) -> Node:
        nodes.append(Node(tmp_path, name))
        return nodes[-1]

    yield start
    for one in nodes:
        if not one.ended:
            one.kill()
