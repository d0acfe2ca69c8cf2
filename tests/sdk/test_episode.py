"""`run_episode` and `run_batch`: what an agent does, well or badly, is data on its episode."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import ajet
from ajet_sdk.agent.workflow import WorkflowOutput
from ajet_sdk.capture.hooks import installed
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.remote import RemoteEngine
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import AjetError, ContextOverflow, EngineUnavailable, TrainingError
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.reporting.metrics import episode_metrics
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.rollout.outcomes import RETRY, check_sound, failure_messages, failures_by_cause
from ajet_sdk.rollout.threads import Workers
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Reward, Task
from tests.gateways import shared_gateway
from tests.serving import answering, serving
from tests.waiting import FOREVER, until, until_async

client = openai.AsyncOpenAI(api_key="own", base_url="http://127.0.0.1:9/v1")


def config(**rollout: Any) -> Config:
    return load_config(values={"rollout": {"timeout": 20, "judge_timeout": 20, **rollout}})


def episodes(
    workflow: Any,
    judge: Any = None,
    *,
    tasks: Sequence[Task] | int = 1,
    replies: Callable[[Any], Any] = lambda ask: "42",
    engine: Any = None,
    settings: Config | None = None,
    **more: Any,
) -> list[Episode]:
    """Run one attempt at each task with scripted replies."""
    found = (
        [Task(main_query=f"q{i}", metadata={"answer": "42"}) for i in range(tasks)]
        if isinstance(tasks, int)
        else tasks
    )

    async def main() -> list[Episode]:
        return await run_batch(
            workflow,
            judge,
            [Attempt(task, run_id="run", seed=i) for i, task in enumerate(found)],
            engine=engine or ScriptedEngine(replies),
            gateway=shared_gateway(),
            config=settings or config(),
            **more,
        )

    return asyncio.run(main())


async def said(question: str, model: str = "gpt-4o-mini", **parameters: Any) -> str:
    """What an agent without any edit does."""
    messages: Any = [{"role": "user", "content": question}]
    reply = await client.chat.completions.create(model=model, messages=messages, **parameters)
    return reply.choices[0].message.content or ""


@ajet.workflow
async def untouched(question: str) -> str:
    return await said(question)


@ajet.workflow
async def solve(question: str, model: Any) -> str:
    return str((await model.chat([{"role": "user", "content": question}]))["content"])


@ajet.judge
def exact(output: str, answer: str) -> float:
    return float(output == answer)


def test_an_episode() -> None:
    [episode] = episodes(solve, exact)
    assert (episode.status, episode.output, episode.reward, episode.error) == (
        "succeeded",
        "42",
        1.0,
        None,
    )
    assert episode.rewards[0].name == "exact" and episode.run_id == "run"
    [call] = episode.calls
    assert call.trainable and call.phase == "rollout" and call.output_ids is not None


@pytest.mark.parametrize("workflow", [solve, untouched])
def test_an_endpoint_whose_reply_is_none_gives_no_reward(workflow: Any) -> None:
    """Found in a run: `{"choices":[{"index":0}]}` was an empty answer, judged, with reward 0."""
    with serving(answering({"choices": [{"index": 0}]})) as url:
        engine = RemoteEngine(f"{url}/v1", "key", "policy")
        [episode] = episodes(
            workflow, exact, engine=engine, settings=config(failure_reward=0.0, max_retries=1)
        )
    assert (episode.status, episode.cause, episode.infrastructure) == (
        "failed",
        "EngineUnavailable",
        True,
    )
    assert episode.rewards == () and "has no message" in (episode.error or "")


def test_a_client_of_the_module_survives_batches_and_a_run() -> None:
    """Async workflows share one loop for as long as the run lasts, so that pooled connections stay
    usable."""

    loops = set()

    @ajet.workflow
    async def own(question: str) -> str:
        loops.add(asyncio.get_running_loop())
        return await said(question)

    with installed(), Workers(8):
        assert all(e.reward == 1 for _ in range(3) for e in episodes(own, exact, tasks=2))
    assert len(loops) == 1


@pytest.mark.parametrize(
    ("returned", "reward", "success"),
    [
        (0.5, 0.5, None),
        (2, 2.0, None),
        (True, 1.0, True),
        (False, 0.0, False),
        (np.float32(0.5), 0.5, None),
        (np.array(1.5), 1.5, None),
        ((0.25, True), 0.25, True),
        ((0.25, None), 0.25, None),
        (Reward(value=3, weight=0.5), 1.5, None),
        ((Reward(value=3), False), 3.0, False),
        ([Reward(name="a", value=1), Reward(name="b", value=2)], 3.0, None),
    ],
)
def test_what_a_judge_may_return(returned: Any, reward: float, success: bool | None) -> None:
    @ajet.judge
    async def judge(output: str) -> Any:
        return returned

    [episode] = episodes(solve, judge)
    assert (episode.status, episode.reward, episode.is_success) == ("succeeded", reward, success)


@pytest.mark.parametrize(
    "returned",
    [
        None,
        float("nan"),
        float("inf"),
        "1.0",
        [],
        [1.0],
        {},
        (1.0, 2.0),
        (1.0,),
        (None, True),
        object(),
    ],
)
def test_nonsense_is_a_failure_and_never_zero(returned: Any) -> None:
    @ajet.judge
    def judge(output: str) -> Any:
        return returned

    [episode] = episodes(solve, judge)
    assert (episode.status, episode.cause, episode.rewards) == ("failed", "NoReward", ())
    assert "judge judge returned" in (episode.error or "")
    assert len(episode.calls) == 1


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        (Reward(value=2), 2.0),
        ([Reward(value=2), Reward(value=3)], 5.0),
        (WorkflowOutput(reward=0.5, is_success=True), 0.5),
        (WorkflowOutput(reward=[0.5, 1]), 1.5),
        (WorkflowOutput(reward=[Reward(value=4)]), 4.0),
        (0.5, None),
        ([], None),
        (WorkflowOutput(), None),
    ],
)
def test_a_reward_of_the_workflow_skips_the_judge_and_a_number_is_output(
    output: Any, reward: float | None
) -> None:
    asked = []

    @ajet.workflow
    def act(question: str) -> Any:
        return output

    @ajet.judge
    def judge(output: Any) -> float:
        asked.append(output)
        return 7.0

    [episode] = episodes(act, judge)
    assert episode.reward == (7.0 if reward is None else reward)
    assert asked == ([] if reward is not None else [output])


def test_no_judge_and_no_reward() -> None:
    [episode] = episodes(solve)
    assert (episode.status, episode.cause, episode.infrastructure) == ("failed", "NoReward", False)
    assert "there is no judge" in (episode.error or "")


class Broken(Exception): ...


RAISED = [
    Broken("pot"),
    SystemExit(3),
    KeyboardInterrupt(),
    StopIteration(),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_async", [True, False])
def test_what_an_agent_raises_is_data(error: BaseException, is_async: bool) -> None:
    @ajet.workflow
    def act(question: str) -> str:
        if question == "q1":
            raise error
        return question

    @ajet.workflow
    async def act_async(question: str) -> str:
        return act(question)

    found = episodes(act_async if is_async else act, ajet.judge(lambda output: 1.0), tasks=3)
    assert [e.status for e in found] == ["succeeded", "failed", "succeeded"]
    if is_async and isinstance(error, StopIteration):
        assert found[1].cause == "RuntimeError"  # as Python has it
    else:
        assert found[1].cause == type(error).__name__
    assert "test_episode.py" in (found[1].error or "") and "workers.py" not in (
        found[1].error or ""
    )
    assert not found[1].infrastructure and found[1].rewards == ()


def test_what_a_judge_raises_is_data_too() -> None:
    @ajet.judge
    def judge(output: str) -> float:
        raise Broken("pot")

    [episode] = episodes(solve, judge)
    assert (episode.status, episode.cause) == ("failed", "Broken")
    assert (episode.error or "").startswith("judge judge: ") and len(episode.calls) == 1


def test_a_task_without_a_key_fails_alone() -> None:
    found = episodes(
        solve, exact, tasks=[Task(main_query="q", metadata={"answer": "42"}), Task(main_query="r")]
    )
    assert [e.cause for e in found] == [None, "SignatureError"]


def test_a_hanging_async_workflow_times_out_and_is_cancelled() -> None:
    cleaned = []

    @ajet.workflow(timeout=0.2)
    async def hang(question: str) -> str:
        try:
            await asyncio.sleep(FOREVER)
        finally:
            cleaned.append(question)
        return ""

    found = episodes(hang, exact, tasks=3)
    assert [e.status for e in found] == ["timeout"] * 3
    assert found[0].cause == "EpisodeTimeout" and sorted(cleaned) == ["q0", "q1", "q2"]


def test_a_hanging_sync_workflow_is_abandoned_with_its_place_and_its_key_revoked(
    short_grace: None,
) -> None:
    released, late = threading.Event(), []

    @ajet.workflow(timeout=0.3)
    def hang(question: str, model: Any) -> str:
        released.wait()
        body = {"model": "m", "messages": [{"role": "user", "content": "late"}]}
        key = {"authorization": f"Bearer {model.api_key}"}
        late.append(
            httpx.post(f"{model.base_url}/chat/completions", headers=key, json=body).status_code
        )
        return ""

    with Workers(4) as workers:

        async def main() -> list[Episode]:
            return await run_batch(hang, exact, [Attempt(Task(main_query="q"))], engine=ScriptedEngine(lambda ask: "x"),
                                   gateway=shared_gateway(), config=config())  # fmt: skip

        [episode] = asyncio.run(main())
        assert workers.abandoned == 1
        released.set()
        until(lambda: late)
    assert episode.status == "timeout" and "hang" in (episode.error or "")
    assert late == [410] and episode.calls == ()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cancelled has a moment to end, and not two seconds."""
    monkeypatch.setattr("ajet_sdk.rollout.threads._GRACE", 0.3)


def test_more_abandoned_than_workers_stops_the_run(short_grace: None) -> None:
    released = threading.Event()

    @ajet.workflow(timeout=0.1)
    def hang(question: str) -> str:
        released.wait()
        return ""

    try:
        with pytest.raises(TrainingError, match="abandoned, more than"):
            episodes(hang, exact, tasks=6, settings=config(max_env_worker=2))
    finally:
        released.set()


def test_blocking_http_inside_async_code_does_not_deadlock() -> None:
    """It serialises; the gateway answers from its own thread."""

    @ajet.workflow
    async def blocking(question: str, model: Any) -> str:
        reply = httpx.post(
            f"{model.base_url}/chat/completions",
            headers={"authorization": f"Bearer {model.api_key}"},
            json={"model": model.name, "messages": [{"role": "user", "content": question}]},
        )
        return str(reply.json()["choices"][0]["message"]["content"])

    found = episodes(blocking, exact, tasks=8)
    assert [e.reward for e in found] == [1.0] * 8


def test_a_blocked_loop_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    @ajet.workflow
    async def blocking(question: str) -> Reward:
        time.sleep(1)
        return Reward(value=1)

    with caplog.at_level(logging.WARNING, "ajet"), Workers(8, patience=0.2):
        assert [e.reward for e in episodes(blocking, tasks=2)] == [1.0, 1.0]
    warned = [r.getMessage() for r in caplog.records if "blocking call" in r.getMessage()]
    assert len(warned) == 1 and "test_episode.py" in warned[0]


@pytest.mark.slow
def test_a_hung_loop_is_replaced_and_who_was_held_up_is_tried_again(short_grace: None) -> None:
    released = threading.Event()

    @ajet.workflow(timeout=2)
    async def act(question: str) -> Reward:
        await asyncio.sleep(0.05)
        if question == "q0":
            released.wait()
        else:
            await asyncio.sleep(0.2)
        return Reward(value=1)

    with Workers(8, patience=0.3) as workers:
        found = episodes(act, tasks=3)
        released.set()
        assert workers.abandoned == 1
    assert [e.status for e in found] == ["timeout", "succeeded", "succeeded"]
    assert "test_episode.py" in (found[0].error or "") and not found[0].infrastructure


class Flaky(ScriptedEngine):
    """Fails the first `failures` requests of each task as a lost connection would."""

    def __init__(self, failures: int) -> None:
        super().__init__(lambda ask: "42")
        self.failures = failures
        self.asked = 0

    async def answer(self, ask: Any) -> Any:
        self.asked += 1
        if self.asked <= self.failures:
            raise EngineUnavailable("connection lost")
        return await super().answer(ask)


def test_an_infrastructure_fault_is_tried_again_as_a_new_episode() -> None:
    put: list[Any] = []

    class Sink:
        def put(self, *records: Any) -> None:
            put.extend(records)

    [episode] = episodes(solve, exact, engine=Flaky(1), writer=Sink())
    assert episode.status == "succeeded"
    first, second = [record for record in put if isinstance(record, Episode)]
    assert first.infrastructure and first.cause == "EngineUnavailable" and second == episode
    assert (
        first.episode_id != second.episode_id
        and first.group_id != ""
        and first.attempt == second.attempt
    )
    assert first.metrics.get(RETRY) is None and second.metrics[RETRY] == 1
    assert any("1 of 1 attempts" in message for message in failure_messages([episode]))
    assert "train/retry" not in episode_metrics("train", [episode], None)


def test_retries_end() -> None:
    engine = Flaky(100)
    [episode] = episodes(solve, exact, engine=engine, settings=config(max_retries=2))
    assert (
        episode.status,
        episode.cause,
        episode.infrastructure,
        engine.asked,
        episode.metrics[RETRY],
    ) == (
        "failed",
        "EngineUnavailable",
        True,
        3,
        2,
    )


def test_an_engine_fault_that_the_agent_swallows_is_no_reward() -> None:
    @ajet.workflow
    async def careless(question: str, model: Any) -> str:
        try:
            return await solve(question, model)
        except AjetError:
            return "42"

    [episode] = episodes(careless, exact, engine=Flaky(100), settings=config(max_retries=0))
    assert (episode.status, episode.infrastructure, episode.rewards) == ("failed", True, ())


def test_an_engine_fault_that_the_agent_overcomes_is_forgotten() -> None:
    @ajet.workflow
    async def patient(question: str, model: Any) -> str:
        try:
            return await solve(question, model)
        except EngineUnavailable:
            return await solve(question, model)

    [episode] = episodes(patient, exact, engine=Flaky(1), settings=config(max_retries=0))
    assert (episode.status, episode.reward) == ("succeeded", 1.0)


def test_a_context_overflow_is_named_as_the_cause() -> None:
    class Full(ScriptedEngine):
        async def answer(self, ask: Any) -> Any:
            raise ContextOverflow("prompt of 9 tokens does not fit 8")

    @ajet.workflow
    async def own(question: str) -> str:
        return await said(question)

    [episode] = episodes(own, exact, engine=Full(lambda ask: ""))
    assert (episode.status, episode.cause, episode.infrastructure) == (
        "failed",
        "ContextOverflow",
        False,
    )


def test_two_model_names_are_ambiguous_even_if_swallowed() -> None:
    @ajet.workflow
    async def two(question: str) -> str:
        for name in ("a", "b"):
            with suppress(openai.BadRequestError):
                await said(question, name)
        return "42"

    [episode] = episodes(two, exact)
    assert (episode.status, episode.cause) == ("failed", "ModelAmbiguous")
    assert "'a' and 'b'" in (episode.error or "")


def test_a_workflow_that_never_calls_the_model_succeeds_with_a_word() -> None:
    @ajet.workflow
    def silent(question: str) -> str:
        return "42"

    found = episodes(silent, exact, tasks=2)
    assert [e.status for e in found] == ["succeeded"] * 2
    assert any("never called a model" in notice for notice in failure_messages(found))


def test_a_nested_workflow_joins_the_outer_episode() -> None:
    @ajet.workflow
    async def outer(question: str, model: Any) -> str:
        return await solve(question, model) + await solve(question, model)

    [episode] = episodes(outer, ajet.judge(lambda output: len(output)))
    assert (episode.reward, len(episode.calls), len({c.episode_id for c in episode.calls})) == (
        4.0,
        2,
        1,
    )


def test_a_judge_asks_the_model_and_is_never_trained() -> None:
    @ajet.judge
    async def asks(output: str, model: Any, episode: Episode) -> float:
        assert (
            episode.status == "succeeded" and len(episode.calls) == 1 and episode.output == output
        )
        return float(
            len((await model.chat([{"role": "user", "content": f"grade {output}"}]))["content"])
        )

    [episode] = episodes(solve, asks)
    assert [(c.phase, c.trainable) for c in episode.calls] == [("rollout", True), ("judge", False)]
    assert episode.reward == 2.0


def test_a_sync_function_that_returns_a_coroutine() -> None:
    def make(question: str, model: Any) -> Any:
        return solve(question, model)

    [episode] = episodes(ajet.workflow(make), exact)
    assert episode.reward == 1.0


@pytest.mark.slow
def test_a_sync_workflow_has_an_event_loop_which_is_closed_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the main thread of a program: some libraries run their async code on
    `asyncio.get_event_loop()`."""
    loops: list[asyncio.AbstractEventLoop] = []
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def ask() -> str:
        loops[0].create_task(forever())
        client = openai.AsyncOpenAI(base_url="http://model.invalid/v1", api_key="x")
        reply = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}]
        )
        return str(reply.choices[0].message.content)

    def agent() -> str:
        loops.append(asyncio.get_event_loop())
        return loops[0].run_until_complete(ask())

    gc.collect()
    with warnings.catch_warnings(record=True) as told, installed():
        warnings.simplefilter("always")
        [episode] = episodes(ajet.workflow(agent), lambda output: 1.0)
        gc.collect()
    assert not [one for one in told if "loop" in str(one.message) or "await" in str(one.message)]
    assert episode.output == "42" and len(episode.calls) == 1
    assert loops[0].is_closed() and ended == ["cancelled"]
    # what other tests left open may be collected here
    assert not [one for one in caplog.records if not one.getMessage().startswith("Unclosed")]


def test_sync_functions_have_threads_of_their_own_and_the_bound_holds() -> None:
    running, most = [0], [0]
    lock, four = threading.Lock(), threading.Barrier(4)

    @ajet.workflow
    def act(question: str) -> Reward:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        four.wait()
        with lock:
            running[0] -= 1
        return Reward(value=1)

    found = episodes(act, tasks=12, settings=config(max_env_worker=4))
    assert [e.reward for e in found] == [1.0] * 12 and most[0] <= 4


@pytest.mark.slow
def test_two_hundred_episodes_at_once_never_mix() -> None:
    @ajet.workflow
    async def own(question: str) -> str:
        await asyncio.sleep(0.01)
        return await said(question)

    found = episodes(
        own,
        ajet.judge(lambda output, main_query: output == main_query),
        tasks=[Task(main_query=f"q{i}") for i in range(200)],
        replies=lambda ask: ask.body["messages"][-1]["content"],
        settings=config(max_env_worker=200, timeout=300),
    )
    assert [e.reward for e in found] == [1.0] * 200
    assert all(len(e.calls) == 1 for e in found)


def test_the_runs_sampling_stands_in_for_the_agents() -> None:
    seen = []

    def reply(ask: Any) -> str:
        seen.append((ask.sampling.temperature, ask.sampling.seed))
        return "42"

    @ajet.workflow
    async def own(question: str) -> str:
        return await said(question, temperature=0)

    episodes(own, exact, tasks=2, replies=reply, sampling=SamplingOverride(temperature=0.7))
    assert {temperature for temperature, _ in seen} == {0.7} and len(
        {seed for _, seed in seen}
    ) == 2


def test_order_is_kept_and_each_episode_is_told_of() -> None:
    told: list[str] = []

    @ajet.workflow
    async def act(question: str) -> Reward:
        await until_async(lambda: len(told) == 2 - int(question[1:]))  # the last one ends first
        return Reward(value=int(question[1:]))

    found = episodes(act, tasks=3, on_episode=lambda episode: told.append(episode.task.main_query))
    assert [e.reward for e in found] == [0.0, 1.0, 2.0] and told == ["q2", "q1", "q0"]


def test_failures_are_summarised_by_cause_and_too_many_stop_the_run() -> None:
    @ajet.workflow
    def act(question: str) -> Reward:
        if question in ("q0", "q1"):
            raise Broken(f"at {question}")
        if question == "q2":
            raise KeyError("k")
        return Reward(value=1)

    found = episodes(act, tasks=4)
    lines = failures_by_cause(found)
    assert (
        lines[0].startswith("2 × Broken:")
        and "at q0" in lines[0]
        and lines[1].startswith("1 × KeyError")
    )
    check_sound(found, 0.25)
    with pytest.raises(TrainingError, match="only 1 of 4 episodes succeeded"):
        check_sound(found, 0.5)


def test_a_cancelled_batch_leaves_aborted_episodes() -> None:
    put: list[Any] = []

    class Sink:
        def put(self, *records: Any) -> None:
            put.extend(records)

    began = threading.Event()

    @ajet.workflow
    async def hang(question: str) -> str:
        began.set()
        await asyncio.sleep(FOREVER)
        return ""

    async def main() -> None:
        batch = asyncio.create_task(
            run_batch(
                hang,
                exact,
                [Attempt(Task(main_query="q"))],
                engine=ScriptedEngine(lambda ask: ""),
                gateway=shared_gateway(),
                config=config(),
                writer=Sink(),
            )  # type: ignore[arg-type]
        )
        await until_async(began.is_set)
        batch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await batch

    asyncio.run(main())
    assert [e.status for e in put] == ["aborted"]


@ajet.workflow
async def leaves_a_generator_that_does_not_close(question: str) -> str:
    async def generate() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(FOREVER)

    kept.append(generate())
    await anext(kept[-1])
    return question


@ajet.workflow
async def leaves_a_task_that_cancels_all_others(question: str) -> str:
    async def cancel() -> None:
        try:
            await asyncio.sleep(FOREVER)
        finally:
            for task in asyncio.all_tasks():
                task.cancel()

    kept.append(asyncio.create_task(cancel()))
    await asyncio.sleep(0)
    return question


@ajet.workflow
async def leaves_a_task_that_goes_on(question: str) -> str:
    async def go_on() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(FOREVER)

    kept.append(asyncio.create_task(go_on()))
    await asyncio.sleep(0)
    return question


kept: list[Any] = []


@pytest.mark.parametrize(
    "workflow",
    [
        solve,
        leaves_a_generator_that_does_not_close,
        leaves_a_task_that_cancels_all_others,
        leaves_a_task_that_goes_on,
    ],
    ids=["ends", "generator", "cancels", "goes_on"],
)
def test_no_thread_of_a_finished_batch_is_left(workflow: Any, short_grace: None) -> None:
    before = {*threading.enumerate()}
    episodes(workflow, exact, tasks=2)
    assert until(
        lambda: not [t for t in {*threading.enumerate()} - before if t.name == "ajet-workflows"]
    )
    kept.clear()


def test_episodes_are_written_as_json_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @ajet.workflow
    async def solve(main_query: str) -> Reward:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": main_query}]
        )
        return Reward(value=1.0)

    def settings(directory: Path, *, wanted: bool) -> Config:
        return load_config(
            values={
                "experiment_dir": str(directory),
                "trainer_common": {"save_trajectory_as_json_file": wanted},
            }
        )

    def run(directory: Path, *, wanted: bool) -> list[Episode]:
        with TraceWriter(directory / "trace.duckdb") as writer:
            return episodes(
                solve, tasks=2, settings=settings(directory, wanted=wanted), writer=writer
            )

    found = run(tmp_path / "on", wanted=True)
    for episode in found:
        text = (
            tmp_path / "on" / "trajectory" / "train-0" / f"{episode.episode_id}.json"
        ).read_text()
        assert Episode.model_validate_json(text) == episode
        assert episode.calls and episode.ended_at is not None
    run(tmp_path / "off", wanted=False)
    assert not (tmp_path / "off" / "trajectory").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "trajectory").write_text("not a directory")
    assert [e.status for e in run(tmp_path / "full", wanted=True)] == ["succeeded", "succeeded"]
    assert "save_trajectory_as_json_file" in caplog.text


def test_an_output_that_json_does_not_hold_costs_no_episode(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Board:
        def __str__(self) -> str:
            return "a board"

    @ajet.workflow
    async def solve(main_query: str) -> Any:
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": main_query}]
        )
        return {"board": Board()} if main_query == "q0" else "\ud83d"

    @ajet.judge
    def content(output: Any) -> float:
        return 1.0

    wanted = {
        "experiment_dir": str(tmp_path),
        "trainer_common": {"save_trajectory_as_json_file": True},
    }
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        odd, broken = episodes(
            solve, content, tasks=2, settings=load_config(values=wanted), writer=writer
        )
    place = tmp_path / "trajectory" / "train-0"
    assert Episode.model_validate_json((place / f"{odd.episode_id}.json").read_text()).output == {
        "board": "a board"
    }
    assert broken.status == "succeeded" and not (place / f"{broken.episode_id}.json").exists()
    assert "surrogates" in caplog.text
