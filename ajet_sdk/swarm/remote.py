"""An attempt that runs here while a swarm's server answers its calls: the counterparts of the
gateway's `OpenEpisode` and of `rollout.place.Here`.

The agent's requests go to the server by its own connections, so that the server sees what is
delivered. Requests that pass through to other models, and other events, are reported to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import asdict
from typing import TYPE_CHECKING

from ajet_sdk.agent.activity import Activity
from ajet_sdk.agent.context import (
    ActiveEpisode,
    AgentIdentity,
    HostGuard,
    ObservedExchange,
    current_episode,
    open_episodes,
)
from ajet_sdk.agent.model import Model
from ajet_sdk.dialects.json import json_bytes
from ajet_sdk.errors import EngineUnavailable
from ajet_sdk.gateway.recorder import EpisodeRecorder
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.place import guard_of
from ajet_sdk.swarm.client import AsyncSwarmClient
from ajet_sdk.swarm.episodes import gateway_root
from ajet_sdk.swarm.exchange import Send, exchange
from ajet_sdk.swarm.failure import error_of_call, is_connection_error, lost_connection
from ajet_sdk.swarm.messages import Claimed
from ajet_sdk.types import Call, Episode, Event

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

log = logging.getLogger("ajet")


class SwarmPlace:
    """The server's gateway, for one claimed episode."""

    tokenizer = None
    decoding = None

    def __init__(self, swarm: AsyncSwarmClient, claimed: Claimed, config: Config) -> None:
        self._swarm = swarm
        self._claimed = claimed
        self._config = config

    def open(
        self, attempt: Attempt, episode_id: str, targets: Sequence[str] | None, uses_handle: bool
    ) -> RemoteEpisode:
        """The claimed episode; its targets were named by the claim."""
        rollout = self._config.rollout
        return RemoteEpisode(
            self._swarm,
            self._claimed,
            uses_handle=uses_handle,
            policy_models=frozenset(rollout.policy_models),
            guard=guard_of(self._config),
            timeout=rollout.timeout,
        )

    def open_debug_model(self, name: str, attempt: Attempt) -> None:
        """Does nothing: the server opens the models that its config names."""

    def with_rewards_of_replies(self, episode: Episode, calls: Sequence[Call]) -> dict[str, object]:
        """No change: the server adds these rewards, by its own config."""
        return {}

    def metrics(self, episode: Episode, calls: Sequence[Call]) -> dict[str, float]:
        """None: the server counts them."""
        return {}


class RemoteEpisode(EpisodeRecorder):
    """A claimed episode whose workflow runs in this process. Its public methods are
    thread-safe."""

    def __init__(
        self,
        swarm: AsyncSwarmClient,
        claimed: Claimed,
        *,
        uses_handle: bool,
        policy_models: frozenset[str],
        guard: HostGuard,
        timeout: float,
    ) -> None:
        super().__init__(
            claimed.episode_id,
            gateway_root(claimed),
            uses_handle=uses_handle,
            policy_models=policy_models,
        )
        self.claimed = claimed
        self.calls: tuple[Call, ...] = ()
        self.stopped: str | None = None
        self._swarm = swarm
        self._timeout = timeout
        self._judge_key = ""
        self._loop = asyncio.get_running_loop()
        self._reports: list[Future[None]] = []
        self._passed_through = 0
        """Requests to other models that have ended."""
        self._known_errors = 0
        self._cut_off_by: BaseException | None = None
        """The error of the last request, if it did not reach the server; reported once."""
        self.active = ActiveEpisode(
            claimed.episode_id,
            self,
            self.url,
            claimed.capture_key,
            "rollout",
            not uses_handle,
            guard,
        )
        open_episodes.add(self.active)

    def model(
        self,
        agent: str = "default",
        target_tag: str | None = None,
        trainable: bool = True,
        debug_model: str | None = None,
    ) -> Model:
        """As `OpenEpisode.model`."""
        key = self._judge_key or self.claimed.api_key
        identity = AgentIdentity(agent, target_tag, trainable, debug_model)
        return self.handle(key, self.claimed.model, identity, self._timeout)

    # The interface of the hooks (`context.Recorder`)

    def unanswered(self, error: BaseException | None) -> None:
        """Remember that the last request did not reach the server."""
        self.is_cut_off = error is not None and is_connection_error(error)
        self._cut_off_by = error

    def observed(self, exchange: ObservedExchange) -> None:
        """Report a request that passed through."""
        if not self._finished:
            self._passed_through += 1
            self._report("observed", json_bytes(asdict(exchange)))

    def happened(self, event: Event) -> None:
        """Report an event besides the LLM calls."""
        if not self._finished:
            self.events.append(event)
            self._report("events", event.model_dump_json().encode())

    def takes_handle(self, agent: str) -> None:
        """Also report it: the server checks that rewards are for agents of the episode."""
        if agent not in self.agents:
            super().takes_handle(agent)
            self._report("handles", json_bytes(asdict(AgentIdentity(agent))))

    def _report(self, name: str, body: bytes) -> None:
        """Send a report without holding up the agent."""
        key = self._judge_key or self.claimed.capture_key
        segment = AgentIdentity().segment()
        send = Send("POST", f"/episodes/{self.episode_id}/{segment}/v1/{name}", key, body)

        async def report() -> None:
            requests = self._swarm.requests
            await self._swarm.arun(
                exchange(requests.server, send, requests.patience, notices=requests.notices)
            )

        # outside of any episode: it is no request of the agent
        future = Context().run(asyncio.run_coroutine_threadsafe, report(), self._loop)
        self._reports.append(future)

    # For the runner

    async def update(self, error: BaseException | None = None) -> None:
        """Fetch what the server has recorded. Raises SwarmError: EpisodeOver if the server has
        given the episode up."""
        await self._await_reports()
        reply = await self._swarm.arun(self._swarm.requests.calls(self.claimed))
        self.calls = reply.calls
        self.context_overflow = self.context_overflow or reply.context_overflow
        self.stopped = reply.stopped
        for fault in reply.errors[self._known_errors :]:
            self.fail(error_of_call(fault))
        self._known_errors = len(reply.errors)
        if error is not None and lost_connection(error, self.url):
            self.unanswered(error)
        if self.is_cut_off and self._cut_off_by is not None:
            cause = f"{type(self._cut_off_by).__name__}: {self._cut_off_by}"
            self.fail(EngineUnavailable(f"a call did not reach the swarm's server ({cause})"))
            self._cut_off_by = None

    async def _await_reports(self) -> None:
        reports = self._reports
        self._reports = []
        waiting = [asyncio.wrap_future(report) for report in reports]
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.warning("Episode %s: a report was lost: %s", self.episode_id, outcome)

    async def senders_left(self) -> list[Activity]:
        """See `senders_running`."""
        answered = self._passed_through
        if not self.uses_handle:
            # one request has several calls if it asks for several choices
            answered = len({call.request_id for call in self.calls if call.phase == "rollout"})
        return await self.senders_running(max(0, self.sent - answered))

    @asynccontextmanager
    async def judging(self) -> AsyncIterator[ActiveEpisode]:
        """As `OpenEpisode.judging`. Raises SwarmError."""
        self.judged = True
        open_episodes.discard(self.active)
        if not self._judge_key:
            self._judge_key = await self._swarm.arun(self._swarm.requests.judging(self.claimed))
            await self.update()  # calls that were in flight are cut off now
        active = ActiveEpisode(self.episode_id, self, self.url, self._judge_key, "judge")
        token = current_episode.set(active)
        try:
            yield active
        finally:
            current_episode.reset(token)

    async def finish(self) -> tuple[Call, ...]:
        """End the episode here; the server ends its calls when it is told the result."""
        self.judged = True
        self._finished = True
        open_episodes.discard(self.active)
        await self._await_reports()
        return self.calls
