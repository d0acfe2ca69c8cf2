"""`python -m tests.frameworks.learning [NAME ...]`: a calculator agent of each framework learns on
a CPU, by `local`.

Each seed is `ajet --conf` with the math tutorial's config, the framework's agent and its recipe, in
an environment that has the framework; the reward is that of the held-out problems, of the untrained
model and of the trained one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ajet_sdk.samples.timelines import merge
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.types import Call
from tests.frameworks.__main__ import ROOT, install, installed
from tests.frameworks.table import FRAMEWORKS

NAMES = ("anthropic_sdk", "langgraph", "openai_agents", "agentscope1", "agentscope2")
LOCAL = ("torch==2.13.0", "transformers>=5.12,<6", "llguidance>=1.7")
"""What the backbone `local` needs beside ajet."""
CONFIG = ROOT / "tutorial/example_math_agent/math_agent.yaml"
SECONDS = 1200
"""For one seed."""

console = Console(stderr=True)


@dataclass(frozen=True)
class Learnt:
    """One seed of one framework: mean rewards of the held-out problems, before and after, and what
    was captured."""

    name: str
    versions: str
    seed: int
    steps: int
    before: float
    after: float
    greedy_before: float
    greedy_after: float
    episodes: int
    failed: int
    calls: int
    exact: int
    """Calls with the ids that they were sampled as and a log-probability each."""
    timelines: int
    seconds: float


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.frameworks.learning", description=__doc__
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which (default: all): {', '.join(NAMES)}"
    )
    parser.add_argument("--seeds", type=int, default=3, help="so many, from 0 on")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--json", action="store_true", help="print JSON, one line per seed, instead of a table"
    )
    parser.add_argument("--venvs", type=Path, help="folder that keeps the environments")
    given = parser.parse_args(arguments)
    if unknown := set(given.names) - set(NAMES):
        parser.error(
            f"no calculator for {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}"
        )
    table = Table(
        "framework",
        "seed",
        "reward",
        "greedy",
        "episodes / failed",
        "calls / exact",
        "timelines per episode",
        "s",
    )
    with tempfile.TemporaryDirectory() as temporary:
        failed = 0
        for name in given.names or NAMES:
            python = environment(name, given.venvs or Path(temporary))
            for seed in range(given.seeds):
                try:
                    one = learn(name, python, seed, given.steps, Path(temporary) / name)
                except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                    failed += 1
                    console.print(
                        f"{name}, seed {seed}: {error}\n{str(error.stderr)[-2000:]}", markup=False
                    )
                    continue
                if given.json:
                    print(json.dumps(asdict(one)), flush=True)
                table.add_row(*row(one))
                console.print("  ".join(row(one)), markup=False, soft_wrap=True)
    if not given.json:
        Console(width=160).print(table)
    return int(failed > 0)


def environment(name: str, venvs: Path) -> Path:
    """The Python of an environment with the framework, ajet and torch, made where it is not there
    yet."""
    folder = venvs / f"{name}-learning"
    python = folder / "bin/python"
    if not (folder / "installed").exists():
        install(name, "newest", folder)
    if not (folder / "local").exists():
        uv = shutil.which("uv") or "uv"
        subprocess.run(
            [uv, "pip", "install", "--python", python, *LOCAL],
            check=True,
            capture_output=True,
            text=True,
        )
        (folder / "local").touch()
    return python


def learn(name: str, python: Path, seed: int, steps: int, folder: Path) -> Learnt:
    """Train one seed as a user does, by `ajet --conf`, and read the figures from its trace."""
    directory = folder / f"seed-{seed}"
    values: dict[str, Any] = {
        "model.path": folder / "model",
        "model.recipe": f"tests.frameworks.calculators.recipes->{name}",
        "rollout.user_workflow": f"tests.frameworks.calculators.{name}->solve",
        "experiment_dir": directory,
        "trainer_common.seed": seed,
        "trainer_common.total_steps": steps,
        "trainer_common.test_freq": 0,
        "trainer_common.save_freq": 0,
        "trainer_common.logger": "[console]",
    }
    command = [
        str(python),
        "-m",
        "ajet",
        "--conf",
        str(CONFIG),
        *(f"ajet.{key}={value}" for key, value in values.items()),
    ]
    keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    begun = time.perf_counter()
    subprocess.run(
        command,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, **keys, "PYTHONPATH": str(ROOT)},
    )
    return read(
        directory, name, installed(name, "newest", python), seed, steps, time.perf_counter() - begun
    )


def read(
    directory: Path, name: str, versions: str, seed: int, steps: int, seconds: float
) -> Learnt:
    with open_trace(directory) as reader:
        metrics = reader.query(
            "SELECT name, step, value FROM metrics WHERE name LIKE 'val/%'"
        ).to_pylist()
        ran = list(episodes(reader))
    values = {(one["name"], one["step"]): one["value"] for one in metrics}
    calls = [call for episode in ran for call in episode.calls]
    return Learnt(
        name,
        versions,
        seed,
        steps,
        values["val/reward", 0],
        values["val/reward", steps],
        values["val/greedy_reward", 0],
        values["val/greedy_reward", steps],
        episodes=len(ran),
        failed=sum(one.status != "succeeded" for one in ran),
        calls=len(calls),
        exact=sum(map(is_exact, calls)),
        timelines=sum(len(merge(one.calls).timelines) for one in ran),
        seconds=seconds,
    )


def is_exact(call: Call) -> bool:
    return (
        call.output_ids is not None
        and call.logprobs is not None
        and len(call.logprobs) == len(call.output_ids)
    )


def row(one: Learnt) -> tuple[str, ...]:
    return (
        FRAMEWORKS[one.name].title,
        str(one.seed),
        f"{one.before:.2f} -> {one.after:.2f}",
        f"{one.greedy_before:.2f} -> {one.greedy_after:.2f}",
        f"{one.episodes:,} / {one.failed}",
        f"{one.calls:,} / {one.exact:,}",
        f"{one.timelines / one.episodes:.3f}",
        f"{one.seconds:.0f}",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
