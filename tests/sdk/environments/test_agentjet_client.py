"""AgentJet's client and judge against our service: what they send, and, where their source is, they
themselves.

`just matrix 3.11 --dependencies agentjet` unpacks AgentJet's wheel and names its folder in
AJET_TEST_AGENTJET.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk.agent.workflow import WorkflowOutput, WorkflowTask
from ajet_sdk.config.config import load_config
from ajet_sdk.config.objects import load_object
from ajet_sdk.environments.client import GymEnv, task_ids
from ajet_sdk.types import Task
from tests.sdk.environments.test_client import Service
from tests.sdk.environments.test_service import counter, hosted, say  # noqa: F401
from tests.serving import serving


def sent(url: str, endpoint: str, env_type: str = "default", **fields: Any) -> Any:
    """What an endpoint answers a request as AgentJet's client writes it: every field is there, most
    are empty."""
    body = {
        "env_type": env_type,
        "task_id": None,
        "instance_id": None,
        "messages": {},
        "params": {},
        **fields,
    }
    answer = httpx.post(f"{url}/{endpoint}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_requests_of_its_client_are_answered(counter: Path) -> None:  # noqa: F811
    with hosted(f"{counter}:Counter") as (url, instances):
        assert sent(url, "get_env_profile", "count", params={"split": "train"})["data"] == [
            "0",
            "1",
        ]
        created = sent(url, "create", "count", task_id="1", instance_id="a")["data"]
        assert created["state"] == [{"role": "user", "content": "at 1"}]
        step = sent(url, "step", instance_id="a", messages={"role": "assistant", "content": "2"})[
            "data"
        ]
        assert (step["state"][0]["content"], step["reward"], step["is_terminated"]) == (
            "at 3",
            0.5,
            False,
        )
        assert sent(url, "get_info", instance_id="a")["data"] == {"tools": ["add"]}
        assert sent(url, "evaluate", instance_id="a", params={"sparse": False})["data"] == 0.6
        assert sent(url, "release", instance_id="a")["success"] is True
        assert not instances.listed()
        wrong = httpx.post(
            f"{url}/create", json={"env_type": "other", "task_id": "1", "instance_id": "b"}
        )
        assert wrong.status_code == 404 and "hosts 'count', not 'other'" in wrong.text


THEIRS = """
import json, sys, types
sys.path.insert(0, sys.argv[1])
package = sys.modules["ajet"] = types.ModuleType("ajet")  # without what its `__init__` imports
package.__path__ = [sys.argv[1] + "/ajet"]
workflow = sys.modules["ajet.workflow"] = types.ModuleType("ajet.workflow")
workflow.WorkflowOutput = workflow.WorkflowTask = object
from ajet.task_judge.env_service_as_judge import EnvServiceJudge
from ajet.utils.env_service_client.env_client_ng import EnvClient

url, kind, actions = sys.argv[2], sys.argv[3], sys.argv[4:]
client = EnvClient(base_url=url)
ids = client.get_env_profile(kind, split="dev")
state = client.create_instance(kind, ids[0], "theirs")["state"]
steps = [client.step("theirs", {"role": "assistant", "content": action}) for action in actions]
info = client.get_tools_info("theirs") if kind == "count" else None

class Env:
    def evaluate(self, uuid, params):
        return client.evaluate(uuid, params=params)

task = types.SimpleNamespace(gym_env=Env(), episode_uuid="theirs")
reward, success = EnvServiceJudge(None).compute_reward(task, None)
steps = [[step["state"]["content"], step["reward"], step["is_terminated"]] for step in steps]
released = client.release_instance("theirs")
print(json.dumps([ids, state, steps, info, reward, success, released]))
"""


def theirs(url: str, kind: str, *actions: str) -> list[Any]:
    """What AgentJet's own client and judge come to."""
    folder = os.environ.get("AJET_TEST_AGENTJET")
    if folder is None:
        pytest.skip("AgentJet's wheel is not here; `just matrix --dependencies agentjet` gets it")
    command = [sys.executable, "-c", THEIRS, folder, url, kind, *actions]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def ours(url: str, kind: str, *actions: str) -> list[Any]:
    """The same by our client and judge."""
    ids = task_ids(url, kind, "dev")
    env = GymEnv(url, kind, ids[0], instance_id="ours")
    state = env.create()
    steps = [list(say(env, action)[:3]) for action in actions]
    info = env.info() if kind == "count" else None
    judge = load_object("ajet.task_judge.env_service_as_judge->EnvServiceJudge")(load_config())
    task = WorkflowTask(task=Task(main_query="q"), gym_env=env)
    reward, success = judge.compute_reward(task, WorkflowOutput())
    env.release()
    return [ids, state, steps, info, reward, success, True]


@pytest.mark.parametrize("actions", [(), ("1",), ("1", "2"), ("3", "3")])
def test_its_client_and_judge_and_ours_agree_on_our_service(
    counter: Path,  # noqa: F811
    actions: tuple[str, ...],
) -> None:
    with hosted(f"{counter}:Counter") as (url, instances):
        assert theirs(url, "count", *actions) == ours(url, "count", *actions)
        assert not instances.listed()


def test_they_agree_on_a_service_that_is_not_ours() -> None:
    service = Service()
    with serving(service.app) as url:
        for actions in [("go",), ("go", "on", "on")]:
            assert theirs(url, "else", *actions) == ours(url, "else", *actions)
    assert service.released == ["theirs", "ours"] * 2
