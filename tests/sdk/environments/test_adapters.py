"""What `ajet env serve` hosts of other packages, with the real package; a test skips where it is
not installed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ajet_sdk.environments.client import GymEnv, task_ids
from ajet_sdk.errors import ConfigError, EnvironmentUnavailable
from ajet_sdk.pictures import picture_at
from tests.sdk.environments.test_service import hosted, say

# gymnasium

LAKE = {"arguments": {"is_slippery": False, "render_mode": "ansi"}, "splits": {"train": ["0", "1"]}}


def test_a_registered_gymnasium_environment() -> None:
    with hosted("gymnasium:FrozenLake-v1", actions=["left", "down", "right", "up"], **LAKE) as (
        url,
        _,
    ):
        assert task_ids(url, "count", "train") == ["0", "1"]
        env = GymEnv(url, "count", "1")
        assert env.create()[0]["content"].split() == ["SFFF", "FHFH", "FFFH", "HFFG"]
        assert env.info()["expected"] == "Say one of: left, down, right, up."
        assert (
            env.step({"content": "north"})[0] == "Not an action. Say one of: left, down, right, up."
        )
        for move in ["down", "down", "RIGHT", "down", "right"]:
            _, reward, ended, info = env.step({"content": move})
            assert (reward, ended) == (0.0, False) and info["truncated"] is False
        _, reward, ended, _ = env.step({"content": " right "})
        assert (reward, ended, env.evaluate()) == (1.0, True, 1.0)
        env.release()
        with pytest.raises(EnvironmentUnavailable, match="is a seed"):
            GymEnv(url, "count", "x").create()


SPACES = """
import gymnasium
from gymnasium import spaces

class Echo(gymnasium.Env):
    def __init__(self, space):
        self.action_space = self.observation_space = space

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.action_space.seed(7)
        return self.action_space.sample(), {}

    def step(self, action):
        return action, 1.0, False, True, {}

def echo(task_id):
    return Echo({
        "discrete": spaces.Discrete(4, start=2),
        "box": spaces.Box(0, 1, (2,)),
        "dict": spaces.Dict(a=spaces.Discrete(3), b=spaces.MultiDiscrete([3, 4])),
        "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Text(5)]),
        "text": spaces.Text(5),
    }[task_id])
"""


def test_actions_and_observations_of_each_space_are_text(tmp_path: Path) -> None:
    path = tmp_path / "spaces.py"
    path.write_text(SPACES)
    ids = ["discrete", "box", "dict", "tuple", "text"]
    with hosted(f"{path}:echo", splits={"train": ids}) as (url, _):
        for name in ids:
            env = GymEnv(url, "count", name)
            sample = env.create()[0]["content"]
            observation, reward, ended, info = say(env, sample)
            assert (observation, reward, ended, info["truncated"]) == (
                sample,
                1.0,
                True,
                True,
            ), name
            many = "1" + "0" * 30
            for wrong in [
                "nothing at all", "[1]", "{}", "-17", '"x"', "[NaN]", "[null]", "[1e999, 1e999]", many, "1" * 5000,
                f"[{many}, 1]", f'{{"a": 1, "b": [{many}, 1]}}', f'{{"a": {many}, "b": [1, 1]}}', "[" * 100_000,
            ]:  # fmt: skip
                assert say(env, wrong)[3] == {"invalid": True}, (name, wrong)
            env.release()


SEEN = """
import gymnasium
import numpy
from gymnasium import spaces

class Seen(gymnasium.Env):
    action_space = spaces.Discrete(2)
    observation_space = spaces.Discrete(4)
    render_mode = "rgb_array"
    place = 0

    def reset(self, seed=None, options=None):
        return self.place, {}

    def step(self, action):
        self.place += 1
        return self.place, 0.0, False, False, {}

    def render(self):
        pixels = numpy.zeros((3, 4, 3), dtype=numpy.uint8)
        pixels[1, self.place] = (255, 128, 1)
        return pixels

def seen(task_id):
    return Seen()
"""


def test_a_rendered_picture_is_the_observation(tmp_path: Path) -> None:
    """And not the value of the observation beside it, which would tell what is to be seen."""
    path = tmp_path / "seen.py"
    path.write_text(SEEN)
    with hosted(f"{path}:seen", splits={"train": ["0"]}) as (url, _):
        env = GymEnv(url, "count", "0")
        [message] = env.create()
        after, *_ = say(env, "1")
        for place, content in enumerate((message["content"], after)):
            [part] = content
            image = picture_at(part["image_url"]["url"]).image()
            assert image.size == (4, 3)
            colours = [image.getpixel((column, 1)) for column in range(4)]
            assert [at for at, each in enumerate(colours) if each == (255, 128, 1)] == [place]


def test_a_name_that_gymnasium_does_not_know_is_said() -> None:
    with pytest.raises(ConfigError, match="FrozenLake"), hosted("gymnasium:FrozenLak-v1"):
        pass


# OpenEnv


PARROT = """
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str

class Heard(Observation):
    echoed_message: str = ""
    message_length: int = 0

class Parrot(Environment):
    def __init__(self):
        self._state = State(episode_id="1", step_count=0)

    def reset(self) -> Heard:
        return Heard(echoed_message="ready", done=False, reward=0.0)

    def step(self, action: Say) -> Heard:
        self._state.step_count += 1
        length = len(action.message)
        return Heard(echoed_message=action.message, message_length=length, done=False, reward=length * 0.1)

    @property
    def state(self) -> State:
        return self._state
"""


def test_an_openenv_package(tmp_path: Path) -> None:
    pytest.importorskip("openenv.core")
    server = tmp_path / "parrot_env" / "server"
    server.mkdir(parents=True)
    for module, text in {"../__init__": "", "__init__": "", "parrot": PARROT}.items():
        (server / f"{module}.py").write_text(text)
    target, splits = "openenv:parrot", {"train": ["3"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
        )
        with hosted(target, splits=splits) as (url, _):
            env = GymEnv(url, "count", task_ids(url, "count", "train")[0])
            assert "ready" in env.create()[0]["content"]
            observation, reward, ended, _ = say(env, "Hello")
            assert json.loads(observation) == {"echoed_message": "Hello", "message_length": 5}
            assert (reward, ended) == (pytest.approx(0.5), False)
            assert "message" in env.info()["action"]["properties"]
            assert say(env, '{"message": "Hi"}')[1] == pytest.approx(0.2)
            assert "Not an action" in say(env, '{"nothing": 1}')[0]
            assert env.evaluate() == pytest.approx(0.7)
            env.release()
        with pytest.raises(ConfigError, match="neither package nobody"), hosted("openenv:nobody"):
            pass


# verifiers

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") < 5)

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for n in range(4):
            yield Sum(Data(prompt=f"{n} + {n}?", system_prompt="Add.", answer=str(2 * n)), self.config.task)

class Twice(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                await interaction.turn("Are you sure?")

__all__ = ["Sums", "Twice"]
"""


@pytest.mark.slow
def test_a_verifiers_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow: verifiers starts its harness's program with uv for each episode."""
    pytest.importorskip("verifiers.v1")
    (tmp_path / "sums_v1").mkdir()
    (tmp_path / "sums_v1" / "__init__.py").write_text(TASKSET)
    (tmp_path / "ones_v1").mkdir()
    (tmp_path / "ones_v1" / "__init__.py").write_text(
        TASKSET.replace('__all__ = ["Sums", "Twice"]', '__all__ = ["Sums"]')
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    with hosted("verifiers:ones-v1", splits={"train": ["3"]}) as (url, instances):
        env = GymEnv(url, "count", "3")
        assert [message["content"] for message in env.create()] == ["Add.", "3 + 3?"]
        assert say(env, "6")[1:3] == (1.5, True) and env.evaluate() == 1.5
        env.release()
        with pytest.raises(EnvironmentUnavailable, match="an index into its tasks"):
            GymEnv(url, "count", "4").create()
        assert not instances.listed()
    with hosted("verifiers:sums-v1", splits={"train": ["2"]}) as (url, _):
        env = GymEnv(url, "count", "2")
        env.create()
        assert say(env, "It is 5.")[:3] == ("Are you sure?", 0.0, False)
        assert say(env, "No, it is 4.")[1:3] == (1.0, True)
        env.release()
        env = GymEnv(url, "count", "2")
        env.create()
        say(env, "It is 4.")
        assert env.evaluate() == 0.5  # it said nothing more, which is short
        env.release()
    with pytest.raises(ConfigError, match="nobody"), hosted("verifiers:nobody"):
        pass
