"""`ajet trace ls` over the files of many nodes: what a file more costs.

The files are one trace under many names, each read as a file of its own, and one that holds the
first page. The command runs in a process of its own, and its processor time counts.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run
from tests.bench import Figure

FEWER, MORE = 100, 1000
ROUNDS = 3


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        node, newest = Path(directory) / "node.duckdb", Path(directory) / "newest.duckdb"
        _write(node, 4)
        _write(newest, 24)
        taken = {}
        for count in (1, FEWER, MORE):
            nodes = Path(directory) / str(count)
            nodes.mkdir()
            os.link(newest, nodes / "trace.duckdb")
            for i in range(1, count):
                os.link(node, nodes / f"trace-{i:04}.duckdb")
            taken[count] = statistics.median(_list(nodes) for _ in range(ROUNDS))
    ratio = (taken[MORE] - taken[1]) / (taken[FEWER] - taken[1])
    return [
        Figure(
            f"`ajet trace ls`, {MORE:,} files over {FEWER}, less what one file takes",
            ratio,
            "x",
            "< 12",
            ratio < 12,
        ),
        Figure(
            f"`ajet trace ls` over {MORE:,} files", taken[MORE], "CPU-s", "< 3", taken[MORE] < 3
        ),
        Figure("`ajet trace ls` of one file", taken[1], "CPU-s"),
    ]


def _write(file: Path, episodes: int) -> None:
    with TraceWriter(file) as writer:
        writer.put(Run(run_id="run", status="finished"))
        for i in range(episodes):
            writer.put(Call(episode_id=f"{episodes}e{i}", prompt_ids=[1, 2], output_ids=[3]))
            writer.put(
                Episode(episode_id=f"{episodes}e{i}", run_id="run", rewards=(Reward(value=1),))
            )


def _list(nodes: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "ajet", "trace", "ls", str(nodes)], capture_output=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
