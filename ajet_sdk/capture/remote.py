"""Reports from an episode in another process than its gateway, over HTTP."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from urllib.request import ProxyHandler, Request, build_opener

from ajet_sdk.agent.context import ActiveEpisode, AgentIdentity, ObservedExchange, Recorder, Verdict
from ajet_sdk.dialects.json import json_bytes
from ajet_sdk.errors import AjetError
from ajet_sdk.types import Event

REPORT_TIMEOUT = 10.0

log = logging.getLogger("ajet")


class RemoteRecorder:
    """The recorder of an episode whose gateway is in another process."""

    def __init__(self, url: str, api_key: str, policy_models: frozenset[str] = frozenset()) -> None:
        self._url = url
        self._api_key = api_key
        self._policy_models = policy_models

    def answers(self, model: str) -> Verdict:
        """The gateway decides if no models are named."""
        return "policy" if not self._policy_models or model in self._policy_models else "other"

    def takes_handle(self, agent: str) -> None:
        with suppress(OSError):  # what a handle can do does not depend on it
            self._report("handles", json_bytes(asdict(AgentIdentity(agent))))

    def fail(self, error: AjetError) -> None:
        """Report to the gateway, which fails the episode even if the agent catches the error."""
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
