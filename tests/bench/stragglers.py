"""`rollout.max_staleness` and `rollout.carry_over`: the time of a run whose agent waits for tools,
one in 50 of them 20 times as long as the others, and the mean age of its trained tokens.

A step has 64 episodes, so three of four have a straggler. The runs with different bounds take
turns, and the median of the rounds counts; the first step of a run, which loads and compiles, does
not.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from tests.bench import Figure
from tests.tiny_models import VLLMS, save_tiny

BOUNDS = ((0, 0), (1, 0), (2, 0), (4, 0), (2, 1), (4, 2), (4, 3))
"""Values of `max_staleness` and `carry_over`."""
STEPS, ROUNDS = 16, 2
TOOL, SLOW_TOOL, SLOW_SHARE = 0.15, 3.0, 1 / 50
WORDS = ("yes", "no", "maybe", "so", "well", "if", "and", "but")


@ajet.workflow
async def use_tool(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
    reply = await model.chat([{"role": "user", "content": question}])
    chance = random.Random(f"{episode.step}/{question}/{episode.attempt}").random()
    await asyncio.sleep(SLOW_TOOL if chance < SLOW_SHARE else TOOL)
    return reply["content"] or ""


@ajet.judge
def length(output: str) -> float:
    return len(output) / 10


def main() -> list[Figure]:
    seconds: dict[tuple[int, int], list[float]] = {bounds: [] for bounds in BOUNDS}
    ages: dict[tuple[int, int], float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_tiny(folder / "model", VLLMS)
        for turn in range(ROUNDS):
            for bounds in BOUNDS:
                directory = folder / f"{turn}-{bounds[0]}-{bounds[1]}"
                measured = _run(directory, model, *bounds)
                seconds[bounds].append(measured.seconds)
                ages[bounds] = measured.age
    medians = {bounds: statistics.median(seconds[bounds]) for bounds in BOUNDS}
    synchronous = medians[0, 0]
    figures = [Figure("a step with max_staleness 0", synchronous, "s")]
    for bounds in BOUNDS[1:]:
        ratio = synchronous / medians[bounds]
        name = f"with {bounds[0]}"
        if bounds[1]:
            name += f", carry_over {bounds[1]}"
        has_goal = bounds in ((4, 0), (4, 3))
        goal = ">= 2.5" if has_goal else ""
        passed = ratio >= 2.5 if has_goal else None
        figures.append(Figure(f"{name}: times as fast", ratio, "x", goal, passed))
        figures.append(Figure(f"{name}: mean age of a token", ages[bounds], "updates"))
    return figures


@dataclass(frozen=True)
class Measured:
    """Means over the steps after the first."""

    seconds: float
    age: float


def _run(directory: Path, model: Path, bound: int, carry_over: int) -> Measured:
    values = {
        "experiment_dir": str(directory),
        "model": {"path": str(model)},
        "data": {"train_batch_size": 8},
        "rollout": {
            "num_repeat": 8,
            "max_env_worker": 512,
            "max_model_len": 200,
            "max_response_length_in_one_turn": 12,
            "max_staleness": bound,
            "carry_over": carry_over,
        },
        "trainer_common": {
            "total_steps": STEPS,
            "test_freq": 0,
            "save_freq": 0,
            "use_kl_loss": False,
            "logger": [],
        },
    }
    tasks = [{"question": f"Say {word}."} for word in WORDS]
    train(load_config(values=values), workflow=use_tool, judge=length, tasks=tasks)
    with open_trace(directory) as reader:
        rows = reader.query(
            "SELECT step, epoch(max(\"at\")) AS at FROM metrics WHERE name = 'train/policy_version'"
            " GROUP BY step ORDER BY step"
        ).to_pylist()
        ages = reader.query(
            "SELECT avg(value) AS age FROM metrics WHERE name = 'train/staleness' AND step > 1"
        ).to_pylist()
    seconds = float(rows[-1]["at"] - rows[0]["at"]) / (STEPS - 1)
    return Measured(seconds, float(ages[0]["age"]))
