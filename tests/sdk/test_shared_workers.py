"""Calls from threads, tasks and pools that several episodes use: each is its own episode's, or
refused."""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import multiprocessing.pool
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

import ajet
from ajet_sdk.config.config import Config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import TrainingError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.types import Episode, Task
from tests.waiting import FOREVER

URL = "http://model.invalid/v1/chat/completions"
Ask = Callable[[str], str]


def post(text: str, url: str = URL, headers: dict[str, str] | None = None) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    response = httpx.post(url, json=body, headers=headers, timeout=FOREVER)
    return str(response.raise_for_status().json()["choices"][0]["message"]["content"])


async def post_async(text: str) -> str:
    async with httpx.AsyncClient(timeout=FOREVER) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        response = await client.post(URL, json=body)
    return str(response.raise_for_status().json()["choices"][0]["message"]["content"])


def run_attempts(agent: Any, count: int = 6, **rollout: Any) -> list[Episode]:
    """Attempts that run at once, each with a task of its own, against an engine that repeats what
    it is asked."""
    config = Config.model_validate(
        {"rollout": {"max_env_worker": count, "max_retries": 0, **rollout}}
    )
    engine = ScriptedEngine(lambda ask: ask.body["messages"][0]["content"])

    async def run() -> list[Episode]:
        attempts = [Attempt(Task(main_query=f"task {number}")) for number in range(count)]
        with Gateway() as gateway:
            return await run_batch(
                ajet.workflow(agent), None, attempts, engine=engine, gateway=gateway, config=config
            )

    return asyncio.run(run())


def assert_own_calls(episodes: list[Episode], calls: int) -> None:
    for episode in episodes:
        assert episode.status == "succeeded", episode.error
        texts = [call.request["messages"][0]["content"] for call in episode.calls]
        assert texts == [episode.task.main_query] * calls


class Worker:
    """A thread behind a queue that begins with its first job, as batchers and rate limiters
    have."""

    def __init__(self, jobs: Any) -> None:
        self.jobs = jobs
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        with self.lock:
            if self.thread is None:
                self.thread = threading.Thread(target=self.run, name="batcher", daemon=True)
                self.thread.start()

    def run(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            call, text, future = job
            try:
                future.set_result(call(text))
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)

    def ask(self, text: str, call: Ask = post) -> str:
        self.start()
        future: Future[str] = Future()
        self.jobs.put((call, text, future))
        return future.result(FOREVER)


class Deque:
    """A queue made of a list and a condition."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.changed = threading.Condition()

    def put(self, item: Any) -> None:
        with self.changed:
            self.items.append(item)
            self.changed.notify()

    def get(self) -> Any:
        with self.changed:
            self.changed.wait_for(lambda: self.items)
            return self.items.popleft()


@contextmanager
def worker_of(jobs: Any) -> Iterator[Worker]:
    worker = Worker(jobs)
    try:
        yield worker
    finally:
        jobs.put(None)


QUEUES = [queue.Queue, queue.SimpleQueue, queue.LifoQueue, Deque]


@pytest.mark.parametrize("kind", QUEUES)
def test_a_worker_thread_that_an_episode_started_serves_no_other(kind: Callable[[], Any]) -> None:
    with worker_of(kind()) as worker:

        def agent(task: str) -> ajet.Reward:
            post(task)
            worker.ask(task)
            return ajet.Reward(value=1.0)

        with pytest.raises(TrainingError, match="batcher"):
            run_attempts(agent)


@pytest.mark.parametrize("kind", QUEUES)
def test_a_worker_thread_that_is_older_than_the_run_is_refused(kind: Callable[[], Any]) -> None:
    with worker_of(kind()) as worker:
        worker.start()

        def agent(task: str) -> ajet.Reward:
            post(task)
            worker.ask(task)
            return ajet.Reward(value=1.0)

        with pytest.raises(TrainingError, match="no episode started"):
            run_attempts(agent)


def test_a_worker_that_hides_the_refusal_ends_the_run_all_the_same() -> None:
    def call(text: str) -> str:
        try:
            return post(text)
        except Exception:  # noqa: BLE001
            return "no answer"

    with worker_of(queue.Queue()) as worker:
        worker.start()

        def agent(task: str) -> ajet.Reward:
            worker.ask(task, call)
            return ajet.Reward(value=1.0)

        with pytest.raises(TrainingError):
            run_attempts(agent)


def test_episodes_one_after_the_other_share_no_worker_either() -> None:
    with worker_of(queue.Queue()) as worker:

        def agent(task: str) -> ajet.Reward:
            worker.ask(task)
            return ajet.Reward(value=1.0)

        with pytest.raises(TrainingError, match="whose workflow has returned"):
            run_attempts(agent, count=3, max_env_worker=1)


def test_a_job_with_its_context_is_its_own_episodes() -> None:
    with worker_of(queue.Queue()) as worker:

        def agent(task: str) -> ajet.Reward:
            post(task)
            context = contextvars.copy_context()
            worker.ask(task, lambda text: context.run(post, text))
            return ajet.Reward(value=1.0)

        assert_own_calls(run_attempts(agent), calls=2)
        worker.start()
        assert_own_calls(run_attempts(agent), calls=2)


def test_an_allowed_url_is_no_call_of_the_agent() -> None:
    with worker_of(queue.Queue()) as worker:
        worker.start()
        failures = list[str]()

        def elsewhere(text: str) -> str:
            try:
                return post(text)
            except httpx.ConnectError as error:  # it was sent to its own host
                failures.append(str(error))
                return ""

        def agent(task: str) -> ajet.Reward:
            worker.ask(task, elsewhere)
            post(task)
            return ajet.Reward(value=1.0)

        assert_own_calls(run_attempts(agent, allowed_urls=["http://model.invalid/v1"]), calls=1)
        assert len(failures) == 6


def test_a_thread_of_one_episode_that_ends_with_it_is_its_own() -> None:
    def agent(task: str) -> ajet.Reward:
        with worker_of(queue.Queue()) as worker:
            worker.ask(task)
        thread = threading.Thread(target=post, args=(task,))
        thread.start()
        thread.join()
        return ajet.Reward(value=1.0)

    assert_own_calls(run_attempts(agent), calls=2)


def test_a_slower_attempt_that_is_left_behind_fails_nobody() -> None:
    async def agent(task: str) -> ajet.Reward:
        asked = [asyncio.ensure_future(post_async(task)) for _ in range(3)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return ajet.Reward(value=1.0)

    episodes = run_attempts(agent)
    assert [episode.status for episode in episodes] == ["succeeded"] * 6
    for episode in episodes:
        assert {call.request["messages"][0]["content"] for call in episode.calls} == {
            episode.task.main_query
        }


@pytest.mark.parametrize(
    "method", ["apply", "map", "starmap", "imap", "imap_unordered", "map_async"]
)
def test_a_pool_of_threads_serves_each_episode_as_its_own(method: str) -> None:
    pools = list[multiprocessing.pool.ThreadPool]()
    lock = threading.Lock()

    def agent(task: str) -> ajet.Reward:
        with lock:
            if not pools:
                pools.append(multiprocessing.pool.ThreadPool(2))
        jobs = [(task,)] if method == "starmap" else [task]
        if method == "apply":
            pools[0].apply(post, (task,))
        elif method == "map_async":
            pools[0].map_async(post, jobs).get()
        else:
            list(getattr(pools[0], method)(post, jobs))
        return ajet.Reward(value=1.0)

    try:
        assert_own_calls(run_attempts(agent), calls=1)
    finally:
        for pool in pools:
            pool.terminate()


def test_a_worker_in_a_thread_pool_is_refused_as_a_thread_is() -> None:
    with ThreadPoolExecutor(1) as pool, worker_of(queue.Queue()) as worker:
        lock = threading.Lock()
        started = list[object]()

        def agent(task: str) -> ajet.Reward:
            with lock:
                if not started:
                    worker.thread = threading.current_thread()  # it needs no other
                    started.append(pool.submit(worker.run))
            worker.ask(task)
            return ajet.Reward(value=1.0)

        with pytest.raises(TrainingError, match=r"Worker\.run"):
            run_attempts(agent)


class AsyncWorker:
    """A task behind an asyncio.Queue, in the loop of the first job."""

    def __init__(self, in_task_of_its_own: bool) -> None:
        self.jobs: asyncio.Queue[Any] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.in_task_of_its_own = in_task_of_its_own

    async def run(self) -> None:
        while True:
            text, future = await self.jobs.get()
            try:
                asked = post_async(text)
                future.set_result(
                    await (asyncio.create_task(asked) if self.in_task_of_its_own else asked)
                )
            except Exception as error:  # noqa: BLE001
                future.set_exception(error)

    async def ask(self, text: str) -> str:
        if self.task is None:
            self.task = asyncio.create_task(self.run())
        future = asyncio.get_running_loop().create_future()
        self.jobs.put_nowait((text, future))
        return str(await future)


@pytest.mark.parametrize("in_task_of_its_own", [False, True])
def test_a_worker_task_that_an_episode_started_serves_no_other(in_task_of_its_own: bool) -> None:
    worker = AsyncWorker(in_task_of_its_own)

    async def agent(task: str) -> ajet.Reward:
        await post_async(task)
        await worker.ask(task)
        return ajet.Reward(value=1.0)

    with pytest.raises(TrainingError, match="a task"):
        run_attempts(agent)


def test_tasks_of_an_episode_are_its_own() -> None:
    async def agent(task: str) -> ajet.Reward:
        await asyncio.gather(*(post_async(task) for _ in range(3)))
        await asyncio.to_thread(post, task)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, contextvars.copy_context().run, post, task)
        return ajet.Reward(value=1.0)

    assert_own_calls(run_attempts(agent), calls=5)


def ask_for_each(jobs: Any, replies: Any, url: str | None) -> None:
    """A process that answers the jobs of a queue by the policy; `url` None: at the address of its
    environment."""
    url = url or f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    headers = {"authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    while (text := jobs.get()) is not None:
        replies.put(post(text, url, headers))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "url"), [("fork", URL), ("forkserver", None)])
def test_a_worker_process_that_an_episode_started_serves_no_other(
    method: str, url: str | None
) -> None:
    context: Any = multiprocessing.get_context(method)
    jobs, replies = context.Queue(), context.Queue()
    lock, workers = threading.Lock(), list[Any]()

    def agent(task: str) -> ajet.Reward:
        with lock:
            if not workers:
                workers.append(
                    context.Process(target=ask_for_each, args=(jobs, replies, url), daemon=True)
                )
                workers[0].start()
            jobs.put(task)
            replies.get(timeout=FOREVER)
        return ajet.Reward(value=1.0)

    try:
        with pytest.raises(TrainingError, match="process"):
            run_attempts(agent)
    finally:
        workers[0].terminate()
        workers[0].join()


@pytest.mark.slow
def test_a_forked_worker_serves_no_other_episode_either() -> None:
    lock, pipes = threading.Lock(), list[Any]()

    def agent(task: str) -> ajet.Reward:
        with lock:
            if not pipes:
                pipes.extend([*multiprocessing.Pipe(), os.fork()])
            if pipes[2] == 0:
                while (text := pipes[1].recv()) is not None:
                    pipes[1].send(post(text))
                os._exit(0)
            pipes[0].send(task)
            pipes[0].recv()
        return ajet.Reward(value=1.0)

    try:
        with pytest.raises(TrainingError, match="process"):
            run_attempts(agent)
    finally:
        pipes[0].send(None)
        os.waitpid(pipes[2], 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_pool_of_processes_serves_each_episode_as_its_own(method: str) -> None:
    pools, lock = list[Any](), threading.Lock()

    def agent(task: str) -> ajet.Reward:
        with lock:
            if not pools:
                pools.append(multiprocessing.get_context(method).Pool(2))
        assert pools[0].apply(post, (task,)) == task
        assert pools[0].map(post, [task, task]) == [task, task]
        return ajet.Reward(value=1.0)

    try:
        assert_own_calls(run_attempts(agent), calls=3)
    finally:
        for pool in pools:
            pool.terminate()
