"""Passes the active episode on to threads, pools and processes."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import spawn
from typing import Any
from urllib.parse import urlsplit

from ajet_sdk.agent.context import ActiveEpisode, current_episode
from ajet_sdk.capture.patches import Patches
from ajet_sdk.capture.remote import for_other_process
from ajet_sdk.config.api_keys import without_placeholders

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


def patch_threads_and_processes(patches: Patches, hooks: Hooks) -> None:
    """Wrap Thread.start, the executors' submit, Popen, and the spawning of multiprocessing."""
    patches.replace(threading.Thread, "start", _thread_start(threading.Thread.start))
    patches.replace(ThreadPoolExecutor, "submit", _thread_submit(ThreadPoolExecutor.submit))
    patches.replace(ProcessPoolExecutor, "submit", _process_submit(ProcessPoolExecutor.submit, hooks))
    patches.replace(subprocess.Popen, "__init__", _popen(subprocess.Popen.__init__))
    patches.replace(spawn, "get_preparation_data", _preparation(spawn.get_preparation_data))


@contextmanager
def _nowhere() -> Any:
    """Run the block outside of any episode: what it starts outlives the current one."""
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

    A proxy that the environment names is told to leave the endpoint's host alone.
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
    """What `multiprocessing` sends a child that is not forked from here, before anything of the user's is imported.

    Not by the child's own environment: a fork server keeps for every later child that of the first.
    """

    def get_preparation_data(name: str) -> dict[str, object]:
        data = original(name)
        active = current_episode.get()
        return data if active is None else {"ajet_environment": _Environment(active), **data}

    return get_preparation_data
