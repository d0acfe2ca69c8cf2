"""Processes that an agent starts: they find the policy by the environment, or by the context that
goes along."""

from __future__ import annotations

import asyncio
import contextvars
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import httpx
import pytest

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.access import locate
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway

pytestmark = pytest.mark.slow

NOWHERE = "http://model.invalid/v1"


def body(text: str) -> dict[str, Any]:
    return {"model": "gpt", "messages": [{"role": "user", "content": text}]}


def ask_by_environment(text: str) -> str:
    """What any client does that reads the environment; module level, so that it can be pickled."""
    headers = {
        "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "content-type": "application/json",
    }
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urlopen(Request(url, json.dumps(body(text)).encode(), headers), timeout=300) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def ask_anywhere(text: str, url: str = NOWHERE, key: str = "k") -> str:
    """A client with a base URL of its own: only the context can reroute it."""
    headers = {"authorization": f"Bearer {key}"}
    response = httpx.post(f"{url}/chat/completions", json=body(text), headers=headers, timeout=300)
    return str(response.json()["choices"][0]["message"]["content"])


def ask_and_tell(how: Callable[[str], str], text: str, queue: Any) -> None:
    queue.put(how(text))


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    with installed(), Gateway() as running:
        yield running


def opened(gateway: Gateway, episode_id: str = "one", **spec: Any) -> OpenEpisode:
    engine = ScriptedEngine(lambda ask: "policy " + ask.body["messages"][0]["content"])
    return gateway.open(EpisodeSpec(episode_id, engine, **spec))


def run_in(episode: OpenEpisode, function: Callable[[], Any]) -> Any:
    def call() -> Any:
        current_episode.set(episode.active)
        return function()

    return contextvars.copy_context().run(call)


PRINT = "import os; print(os.environ.get('OPENAI_BASE_URL'), os.environ.get('OPENAI_API_KEY'))"


def printed(**arguments: Any) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PRINT], capture_output=True, text=True, check=True, **arguments
    )
    return done.stdout.split()


def is_of_a_child(url: str, episode: OpenEpisode) -> bool:
    """Whether an address is that of the episode's policy, for one child process."""
    place = locate(urlsplit(f"{url}/chat/completions").path, "", {})
    return (place.episode, place.agent.agent, bool(place.agent.child)) == (
        episode.episode_id,
        "default",
        True,
    )


def test_subprocesses_are_given_the_episode_and_nothing_else_changes(gateway: Gateway) -> None:
    episode = opened(gateway)
    url, key = run_in(episode, printed)
    assert is_of_a_child(url, episode) and key == episode.active.api_key
    other_url, key = run_in(episode, lambda: printed(env={"PATH": ""}))
    assert is_of_a_child(other_url, episode) and key == episode.active.api_key
    assert url != other_url, "each child process has its own"
    assert printed() == ["None", "sk-mine"] and os.environ["OPENAI_API_KEY"] == "sk-mine"
    handle = opened(gateway, "handle", uses_handle=True)
    assert run_in(handle, printed) == ["None", "sk-mine"]

    async def judged() -> list[str]:
        async with episode.judging():
            return printed()

    assert asyncio.run(judged()) == ["None", "sk-mine"]


def test_an_asyncio_subprocess_is_given_the_episode(gateway: Gateway) -> None:
    episode = opened(gateway)

    async def agent() -> str:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PRINT, stdout=pipe)
        return (await process.communicate())[0].decode()

    assert is_of_a_child(run_in(episode, lambda: asyncio.run(agent())).split()[0], episode)


def test_a_program_that_reads_the_environment_is_answered_by_the_policy(gateway: Gateway) -> None:
    episode = opened(gateway)
    program = (
        "import openai; c = openai.OpenAI();print(c.chat.completions.create(model='m',"
        " messages=[{'role': 'user', 'content': 'x'}]).choices[0].message)"
    )
    done = run_in(
        episode,
        lambda: subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False
        ),
    )
    assert "policy x" in done.stdout, done.stderr
    assert [call.error for call in episode.calls] == [None]


@pytest.mark.parametrize(
    ("method", "how"),
    [("spawn", ask_by_environment), ("forkserver", ask_by_environment), ("fork", ask_anywhere)],
)
def test_multiprocessing_children_find_the_policy(
    gateway: Gateway, method: str, how: Callable[[str], str]
) -> None:
    """A spawned child is given the environment, a forked one the context; a fork server serves
    several episodes."""
    context: Any = multiprocessing.get_context(method)

    def agent() -> str:
        queue = context.Queue()
        child = context.Process(target=ask_and_tell, args=(how, "from a child", queue))
        child.start()
        said = queue.get(timeout=300)
        child.join()
        return str(said)

    for episode in [
        opened(gateway, name) for name in (("one", "two") if method == "forkserver" else ("one",))
    ]:
        assert run_in(episode, agent) == "policy from a child"
        assert [call.error for call in episode.calls] == [None]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_process_pool_serves_each_episode_as_its_own(gateway: Gateway, method: str) -> None:
    one, two = opened(gateway, "one"), opened(gateway, "two")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        assert run_in(one, lambda: pool.submit(ask_anywhere, "first").result()) == "policy first"
        assert (
            run_in(two, lambda: pool.submit(ask_by_environment, "second").result())
            == "policy second"
        )
        assert pool.submit(os.getenv, "OPENAI_BASE_URL").result() is None
    for episode, text in ((one, "first"), (two, "second")):
        assert [call.request["messages"][0]["content"] for call in episode.calls] == [text]


def test_a_forked_child_reports_what_passes_through(gateway: Gateway) -> None:
    with Gateway() as other:
        elsewhere = opened(other, "elsewhere")
        episode = opened(gateway, policy_models=frozenset({"the-policy"}))

        def agent() -> str:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
                return pool.submit(
                    ask_anywhere, "out", f"{elsewhere.url}/v1", elsewhere.handle_key
                ).result()

        assert run_in(episode, agent) == "policy out"
        (call,) = episode.calls
        assert (call.trainable, call.error, call.model) == (False, None, "gpt")
        assert call.response["choices"][0]["message"]["content"] == "policy out"
