"""The environment service's client, against a small real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import anyio
import pytest

import ajet
from ajet_sdk.agent.workflow import AjetTuner, Workflow, WorkflowOutput, WorkflowTask
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.environments.client import GymEnv, task_ids
from ajet_sdk.errors import EnvironmentUnavailable
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.types import Episode, Reward, Task
from tests.serving import replying, serving


class Service:
    """A counting environment: three steps to the end; `refuse` gives an endpoint so many failures
    first."""

    def __init__(self) -> None:
        self.instances: dict[str, int] = {}
        self.released: list[str] = []
        self.asked: list[str] = []
        self.refuse: dict[str, int] = {}
        self.answers: dict[str, Any] = {}
        self.app = replying(lambda path, _, body: self.answer(path.strip("/"), body))

    def answer(self, endpoint: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append(endpoint)
        if self.refuse.get(endpoint, 0) > 0:
            self.refuse[endpoint] -= 1
            return 503, {"detail": "busy"}
        if endpoint in self.answers:
            return 200, self.answers[endpoint]
        key = body["instance_id"]
        if endpoint == "create":
            self.instances[key] = 0
            return 200, {
                "data": {"state": [{"role": "user", "content": f"task {body['task_id']}"}]}
            }
        if endpoint == "step":
            self.instances[key] += 1
            state = [{"role": "user", "content": f"saw {body['messages']['content']}"}]
            return 200, {
                "data": {"state": state, "reward": 0.5, "is_terminated": self.instances[key] == 3}
            }
        if endpoint == "evaluate":
            return 200, {"data": self.instances[key] / 3}
        if endpoint == "release":
            self.released.append(key)
            return 200, {"success": True}
        if endpoint == "get_env_profile":
            return 200, {"data": [f"{body['params']['split']}-{i}" for i in range(2)]}
        return 404, {"detail": f"no endpoint {endpoint}"}


@pytest.fixture
def service() -> Iterator[tuple[Service, str]]:
    state = Service()
    with serving(state.app) as url:
        yield state, url


def test_an_environment(service: tuple[Service, str]) -> None:
    state, url = service
    env = GymEnv(url + "/", "count", "t1")
    assert env.service_url == url
    assert env.create() == [{"role": "user", "content": "task t1"}]
    assert env.step({"role": "assistant", "content": "go"}) == ("saw go", 0.5, False, {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert env.step({"role": "assistant", "content": parts})[0] == "saw ab"
    assert env.step({"role": "assistant", "content": "x"})[2] is True
    assert env.evaluate("any uuid", {"sparse": True}) == 1.0
    env.release()
    assert state.released == [env.instance_id]
    assert task_ids(url, "count", "dev") == ["dev-0", "dev-1"]


def test_an_empty_observation_says_so(service: tuple[Service, str]) -> None:
    state, url = service
    env = GymEnv(url, "count", "t1")
    state.answers["step"] = {
        "data": {"state": {"role": "user", "content": ""}, "is_terminated": False}
    }
    assert "no feedback" in env.step({"content": "go"})[0]
    state.answers["step"] = {"data": {"state": {"error": "bad action"}, "is_terminated": False}}
    assert env.step({"content": "go"})[0] == "bad action"


def test_a_step_is_asked_once_and_the_rest_again(service: tuple[Service, str]) -> None:
    state, url = service
    env = GymEnv(url, "count", "t1")
    state.refuse = {"create": 1, "step": 1}
    env.create()
    with pytest.raises(EnvironmentUnavailable, match="answered step with 5") as raised:
        env.step({"content": "go"})
    assert raised.value.infrastructure and state.asked == ["create", "create", "step"]
    assert "env_url" not in str(raised.value), "it answered: its address is right"


def test_senseless_answers_are_errors(service: tuple[Service, str]) -> None:
    state, url = service
    env = GymEnv(url, "count", "t1")
    state.answers = {
        "step": {"data": {"state": "text"}},
        "evaluate": {"data": None},
        "get_env_profile": {"data": 3},
    }
    for ask in (
        lambda: env.step({"content": ""}),
        env.evaluate,
        lambda: task_ids(url, "count", "dev"),
    ):
        with pytest.raises(EnvironmentUnavailable):
            ask()
    state.answers = {"step": [1]}
    with pytest.raises(EnvironmentUnavailable):
        env.step({"content": ""})


def test_nobody_there() -> None:
    with pytest.raises(
        EnvironmentUnavailable, match=r"http://127.0.0.1:9 cannot be reached .*env_url"
    ):
        GymEnv("http://127.0.0.1:9", "count", "t").step({"content": "go"})


def settings(url: str, **reader: Any) -> Config:
    return load_config(
        values={"task_reader": {"type": "env_service", "env_service": {"env_url": url}, **reader}}
    )


def episode(workflow: Any, judge: Any, config: Config) -> Episode:
    async def main() -> list[Episode]:
        with Gateway() as gateway:
            return await run_batch(
                workflow,
                judge,
                [Attempt(Task(task_id="t7", env_type="count"))],
                engine=ScriptedEngine(lambda ask: "go"),
                gateway=gateway,
                config=config,
            )

    return asyncio.run(main())[0]


class Player(Workflow):
    async def execute(self, workflow_task: WorkflowTask, tuner: AjetTuner) -> WorkflowOutput:
        client, messages = tuner.as_raw_openai_sdk_client(), list(workflow_task.task.init_messages)
        assert messages == [{"role": "user", "content": "task t7"}]
        terminate = False
        while not terminate:
            reply = (await client.chat.completions.create(messages)).choices[0].message.content
            obs, _, terminate, _ = workflow_task.gym_env.step(
                {"role": "assistant", "content": reply}
            )
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": obs}]
        return WorkflowOutput(reward=workflow_task.gym_env.evaluate(workflow_task.episode_uuid, {}))


def test_a_class_workflow_plays_and_its_environment_is_released(
    service: tuple[Service, str],
) -> None:
    state, url = service
    played = episode(Player, None, settings(url))
    assert (played.error, played.reward, len(played.calls)) == (None, 1.0, 3)
    assert len(state.released) == 1 and state.released[0] in state.instances


def test_a_function_and_its_judge_share_the_environment(service: tuple[Service, str]) -> None:
    state, url = service

    @ajet.workflow
    def act(env: GymEnv, task: Task) -> str:
        return env.step({"role": "assistant", "content": task.task_id})[0]

    @ajet.judge
    def score(env: GymEnv, output: str) -> float:
        assert output == "saw t7"
        return env.evaluate()

    played = episode(act, score, settings(url))
    assert (played.error, played.reward) == (None, pytest.approx(1 / 3))
    assert len(state.released) == 1


def test_a_service_that_fails_is_no_fault_of_the_agent(service: tuple[Service, str]) -> None:
    state, url = service
    state.refuse = {"step": 99}

    @ajet.workflow
    def act(env: GymEnv) -> Reward:
        env.step({"role": "assistant", "content": "go"})
        return Reward(value=1)

    played = episode(act, None, settings(url))
    assert (played.status, played.cause, played.infrastructure) == (
        "failed",
        "EnvironmentUnavailable",
        True,
    )
    assert (
        state.asked.count("create") == 2 and len(state.released) == 2
    )  # tried again as a new episode


class Broken(GymEnv):
    """An environment of a user's own, that loses its connection."""

    def step(self, action: Any) -> Any:
        raise ConnectionError("the game's server hung up")


def wrapped(env: Broken) -> None:
    try:
        env.step({})
    except ConnectionError as error:
        raise RuntimeError("no move") from error


def restated(env: Broken) -> None:
    try:
        env.step({})
    except ConnectionError:
        raise KeyError("missing") from None  # the agent's own words for it


def own(env: Broken) -> None:
    raise ConnectionError("a tool of the agent's own")


def after(env: Broken) -> None:
    with suppress(ConnectionError):
        env.step({})
    raise ValueError("later")


async def grouped(env: Broken) -> None:
    async def one() -> None:
        wrapped(env)

    async with anyio.create_task_group() as group:
        group.start_soon(one)


ACTS = [(lambda env: env.step({}), True), (wrapped, True), (grouped, True), (restated, False), (own, False),
        (after, False)]  # fmt: skip


@pytest.mark.parametrize(
    ("act", "infrastructure"),
    ACTS,
    ids=["raised", "wrapped", "grouped", "restated", "own", "after"],
)
@pytest.mark.parametrize("in_judge", [False, True])
def test_a_fault_is_the_environments_by_where_it_began(
    act: Any, infrastructure: bool, in_judge: bool
) -> None:
    tries = []

    @ajet.workflow
    async def agent() -> str:
        tries.append(1)
        if not in_judge:
            await played()
        return "done"

    @ajet.judge
    async def judge(output: str) -> float:
        await played()
        return 1.0

    async def played() -> None:
        done = act(Broken("http://127.0.0.1:9", "game", "t"))
        if asyncio.iscoroutine(done):
            await done

    ended = episode(
        agent, judge, load_config(values={"rollout": {"max_retries": 2, "failure_reward": 0.0}})
    )
    assert (ended.status, ended.infrastructure, ended.rewards) == ("failed", infrastructure, ())
    assert len(tries) == (3 if infrastructure else 1)


@pytest.mark.parametrize(
    ("endpoint", "answer"),
    [
        ("create", {"data": {"state": "text"}}),
        ("create", {"data": {"state": 3}}),
        ("step", {"data": None}),
        ("step", {"data": {}}),
        ("step", {"data": {"state": {"content": "x"}, "reward": "much"}}),
        ("step", {"data": {"state": {"content": "x"}, "info": [1]}}),
        ("evaluate", {"data": float("nan")}),
    ],
)
def test_an_answer_of_another_shape_is_the_services_fault(
    service: tuple[Service, str], endpoint: str, answer: Any
) -> None:
    state, url = service
    state.answers[endpoint] = answer

    @ajet.workflow
    def act(env: GymEnv) -> Reward:
        env.step({"role": "assistant", "content": "go"})
        return Reward(value=env.evaluate())

    played = episode(act, None, settings(url))
    assert (played.status, played.cause, played.infrastructure) == (
        "failed",
        "EnvironmentUnavailable",
        True,
    )


def test_an_action_that_is_no_message_is_the_agents_fault(service: tuple[Service, str]) -> None:
    @ajet.workflow
    def act(env: GymEnv) -> Reward:
        env.step("north")  # type: ignore[arg-type]
        return Reward(value=1)

    played = episode(act, None, settings(service[1]))
    assert (played.status, played.cause, played.infrastructure) == (
        "failed",
        "SignatureError",
        False,
    )
