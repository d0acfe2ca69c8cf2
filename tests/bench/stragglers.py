"""`rollout.max_staleness`: the time of a run whose agent waits for tools, one in 50 of them 20 times
as long as the others.

A step has 64 episodes, so three of four have a straggler. The runs with different bounds take
turns, and the median of the rounds counts; the first step of a run, which loads and compiles, does
not.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from pathlib import Path

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from tests.bench import Figure
from tests.tiny_models import VLLMS, save_tiny

BOUNDS = (0, 1, 2, 4)
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
    seconds: dict[int, list[float]] = {bound: [] for bound in BOUNDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_tiny(folder / "model", VLLMS)
        for turn in range(ROUNDS):
            for bound in BOUNDS:
                seconds[bound].append(_seconds(folder / f"{turn}-{bound}", model, bound))
    medians = {bound: statistics.median(seconds[bound]) for bound in BOUNDS}
    figures = [Figure("a step with max_staleness 0", medians[0], "s")]
    for bound in BOUNDS[1:]:
        ratio = medians[0] / medians[bound]
        is_last = bound == BOUNDS[-1]
        goal = ">= 2.5" if is_last else ""
        passed = ratio >= 2.5 if is_last else None
        figures.append(Figure(f"with {bound}: times as fast", ratio, "x", goal, passed))
    return figures


def _seconds(directory: Path, model: Path, bound: int) -> float:
    """Mean seconds of a step after the first."""
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
    return float(rows[-1]["at"] - rows[0]["at"]) / (STEPS - 1)
