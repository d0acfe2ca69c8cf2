"""The environment service: real processes behind a real server, asked by the client that a job
uses."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.environments.client import GymEnv, service_health, task_ids
from ajet_sdk.environments.hosted import load
from ajet_sdk.environments.instances import InstanceLimits, Instances
from ajet_sdk.environments.server import service_app
from ajet_sdk.environments.spec import Spec, WrongTarget
from ajet_sdk.errors import ConfigError, EnvironmentUnavailable
from ajet_sdk.gateway.gateway import Gateway, listening_socket
from ajet_sdk.gateway.http_server import server_config
from ajet_sdk.judges.load import load_judge
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.types import Episode, Reward, Task
from tests.waiting import is_running, until

COUNTER = '''
import os, subprocess, time

class Counter:
    """From the task's number up to five."""

    @staticmethod
    def tasks(split):
        return {"train": [0, 1], "dev": [2]}[split]

    def __init__(self, task_id, start=0):
        self.count = start + int(task_id)

    def reset(self):
        return f"at {self.count}"

    def step(self, action):
        if action == "raise":
            raise RuntimeError("the counter is stuck")
        if action == "sleep":
            time.sleep(600)
        if action == "die":
            os._exit(3)
        if action == "grow":
            self.room = bytearray(2**31)
        if action == "child":
            return str(subprocess.Popen(["sleep", "600"]).pid), 0, False, {}
        if action == "nan":
            return "lost", float("nan"), False, {}
        self.count += int(action)
        return f"at {self.count}", 0.5, self.count >= 5, {"pid": os.getpid()}

    def evaluate(self, params):
        return float(self.count >= 5) if params.get("sparse") else self.count / 5

    async def info(self):
        return {"tools": ["add"]}

class Slow(Counter):
    def reset(self):
        time.sleep(1)
        return super().reset()

def made(task_id):
    return Counter(task_id)

class Talker:
    def __init__(self, task_id): ...
    def reset(self): return [{"role": "system", "content": "Talk."}, {"role": "user", "content": "Hello"}]
    def step(self, message):
        calls = {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        answers = [{"role": "tool", "tool_call_id": id, "content": name} for id, name in calls.items()]
        return answers, 1, False, False, None

class Drawn:
    """Its observations have pictures, in several forms."""

    def __init__(self, task_id): ...
    def reset(self): return ["Look.", part()]
    def step(self, action):
        shown = {"part": part(), "parts": [{"type": "text", "text": "Look."}, part()], "dict": {"type": "move"}}
        shown["message"] = {"role": "tool", "tool_call_id": "1", "content": [part()]}
        return shown[action], 0, False, {}

def part(): return {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
'''


@contextmanager
def hosted(
    target: str, limits: InstanceLimits | None = None, *, name: str = "count", **spec: Any
) -> Iterator[tuple[str, Instances]]:
    """The service's URL and its instances, for as long as the block lasts."""
    instances = Instances(Spec(target, **spec), limits or InstanceLimits())
    listener = listening_socket("127.0.0.1", 0)
    failed: list[BaseException] = []

    async def main() -> None:
        try:
            await instances.start()
        except ConfigError as error:
            failed.append(error)
            return
        finally:
            started.set()
        await server.serve(sockets=[listener])

    started = threading.Event()
    server = uvicorn.Server(server_config(service_app(instances, name), lifespan="on"))
    thread = threading.Thread(target=asyncio.run, args=[main()], daemon=True)
    thread.start()
    started.wait()
    try:
        if failed:
            raise failed[0]
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", instances
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environment") / "counter.py"
    path.write_text(COUNTER)
    return path


@pytest.fixture(scope="module")
def service(counter: Path) -> Iterator[tuple[str, Instances]]:
    with hosted(f"{counter}:Counter", InstanceLimits(timeout=600, memory=2**30)) as found:
        yield found


def say(env: GymEnv, text: Any) -> tuple[Any, float, bool, dict[str, Any]]:
    return env.step({"role": "assistant", "content": str(text)})


def test_an_environment_of_a_class(service: tuple[str, Instances]) -> None:
    url, instances = service
    assert task_ids(url, "count", "train") == ["0", "1"]
    env = GymEnv(url, "count", "1")
    assert env.create() == [{"role": "user", "content": "at 1"}]
    observation, reward, ended, info = say(env, 2)
    assert (observation, reward, ended) == ("at 3", 0.5, False)
    assert instances.listed()[0]["pid"] == info["pid"] != os.getpid()
    assert (
        say(env, 2)[2] and env.evaluate() == 1.0 and env.evaluate("uuid", {"sparse": True}) == 1.0
    )
    assert env.info() == {"tools": ["add"]}
    env.release()
    assert not instances.listed()
    until(lambda: not is_running(info["pid"]))
    with pytest.raises(EnvironmentUnavailable, match="there is no instance"):
        say(env, 1)


def test_messages_and_tool_calls_pass_as_they_are(counter: Path) -> None:
    with hosted(f"{counter}->Talker", splits={"train": ["a"]}) as (url, _):
        assert task_ids(url, "count", "train") == ["a"]
        with pytest.raises(EnvironmentUnavailable, match=r"no split 'dev'.*splits: train"):
            task_ids(url, "count", "dev")
        env = GymEnv(url, "count", "a")
        assert [message["role"] for message in env.create()] == ["system", "user"]
        calls = [
            {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for name in "xy"
        ]
        observation, reward, ended, info = env.step(
            {"role": "assistant", "content": None, "tool_calls": calls}
        )
        assert (observation, reward, ended) == ("x\ny", 1.0, False)
        assert [message["tool_call_id"] for message in info["messages"]] == ["x", "y"]
        assert env.evaluate() == 1.0  # without one of its own: the sum of the rewards


def test_pictures_of_observations_pass_as_they_are(counter: Path) -> None:
    """Not as text, which would be a page of base64."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    look = {"type": "text", "text": "Look."}
    with hosted(f"{counter}->Drawn", splits={"train": ["a"]}) as (url, _):
        env = GymEnv(url, "count", "a")
        assert env.create() == [{"role": "user", "content": [look, picture]}]
        assert say(env, "part")[0] == [picture]
        assert say(env, "parts")[0] == [look, picture]
        assert say(env, "dict")[0] == str({"type": "move"})
        observation, _, _, info = say(env, "message")
        assert observation == [picture]
        assert info["messages"][0]["content"] == [picture]


FAULTS = [
    ("raise", "the counter is stuck", 500), ("die", "its process died", 410), ("grow", "MemoryError", 500),
    ("nan", "step of task '0'.* returned a value that is not JSON", 500),
]  # fmt: skip


@pytest.mark.parametrize(("action", "said", "status"), FAULTS)
def test_a_fault_is_said_and_stays_in_its_process(
    service: tuple[str, Instances], action: str, said: str, status: int
) -> None:
    url, _ = service
    env, other = GymEnv(url, "count", "0"), GymEnv(url, "count", "0")
    env.create(), other.create()
    with pytest.raises(EnvironmentUnavailable, match=said) as raised:
        say(env, action)
    assert (raised.value.status, raised.value.infrastructure) == (status, True)
    assert say(other, 1)[0] == "at 1"
    env.release(), other.release()


@pytest.mark.slow
def test_a_request_that_takes_too_long_ends_its_process_and_those_it_started(counter: Path) -> None:
    with hosted(f"{counter}:Counter", InstanceLimits(timeout=2)) as (url, instances):
        env = GymEnv(url, "count", "0")
        env.create()
        child = int(say(env, "child")[0])
        assert is_running(child)
        with pytest.raises(EnvironmentUnavailable, match="longer than 2 s"):
            say(env, "sleep")
        until(lambda: not is_running(child))
        with pytest.raises(
            EnvironmentUnavailable, match="was stopped: step of task '0' took longer"
        ):
            GymEnv(url, "count", "0", instance_id=env.instance_id).evaluate()
        assert not instances.listed() and service_health(url)["lost"] == 1
        assert env.create() and say(env, 1)[0] == "at 1"  # made again under the same id


def test_instances_that_nobody_asks_are_ended(counter: Path) -> None:
    with hosted(f"{counter}:Counter", InstanceLimits(idle=0.3)) as (url, instances):
        env = GymEnv(url, "count", "0")
        env.create()
        until(lambda: not instances.listed())
        with pytest.raises(EnvironmentUnavailable, match="no request for"):
            env.evaluate()


def test_an_instance_that_is_being_made_is_not_idle(counter: Path) -> None:
    with hosted(f"{counter}:Slow", InstanceLimits(idle=0.1)) as (url, instances):
        GymEnv(url, "count", "0").create()
        until(lambda: not instances.listed())


def test_no_more_are_made_at_once_than_may_run(counter: Path) -> None:
    async def main() -> list[Any]:
        instances = Instances(Spec(f"{counter}:Counter"), InstanceLimits(instances=2))
        await instances.start()
        try:
            return await asyncio.gather(
                *(instances.create(str(i), "0", {}) for i in range(8)), return_exceptions=True
            )
        finally:
            await instances.close()

    made = asyncio.run(main())
    assert [getattr(one, "status", 200) for one in made] == [200] * 2 + [503] * 6


def test_all_end_with_the_service(counter: Path) -> None:
    with hosted(f"{counter}:Counter") as (url, instances):
        env = GymEnv(url, "count", "0")
        env.create()
        pids = [instances.listed()[0]["pid"], int(say(env, "child")[0])]
    until(lambda: not any(map(is_running, pids)))


def test_what_a_killed_instance_has_started_ends_with_it(service: tuple[str, Instances]) -> None:
    """At once, not when it is next asked: its process id may be another's by then."""
    url, instances = service
    env = GymEnv(url, "count", "0")
    env.create()
    child = int(say(env, "child")[0])
    os.kill(instances.listed()[0]["pid"], signal.SIGKILL)
    until(lambda: not is_running(child))
    with pytest.raises(EnvironmentUnavailable, match="step of task '0': its process died"):
        say(env, 1)
    assert not instances.listed()


def test_a_killed_template_is_started_again(service: tuple[str, Instances]) -> None:
    url, instances = service
    template = instances._template._process
    assert template is not None
    os.kill(template.pid, signal.SIGKILL)
    template.wait()
    env = GymEnv(url, "count", "1")
    assert env.create()[0]["content"] == "at 1"
    env.release()


@pytest.mark.slow
def test_load_is_spread_and_a_full_or_absent_service_is_passed_over(counter: Path) -> None:
    limits = InstanceLimits(instances=3)
    with (
        hosted(f"{counter}:Counter", limits) as (one, _),
        hosted(f"{counter}:Counter", limits) as (two, _),
    ):
        urls = [one, two, "http://127.0.0.1:9"]
        assert task_ids(urls[::-1], "count", "dev") == ["2"]
        envs = [GymEnv(urls, "count", "0", timeout=1) for _ in range(6)]
        for env in envs:
            env.create()
        assert sorted(env.service_url for env in envs) == sorted([one, two] * 3)
        with pytest.raises(EnvironmentUnavailable):
            GymEnv([one, two], "count", "0", timeout=0).create()
        thread = threading.Timer(0.2, envs[0].release)
        thread.start()
        GymEnv([one, two], "count", "0").create()  # waits for a place
        thread.join()


def test_what_cannot_be_hosted_says_why(counter: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package")
    for target, said in [
        ("nothing", "is not an environment"),
        (f"{counter}:Nothing", "no class or function Nothing"),
        (f"{tmp_path}/none.py:A", "there is no file"),
        (f"{broken}:A", "No module named 'no_such_package'"),
        (
            "gymnasium:FrozenLak-v1",
            r"no environment FrozenLak-v1: .*Did you mean: .FrozenLake.*[^\n]$",
        ),
    ]:
        with pytest.raises(ConfigError, match=said), hosted(target):
            pass
    for spec, said in [
        (
            Spec(f"{counter}:Counter", splits={"train": ["1"]}),
            r"tasks of its own, from Counter.tasks\(split\)",
        ),
        (Spec("mcp:true", actions=["left"]), "mcp:true is none; leave it out"),
    ]:
        with pytest.raises(WrongTarget, match=said):
            load(spec)


def test_actions_that_do_not_fit_are_refused_at_the_start(counter: Path) -> None:
    """What a function makes is known once it has made it: the first task's instance is made at the
    start."""
    lake, split = "gymnasium:FrozenLake-v1", {"train": ["1", "2"]}
    for spec, said in [
        (
            Spec(f"{counter}:Counter", actions=["left"]),
            "--actions left: task .*gymnasium environment.* leave it out",
        ),
        (
            Spec(f"{counter}:made", splits=split, actions=["left"]),
            "task 1: .*made is none; leave it out",
        ),
        (
            Spec(lake, splits=split, actions=["left", "right"]),
            r"names 2 actions, but .* are Discrete\(4\)",
        ),
    ]:
        with pytest.raises(ConfigError, match=said):
            asyncio.run(Instances(spec, InstanceLimits()).start())


@pytest.mark.slow
def test_refusals(service: tuple[str, Instances]) -> None:
    url, _ = service
    for endpoint, body, status, said in [
        ("create", {"env_type": "count"}, 400, "task_id is missing"),
        (
            "step",
            {"messages": {"role": "assistant", "content": "1"}},
            400,
            "instance_id is missing",
        ),
        ("step", {"instance_id": "a"}, 400, "messages is missing"),
        ("step", {"messages": 3}, 400, "messages: Input should be"),
        ("create", {"env_type": "other", "task_id": "1"}, 404, "hosts 'count', not 'other'"),
        ("create", {"task_id": "x"}, 500, "invalid literal for int"),
    ]:
        answer = httpx.post(f"{url}/{endpoint}", json=body)
        assert answer.status_code == status and said in answer.json()["detail"]


def test_a_key_is_asked_for(counter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.testclient import TestClient

    with TestClient(
        service_app(Instances(Spec(f"{counter}:Counter"), InstanceLimits()), "count", "secret")
    ) as client:
        asked = {"params": {"split": "dev"}}
        assert client.post("/get_env_profile", json=asked).status_code == 401
        assert client.get("/instances").status_code == 401
        assert client.post(
            "/get_env_profile", json=asked, headers={"authorization": "Bearer secret"}
        ).json()["data"]


# In a job


def run(workflow: Any, judge: Any, config: Any, tasks: list[Task]) -> list[Episode]:
    async def main() -> list[Episode]:
        with Gateway() as gateway:
            engine = ScriptedEngine(lambda ask: "1")
            attempts = [Attempt(task) for task in tasks]
            return await run_batch(
                workflow, judge, attempts, engine=engine, gateway=gateway, config=config
            )

    return asyncio.run(main())


def job(url: str | list[str], **rollout: Any) -> Any:
    service = {"env_type": "count", "env_url": url}
    return load_config(
        values={"task_reader": {"type": "env_service", "env_service": service}, "rollout": rollout}
    )


def test_a_jobs_tasks_are_the_services(service: tuple[str, Instances]) -> None:
    sets = load_tasks(job(service[0]))
    assert [(task.task_id, task.env_type) for task in (*sets.train, *sets.val)] == [
        ("0", "count"), ("1", "count"), ("2", "count"),
    ]  # fmt: skip


def killing(pid_of: Callable[[], int]) -> Any:
    tries: list[int] = []

    @ajet.workflow
    def act(env: GymEnv) -> None:
        say(env, 1)
        tries.append(1)
        if len(tries) == 1:
            os.kill(pid_of(), signal.SIGKILL)
        say(env, 1)

    return act, tries


def test_a_killed_instance_is_infrastructure_and_never_a_reward_of_0(
    service: tuple[str, Instances],
) -> None:
    url, instances = service
    act, tries = killing(lambda: instances.listed()[0]["pid"])
    path = "ajet.task_judge.env_service_as_judge->EnvServiceJudge"
    judge = load_judge(load_config(values={"task_judge": {"judge_protocol": path}}))
    (played,) = run(act, judge, job(url, max_retries=2), [Task(task_id="1")])
    assert (played.status, played.reward, len(tries)) == ("succeeded", 0.3, 2)
    act, tries = killing(lambda: instances.listed()[0]["pid"])
    (lost,) = run(act, judge, job(url, max_retries=0, failure_reward=0.0), [Task(task_id="1")])
    assert (lost.status, lost.cause, lost.infrastructure, lost.rewards) == (
        "failed",
        "EnvironmentUnavailable",
        True,
        (),
    )
    assert not instances.listed()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "takes too long"])
def test_the_instance_of_a_rollout_that_dies_is_ended(
    service: tuple[str, Instances], how: str
) -> None:
    url, instances = service

    @ajet.workflow
    def act(env: GymEnv) -> Reward:
        say(env, 1)
        assert instances.listed()
        if how == "raises":
            raise ValueError("no plan")
        time.sleep(600)
        return Reward(value=1)

    (died,) = run(act, None, job(url, timeout=0.5), [Task(task_id="1")])
    assert died.status in ("failed", "timeout") and not died.infrastructure
    assert not instances.listed()
