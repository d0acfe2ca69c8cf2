"""`--backbone tinker`: a step with and without sampling the next batch while the service trains.

`ajet trainer serve` is a process of its own. The agent makes two calls, with a tool of a tenth of a
second between them, and the two kinds of run take turns; the median step after the first counts.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from tests.bench import Figure
from tests.tiny_models import VLLMS, save_tiny

STEPS, ROUNDS, TOOL = 8, 2, 0.1


@ajet.workflow
async def use_tool(question: str, model: ajet.Model) -> str:
    first = {"role": "user", "content": question}
    reply = await model.chat([first])
    await asyncio.sleep(TOOL)
    last = await model.chat([first, reply, {"role": "user", "content": "Again."}])
    return last["content"] or ""


@ajet.judge
def length(output: str) -> float:
    return len(output) / 10


def main() -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_tiny(folder / "model", VLLMS)
        command = [
            sys.executable,
            "-m",
            "ajet",
            "trainer",
            "serve",
            "--model",
            str(model),
            "--port",
            "0",
        ]
        server = subprocess.Popen(
            [*command, "--state", str(folder / "state")], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            url = server.stdout.readline().rpartition("TINKER_BASE_URL=")[2].strip()
            steps: dict[int, list[float]] = {0: [], 1: []}
            for turn in range(ROUNDS):
                for staleness, seconds in steps.items():
                    seconds += _seconds(folder / f"{turn}-{staleness}", model, url, staleness)
        finally:
            server.terminate()
            server.wait()
    alone, overlapped = (statistics.median(steps[staleness]) for staleness in (0, 1))
    return [
        Figure(
            "a step with the next batch sampled meanwhile, by one without",
            overlapped / alone,
            "x",
            "< 1",
            overlapped < alone,
        ),
        Figure("a step without", alone, "s"),
    ]


def _seconds(directory: Path, model: Path, url: str, staleness: int) -> list[float]:
    """Of each step after the first."""
    values = {
        "experiment_dir": str(directory), "backbone": "tinker", "model": {"path": str(model), "lora": {"r": 16}},
        "tinker": {"base_url": url}, "data": {"train_batch_size": 8},
        "rollout": {"num_repeat": 8, "max_model_len": 200, "max_response_length_in_one_turn": 12,
                    "max_staleness": staleness},
        "trainer_common": {"total_steps": STEPS, "test_freq": 0, "save_freq": 0, "use_kl_loss": False, "logger": []},
    }  # fmt: skip
    tasks = [
        {"question": f"Say {word}."}
        for word in ("yes", "no", "maybe", "so", "well", "if", "and", "but")
    ]
    train(load_config(values=values), workflow=use_tool, judge=length, tasks=tasks)
    with open_trace(directory) as reader:
        rows = reader.query(
            "SELECT value FROM metrics WHERE name = 'time/step' AND step > 1"
        ).to_pylist()
    return [row["value"] for row in rows]
