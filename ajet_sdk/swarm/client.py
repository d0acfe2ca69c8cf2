"""`SwarmClient`: joins a training server by its URL, from any machine.

    swarm = ajet.SwarmClient("http://gpu-box:10086", key=...)
    with swarm.episode(task) as episode:
        answer = my_agent(episode.base_url, episode.api_key, episode.model)
        episode.end(score(answer))

A client may be used from any number of threads. `AsyncSwarmClient` has the same methods for
`await`, and `async with swarm.episode(task)` works with both.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from ajet_sdk.agent.context import AgentIdentity
from ajet_sdk.agent.model import Model
from ajet_sdk.errors import ConfigError, EpisodeOver, SwarmError, TaskError, first_line
from ajet_sdk.swarm.exchange import (
    AsyncConnection,
    AsyncTransport,
    Connection,
    Exchange,
    Transport,
)
from ajet_sdk.swarm.messages import (
    LONGEST_NAME,
    PREFIX,
    Abort,
    Agreed,
    Claim,
    Claimed,
    End,
    EpisodeCalls,
    EpisodeSplit,
    Receipt,
    State,
    SwarmEvent,
    SwarmStatus,
)
from ajet_sdk.swarm.requests import EventFeed, Requests, end_of, without_end
from ajet_sdk.types import Task, new_id

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

log = logging.getLogger("ajet")

PATIENCE = 600.0
"""Seconds for which a request is repeated while its server is away: time to restart it."""
AT_THE_END = 10.0
"""The same for an abort, so that a block or a program ends although the server is away."""
IDLE_TIMEOUT = 240.0
"""Default seconds after which a silent episode is given up."""
T = TypeVar("T")


class _Client:
    """A server's address, the identity of a client, and the bodies of its requests."""

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        name: str | None = None,
        *,
        patience: float = PATIENCE,
    ) -> None:
        """Nothing is requested yet.

        Args:
            url: the server's URL, such as `http://gpu-box:10086`; None: AJET_SWARM_URL.
            key: a key of the server; None: AJET_SWARM_KEY. A server on this machine may need none.
            name: who and where, shown to people; None: the machine's name and the process's number.
            patience: seconds for which a request is repeated while the server is away or restarts.

        Raises:
            ConfigError: there is no URL, or it is no URL.
        """
        self.url = server_url(url or os.environ.get("AJET_SWARM_URL", ""))
        self.name = name or f"{socket.gethostname()} {os.getpid()}"
        self.client_id = new_id()
        self.requests = Requests(self.url, key or os.environ.get("AJET_SWARM_KEY"), patience)
        self._transport = Transport(self.url)
        self._async_transport = AsyncTransport(self.url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def run(self, steps: Exchange[T]) -> T:
        """Run a request and wait for its result."""
        return self._transport.run(steps)

    async def arun(self, steps: Exchange[T]) -> T:
        """Await the result of a request."""
        return await self._async_transport.run(steps)

    def episode(
        self,
        task: Task | Mapping[str, Any] | None = None,
        *,
        split: EpisodeSplit = "train",
        idle_timeout: float = IDLE_TIMEOUT,
        wait: float | None = None,
        attempt: int | None = None,
        decoding: Literal["sampled", "greedy"] | None = None,
        task_at_end: bool = False,
        trainable_targets: Sequence[str] | None = None,
    ) -> EpisodeBlock:
        """Claim an episode for a block: `with swarm.episode(task) as episode:`, or `async with`.

        An exception that leaves the block aborts the episode with its cause. So does leaving it
        without `episode.end(...)`.

        Args:
            task: a `Task`, or a dict with its fields; None: the server's next task.
            split: `val`: the episode is part of a validation and is not trained.
            idle_timeout: seconds without a call or another request, after which the server gives the episode up.
            wait: seconds to wait for a place, while the server updates its model or has enough episodes; None: without
                a limit.
            attempt: the number of the attempt at its task, for `val`.
            decoding: how the model samples, for `val`; None: as the server's config says.
            task_at_end: the task is only known at the end, and is passed to `episode.end`.
            trainable_targets: the target tags to train, unless the server's config names some; None: all.

        Raises, at the start of the block:
            SwarmKeyRefused, SwarmFinished, HeldOutTask: as their names say.
            SwarmOffline, SwarmUnavailable: after the time limits.
        """
        claim = self.claim_of(
            task,
            split=split,
            idle_timeout=idle_timeout,
            attempt=attempt,
            decoding=decoding,
            task_at_end=task_at_end,
            trainable_targets=trainable_targets,
        )
        return EpisodeBlock(self, claim, wait)

    def claim_of(
        self,
        task: Task | Mapping[str, Any] | None,
        *,
        split: EpisodeSplit,
        idle_timeout: float,
        attempt: int | None,
        decoding: Literal["sampled", "greedy"] | None,
        task_at_end: bool = False,
        trainable_targets: Sequence[str] | None = None,
    ) -> Claim:
        """A new claim of this client; see `episode`."""
        return Claim(
            request_id=new_id(),
            client_id=self.client_id,
            client_name=self.name[:LONGEST_NAME],
            task=task_of(task),
            task_at_end=task_at_end,
            split=split,
            idle_timeout=float(idle_timeout),
            attempt=attempt,
            decoding=decoding,
            trainable_targets=None if trainable_targets is None else list(trainable_targets),
        )


class SwarmClient(_Client):
    """A client of a training server: claims episodes, and asks what became of their tokens.

    It may be used from any number of threads.
    """

    def status(self) -> SwarmStatus:
        """The server's state, the step that it collects, its clients, and what it waits for."""
        return self.run(self.requests.status())

    def receipt(self, episode_id: str) -> Receipt:
        """What became of an episode and of each of its tokens."""
        return self.run(self.requests.receipt(episode_id))

    def events(self, after: int = 0) -> Iterator[SwarmEvent]:
        """Yield what happens at the server, from the event after number `after` on, until the
        training is finished."""
        feed = EventFeed(self.requests, after)
        with Connection() as connection:
            while not feed.is_over:
                yield self._transport.run(feed.next_event(), connection)

    def agree(self) -> Agreed:
        """Say that this client has enough episodes in the step, for the stop rules by consent."""
        return self.run(self.requests.agree(self.client_id))

    def configure(self, config: Config | Mapping[str, Any] | str | Path) -> None:
        """Send a config, or a file of one, to a server that is offline; needs an owner's key.

        Raises SwarmError `config` for a config that the server refuses, `not_offline`.
        """
        self.run(self.requests.configure(yaml_of(config)))

    def start(self) -> State:
        """Start the training of the config that was sent; needs an owner's key."""
        return self.run(self.requests.start())

    def stop(self) -> State:
        """Stop the training; needs an owner's key."""
        return self.run(self.requests.stop())

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> SwarmClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncSwarmClient(_Client):
    """As `SwarmClient`, with methods to await, for any event loop."""

    async def status(self) -> SwarmStatus:
        """As `SwarmClient.status`."""
        return await self.arun(self.requests.status())

    async def receipt(self, episode_id: str) -> Receipt:
        """As `SwarmClient.receipt`."""
        return await self.arun(self.requests.receipt(episode_id))

    async def events(self, after: int = 0) -> AsyncIterator[SwarmEvent]:
        """As `SwarmClient.events`."""
        feed = EventFeed(self.requests, after)
        async with AsyncConnection() as connection:
            while not feed.is_over:
                yield await self._async_transport.run(feed.next_event(), connection)

    async def agree(self) -> Agreed:
        """As `SwarmClient.agree`."""
        return await self.arun(self.requests.agree(self.client_id))

    async def configure(self, config: Config | Mapping[str, Any] | str | Path) -> None:
        """As `SwarmClient.configure`."""
        await self.arun(self.requests.configure(yaml_of(config)))

    async def start(self) -> State:
        """As `SwarmClient.start`."""
        return await self.arun(self.requests.start())

    async def stop(self) -> State:
        """As `SwarmClient.stop`."""
        return await self.arun(self.requests.stop())

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._async_transport.aclose()

    async def __aenter__(self) -> AsyncSwarmClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class ClaimedEpisode:
    """What a client knows of its open episode, and the bodies of its requests."""

    def __init__(self, swarm: _Client, claimed: Claimed) -> None:
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
        return self._swarm.requests.receipt(self.id, self.api_key)

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
        from ajet_sdk.swarm.failure import abort_of  # loads the runner, which few clients need

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
            reward: a number or bool, a list of numbers, a dict by agent, an `ajet.Reward` or a list of them.
            is_success: whether the task is solved; None: by the reward.
            metrics: numbers that the server averages.
            output: the agent's answer, for people.
            task: the task, for an episode that was claimed with `task_at_end`.

        Returns:
            The receipt as it is now; tokens are `pending` until their step has trained.

        Raises:
            SwarmError: what is wrong with the reward (`bad_reward`), or `no_calls`; the episode stays open.
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

    def __init__(self, swarm: _Client, claim: Claim, wait: float | None) -> None:
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


def server_url(url: str) -> str:
    """The server's URL without the routes of the protocol. Raises ConfigError."""
    if not url:
        raise ConfigError(
            "no server is named: pass url=, or set AJET_SWARM_URL, to what `ajet swarm start`"
            " prints, such as http://127.0.0.1:10086"
        )
    address = url if "://" in url else f"http://{url}"
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"{url!r} is no URL of a swarm's server, such as http://gpu-box:10086")
    return address.rstrip("/").removesuffix(PREFIX)


def task_of(task: Task | Mapping[str, Any] | None) -> Task | None:
    """A task from its fields. Raises TaskError."""
    if task is None or isinstance(task, Task):
        return task
    try:
        return Task.model_validate(dict(task))
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"{task!r:.200} is no task: pass ajet.Task, or a dict with main_query, task_id and"
            f" metadata ({first_line(error)})"
        ) from error


def yaml_of(config: Config | Mapping[str, Any] | str | Path) -> str:
    """A config as YAML. A path is read here. Raises ConfigError."""
    from ajet_sdk.config.config import Config, load_config

    if isinstance(config, Config):
        return config.dump_yaml(only_set=True)
    if isinstance(config, Mapping):
        return load_config(values=config).dump_yaml(only_set=True)
    return load_config(config).dump_yaml(only_set=True)
