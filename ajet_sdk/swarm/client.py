"""`SwarmClient`: joins a training server by its URL, from any machine.

    swarm = ajet.SwarmClient("http://gpu-box:10086", key=...)
    with swarm.episode(task) as episode:
        answer = my_agent(episode.base_url, episode.api_key, episode.model)
        episode.end(score(answer))

A client may be used from any number of threads. `AsyncSwarmClient` has the same methods for
`await`, and `async with swarm.episode(task)` works with both.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ajet_sdk.errors import ConfigError
from ajet_sdk.swarm.core import ClientCore
from ajet_sdk.swarm.episodes import EpisodeBlock
from ajet_sdk.swarm.exchange import AsyncConnection, Connection
from ajet_sdk.swarm.messages import Agreed, EpisodeSplit, Receipt, State, SwarmEvent, SwarmStatus
from ajet_sdk.swarm.requests import EventFeed
from ajet_sdk.types import Task

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

IDLE_TIMEOUT = 240.0
"""Default seconds after which a silent episode is given up."""


class _Client(ClientCore):
    """A client that claims episodes for blocks."""

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
            idle_timeout: seconds without a call or another request until the episode is given up.
            wait: seconds to wait for a place, while the model is updated or the step has enough;
                None: without a limit.
            attempt: the number of the attempt at its task, for `val`.
            decoding: how the model samples, for `val`; None: as the server's config says.
            task_at_end: the task is only known at the end, and is passed to `episode.end`.
            trainable_targets: the target tags to train, unless the server's config names some.

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
                yield self.transport.run(feed.next_event(), connection)

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
        self.transport.close()

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
                yield await self.async_transport.run(feed.next_event(), connection)

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
        await self.async_transport.aclose()

    async def __aenter__(self) -> AsyncSwarmClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def yaml_of(config: Config | Mapping[str, Any] | str | Path) -> str:
    """A config as YAML, which the server checks: of a file its text, as it is. Raises
    ConfigError."""
    if isinstance(config, Mapping):
        return json.dumps(config if "ajet" in config else {"ajet": dict(config)})  # JSON is YAML
    if not isinstance(config, str | Path):
        return config.dump_yaml(only_set=True)
    try:
        return Path(config).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config {config} cannot be read: {error}") from error
