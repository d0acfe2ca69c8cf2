"""Passes the active episode on to threads, pools and processes; other processes report to its
gateway over HTTP.

A function that is submitted to a pool belongs to the episode that submitted it. A thread or task
belongs to the episode that started it; each is an `Activity`, so that one that works for several
episodes is found when it outlives its own.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing.pool
import os
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import copy_context
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import spawn
from multiprocessing.process import BaseProcess
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from ajet_sdk.agent.activity import FORKED, Activity, current_activity, process_activity
from ajet_sdk.agent.context import (
    ActiveEpisode,
    AgentIdentity,
    ObservedExchange,
    Recorder,
    Verdict,
    current_episode,
)
from ajet_sdk.capture.patches import Patches
from ajet_sdk.config.api_keys import without_placeholders
from ajet_sdk.dialects.json import json_bytes
from ajet_sdk.errors import AjetError
from ajet_sdk.types import Event, Phase, new_id

log = logging.getLogger("ajet")
Hooks = Callable[[], AbstractContextManager[None]]

VERSIONED = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
"""Base URLs whose clients expect the version in them."""
UNVERSIONED = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "GOOGLE_GEMINI_BASE_URL")
"""Base URLs whose clients add the version."""
KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY")
KEYS_IF_SET = frozenset(("ANTHROPIC_AUTH_TOKEN",))
"""Clients prefer it to the key and refuse both, so it is replaced if it is set."""

ENV_POSITION = 10
"""Position of `env` in the arguments of `Popen.__init__`, without self."""
REPORT_TIMEOUT = 10.0
"""Seconds."""


def patch_threads_and_processes(patches: Patches, hooks: Hooks) -> None:
    """Wrap the start of threads, tasks and programs, the pools, and the spawning of
    multiprocessing."""
    loop = asyncio.BaseEventLoop
    patches.replace(loop, "create_task", _create_task(loop.create_task))
    patches.replace(threading.Thread, "start", _thread_start(threading.Thread.start))
    patches.replace(ThreadPoolExecutor, "submit", _thread_submit(ThreadPoolExecutor.submit))
    patches.replace(
        ProcessPoolExecutor, "submit", _process_submit(ProcessPoolExecutor.submit, hooks)
    )
    pool = multiprocessing.pool.Pool
    patches.replace(pool, "__init__", _outside(pool.__init__))
    for name in _POOL_METHODS:
        patches.replace(pool, name, _pool_submit(vars(pool)[name], hooks))
    patches.replace(BaseProcess, "start", _process_start(BaseProcess.start))
    patches.replace(subprocess.Popen, "__init__", _popen(subprocess.Popen.__init__))
    patches.replace(spawn, "get_preparation_data", _preparation(spawn.get_preparation_data))


@contextmanager
def _nowhere() -> Any:
    """Run the block outside of any episode, as the threads and processes it starts outlive the
    episode."""
    token = current_episode.set(None)
    outer = current_activity.set(None)
    try:
        yield
    finally:
        current_activity.reset(outer)
        current_episode.reset(token)


def _outside(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> None:
        with _nowhere():
            original(*args, **kwargs)

    return call


def _create_task(original: Callable[..., asyncio.Task[Any]]) -> Callable[..., asyncio.Task[Any]]:
    @functools.wraps(original)
    def create_task(self: asyncio.BaseEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task[Any]:
        if current_episode.get() is None:
            return original(self, coro, **kwargs)
        context = kwargs.pop("context", None) or copy_context()
        parent = context.get(current_activity)
        context.run(current_activity.set, Activity("a task", lambda: not task.done(), parent))
        # Python 3.10 has no parameter `context`; the task copies the context that it is created in.
        task = context.run(original, self, coro, **kwargs)
        return task

    return create_task


def _thread_start(
    original: Callable[[threading.Thread], None],
) -> Callable[[threading.Thread], None]:
    def start(self: threading.Thread) -> None:
        active = current_episode.get()
        if active is not None:
            run = self.run
            activity = Activity(f"thread {self.name!r}", self.is_alive, current_activity.get())

            def in_episode() -> None:
                self.__dict__.pop("run", None)
                current_episode.set(active)
                current_activity.set(activity)
                run()

            self.run = in_episode  # type: ignore[method-assign]
        original(self)

    return start


class _Submitted:
    """A function that runs in a thread of a pool, in the episode that submitted it."""

    def __init__(self, function: Callable[..., Any], active: ActiveEpisode | None) -> None:
        self._function = function
        self._active = active
        self._threads: set[int] = set()
        """Threads that are in the function: a pool's `map` calls it for several items at once."""
        name = getattr(function, "__qualname__", type(function).__name__)
        is_running = partial(bool, self._threads)
        self._activity = Activity(
            f"function {name!r} in a pool", is_running, current_activity.get()
        )

    def __call__(self, *args: object, **kwargs: object) -> Any:
        activity = None if self._active is None else self._activity
        token = current_episode.set(self._active)
        outer = current_activity.set(activity)
        self._threads.add(threading.get_ident())
        try:
            return self._function(*args, **kwargs)
        finally:
            self._threads.discard(threading.get_ident())
            current_activity.reset(outer)
            current_episode.reset(token)


def _thread_submit(original: Callable[..., object]) -> Callable[..., object]:
    def submit(
        self: ThreadPoolExecutor, fn: Callable[..., object], /, *args: object, **kwargs: object
    ) -> object:
        submitted = _Submitted(fn, current_episode.get())
        with _nowhere():
            return original(self, submitted, *args, **kwargs)

    return submit


_POOL_METHODS = ("apply_async", "_map_async", "imap", "imap_unordered")
"""Methods of `multiprocessing.Pool` through which all others send a function to its workers."""


def _pool_submit(original: Callable[..., object], hooks: Hooks) -> Callable[..., object]:
    @functools.wraps(original)
    def submit(
        self: multiprocessing.pool.Pool,
        func: Callable[..., object],
        *args: object,
        **kwargs: object,
    ) -> object:
        active = current_episode.get()
        if isinstance(self, multiprocessing.pool.ThreadPool):
            func = _Submitted(func, active)
        elif active is not None and active.gateway_url:
            func = Carried(func, for_other_process(active), hooks)
        with _nowhere():
            return original(self, func, *args, **kwargs)

    return submit


class Carried:
    """Runs a function in another process, in the episode that submitted it."""

    def __init__(self, fn: Callable[..., Any], active: ActiveEpisode, hooks: Hooks) -> None:
        self._fn = fn
        self._hooks = hooks
        self._active = active

    def __call__(self, *args: object, **kwargs: object) -> Any:
        added = _environment(self._active)
        previous = {name: os.environ[name] for name in added.keys() & os.environ.keys()}
        os.environ.update(added)
        token = current_episode.set(self._active)
        try:
            with self._hooks():
                return self._fn(*args, **kwargs)
        finally:
            current_episode.reset(token)
            for name in added.keys() - previous.keys():
                os.environ.pop(name, None)
            os.environ.update(previous)


def _process_submit(original: Callable[..., object], hooks: Hooks) -> Callable[..., object]:
    def submit(
        self: ProcessPoolExecutor, fn: Callable[..., object], /, *args: object, **kwargs: object
    ) -> object:
        active = current_episode.get()
        if active is not None and active.gateway_url:
            fn = Carried(fn, for_other_process(active), hooks)
        with _nowhere():
            return original(self, fn, *args, **kwargs)

    return submit


def _environment(active: ActiveEpisode | None) -> dict[str, str]:
    """The environment variables that route a child's LLM calls to the policy."""
    if active is None or not active.reroutes:
        return {}
    return endpoint_variables(active.base_url, active.api_key)


def endpoint_variables(base_url: str, api_key: str) -> dict[str, str]:
    """The variables that point every vendor's client to an endpoint. `base_url` ends in `/v1`; some
    clients add it.

    Proxies of the environment are bypassed for the endpoint's host.
    """
    named: dict[str, str] = {}
    named |= dict.fromkeys(VERSIONED, base_url) | dict.fromkeys(
        UNVERSIONED, base_url.removesuffix("/v1")
    )
    named |= dict.fromkeys(KEYS, api_key) | dict.fromkeys(KEYS_IF_SET & os.environ.keys(), api_key)
    host = urlsplit(base_url).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):
        direct = os.environ.get(name, "")
        named[name] = f"{direct},{host}" if direct else host
    return named


def _popen(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
        active = current_episode.get()
        if active is None:
            original(self, *args, **kwargs)
            return
        active = _for_child(active)
        at_position = len(args) > ENV_POSITION
        caller_env = args[ENV_POSITION] if at_position else kwargs.get("env")
        env = without_placeholders(os.environ if caller_env is None else caller_env) | _environment(
            active
        )
        if at_position:
            args = (*args[:ENV_POSITION], env, *args[ENV_POSITION + 1 :])
        else:
            kwargs["env"] = env
        original(self, *args, **kwargs)
        active.recorder.has_child(
            active.child, process_activity(self.pid, f"program {self.args!s:.100}")
        )

    return init


def _process_start(original: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    def start(self: BaseProcess) -> None:
        active = current_episode.get()
        if active is None:
            original(self)
            return
        active = _for_child(active)
        token = current_episode.set(
            active
        )  # a forked child inherits it, a spawned one gets its variables
        try:
            original(self)
        finally:
            current_episode.reset(token)
        # A fork server is the parent of its processes, so that they cannot be waited for by their
        # pid.
        active.recorder.has_child(
            active.child, Activity(f"process {self.name!r}", self.is_alive, current_activity.get())
        )

    return start


def _for_child(active: ActiveEpisode) -> ActiveEpisode:
    return replace(active, child=new_id()[:12])


class _Environment:
    """Sets environment variables when it is unpickled, without importing ajet."""

    def __init__(self, active: ActiveEpisode) -> None:
        removed = os.environ.keys() - without_placeholders(os.environ).keys()
        self._code = f"import os; [os.environ.pop(name, None) for name in {sorted(removed)}]; "
        self._code += f"os.environ.update({_environment(active)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return exec, (self._code,)


def _preparation(
    original: Callable[[str], dict[str, object]],
) -> Callable[[str], dict[str, object]]:
    """Adds the variables to the data that `multiprocessing` sends to a spawned child before it
    imports user code.

    The child's environment would not do: a fork server passes that of its first child to all later
    ones.
    """

    def get_preparation_data(name: str) -> dict[str, object]:
        data = original(name)
        active = current_episode.get()
        if active is None:
            return data
        return {"ajet_environment": _Environment(active), **data}

    return get_preparation_data


class RemoteRecorder:
    """The recorder of an episode whose gateway is in another process."""

    def __init__(self, url: str, api_key: str, policy_models: frozenset[str] = frozenset()) -> None:
        self._url = url
        self._api_key = api_key
        self.policy_models = policy_models

    def hide(self, secrets: Collection[str]) -> None:
        """Does nothing: the errors of another process are not stored."""

    def unanswered(self, error: BaseException | None) -> None:
        """Does nothing: the gateway cannot be told."""

    def answers(self, model: str) -> Verdict:
        """Without named models the gateway decides."""
        if not self.policy_models or model in self.policy_models:
            return "policy"
        return "other"

    def is_over(self, phase: Phase) -> bool:
        """Always false: the gateway refuses the keys of an episode that is over."""
        return False

    def called_by(self, activity: Activity) -> None:
        """Does nothing: activities are known in the process of the workflow only."""

    def has_child(self, child: str, activity: Activity) -> None:
        """Does nothing, as `called_by`."""

    def is_outlived_by(self, activities: Iterable[Activity]) -> bool:
        """Always false, as `is_over`."""
        return False

    def takes_handle(self, agent: str) -> None:
        with suppress(OSError):  # the handle works without it
            self._report("handles", json_bytes(asdict(AgentIdentity(agent))))

    def fail(self, error: AjetError) -> None:
        """Report to the gateway; the episode fails even if the agent catches the error."""
        never_raise(
            lambda: self._report(
                "faults", json_bytes({"kind": type(error).__name__, "message": str(error)})
            )
        )

    def observed(self, exchange: ObservedExchange) -> None:
        self._report("observed", json_bytes(asdict(exchange)))

    def happened(self, event: Event) -> None:
        self._report("events", event.model_dump_json().encode())

    def _report(self, route: str, body: bytes) -> None:
        if not self._url:
            return
        headers = {"authorization": f"Bearer {self._api_key}", "content-type": "application/json"}
        request = Request(f"{self._url}/{route}", body, headers)
        with build_opener(ProxyHandler({})).open(request, timeout=REPORT_TIMEOUT):
            return


def for_other_process(active: ActiveEpisode) -> ActiveEpisode:
    """The same episode for another process. It can be pickled."""
    models: frozenset[str] = getattr(active.recorder, "policy_models", frozenset())
    recorder: Recorder = RemoteRecorder(
        active.base_url if active.gateway_url else "", active.api_key, models
    )
    return replace(
        active, recorder=recorder, in_client=False, pid=os.getpid(), process_groups=set()
    )


def in_this_process(active: ActiveEpisode) -> ActiveEpisode:
    """The episode; after a fork, with a recorder that reports to the gateway's process."""
    if active.pid == os.getpid() or isinstance(active.recorder, RemoteRecorder):
        return active
    return for_other_process(replace(active, child=active.child or f"{FORKED}{os.getpid()}"))


def never_raise(action: Callable[[], object]) -> None:
    """Call `action` and log what it raises: recording must never break the agent."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  # the boundary between recording and the agent
        log.warning("could not record a call: %s: %s", type(error).__name__, error)
