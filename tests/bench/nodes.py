"""`ajet trace ls` over the files of many nodes: what a file more costs.

Each file has four episodes of one run, but for the first, which holds the first page. The command
runs in a process of its own, and its processor time counts.
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

FEWER, MORE = 50, 500
ROUNDS = 3


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        all_files = [Path(directory) / f"trace-{i:04}.duckdb" for i in range(MORE)]
        for i, file in enumerate(all_files):
            _write(file, f"node{i}", 4 if i else 24)
        taken = {}
        for count in (1, FEWER, MORE):
            nodes = Path(directory) / str(count)
            nodes.mkdir()
            for file in all_files[:count]:
                os.link(file, nodes / file.name)
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


def _write(file: Path, node: str, episodes: int) -> None:
    with TraceWriter(file) as writer:
        if node == "node0":
            writer.put(Run(run_id="run", status="finished"))
        for i in range(episodes):
            episode_id = f"{node}-{i}"
            writer.put(Call(episode_id=episode_id, prompt_ids=[1, 2], output_ids=[3]))
            writer.put(Episode(episode_id=episode_id, run_id="run", rewards=(Reward(value=1),)))


def _list(nodes: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "ajet", "trace", "ls", str(nodes)], capture_output=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
