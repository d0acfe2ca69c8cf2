"""Installs the hooks of HTTP clients while a run or `ajet.trace` is on, and restores the originals
at its end.

A library of `LIBRARIES` is wrapped once it is imported. Threads, thread pools and process pools
inherit the active episode; other processes get `OPENAI_BASE_URL` and `OPENAI_API_KEY`. Outside of
an episode a wrapper only calls the original. This is the only module with global state.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from ajet_sdk.agent.context import ActiveEpisode
from ajet_sdk.capture.aiohttp import patch_aiohttp
from ajet_sdk.capture.events import patch_mcp, patch_spans
from ajet_sdk.capture.http_client import patch_http_client, patch_urllib3
from ajet_sdk.capture.httpx import patch_httpx
from ajet_sdk.capture.lm15 import patch_lm15
from ajet_sdk.capture.patches import Patches
from ajet_sdk.capture.processes import patch_threads_and_processes
from ajet_sdk.capture.routing import Fallback
from ajet_sdk.capture.uncaptured import patch_grpc, patch_sockets

LIBRARIES: dict[str, Callable[[ModuleType, Patches, Fallback], None]] = {
    "httpx": patch_httpx,
    "httpx2": patch_httpx,
    "aiohttp": patch_aiohttp,
    "urllib3": patch_urllib3,
    "http.client": patch_http_client,
    "grpc": patch_grpc,
    "mcp.client.session": patch_mcp,
    "opentelemetry.sdk.trace": patch_spans,
    "lm15.transports": patch_lm15,
    "dspy._vendor.lm15.transports": patch_lm15,
}


class _Hooks:
    """The installed hooks, and the observer of calls outside of an episode."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.patches = Patches()
        self.observing: Callable[[], ActiveEpisode | None] | None = None


HOOKS = _Hooks()


@contextmanager
def installed() -> Iterator[None]:
    """Install the hooks. Re-entrant: the outermost exit restores everything."""
    with HOOKS.lock:
        if HOOKS.users == 0:
            _install(HOOKS.patches)
        HOOKS.users += 1
    try:
        yield
    finally:
        with HOOKS.lock:
            HOOKS.users -= 1
            if HOOKS.users == 0:
                HOOKS.patches.undo()


def _install(patches: Patches) -> None:
    finder = _Finder(patches, lambda: HOOKS.observing and HOOKS.observing())
    for module in map(sys.modules.get, LIBRARIES):
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            finder.patch(module)
    sys.meta_path.insert(0, finder)
    patches.at_end(lambda: sys.meta_path.remove(finder))
    patch_sockets(patches)
    patch_threads_and_processes(patches, installed)


class _Finder(importlib.abc.MetaPathFinder):
    """Patches libraries that are imported later."""

    def __init__(self, patches: Patches, fallback: Fallback) -> None:
        self._patches = patches
        self._fallback = fallback

    def patch(self, module: ModuleType) -> None:
        LIBRARIES[module.__name__](module, self._patches, self._fallback)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in LIBRARIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                loader.exec_module = execute  # type: ignore[method-assign]  # a reload is not patched
                execute(module)
                self.patch(module)

            loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec
