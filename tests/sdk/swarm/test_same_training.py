"""Trainings over a swarm with a real model: the same as a run that samples by itself, mixtures,
staleness, and the end of a server."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import SwarmFinished
from ajet_sdk.run import train
from ajet_sdk.swarm.client import SwarmClient
from ajet_sdk.swarm_server import SwarmServer
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Task
from tests.tiny_models import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("audited")]

WORDS = ("yes", "no", "maybe")


def config_of(place: Path, name: str, *more: str) -> Config:
    model = place / "model"
    if not model.exists():
        save_tiny(model)
    rows = [
        f'{{"main_query": "Say {w}.", "answer": "{w}", "kind": "{"odd" if i else "even"}"}}'
        for i, w in enumerate(WORDS)
    ]
    tasks = place / "tasks.jsonl"
    tasks.write_text("\n".join(rows) + "\n")
    return load_config(
        overrides=[
            f"ajet.experiment_name={name}",
            f"ajet.experiment_dir={place / name}",
            f"ajet.model.path={model}",
            "ajet.task_reader.type=jsonl_dataset_file",
            f"ajet.task_reader.jsonl_dataset_file.training.file_path={tasks}",
            "ajet.data.train_batch_size=2",
            "ajet.rollout.num_repeat=4",
            "ajet.rollout.max_model_len=128",
            "ajet.rollout.max_response_length_in_one_turn=8",
            "ajet.trainer_common.total_steps=3",
            "ajet.trainer_common.optim.lr=0.01",
            "ajet.trainer_common.val_before_train=false",
            "ajet.trainer_common.test_freq=-1",
            "ajet.trainer_common.logger=[]",
            *more,
        ]
    )


def score(answer: str, task: Task) -> float:
    """A reward that differs among random replies."""
    return len(set(answer) & set(str(task.metadata["answer"]))) / 8


def ask(base_url: str, api_key: str, model: str, text: str) -> str:
    answer = httpx.post(
        f"{base_url}/chat/completions",
        json={"model": model, "messages": [{"role": "user", "content": text}]},
        headers={"authorization": f"Bearer {api_key}"},
        timeout=60.0,
        trust_env=False,
    )
    answer.raise_for_status()
    content: str = answer.json()["choices"][0]["message"]["content"] or ""
    return content


def serve(config: Config, workers: int = 4, task: Any = None) -> list[str]:
    """Train at a server in this process, with threads as its clients; returns its lines."""
    said: list[str] = []
    server = SwarmServer(port=0, say=said.append)

    def work() -> None:
        with SwarmClient(server.gateway.url) as swarm:
            while True:
                try:
                    with swarm.episode(task() if task else None) as episode:
                        question = episode.task.main_query
                        text = ask(episode.base_url, episode.api_key, episode.model, question)
                        episode.end(score(text, episode.task))
                except SwarmFinished:
                    return

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    server.gateway.start()
    for thread in threads:
        thread.start()
    server.serve(config)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return said


def metrics_of(directory: Path, *names: str) -> dict[tuple[str, int], float]:
    with open_trace(directory) as trace:
        rows = trace.query("SELECT name, step, value FROM metrics").to_pylist()
    return {(r["name"], r["step"]): r["value"] for r in rows if r["name"] in names}


def test_a_swarm_trains_what_a_run_by_itself_samples(tmp_path: Path) -> None:
    import ajet

    @ajet.workflow
    def agent(task: Task, model: ajet.Model) -> str:
        return ask(model.base_url, model.api_key, model.name, task.main_query)

    @ajet.judge
    def judge(output: str, task: Task) -> float:
        return score(output, task)

    train(config_of(tmp_path, "alone"), workflow=agent, judge=judge)
    serve(config_of(tmp_path, "swarm"))
    names = ("train/reward", "train/loss", "train/tokens_sampled", "train/entropy")
    alone, swarm = (metrics_of(tmp_path / name, *names) for name in ("alone", "swarm"))
    assert len(alone) == 12
    assert swarm == pytest.approx(alone, rel=1e-4, abs=1e-6)


def test_an_update_runs_beside_the_next_step(tmp_path: Path) -> None:
    serve(config_of(tmp_path, "ahead", "ajet.rollout.max_staleness=1"))
    ages = metrics_of(tmp_path / "ahead", "train/staleness_max", "train/policy_version")
    assert max(v for (name, _), v in ages.items() if name == "train/staleness_max") <= 1
    assert ages["train/policy_version", 3] == 3


def test_shares_of_kinds(tmp_path: Path) -> None:
    shares = "ajet.swarm.shares={odd: 1, even: 1}"
    serve(config_of(tmp_path, "mixed", shares))
    counts = metrics_of(tmp_path / "mixed", "train/episodes/odd", "train/episodes/even")
    assert set(counts.values()) == {4.0} and len(counts) == 6


def test_a_program_without_torch_joins(tmp_path: Path) -> None:
    """What a client imports: no torch, no DuckDB."""
    code = (
        "import sys, ajet\n"
        "ajet.SwarmClient('http://127.0.0.1:9')\n"
        "print([name for name in ('torch', 'duckdb', 'ray', 'transformers') if name in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert shown.stdout.strip() == "[]"
