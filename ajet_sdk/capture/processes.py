"""Passes the active episode on to threads, pools and processes; other processes report to its gateway over HTTP."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from multiprocessing import spawn
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from ajet_sdk.agent.context import ActiveEpisode, AgentIdentity, ObservedExchange, Recorder, Verdict, current_episode
from ajet_sdk.capture.patches import Patches
from ajet_sdk.config.api_keys import without_placeholders
from ajet_sdk.dialects.json import json_bytes
from ajet_sdk.errors import AjetError
from ajet_sdk.types import Event

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
    """Wrap Thread.start, the executors' submit, Popen, and the spawning of multiprocessing."""
    patches.replace(threading.Thread, "start", _thread_start(threading.Thread.start))
    patches.replace(ThreadPoolExecutor, "submit", _thread_submit(ThreadPoolExecutor.submit))
    patches.replace(ProcessPoolExecutor, "submit", _process_submit(ProcessPoolExecutor.submit, hooks))
    patches.replace(subprocess.Popen, "__init__", _popen(subprocess.Popen.__init__))
    patches.replace(spawn, "get_preparation_data", _preparation(spawn.get_preparation_data))


@contextmanager
def _nowhere() -> Any:
    """Run the block outside of any episode, as the threads and processes it starts outlive the episode."""
    token = current_episode.set(None)
    try:
        yield
    finally:
        current_episode.reset(token)


def _thread_start(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def start(self: threading.Thread) -> None:
        active = current_episode.get()
        if active is not None:
            run = self.run

            def in_episode() -> None:
                self.__dict__.pop("run", None)
                current_episode.set(active)
                run()

            self.run = in_episode  # type: ignore[method-assign]
        original(self)

    return start


def _thread_submit(original: Callable[..., object]) -> Callable[..., object]:
    def submit(self: ThreadPoolExecutor, fn: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        active = current_episode.get()

        def in_episode() -> object:
            token = current_episode.set(active)
            try:
                return fn(*args, **kwargs)
            finally:
                current_episode.reset(token)

        with _nowhere():
            return original(self, in_episode)

    return submit


class Carried:
    """Runs a function in another process, in the episode that submitted it."""

    def __init__(self, fn: Callable[..., Any], active: ActiveEpisode, hooks: Hooks) -> None:
        self._fn, self._hooks = fn, hooks
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
    def submit(self: ProcessPoolExecutor, fn: Callable[..., object], /, *args: object, **kwargs: object) -> object:
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
    """The variables that point every vendor's client to an endpoint. `base_url` ends in `/v1`; some clients add it.

    Proxies of the environment are bypassed for the endpoint's host.
    """
    named: dict[str, str] = {}
    named |= dict.fromkeys(VERSIONED, base_url) | dict.fromkeys(UNVERSIONED, base_url.removesuffix("/v1"))
    named |= dict.fromkeys(KEYS, api_key) | dict.fromkeys(KEYS_IF_SET & os.environ.keys(), api_key)
    host = urlsplit(base_url).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):
        direct = os.environ.get(name, "")
        named[name] = f"{direct},{host}" if direct else host
    return named


def _popen(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
        active = current_episode.get()
        if active is not None:
            at_position = len(args) > ENV_POSITION
            caller_env = args[ENV_POSITION] if at_position else kwargs.get("env")
            env = without_placeholders(os.environ if caller_env is None else caller_env) | _environment(active)
            if at_position:
                args = (*args[:ENV_POSITION], env, *args[ENV_POSITION + 1 :])
            else:
                kwargs["env"] = env
        original(self, *args, **kwargs)

    return init


class _Environment:
    """Sets environment variables when it is unpickled, without importing ajet."""

    def __init__(self, active: ActiveEpisode) -> None:
        removed = os.environ.keys() - without_placeholders(os.environ).keys()
        self._code = f"import os; [os.environ.pop(name, None) for name in {sorted(removed)}]; "
        self._code += f"os.environ.update({_environment(active)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return exec, (self._code,)


def _preparation(original: Callable[[str], dict[str, object]]) -> Callable[[str], dict[str, object]]:
    """Adds the variables to the data that `multiprocessing` sends to a spawned child before it imports user code.

    The child's environment would not do: a fork server passes that of its first child to all later ones.
    """

    def get_preparation_data(name: str) -> dict[str, object]:
        data = original(name)
        active = current_episode.get()
        return data if active is None else {"ajet_environment": _Environment(active), **data}

    return get_preparation_data


class RemoteRecorder:
    """The recorder of an episode whose gateway is in another process."""

    def __init__(self, url: str, api_key: str, policy_models: frozenset[str] = frozenset()) -> None:
        self._url = url
        self._api_key = api_key
        self._policy_models = policy_models

    def answers(self, model: str) -> Verdict:
        """Without named models the gateway decides."""
        return "policy" if not self._policy_models or model in self._policy_models else "other"

    def takes_handle(self, agent: str) -> None:
        with suppress(OSError):  # the handle works without it
            self._report("handles", json_bytes(asdict(AgentIdentity(agent))))

    def fail(self, error: AjetError) -> None:
        """Report to the gateway; the episode fails even if the agent catches the error."""
        never_raise(lambda: self._report("faults", json_bytes({"kind": type(error).__name__, "message": str(error)})))

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
    models: frozenset[str] = getattr(getattr(active.recorder, "spec", None), "policy_models", frozenset())
    recorder: Recorder = RemoteRecorder(active.base_url if active.gateway_url else "", active.api_key, models)
    return replace(active, recorder=recorder, in_client=False, pid=os.getpid(), process_groups=set())


def in_this_process(active: ActiveEpisode) -> ActiveEpisode:
    """The episode; after a fork, with a recorder that reports to the gateway's process."""
    forked = active.pid != os.getpid() and not isinstance(active.recorder, RemoteRecorder)
    return for_other_process(active) if forked else active


def never_raise(action: Callable[[], object]) -> None:
    """Call `action` and log what it raises: recording must never break the agent."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  # the boundary between recording and the agent
        log.warning("could not record a call: %s: %s", type(error).__name__, error)
