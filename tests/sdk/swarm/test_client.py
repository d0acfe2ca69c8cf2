"""The client of a swarm: claims, ends, failures, and servers that are away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import yaml

import ajet
from ajet_sdk.errors import (
    ConfigError,
    EngineUnavailable,
    EpisodeOver,
    HeldOutTask,
    SwarmError,
    SwarmFinished,
    SwarmKeyRefused,
    SwarmOffline,
    SwarmUnavailable,
)
from ajet_sdk.swarm.episodes import AsyncEpisode, Episode
from ajet_sdk.swarm.messages import Abort, Receipt
from ajet_sdk.swarm.routes import Keys
from ajet_sdk.types import Task
from tests.sdk.swarm.faulty_proxy import FaultyProxy
from tests.sdk.swarm.scripted_server import ScriptedSwarm
from tests.waiting import until


def ask(episode: Episode | AsyncEpisode, text: str = "hello") -> str:
    """A call of the episode's model, as a program without ajet makes it."""
    body = {"model": episode.model, "messages": [{"role": "user", "content": text}]}
    reply = httpx.post(
        f"{episode.base_url}/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {episode.api_key}"},
        timeout=30,
    )
    reply.raise_for_status()
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


def run_sync(swarm: ajet.SwarmClient, act: Callable[[Episode], object], **claim: Any) -> Receipt:
    """Run `act` in a sync block, and end it with what it returns."""
    with swarm.episode(**claim) as episode:
        return episode.end(act(episode))


def run_async(
    swarm: ajet.SwarmClient, act: Callable[[AsyncEpisode], object], **claim: Any
) -> Receipt:
    """The same in an async block of a client for sync programs."""

    async def run() -> Receipt:
        async with swarm.episode(**claim) as episode:
            return await episode.end(await asyncio.to_thread(act, episode))

    return asyncio.run(run())


BOTH = pytest.mark.parametrize("run", [run_sync, run_async])


@BOTH
def test_an_episode_goes_from_its_claim_to_its_receipt(run: Any, server: ScriptedSwarm) -> None:
    swarm = ajet.SwarmClient(server.url)
    seen: list[Any] = []

    def act(episode: Any) -> float:
        seen.append(episode)
        assert ask(episode) == "ok"
        return 0.5

    receipt = run(swarm, act, task={"main_query": "Say yes.", "task_id": "yes"})
    [episode] = seen
    assert episode.step == 1
    assert episode.policy_version == 0
    assert episode.task == Task(main_query="Say yes.", task_id="yes")
    assert (receipt.episode_id, receipt.state, receipt.reward) == (episode.id, "ended", 0.5)
    assert receipt.pending > 0 and receipt.trained == 0
    assert swarm.receipt(episode.id) == receipt
    assert [e.reward for e in server.recorded()] == [0.5]


@BOTH
def test_an_exception_aborts_the_episode_with_its_cause(run: Any, server: ScriptedSwarm) -> None:
    swarm = ajet.SwarmClient(server.url)

    def act(episode: Any) -> float:
        ask(episode)
        raise KeyError("no such tool")

    with pytest.raises(KeyError):
        run(swarm, act, task=Task(task_id="t"))
    [failed] = server.recorded()  # a failure of the agent is an attempt
    assert (failed.status, failed.cause, failed.infrastructure) == ("failed", "KeyError", False)
    assert "no such tool" in (failed.error or "")
    assert failed.reward is None


@BOTH
def test_faults_of_the_infrastructure_free_the_place(run: Any, server: ScriptedSwarm) -> None:
    swarm = ajet.SwarmClient(server.url)

    def act(episode: Any) -> float:
        ask(episode)
        raise EngineUnavailable("my own model is down")

    with pytest.raises(EngineUnavailable):
        run(swarm, act, task=Task(task_id="t"))
    assert server.recorded() == []
    assert server.collection.pool.groups == []


@BOTH
def test_a_failed_call_of_the_model_is_the_cause_and_not_what_the_agent_made_of_it(
    run: Any, tmp_path: Path
) -> None:
    def broken(asked: Any) -> str:
        raise EngineUnavailable("the card fell out")

    with ScriptedSwarm(tmp_path, broken) as server:
        swarm = ajet.SwarmClient(server.url)
        ids: list[str] = []

        def act(episode: Any) -> float:
            ids.append(episode.id)
            ask(episode)
            return 1.0

        with pytest.raises(httpx.HTTPStatusError):
            run(swarm, act, task=Task(task_id="t"))
        receipt = swarm.receipt(ids[0])
        assert (receipt.state, receipt.cause) == ("aborted", "EngineUnavailable")


def test_an_interrupted_block_is_aborted_and_not_a_failed_attempt(server: ScriptedSwarm) -> None:
    swarm = ajet.SwarmClient(server.url)
    with pytest.raises(KeyboardInterrupt), swarm.episode(Task(task_id="t")) as episode:
        ask(episode)
        raise KeyboardInterrupt
    receipt = swarm.receipt(episode.id)
    assert (receipt.state, receipt.status, receipt.cause) == ("aborted", "aborted", "Aborted")


def test_a_cancelled_task_aborts_its_episode(server: ScriptedSwarm) -> None:
    swarm = ajet.AsyncSwarmClient(server.url)

    async def main() -> Receipt:
        claimed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            async with swarm.episode(Task(task_id="t")) as episode:
                claimed.set_result(episode.id)
                await asyncio.sleep(3600)

        task = asyncio.create_task(work())
        episode_id = await claimed
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await swarm.receipt(episode_id)

    assert asyncio.run(main()).state == "aborted"


@BOTH
def test_a_block_without_an_end_is_aborted(run: Any, server: ScriptedSwarm) -> None:
    swarm = ajet.SwarmClient(server.url)
    with swarm.episode(Task(task_id="t")) as episode:
        ask(episode)
    receipt = swarm.receipt(episode.id)
    assert (receipt.state, receipt.cause) == ("aborted", "NoReward")
    assert server.recorded() == []


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), 1e308, "1", None, [], {}, [1.0, "1"], object()]
)
def test_what_is_no_reward_is_never_trained(reward: Any, server: ScriptedSwarm) -> None:
    swarm = ajet.SwarmClient(server.url)
    with pytest.raises(SwarmError) as raised, swarm.episode(Task(task_id="t")) as episode:
        ask(episode)
        episode.end(reward)
    assert raised.value.code == "bad_reward"
    assert [e.reward for e in server.recorded()] == [None]


@pytest.mark.parametrize(
    ("reward", "total", "is_success"),
    [
        (1, 1.0, None),
        (True, 1.0, True),
        (np.float32(0.5), 0.5, None),
        (np.bool_(False), 0.0, False),
        (np.array(2), 2.0, None),
        ([0.25, 0.5], 0.75, None),
        ({"default": 0.5}, 0.5, None),
        (ajet.Reward(name="style", value=2.0, weight=0.5), 1.0, None),
        ([ajet.Reward(value=1.0), ajet.Reward(name="length", value=-0.5)], 0.5, None),
    ],
)
def test_rewards_of_every_form_arrive(
    reward: Any, total: float, is_success: bool | None, server: ScriptedSwarm
) -> None:
    with ajet.SwarmClient(server.url).episode(Task(task_id="t")) as episode:
        ask(episode)
        episode.end(reward, metrics={"turns": 3, "bad": float("nan")}, output={"answer": "ok"})
    [ended] = server.recorded()
    assert (ended.reward, ended.is_success) == (total, is_success)
    assert (ended.metrics["turns"], ended.output) == (3.0, {"answer": "ok"})
    assert "bad" not in ended.metrics


def test_a_refused_end_leaves_the_episode_open(server: ScriptedSwarm) -> None:
    with ajet.SwarmClient(server.url).episode(Task(task_id="t")) as episode:
        with pytest.raises(SwarmError) as refused:
            episode.end(1.0)
        assert refused.value.code == "no_calls"
        ask(episode)
        with pytest.raises(SwarmError) as refused:
            episode.end({"nobody": 1.0})
        assert refused.value.code == "bad_reward"
        episode.end(1.0)
    assert [e.reward for e in server.recorded()] == [1.0]


def test_handles_of_agents(server: ScriptedSwarm) -> None:
    with ajet.SwarmClient(server.url).episode(Task(task_id="t")) as episode:
        for name, trainable in (("planner", True), ("critic", False)):
            model = episode.agent(name, trainable=trainable)
            client = model.openai()
            client.chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": name}]
            )
        recorded = episode.calls()
        assert [(c.agent, c.trainable) for c in recorded.calls] == [
            ("planner", True),
            ("critic", False),
        ]
        receipt = episode.end({"planner": 1.0, "critic": 0.0})
    assert len(receipt.calls) == 1  # the critic's tokens are nobody's to train


# Refusals


def test_each_refusal_has_its_error(tmp_path: Path) -> None:
    held_out = Task(main_query="What is 2 + 2?", task_id="held")
    keys = Keys(owner="owner-key", worker="worker-key")
    with ScriptedSwarm(tmp_path, keys=keys, val=[held_out]) as server:
        with pytest.raises(SwarmKeyRefused), ajet.SwarmClient(server.url, "wrong").episode():
            pass
        worker = ajet.SwarmClient(server.url, "worker-key")
        with pytest.raises(SwarmKeyRefused) as refused:
            worker.start()
        assert (refused.value.code, refused.value.status) == ("forbidden", 403)
        with pytest.raises(HeldOutTask), worker.episode(held_out):
            pass
        with worker.episode(Task(task_id="t")) as episode:
            server.run(
                server.collection.attempts.abandon(
                    server.collection.attempts.open[episode.id], "idle"
                )
            )
            with pytest.raises(EpisodeOver):
                episode.end(1.0)
        with pytest.raises(SwarmError) as missing:
            worker.receipt("no-such-episode")
        assert missing.value.status == 404
        server.finish()
        with pytest.raises(SwarmFinished), worker.episode(Task(task_id="t")):
            pass


def test_the_key_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedSwarm(tmp_path, keys=Keys("owner-key", "worker-key")) as server:
        monkeypatch.setenv("AJET_SWARM_URL", server.url)
        monkeypatch.setenv("AJET_SWARM_KEY", "worker-key")
        assert ajet.SwarmClient().status().state == "collecting"


@pytest.mark.slow
def test_a_server_that_stops_to_go_on_later_is_waited_for(tmp_path: Path) -> None:
    with ScriptedSwarm(tmp_path) as server:
        server.run(server.collection.close("the server was stopped", will_resume=True))
        with pytest.raises(SwarmOffline), ajet.SwarmClient(server.url, patience=0.1).episode():
            pass


@pytest.mark.parametrize("will_resume", [True, False])
def test_a_claim_that_waits_for_a_place_is_told_that_the_server_stops(
    tmp_path: Path, will_resume: bool
) -> None:
    with ScriptedSwarm(tmp_path, groups=1) as server:
        swarm = ajet.SwarmClient(server.url, patience=0)
        with swarm.episode(Task(task_id="a")), ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(swarm.episode(Task(task_id="b"), wait=None).__enter__)
            [claim] = until(lambda: list(server.collection._waiting))
            server.run(server.collection.close("stopped", will_resume=will_resume))
            assert claim.turn.done(), "at once, and not when it asks again"
            with pytest.raises(SwarmOffline if will_resume else SwarmFinished):
                waiting.result(60)


def test_an_offline_server_is_waited_for_and_then_reported(tmp_path: Path) -> None:
    with ScriptedSwarm(tmp_path, online=False) as server:
        with pytest.raises(SwarmOffline), ajet.SwarmClient(server.url, patience=0.1).episode():
            pass
        owner = ajet.SwarmClient(server.url)
        owner.configure({"rollout": {"num_repeat": 3}})
        file = tmp_path / "job.yaml"
        file.write_text("ajet: {rollout: {num_repeat: 4}}  # four")
        owner.configure(file)
        owner.configure(ajet.Config(rollout={"num_repeat": 5}))
        repeats = [yaml.safe_load(text)["ajet"]["rollout"] for text in server.owner.configs]
        assert repeats == [{"num_repeat": 3}, {"num_repeat": 4}, {"num_repeat": 5}]
        with pytest.raises(ConfigError):
            owner.configure(tmp_path / "missing.yaml")
        assert owner.start().state == "collecting"
        assert owner.stop().state == "offline"


@pytest.mark.parametrize("url", ["", "ftp://there", "http://", "http://there?x=1"])
def test_what_is_no_url_is_refused_before_any_request(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AJET_SWARM_URL", raising=False)
    with pytest.raises(ConfigError):
        ajet.SwarmClient(url)


@pytest.mark.parametrize("form", ["{0}", "{0}/", "{0}/swarm/v1", "{1}"])
def test_forms_of_a_url(form: str, server: ScriptedSwarm) -> None:
    url = form.format(server.url, server.url.removeprefix("http://"))
    assert ajet.SwarmClient(url).url == server.url


def test_a_full_step_is_waited_for_as_long_as_the_caller_wants(tmp_path: Path) -> None:
    with ScriptedSwarm(tmp_path, groups=1) as server:
        swarm = ajet.SwarmClient(server.url)
        run_sync(swarm, lambda e: len(ask(e)), task=Task(task_id="a"))
        with swarm.episode(Task(task_id="a")) as episode:
            ask(episode)
            with pytest.raises(SwarmUnavailable) as refused:
                swarm.episode(Task(task_id="b"), wait=0).__enter__()
            assert refused.value.code == "group_full"
            episode.end(1.0)
        later = ThreadPoolExecutor(1).submit(run_sync, swarm, lambda e: len(ask(e)), task=Task())
        server.end_step()
        server.next_step()
        assert later.result(timeout=60).step == 2


# Servers and networks with faults


def test_lost_answers_and_duplicates_change_nothing(server: ScriptedSwarm) -> None:
    """Each request of an episode is lost on its way, answered into the void, or sent twice."""
    with FaultyProxy(server.url) as proxy:
        for fault in ("refuse", "lose_answer", "twice"):
            proxy.faults = [fault] * 2
            swarm = ajet.SwarmClient(proxy.url)
            with swarm.episode(Task(task_id=fault)) as episode:
                ask(episode)
                proxy.faults = [fault] * 2
                receipt = episode.end(1.0)
            assert receipt.state == "ended"
    rewards = Counter(e.task.task_id for e in server.recorded())
    assert rewards == {"refuse": 1, "lose_answer": 1, "twice": 1}
    assert server.collection.attempts.open == {}


def test_a_server_that_restarts_is_waited_for(tmp_path: Path) -> None:
    with ScriptedSwarm(tmp_path / "first") as first:
        port = first.gateway.port
        swarm = ajet.SwarmClient(first.url)
        assert swarm.status().state == "collecting"
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(run_sync, swarm, lambda e: len(ask(e)), task=Task())
        with ScriptedSwarm(tmp_path / "second", port=port) as second:
            assert later.result(timeout=60).state == "ended"
            assert len(second.recorded()) == 1


def test_a_server_that_stays_away_is_reported_after_the_time_limit(tmp_path: Path) -> None:
    with ScriptedSwarm(tmp_path) as server:
        url = server.url
    with pytest.raises(SwarmUnavailable) as away:
        ajet.SwarmClient(url, patience=0.3).status()
    assert away.value.infrastructure


def test_a_block_ends_although_the_server_is_away(tmp_path: Path) -> None:
    with ScriptedSwarm(tmp_path) as server:
        swarm = ajet.SwarmClient(server.url, patience=0.2)
        block = swarm.episode(Task(task_id="t"))
        episode = block.__enter__()
        ask(episode)
    error = KeyError("my own")
    assert (
        block.__exit__(KeyError, error, None) is None
    )  # the agent's error is what the caller sees


def test_an_address_that_is_no_server(server: ScriptedSwarm) -> None:
    with FaultyProxy(server.url) as proxy:
        proxy.faults = ["not_found"]
        with pytest.raises(SwarmError) as refused:
            ajet.SwarmClient(proxy.url).status()
        assert refused.value.status == 404
        proxy.faults = ["web_page"]
        with pytest.raises(SwarmError) as refused:
            ajet.SwarmClient(proxy.url).status()
        assert refused.value.code == "not_a_swarm"


def test_the_address_of_calls_is_the_one_that_the_client_uses(server: ScriptedSwarm) -> None:
    """A proxy with a path of its own, which the server cannot know."""
    with FaultyProxy(server.url, prefix="/training") as proxy:
        swarm = ajet.SwarmClient(f"{proxy.url}/training")
        with swarm.episode(Task(task_id="t")) as episode:
            assert episode.base_url.startswith(f"{proxy.url}/training/episodes/")
            assert ask(episode) == "ok"
            model = episode.agent("planner")
            assert model.base_url.startswith(f"{proxy.url}/training/episodes/")
            episode.end(1.0)


def test_threads_never_exchange_rewards(tmp_path: Path) -> None:
    with ScriptedSwarm(tmp_path, groups=8, attempts=8) as server:
        swarm = ajet.SwarmClient(server.url)
        barrier = threading.Barrier(16)

        def attempt(number: int) -> tuple[str, float]:
            if number < 16:
                barrier.wait()
            with swarm.episode(Task(task_id=f"{number % 8}")) as episode:
                ask(episode, str(number))
                episode.end(float(number))
                return episode.id, float(number)

        with ThreadPoolExecutor(16) as pool:
            sent = dict(pool.map(attempt, range(64)))
        recorded = {e.episode_id: e for e in server.recorded()}
        assert {key: e.reward for key, e in recorded.items()} == sent
        for episode in recorded.values():
            [call] = episode.calls
            assert call.request["messages"][0]["content"] == f"{episode.reward:.0f}"


def test_events_go_on_over_lost_connections(server: ScriptedSwarm) -> None:
    with FaultyProxy(server.url) as proxy:
        swarm = ajet.SwarmClient(proxy.url)
        events = swarm.events()
        kinds = [next(events).kind, next(events).kind]
        with swarm.episode(Task(task_id="t")) as episode:
            ask(episode)
            episode.end(1.0)
        proxy.drop_connections()
        kinds += [next(events).kind, next(events).kind]
        assert set(kinds) == {"step", "state", "claimed", "ended"}
        server.finish()
        rest = list(events)
        assert rest[-1].data == {"state": "finished"}
        ids = [event.id for event in rest]
        assert ids == sorted(set(ids)) and ids[0] == 5


def test_events_and_status_can_be_awaited(server: ScriptedSwarm) -> None:
    async def main() -> None:
        async with ajet.AsyncSwarmClient(server.url, name="laptop") as swarm:
            async with swarm.episode(Task(task_id="t")) as episode:
                status = await swarm.status()
                assert [o.episode_id for o in status.open] == [episode.id]
                assert [c.client_name for c in status.clients] == ["laptop"]
                await asyncio.to_thread(ask, episode)
                await episode.end(1.0)
            seen = []
            async for event in swarm.events():
                seen.append(event.kind)
                if event.kind == "ended":
                    break
            assert seen[-2:] == ["claimed", "ended"]
            assert not (await swarm.agree()).accepted

    asyncio.run(main())


def test_who_looks_at_an_episode_keeps_it_open(server: ScriptedSwarm) -> None:
    swarm = ajet.SwarmClient(server.url)
    with swarm.episode(Task(task_id="t"), idle_timeout=1.0) as episode:
        ask(episode)
        began = time.monotonic()
        while time.monotonic() < began + 2.5:
            assert episode.receipt().state == "open"
        episode.end(1.0)
    with swarm.episode(Task(task_id="t"), idle_timeout=0.2) as episode:
        ask(episode)
        assert until(lambda: swarm.receipt(episode.id).state == "abandoned")
        with pytest.raises(EpisodeOver):
            episode.end(1.0)


def test_openai_clients_use_an_episode(server: ScriptedSwarm) -> None:
    with ajet.SwarmClient(server.url).episode(Task(task_id="t")) as episode:
        client = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key)
        client.chat.completions.create(
            model=episode.model, messages=[{"role": "user", "content": "hello"}]
        )
        episode.end(1.0)
    assert until(server.recorded)


def test_the_server_knows_why_an_agent_gave_up(server: ScriptedSwarm) -> None:
    swarm = ajet.SwarmClient(server.url)
    with swarm.episode(Task(task_id="t")) as episode:
        ask(episode)
        receipt = episode.abort("the browser crashed", cause="BrowserGone", infrastructure=True)
    assert (receipt.state, receipt.cause) == ("aborted", "BrowserGone")
    assert Abort(reason="x").status == "aborted"
