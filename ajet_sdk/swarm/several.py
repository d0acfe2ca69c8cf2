"""Episodes of several models for one block: `ajet.episodes({planner: task, executor: task})`.

Each model has its own server, which trains it on its own calls and its own reward. All episodes are
opened or none, and all are ended or none: an end is only sent once every server has said that its
episode is open and has calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack
from types import TracebackType
from typing import Any

from ajet_sdk.errors import ConfigError, SwarmError
from ajet_sdk.swarm.client import AsyncSwarmClient, SwarmClient
from ajet_sdk.swarm.episodes import ClaimedEpisode
from ajet_sdk.swarm.exchange import Exchange
from ajet_sdk.swarm.messages import End, EpisodeSplit, Receipt
from ajet_sdk.swarm.requests import end_of
from ajet_sdk.types import Task

Client = SwarmClient | AsyncSwarmClient
GivenTask = Task | Mapping[str, Any] | None


def episodes(tasks: Mapping[Client, GivenTask], *, split: EpisodeSplit = "train") -> EpisodesBlock:
    """Open an episode at each of several servers for a block.

        with ajet.episodes({planner: task, executor: task}) as opened:
            answer = solve(opened[planner], opened[executor])
            opened.end({planner: score(answer), executor: 1.0})

    `async with` does the same with `AsyncSwarmClient`s. An exception that leaves the block aborts
    all of them.

    Args:
        tasks: the task for each client, as for `SwarmClient.episode`.
        split: `val`: the episodes are part of a validation and are not trained.

    Raises:
        ConfigError: there is no client.
        SwarmError: as `SwarmClient.episode`; then none is open.
    """
    if not tasks:
        raise ConfigError("ajet.episodes needs at least one client, with its task")
    return EpisodesBlock(tasks, split)


class _Opened:
    """The open episodes of a block, by client."""

    def __init__(self, by_client: Mapping[Any, ClaimedEpisode]) -> None:
        self._by_client = dict(by_client)

    def __getitem__(self, client: Client) -> Any:
        return self._by_client[client]

    def _ends(self, rewards: Mapping[Any, object]) -> dict[Any, End]:
        """The messages of all ends. Raises SwarmError, ConfigError before any is sent."""
        if rewards.keys() != self._by_client.keys():
            missing = [client.url for client in self._by_client if client not in rewards]
            raise ConfigError(
                "each of the models needs a reward; there is none for"
                f" {', '.join(missing) or 'a client that is not in the block'}"
            )
        return {client: end_of(reward) for client, reward in rewards.items()}

    def _check(self, client: Client) -> Exchange[None]:
        """Raise SwarmError unless an episode is open and has calls."""
        episode = self._by_client[client]
        recorded = yield from client.requests.calls(episode.claimed)
        if not any(call.phase == "rollout" for call in recorded.calls):
            raise SwarmError(
                f"the model of {client.url} was not called in this block, so there is nothing to"
                " train: leave its client out, or call it",
                code="no_calls",
            )


class Episodes(_Opened):
    """The open episodes of a `with` block."""

    def end(self, rewards: Mapping[SwarmClient, object]) -> dict[SwarmClient, Receipt]:
        """End all episodes, each with the reward of its model. Raises before any is ended if one of
        them cannot be."""
        ends = self._ends(rewards)
        for client in ends:
            client.run(self._check(client))
        return {
            client: client.run(self._by_client[client]._end(end)) for client, end in ends.items()
        }


class AsyncEpisodes(_Opened):
    """The open episodes of an `async with` block."""

    async def end(
        self, rewards: Mapping[AsyncSwarmClient, object]
    ) -> dict[AsyncSwarmClient, Receipt]:
        """As `Episodes.end`."""
        ends = self._ends(rewards)
        for client in ends:
            await client.arun(self._check(client))
        return {
            client: await client.arun(self._by_client[client]._end(end))
            for client, end in ends.items()
        }


class EpisodesBlock:
    """Opens the episodes as its block begins; see `episodes`."""

    def __init__(self, tasks: Mapping[Client, GivenTask], split: EpisodeSplit) -> None:
        self._blocks = {client: client.episode(task, split=split) for client, task in tasks.items()}
        self._stack = ExitStack()
        self._async_stack = AsyncExitStack()

    def __enter__(self) -> Episodes:
        with ExitStack() as stack:
            opened = {c: stack.enter_context(block) for c, block in self._blocks.items()}
            self._stack = stack.pop_all()
        return Episodes(opened)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    async def __aenter__(self) -> AsyncEpisodes:
        async with AsyncExitStack() as stack:
            opened = {
                c: await stack.enter_async_context(block) for c, block in self._blocks.items()
            }
            self._async_stack = stack.pop_all()
        return AsyncEpisodes(opened)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._async_stack.__aexit__(kind, error, trace)
