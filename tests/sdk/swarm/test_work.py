"""An agent that runs here while a swarm's server answers and trains it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import ajet
from ajet_sdk.config.config import Config
from ajet_sdk.engines.loop_calls import in_thread
from ajet_sdk.errors import (
    ConfigError,
    ContextOverflow,
    EngineUnavailable,
    SwarmKeyRefused,
    TrainingError,
)
from ajet_sdk.swarm.client import AsyncSwarmClient
from ajet_sdk.swarm.routes import Keys
from ajet_sdk.swarm.work import Work, WorkSummary
from ajet_sdk.swarm.worker import Worker
from ajet_sdk.swarm_worker import work
from ajet_sdk.types import Episode, Task
from tests.sdk.swarm.faulty_proxy import FaultyProxy
from tests.sdk.swarm.scripted_server import ScriptedSwarm
from tests.serving import answering, serving
from tests.waiting import until_async

TASKS = [Task(main_query=f"Say {word}.", task_id=word) for word in ("yes", "no", "maybe")]


@ajet.workflow
async def captured(main_query: str) -> str:
    client = openai.AsyncOpenAI()
    messages: Any = [{"role": "user", "content": main_query}]
    reply = await client.chat.completions.create(model="gpt-4o", messages=messages)
    return reply.choices[0].message.content or ""


@ajet.workflow
async def by_handle(main_query: str, model: ajet.Model) -> str:
    reply = await model.chat([{"role": "user", "content": main_query}])
    return reply.content or ""


@ajet.workflow
def in_threads(main_query: str) -> str:
    def ask(number: int) -> str:
        client = openai.OpenAI()
        messages: Any = [{"role": "user", "content": f"{main_query} {number}"}]
        reply = client.chat.completions.create(model="gpt-4o", messages=messages)
        return reply.choices[0].message.content or ""

    with ThreadPoolExecutor(3) as pool:
        return " ".join(pool.map(ask, range(3)))


@ajet.judge
def is_ok(output: str) -> bool:
    return "ok" in output


def config(**rollout: Any) -> Config:
    return Config(rollout={"max_retries": 0, **rollout})


def begin(
    server: ScriptedSwarm,
    workflow: Any,
    judge: Any = is_ok,
    *,
    tasks: Sequence[Task] | None = TASKS,
    url: str | None = None,
    rollout: dict[str, Any] | None = None,
    **options: Any,
) -> Future[WorkSummary]:
    """Begin to work in a thread."""
    given = config(**(rollout or {}))

    def run() -> WorkSummary:
        return work(
            given,
            url or server.url,
            workflow=workflow,
            judge=judge,
            tasks=tasks,
            say=lambda line: None,
            **options,
        )

    return in_thread(run, "worker")


def work_a_step(server: ScriptedSwarm, workflow: Any, judge: Any = is_ok, **options: Any) -> Any:
    """The episodes of a step, and what the worker says of its work after the training."""
    working = begin(server, workflow, judge, **options)
    episodes = server.end_step()
    server.finish()
    return episodes, working.result(timeout=60)


@pytest.mark.parametrize("workflow", [captured, by_handle, in_threads], ids=lambda w: w.__name__)
def test_agents_run_here_without_a_change(workflow: Any, server: ScriptedSwarm) -> None:
    episodes, summary = work_a_step(server, workflow)
    assert len(episodes) == 4  # two groups of two, as the server's config says
    for episode in episodes:
        assert (episode.status, episode.reward, episode.is_success) == ("succeeded", 1.0, True)
        assert episode.output in ("ok", "ok ok ok")
        assert {c.phase for c in episode.calls} == {"rollout"}
        assert all(c.trainable and c.output_ids is not None for c in episode.calls)
    assert len(summary.finished) >= 4
    assert summary.reward == 1.0
    assert {e.episode_id for e in episodes} <= {e.episode_id for e in summary.episodes}


def test_the_servers_tasks_are_given_out(tmp_path: Path) -> None:
    with ScriptedSwarm(tmp_path, planned=TASKS) as server:
        episodes, _ = work_a_step(server, captured, tasks=None)
    made = sorted((e.task.task_id, e.attempt) for e in episodes)
    assert made == [("no", 0), ("no", 1), ("yes", 0), ("yes", 1)]


def test_a_failure_of_the_agent_counts_with_its_cause(roomy: ScriptedSwarm) -> None:
    @ajet.workflow
    async def fails(main_query: str) -> str:
        await captured(main_query=main_query)
        raise LookupError("no such shelf")

    with pytest.raises(TrainingError):  # an agent that always fails does not go on for ever
        begin(roomy, fails).result(timeout=60)
    assert len(roomy.recorded()) >= 16
    for episode in roomy.recorded():
        assert (episode.status, episode.cause) == ("failed", "LookupError")
        assert not episode.infrastructure
        assert "no such shelf" in (episode.error or "")
        assert "test_work.py" in (episode.error or "")


def test_an_agent_that_never_calls_is_no_attempt(roomy: ScriptedSwarm) -> None:
    @ajet.workflow
    async def silent(main_query: str) -> str:
        return "ok"

    with pytest.raises(TrainingError):
        begin(roomy, silent).result(timeout=60)
    assert roomy.recorded() == []


def test_a_judge_without_a_reward_fails_the_attempt(roomy: ScriptedSwarm) -> None:
    @ajet.judge
    def wordy(output: str) -> str:
        return "good"

    with pytest.raises(TrainingError):
        begin(roomy, captured, wordy).result(timeout=60)
    assert {e.cause for e in roomy.recorded()} == {"NoReward"}
    assert {e.reward for e in roomy.recorded()} == {None}


def test_a_slow_agent_is_timed_out(roomy: ScriptedSwarm) -> None:
    @ajet.workflow(timeout=0.2)
    async def slow(main_query: str) -> str:
        await captured(main_query=main_query)
        await asyncio.sleep(3600)
        return ""

    with pytest.raises(TrainingError):
        begin(roomy, slow).result(timeout=60)
    assert {(e.status, e.cause) for e in roomy.recorded()} == {("timeout", "EpisodeTimeout")}


def test_a_full_context_is_the_cause(tmp_path: Path) -> None:
    def full(ask: Any) -> str:
        raise ContextOverflow("12 tokens are too many")

    with ScriptedSwarm(tmp_path, full, groups=50) as server:
        with pytest.raises(TrainingError):
            begin(server, captured).result(timeout=60)
        assert {(e.cause, e.infrastructure) for e in server.recorded()} == {
            ("ContextOverflow", False)
        }


def test_a_broken_engine_is_no_failure_of_the_agent(tmp_path: Path) -> None:
    @ajet.workflow
    async def swallows(main_query: str) -> str:
        with suppress(openai.APIError):
            return await captured(main_query=main_query)
        return "sorry"

    def broken(ask: Any) -> str:
        raise EngineUnavailable("the card fell out")

    with ScriptedSwarm(tmp_path, broken, groups=50) as server:
        with pytest.raises(TrainingError):
            begin(server, swallows).result(timeout=60)
        assert server.recorded() == []


def test_a_call_that_never_arrived_is_no_failure_of_the_agent(roomy: ScriptedSwarm) -> None:
    """The agent hides that it lost the server, and its judge would give it 0."""

    @ajet.workflow
    async def swallows(main_query: str, model: ajet.Model) -> str:
        answer = await by_handle(main_query=main_query, model=model)
        proxy.breaks_calls = True
        with suppress(Exception):
            client = model.async_openai().with_options(max_retries=0)
            messages: Any = [{"role": "user", "content": "again"}]
            await client.chat.completions.create(model=model.name, messages=messages)
            answer = "ok"
        proxy.breaks_calls = False
        return f"{answer}, sorry".replace("ok", "")

    with FaultyProxy(roomy.url) as proxy, pytest.raises(TrainingError):
        begin(roomy, swallows, url=proxy.url, concurrency=1).result(timeout=60)
    assert roomy.recorded() == []


def test_calls_of_a_judge_are_not_trained(server: ScriptedSwarm) -> None:
    @ajet.judge
    async def asks(output: str, model: ajet.Model) -> float:
        reply = await model.chat([{"role": "user", "content": f"Is {output} good?"}])
        return float(len(reply.content))

    episodes, _ = work_a_step(server, captured, asks)
    for episode in episodes:
        assert [(c.phase, c.trainable) for c in episode.calls] == [
            ("rollout", True),
            ("judge", False),
        ]
        assert episode.reward == 2.0


def test_a_group_judge_sees_all_attempts_of_a_task(server: ScriptedSwarm) -> None:
    sizes: list[int] = []

    @ajet.judge(group=True)
    def compares(episodes: Sequence[Episode]) -> list[float]:
        sizes.append(len(episodes))
        assert {e.output for e in episodes} == {"ok"}
        return [float(number) for number in range(len(episodes))]

    episodes, _ = work_a_step(server, captured, compares)
    assert set(sizes[:2]) == {2}
    for group in {e.group_id for e in episodes}:
        rewards = sorted(e.reward or 0.0 for e in episodes if e.group_id == group)
        assert rewards == [0.0, 1.0]


def test_a_group_judge_needs_tasks_here(server: ScriptedSwarm) -> None:
    @ajet.judge(group=True)
    def compares(episodes: Sequence[Episode]) -> list[float]:
        return [0.0] * len(episodes)

    with pytest.raises(ConfigError):
        begin(server, captured, compares, tasks=None).result(timeout=60)


def test_requests_to_other_models_are_recorded_and_not_trained(
    server: ScriptedSwarm,
) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "m"}}]}
    with serving(answering(answer)) as url:

        @ajet.workflow
        async def with_embedding(main_query: str, model: ajet.Model) -> str:
            async with httpx.AsyncClient() as client:
                body = {"model": "other", "messages": [{"role": "user", "content": "hm"}]}
                await client.post(f"{url}/v1/chat/completions", json=body)
            return await by_handle(main_query=main_query, model=model)

        episodes, _ = work_a_step(server, with_embedding)
    for episode in episodes:
        assert sorted((c.model, c.trainable) for c in episode.calls)[0] == ("other", False)
        assert sum(c.trainable for c in episode.calls) == 1


def test_targets_of_the_workflow_are_trained_alone(tmp_path: Path) -> None:
    @ajet.workflow(trainable_targets=["wolf"])
    async def play(main_query: str, model: ajet.Model) -> str:
        for name in ("wolf", "judge"):
            agent = model.agent(name, target_tag=name, trainable=name == "wolf")
            await agent.chat([{"role": "user", "content": main_query}])
        return "ok"

    with ScriptedSwarm(tmp_path) as server:
        episodes, _ = work_a_step(server, play)
    for episode in episodes:
        assert {c.agent: c.trainable for c in episode.calls} == {"wolf": True, "judge": False}


def test_a_validation_is_one_pass(server: ScriptedSwarm) -> None:
    summary = begin(server, captured, split="val", attempts=2).result(timeout=60)
    assert len(summary.finished) == 6
    assert {e.split for e in summary.episodes} == {"val"}
    assert set(summary.tokens) == {"evaluation"}
    validated = server.run(_validated(server))
    made = sorted((e.task.task_id, e.attempt) for e in validated[0])
    assert made == sorted((task.task_id, attempt) for task in TASKS for attempt in (0, 1))


async def _validated(server: ScriptedSwarm) -> dict[int, list[Episode]]:
    return server.collection.take_validated()


def test_two_workers_share_the_groups(server: ScriptedSwarm) -> None:
    workers = [begin(server, captured, name=name) for name in ("laptop", "container")]
    for _ in range(3):
        episodes = server.end_step()
        assert len(episodes) == 4
        server.next_step()
    server.finish()
    summaries = [worker.result(timeout=60) for worker in workers]
    ids = [e.episode_id for summary in summaries for e in summary.episodes]
    assert len(ids) == len(set(ids))
    assert all(summary.finished for summary in summaries)


def test_a_worker_without_the_key_stops_at_once(tmp_path: Path) -> None:
    with ScriptedSwarm(tmp_path, keys=Keys("owner-key", "worker-key")) as server:
        with pytest.raises(SwarmKeyRefused):
            begin(server, captured).result(timeout=60)
        episodes, _ = work_a_step(server, captured, key="worker-key")
        assert len(episodes) == 4


def test_an_attempt_is_made_again_after_a_fault_of_the_infrastructure(
    server: ScriptedSwarm,
) -> None:
    tried: list[str] = []

    @ajet.workflow
    async def fails_once(main_query: str, model: ajet.Model) -> str:
        answer = await by_handle(main_query=main_query, model=model)
        tried.append(main_query)
        if len(tried) == 1:
            raise EngineUnavailable("my own search engine is down")
        return answer

    episodes, summary = work_a_step(server, fails_once, rollout={"max_retries": 1}, concurrency=1)
    assert len(episodes) == 4
    assert [e.status for e in summary.episodes[:2]] == ["failed", "succeeded"]
    assert tried[0] == tried[1]
    states = [each.receipt.state for each in summary.finished if each.receipt is not None]
    assert states[:2] == ["aborted", "ended"]


def test_a_cancelled_worker_aborts_its_open_episodes(server: ScriptedSwarm) -> None:
    @ajet.workflow
    async def sleeps(main_query: str) -> str:
        await captured(main_query=main_query)
        await asyncio.sleep(3600)
        return "ok"

    summary = WorkSummary()
    swarm = AsyncSwarmClient(server.url)
    plan = Work(config(), sleeps, is_ok, TASKS, attempts=2, concurrency=6)  # two wait for a place

    async def main() -> None:
        working = asyncio.create_task(Worker(swarm, plan, print, summary).run())
        await until_async(lambda: _calls(server) == 4)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        await swarm.aclose()

    asyncio.run(main())
    assert server.collection.attempts.open == {}
    assert server.recorded() == []
    assert summary.statuses == {"aborted": 4}
    assert set(summary.tokens) == {"failed"}


def _calls(server: ScriptedSwarm) -> int:
    attempts = list(server.collection.attempts.open.values())
    return sum(len(attempt.opened.calls) for attempt in attempts)
