"""The open episodes of a client, and the blocks that end or abort them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ajet_sdk.agent.context import AgentIdentity
from ajet_sdk.agent.model import Model
from ajet_sdk.errors import EpisodeOver, SwarmError
from ajet_sdk.swarm.core import ClientCore, task_of
from ajet_sdk.swarm.exchange import Exchange
from ajet_sdk.swarm.failure import abort_of
from ajet_sdk.swarm.messages import Abort, Claim, Claimed, End, EpisodeCalls, Receipt
from ajet_sdk.swarm.requests import end_of, without_end
from ajet_sdk.types import Task

log = logging.getLogger("ajet")

AT_THE_END = 10.0
"""Seconds for which an abort is repeated, so that a block or a program ends although the server is
away."""


class ClaimedEpisode:
    """What a client knows of its open episode, and the bodies of its requests."""

    def __init__(self, swarm: ClientCore, claimed: Claimed) -> None:
        self.claimed = claimed
        self.is_over = False
        """Whether this client has ended or aborted it."""
        self._swarm = swarm

    @property
    def id(self) -> str:
        return self.claimed.episode_id

    @property
    def base_url(self) -> str:
        """The base URL for clients of OpenAI's API; it ends in `/v1`."""
        return self.claimed.base_url

    @property
    def api_key(self) -> str:
        """The key of this episode alone."""
        return self.claimed.api_key

    @property
    def model(self) -> str:
        """The model's name in requests."""
        return self.claimed.model

    @property
    def task(self) -> Task:
        """The task, which the server chose if the claim named none."""
        return self.claimed.task

    @property
    def step(self) -> int:
        """The step that the server collects."""
        return self.claimed.step

    @property
    def policy_version(self) -> int:
        """The number of updates of the model so far."""
        return self.claimed.policy_version

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, task {self.task.task_id!r})"

    def agent(
        self, name: str = "default", target_tag: str | None = None, trainable: bool = True
    ) -> Model:
        """Return a handle of the model for one agent of the episode; see `Model.agent`."""
        segment = AgentIdentity(name, target_tag, trainable).segment()
        root = f"{gateway_root(self.claimed)}/episodes/{self.id}"
        return Model(f"{root}/{segment}/v1", self.api_key, self.model)

    def _end(self, end: End) -> Exchange[Receipt]:
        receipt = yield from self._swarm.requests.end(self.claimed, end)
        self.is_over = True
        return receipt

    def _abort(
        self, reason: str, cause: str = "Aborted", infrastructure: bool = False
    ) -> Exchange[Receipt]:
        abort = Abort(reason=reason, cause=cause, infrastructure=infrastructure, error=reason)
        receipt = yield from self._swarm.requests.abort(self.claimed, abort)
        self.is_over = True
        return receipt

    def _receipt(self) -> Exchange[Receipt]:
        return self._swarm.requests.receipt(self.id, self.claimed.end_key)

    def leave(self, error: BaseException | None) -> Exchange[None]:
        """Abort the episode at the end of its block, unless it is over. Raises nothing: the block's
        own exception is what its caller needs to see."""
        if self.is_over:
            return
        abort = without_end()
        if error is None:
            log.warning("%r: %s", self, abort.reason)
        else:
            abort = yield from self._failure(error)
        try:
            yield from self._swarm.requests.abort(self.claimed, abort, AT_THE_END)
        except EpisodeOver:
            pass  # what the abort is for has happened already
        except SwarmError as lost:
            log.warning("%r could not be aborted, and will idle out: %s", self, lost)
        self.is_over = True

    def _failure(self, error: BaseException) -> Exchange[Abort]:
        recorded = EpisodeCalls()
        if isinstance(error, Exception) and not isinstance(error, SwarmError):
            try:  # a failed call of the model explains the agent's exception
                recorded = yield from self._swarm.requests.calls(self.claimed, AT_THE_END)
            except SwarmError as lost:
                log.debug("The calls of %r are unknown: %s", self, lost)
        return abort_of(error, recorded, gateway_root(self.claimed))


class Episode(ClaimedEpisode):
    """An open episode of a `with` block."""

    def end(
        self,
        reward: object = None,
        is_success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        output: object = None,
        task: Task | Mapping[str, Any] | None = None,
    ) -> Receipt:
        """Report the result. It is on the server's disk when this returns.

        Args:
            reward: a number or bool, several numbers, a dict by agent, or `ajet.Reward`s.
            is_success: whether the task is solved; None: by the reward.
            metrics: numbers that the server averages.
            output: the agent's answer, for people.
            task: the task, for an episode that was claimed with `task_at_end`.

        Returns:
            The receipt as it is now; tokens are `pending` until their step has trained.

        Raises:
            SwarmError: `bad_reward` or `no_calls`; the episode stays open.
            EpisodeOver: it was idle for too long, or was aborted.
        """
        return self._swarm.run(
            self._end(end_of(reward, is_success, metrics, output, task_of(task)))
        )

    def abort(
        self, reason: str, *, cause: str = "Aborted", infrastructure: bool = False
    ) -> Receipt:
        """Give the episode up; its place is free for another attempt."""
        return self._swarm.run(self._abort(reason, cause, infrastructure))

    def receipt(self) -> Receipt:
        """What became of the episode and of each of its tokens, as it is now."""
        return self._swarm.run(self._receipt())

    def calls(self) -> EpisodeCalls:
        """The calls that the server has recorded so far."""
        return self._swarm.run(self._swarm.requests.calls(self.claimed))


class AsyncEpisode(ClaimedEpisode):
    """An open episode of an `async with` block; its methods are those of `Episode`, to await."""

    async def end(
        self,
        reward: object = None,
        is_success: bool | None = None,
        metrics: Mapping[str, float] | None = None,
        output: object = None,
        task: Task | Mapping[str, Any] | None = None,
    ) -> Receipt:
        """As `Episode.end`."""
        return await self._swarm.arun(
            self._end(end_of(reward, is_success, metrics, output, task_of(task)))
        )

    async def abort(
        self, reason: str, *, cause: str = "Aborted", infrastructure: bool = False
    ) -> Receipt:
        """As `Episode.abort`."""
        return await self._swarm.arun(self._abort(reason, cause, infrastructure))

    async def receipt(self) -> Receipt:
        """As `Episode.receipt`."""
        return await self._swarm.arun(self._receipt())

    async def calls(self) -> EpisodeCalls:
        """As `Episode.calls`."""
        return await self._swarm.arun(self._swarm.requests.calls(self.claimed))


class EpisodeBlock:
    """The block of an episode; see `SwarmClient.episode`. It can be entered once."""

    def __init__(self, swarm: ClientCore, claim: Claim, wait: float | None) -> None:
        self._swarm = swarm
        self._claim = swarm.requests.claim(claim, wait)
        self._episode: ClaimedEpisode | None = None

    def __enter__(self) -> Episode:
        self._episode = episode = Episode(self._swarm, self._swarm.run(self._claim))
        return episode

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._episode is not None:
            self._swarm.run(self._episode.leave(error))

    async def __aenter__(self) -> AsyncEpisode:
        self._episode = episode = AsyncEpisode(self._swarm, await self._swarm.arun(self._claim))
        return episode

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._episode is not None:
            await self._swarm.arun(self._episode.leave(error))


def gateway_root(claimed: Claimed) -> str:
    """The address of the server's gateway, below which each episode has its own."""
    return claimed.base_url.partition("/episodes/")[0].removesuffix("/v1")
