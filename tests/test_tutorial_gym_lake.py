"""The frozen lake as a gymnasium environment behind a service, with an instance killed on the
way."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from ajet_sdk.config.config import load_config
from ajet_sdk.environments.client import GymEnv, task_ids
from ajet_sdk.protocols import Ask
from ajet_sdk.run import train
from tests.sdk.environments.test_service import hosted, say
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("audited")

FOLDER = Path(__file__).parents[1] / "tutorial" / "example_frozenlake"
TARGET = f"{FOLDER / 'gym_lake.py'}:GymLake"
on_call: list[Callable[[], None]] = []
"""What the scripted model does once, when it is asked."""


def walker(ask: Ask) -> str:
    """A step towards the goal where one is safe."""
    if on_call and len(ask.body["messages"]) > 3:  # in the middle of an episode
        on_call.pop()()
    goal, safe = (line.split()[1:] for line in ask.body["messages"][-1]["content"].splitlines())
    return next((move for move in goal if move in safe), (safe or ["up"])[0])


def test_the_game_is_gymnasiums() -> None:
    with hosted(TARGET, name="GymLake") as (url, _):
        assert (len(task_ids(url, "GymLake", "train")), len(task_ids(url, "GymLake", "dev"))) == (
            1024,
            256,
        )
        env = GymEnv(url, "GymLake", "A.#./..../#..G/....")
        assert env.create()[1]["content"] == "goal down 2 right 3\nsafe down right"
        assert say(env, "up")[:3] == (
            "goal down 2 right 3\nsafe down right",
            0.0,
            False,
        )  # the edge
        for move in ("down", "right", "down", "right"):
            assert say(env, move)[2] is False
        assert say(env, "right")[1:] == (1.0, True, {"end": "goal"}) and env.evaluate() == 1.0
        env.release()
        for moves, end in [
            (["right", "right"], "hole"),
            (["north"], "nonsense"),
            (["up"] * 12, "lost"),
        ]:
            env = GymEnv(url, "GymLake", "A.#./..../#..G/....")
            env.create()
            *_, last = (say(env, move) for move in moves)
            assert last[1:] == (0.0, True, {"end": end}) and env.evaluate() == 0.0
            env.release()


@pytest.mark.slow
def test_a_killed_instance_costs_no_episode(tmp_path: Path) -> None:
    (tmp_path / "replies.py").write_text(
        "from ajet_sdk.engines.scripted import ScriptedEngine\n"
        "from test_tutorial_gym_lake import walker\n"
        "replies = ScriptedEngine(walker)\n"
    )
    sys.modules.setdefault("test_tutorial_gym_lake", sys.modules[__name__])
    with hosted(TARGET, name="GymLake") as (url, instances):

        def kill() -> None:
            os.kill(next(one["pid"] for one in instances.listed() if one["steps"]), signal.SIGKILL)

        on_call.append(kill)
        config = load_config(
            FOLDER / "gym_lake.yaml",
            [
                "ajet.backbone=debug",
                "ajet.debug.debug_first_n_tasks=6",
                "ajet.rollout.max_response_length_in_one_turn=16",  # the scripted model's tokens are bytes
                "ajet.rollout.max_model_len=4096",
                f"ajet.model.scripted={tmp_path / 'replies.py'}->replies",
                f"ajet.task_reader.env_service.env_url={url}",
                f"ajet.experiment_dir={tmp_path / 'experiment'}",
            ],
        )
        tuned = train(config)
        assert len(instances.lost) == 1 and not on_call and not instances.listed()
        assert all(episode.status == "succeeded" for episode in tuned.episodes)
        assert {episode.output: episode.reward for episode in tuned.episodes} == {
            "goal": 1.0,
            "lost": 0.0,
        }


@pytest.mark.long
@pytest.mark.slow
def test_it_learns_while_instances_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tutorial with fewer steps; one of every 200 instances is killed."""
    monkeypatch.chdir(tmp_path)
    over = threading.Event()

    def kill() -> None:
        while not over.is_set():
            until(lambda: over.is_set() or instances.created > 200 * (len(killed) + 1))
            played = [one["pid"] for one in httpx.get(f"{url}/instances").json() if one["steps"]]
            with suppress(IndexError, ProcessLookupError):  # none has taken a step; it has ended
                os.kill(played[-1], signal.SIGKILL)
                killed.append(played[-1])

    killed: list[int] = []
    with hosted(TARGET, name="GymLake") as (url, instances):
        killer = threading.Thread(target=kill)
        killer.start()
        steps = [
            "ajet.trainer_common.total_steps=6",
            "ajet.trainer_common.test_freq=6",
            "ajet.trainer_common.optim.lr_scheduler_type=constant",
            f"ajet.task_reader.env_service.env_url={url}",
        ]
        try:
            tuned = train(load_config(FOLDER / "gym_lake.yaml", steps))
        finally:
            over.set()
            killer.join()
    recipe = json.loads((tmp_path / "launcher_record/models/lake/.ajet").read_text())
    assert len(killed) >= 5 and 0 < len(instances.lost) <= len(killed)
    assert tuned.metrics["val/reward"] >= recipe["reward"] + 0.1
