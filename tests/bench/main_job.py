"""The two tutorials end to end, three seeds each: held-out reward before and after, and the time of the main job.

Each run is a process of its own, as a user would start it.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ajet_sdk.trace.reader import open_trace
from tests.bench import Figure

ROOT = Path(__file__).parents[2]
SEEDS = (0, 1, 2)
CALCULATOR = ROOT / "tutorial/example_math_agent/math_agent.yaml"
LAKE = ROOT / "tutorial/example_frozenlake/frozenlake.yaml"


@dataclass(frozen=True)
class Result:
    """One run: validation at temperature 1 before and after, seconds of wall and of CPU, and bytes at the peak."""

    before: float
    after: float
    wall: float
    cpu: float
    peak: int


def main() -> list[Figure]:
    calculator = [train(CALCULATOR, seed) for seed in SEEDS]
    lake = [train(LAKE, seed) for seed in SEEDS]
    seconds = statistics.median(r.wall for r in calculator)
    peak = max(r.peak for r in calculator) / 2**30
    return [
        Figure("main job, wall time (median)", seconds, "s", "under 360", seconds < 360),
        Figure("main job, CPU time (median)", statistics.median(r.cpu for r in calculator), "s"),
        Figure("main job, memory at the peak", peak, "GiB", "under 2", peak < 2),
        *rewards("calculator", calculator, before=0.5, median=0.9, least=0.8),
        *rewards("lake", lake, before=0.5, median=0.85, least=0.0),
    ]


def rewards(name: str, results: list[Result], *, before: float, median: float, least: float) -> list[Figure]:
    start, end = max(r.before for r in results), [r.after for r in results]
    middle = statistics.median(end)
    return [
        Figure(f"{name}, val/reward before (highest)", start, "", f"under {before}", start < before),
        Figure(f"{name}, val/reward after (median)", middle, "", f"at least {median}", middle >= median),
        Figure(f"{name}, val/reward after (lowest)", min(end), "", f"at least {least}", min(end) >= least),
    ]


def train(file: Path, seed: int) -> Result:
    """A fresh directory, so that the recipe's model is made anew from this seed as well."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        command = [sys.executable, "-m", "ajet", "--conf", str(file), f"ajet.trainer_common.seed={seed}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
        wall = time.perf_counter() - started
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        first, last = _validation(next(Path(folder, "launcher_record").glob("*/trace.duckdb")))
    print(json.dumps({"file": file.name, "seed": seed, "before": first, "after": last, "wall": wall}), file=sys.stderr)
    return Result(first, last, wall, cpu, after.ru_maxrss * 1024)


def _validation(trace: Path) -> tuple[float, float]:
    reader = open_trace(trace)
    try:
        rows = reader.query("SELECT value FROM metrics WHERE name = 'val/reward' ORDER BY step").to_pylist()
    finally:
        reader.close()
    return float(rows[0]["value"]), float(rows[-1]["value"])
