"""A job of several turns and parallel calls whose results must not depend on when anything happens,
and its numbers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import threading
from pathlib import Path

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.run import train
from ajet_sdk.trace.reader import episodes, open_trace

TASKS = ("yes", "no", "maybe", "so", "well")


def repeating_job(
    directory: Path, model: Path, steps: int, *, attempts: int = 3, deterministic: bool = True
) -> Config:
    directory.mkdir(parents=True, exist_ok=True)
    tasks = directory / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": f"Say {word}."}) + "\n" for word in TASKS))
    files = {"training": {"file_path": str(tasks)}}
    return load_config(
        values={
            "experiment_name": "repeating",
            "experiment_dir": str(directory / "experiment"),
            "backbone": "local",
            "model": {"path": str(model)},
            "task_reader": {"type": "jsonl_dataset_file", "jsonl_dataset_file": files},
            "data": {"train_batch_size": 3},
            "rollout": {
                "num_repeat": attempts,
                "temperature": 1.0,
                "max_model_len": 256,
                "deterministic": deterministic,
                "max_response_length_in_one_turn": 12,
            },
            "trainer_common": {
                "total_steps": steps,
                "save_freq": 1,
                "test_freq": 0,
                "use_kl_loss": False,
                "mini_batch_num": 2,
                "logger": ["console"],
            },
        }
    )


class Disorder:
    """Lets calls arrive in another order every time, and may kill the process."""

    def __init__(self, kill_after: int | None = None, pause: float = 0.0) -> None:
        self._chance, self._calls = random.Random(os.urandom(8)), 0
        self._kill_after, self._pause = kill_after, pause

    async def before_call(self) -> None:
        self._calls += 1
        if (
            self._calls == self._kill_after
        ):  # a little later, so that updates and checkpoints are hit too
            threading.Timer(self._pause, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        for _ in range(self._chance.randrange(4)):
            await asyncio.sleep(0.001 * self._chance.random())


def agent(disorder: Disorder) -> ajet.Workflow:
    @ajet.workflow
    async def talk(question: str, model: ajet.Model) -> str:
        async def ask(messages: list[dict[str, str]]) -> str:
            await disorder.before_call()
            return (await model.chat(messages))["content"] or ""

        messages, text = [{"role": "user", "content": question}], ""
        for turn in range(3):
            text = await ask(messages)
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"Go on {turn}."},
            ]
        sides = [
            ask([{"role": "user", "content": f"{word} {question}"}]) for word in ("One", "Two")
        ]
        ends = [ask([*messages, {"role": "user", "content": word}]) for word in ("Three", "Four")]
        return text + "".join(await asyncio.gather(*sides, *ends))

    return talk


@ajet.judge
def length(output: str) -> float:
    return len(output) / 10


def repeat(
    config: Config, *, resume: bool = False, kill_after: int | None = None, pause: float = 0.0
) -> None:
    """Run the job, in a process that may not live to its end."""
    train(config, workflow=agent(Disorder(kill_after, pause)), judge=length, resume=resume)


def numbers_of(
    config: Config,
) -> tuple[dict[str, tuple[bytes, bytes]], dict[int, float], list[str]]:
    """Each call's ids and log-probabilities, each step's hash, and the digests of the trained
    weights."""
    calls: dict[str, tuple[bytes, bytes]] = {}
    with open_trace(config.directory) as trace:
        for episode in episodes(trace):
            for call in episode.calls:
                assert (
                    call.prompt_ids is not None
                    and call.output_ids is not None
                    and call.logprobs is not None
                )
                place = (
                    f"{episode.step} {episode.task.main_query} {episode.attempt}"
                    f" {call.prompt_ids.tolist()}"
                )
                calls[place] = call.output_ids.tobytes(), call.logprobs.tobytes()
        rows = trace.query("SELECT step, value FROM metrics WHERE name = 'train/hash'").to_pylist()
    files = sorted(config.directory.glob("checkpoint/*/model/*.safetensors"))
    weights = [hashlib.blake2b(file.read_bytes()).hexdigest() for file in files]
    return calls, {row["step"]: row["value"] for row in rows}, weights
