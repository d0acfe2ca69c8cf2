"""MCP servers as environments: one made with the package `mcp`, and one that breaks the
protocol."""

from __future__ import annotations

import asyncio
import base64
import importlib.metadata
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.environments.client import GymEnv
from ajet_sdk.environments.instances import Instances
from ajet_sdk.errors import EnvironmentUnavailable
from ajet_sdk.judges.load import load_judge
from ajet_sdk.types import Task
from tests.sdk.environments.test_service import hosted, job, run, say
from tests.waiting import is_running, until

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="needs mcp")
_SECOND = (
    find_spec("mcp") is not None and int(importlib.metadata.version("mcp").partition(".")[0]) >= 2
)
_IMPORT = (
    f"from mcp.server.{'mcpserver import MCPServer' if _SECOND else 'fastmcp import FastMCP'} as"
    " Server"
)

TILL = f"""
import os
from typing import Any
{_IMPORT}, Image

server = Server("till")
sold = []

@server.tool()
def sell(thing: str, price: float) -> str:
    "Sell a thing."
    sold.append(price)
    return f"{{thing}} of {{os.environ['AJET_TASK_ID']}} sold"

@server.tool()
def total() -> str:
    return str(sum(sold))

@server.tool()
def photograph() -> {"Any" if _SECOND else "Image"}:
    return Image(data=b"drawer", format="png")

@server.tool()
def broken() -> str:
    raise RuntimeError("the drawer is stuck")

@server.tool()
def die() -> str:
    os._exit(3)

@server.tool()
def open_safe() -> str:
    @server.tool()
    def take() -> str:
        return "taken"
    return "open"

server.run()
"""

RAW = """
import json, os, sys, time

def send(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

def text(text, **more):
    return {"content": [{"type": "text", "text": text}], **more}

def answer(name, asked):
    if name == "closed":
        os.close(1)
        sys.stdin.read()
    if name == "exit":
        sys.exit(0)
    if name == "hang":
        open(os.environ["AJET_TASK_ID"], "w").write(f"{os.getpid()}.")
        time.sleep(3600)
    codes = {"internal": -32603, "refused": -32602, "invalid": -32600}
    if name in codes:
        return send(id=asked, error={"code": codes[name], "message": name})
    results = {"senseless": {"content": 3}, "failed": text("no", isError=True)}
    return send(id=asked, result=results.get(name) or text(os.environ["AJET_TASK_ID"]))

PAGES = [["closed", "internal", "hang"], ["refused", "senseless", "exit"], ["invalid", "score", "failed"]]
print("a line of a log", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    method, params = asked["method"], asked.get("params") or {}
    if method == "initialize":
        about = {"serverInfo": {"name": "raw", "version": "1"}, "protocolVersion": params["protocolVersion"]}
        send(id=asked["id"], result={"capabilities": {}, **about})
    if method == "tools/list":
        page = int(params.get("cursor") or 0)
        tools = [{"name": name, "inputSchema": {"type": "object"}} for name in PAGES[page]]
        send(id=asked["id"], result={"tools": tools, **({"nextCursor": str(page + 1)} if page < 2 else {})})
    if method == "tools/call":
        answer(params["name"], asked["id"])
"""


def server_of(text: str, folder: Path) -> str:
    path = folder / "server.py"
    path.write_text(text)
    return f"mcp:{sys.executable} {path}"


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Instances]]:
    """A service of the server that breaks the protocol, whose score is the task's id."""
    target = server_of(RAW, tmp_path_factory.mktemp("mcp"))
    with hosted(target, arguments={"evaluate": "score"}, splits={"train": ["0"]}) as service:
        yield service


def created(service: tuple[str, Instances], task_id: str = "0") -> GymEnv:
    env = GymEnv(service[0], "count", task_id)
    assert env.create() == []
    return env


def call(name: Any, arguments: Any = "") -> dict[str, Any]:
    given = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": str(name), "type": "function", "function": {"name": name, "arguments": given}}


def acting(env: GymEnv, *calls: Any) -> list[str]:
    """What the calls of one message are answered with."""
    _, reward, ended, info = env.step(
        {"role": "assistant", "content": None, "tool_calls": [*calls]}
    )
    assert (reward, ended) == (0.0, False)
    return [message["content"] for message in info["messages"]]


@pytest.mark.slow
def test_a_servers_tools(tmp_path: Path) -> None:
    """Of the package's own server; what a tool answers, and what the agent does wrong, are
    observations."""
    with hosted(server_of(TILL, tmp_path), arguments={"evaluate": "total"}) as (url, instances):
        env, other = GymEnv(url, "count", "monday"), GymEnv(url, "count", "tuesday")
        assert (env.create(), other.create()) == ([], [])
        tools = {tool["function"]["name"]: tool["function"] for tool in env.info()["tools"]}
        assert sorted(tools) == ["broken", "die", "open_safe", "photograph", "sell"]
        [[photo]] = acting(env, call("photograph"))
        data = base64.b64encode(b"drawer").decode()
        assert photo == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        assert set(tools["sell"]["parameters"]["properties"]) == {"thing", "price"}
        assert acting(env, call("sell", {"thing": "tea", "price": 2})) == ["tea of monday sold"]
        assert (
            say(env, '{"name": "sell", "arguments": {"thing": "cake", "price": 3}}')[0]
            == "cake of monday sold"
        )
        broken, unfit = acting(env, call("broken"), call("sell", {"thing": "tea"}))
        assert "broken" in broken and "price" in unfit
        assert acting(env, call("take"))[0].startswith("There is no tool 'take'. Tools: ")
        assert acting(env, call("open_safe"), call("take")) == ["open", "taken"]
        assert acting(env, call("total"))[0].startswith("There is no tool 'total'")
        assert (env.evaluate(), other.evaluate()) == (5.0, 0.0)  # a server each
        with pytest.raises(EnvironmentUnavailable, match="failed in a call of die"):
            acting(env, call("die"))
        env.release(), other.release()
        assert not instances.listed()


def test_the_agents_mistakes_are_observations(raw: tuple[str, Instances]) -> None:
    env = created(raw)
    deep = "[" * 100_000
    nothing: list[Any] = [
        call(None),
        call(3),
        call("nothing"),
        {},
        {"function": "failed"},
        None,
        "failed",
    ]
    answers = acting(env, *nothing)
    assert len(answers) == len(nothing) and all(
        text.startswith("There is no tool") for text in answers
    )
    wrong = [
        "no json",
        "[1]",
        "3",
        deep,
        '{"thing": "\\ud800", "price": 1}',
        '{"thing": "tea", "price": NaN}',
    ]
    assert all(
        "not a JSON object" in text
        for text in acting(env, *(call("failed", given) for given in wrong))
    )
    assert acting(env, call("failed"), call("refused")) == ["no", "refused"]
    for text in [
        deep,
        '{"name": ' + deep,
        '{"name": 3}',
        '{"name": "nothing"}',
        "null",
        "3",
        "Done.",
    ]:
        observation, reward, ended, _ = say(env, text)
        assert ("Call a tool" in observation or "no tool" in observation) and (reward, ended) == (
            0.0,
            False,
        )
    assert len(env.info()["tools"]) == 8  # of three pages
    env.release()


SPELLINGS = (
    "score",
    " score",
    "score ",
    "score\n",
    "SCORE",
    "ｓｃｏｒｅ",
    "score\u200b",
    "sc\u043ere",
    "raw.score",
    "/score",
)


def test_the_agent_cannot_call_the_tool_of_the_score(raw: tuple[str, Instances]) -> None:
    env = created(raw, "0.75")
    for name in SPELLINGS:
        calls = [call(name), {"function": {"name": name, "arguments": {}}}, call(name, {"of": 1})]
        texts = [*acting(env, *calls), say(env, json.dumps({"name": name}))[0]]
        assert all(text.startswith("There is no tool") and "0.75" not in text for text in texts)
        assert "score" not in texts[0].partition("Tools:")[2]
    assert env.evaluate() == 0.75
    env.release()


@pytest.mark.slow
def test_a_scoring_tool_that_is_not_there_is_refused_at_the_creation(tmp_path: Path) -> None:
    with hosted(server_of(RAW, tmp_path), arguments={"evaluate": "scores"}) as service:
        with pytest.raises(
            EnvironmentUnavailable, match=r"evaluate=scores: the server has no tool .*score"
        ):
            created(service)
        assert not service[1].listed()


@pytest.mark.parametrize("tool", ["closed", "exit", "internal", "invalid", "senseless"])
def test_what_the_server_does_wrong_is_its_fault(raw: tuple[str, Instances], tool: str) -> None:
    env = created(raw)
    with pytest.raises(EnvironmentUnavailable, match="step of task '0'"):
        acting(env, call(tool))
    with pytest.raises(EnvironmentUnavailable):
        env.evaluate()
    with pytest.raises(EnvironmentUnavailable, match="was stopped: step of task '0'"):
        GymEnv(
            raw[0], "count", "0", instance_id=env.instance_id
        ).evaluate()  # the service knows it too
    assert not raw[1].listed()


@pytest.mark.parametrize("score", ["nan", "inf", "-Infinity", "-", "one", "0.5 of 1", "null"])
def test_a_score_that_is_no_number_is_no_score(raw: tuple[str, Instances], score: str) -> None:
    env = created(raw, score)
    with pytest.raises(EnvironmentUnavailable, match="evaluate of task"):
        env.evaluate()
    env.release()


def test_a_server_that_hangs_ends_with_its_instance(
    raw: tuple[str, Instances], tmp_path: Path
) -> None:
    path = tmp_path / "pid"
    env = created(raw, str(path))
    failed: list[Exception] = []

    def hang() -> None:
        try:
            acting(env, call("hang"))
        except EnvironmentUnavailable as error:
            failed.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    until(lambda: path.exists() and path.read_text().endswith("."))
    os.kill(raw[1].listed()[0]["pid"], signal.SIGKILL)
    until(lambda: not is_running(int(path.read_text()[:-1])))
    thread.join()
    assert "its process died" in str(failed[0])


def swallowing(tool: str, then: Callable[[], Any]) -> Any:
    """An agent that takes an exception of its environment for an answer, as frameworks do with a
    tool's."""

    @ajet.workflow
    async def act(model: ajet.Model, env: GymEnv) -> Any:
        try:
            [text] = await asyncio.to_thread(acting, env, call(tool))
        except Exception as error:  # noqa: BLE001
            text = str(error)
        await model.chat([{"role": "user", "content": f"The tool said: {text}"}])
        return then()

    return act


@pytest.mark.slow
@pytest.mark.parametrize(
    "then", [lambda: None, lambda: ajet.Reward(value=0.0)], ids=["judge", "own reward"]
)
def test_a_server_that_dies_is_infrastructure_whatever_the_agent_makes_of_it(
    raw: tuple[str, Instances], then: Callable[[], Any]
) -> None:
    path = "ajet.task_judge.env_service_as_judge->EnvServiceJudge"
    judge = load_judge(load_config(values={"task_judge": {"judge_protocol": path}}))
    config = job(raw[0], max_retries=0)
    (episode,) = run(swallowing("exit", then), judge, config, [Task(task_id="0")])
    assert (episode.status, episode.cause, episode.infrastructure, episode.rewards) == (
        "failed",
        "EnvironmentUnavailable",
        True,
        (),
    )
    (episode,) = run(swallowing("failed", then), judge, config, [Task(task_id="0")])
    assert (episode.status, episode.reward) == ("succeeded", 0.0)  # the tool's error is its answer
    assert not raw[1].listed()
