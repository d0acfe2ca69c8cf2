"""Messages from the nodes of a cluster to the driver, through a Ray actor.

The driver writes the metrics, trained tokens and groups of episodes to its trace, console and
loggers.
"""

# without Ray, pyright takes `ray` for the module beside this one:
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from ajet_sdk.types import Episode

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_NAME = "ajet-mailbox"
_HEAVY: dict[str, object] = {
    "request": {},
    "response": {},
    "prompt_ids": None,
    "output_ids": None,
    "logprobs": None,
}


class GroupMessage(TypedDict):
    """A finished group of attempts."""

    step: int
    position: int
    """Of the task in its batch."""
    purpose: str
    """`train`, `val` or `val, greedy`."""
    metrics: dict[str, float]
    episodes: list[str]
    """As JSON, without requests, responses and tokens."""


class BatchMessage(TypedDict):
    """The samples of a step that verl's trainer gets."""

    step: int
    metrics: dict[str, float]
    words: list[str]
    """Lines to print."""
    ledger: list[dict[str, Any]]
    """Fields of `LedgerEntry`."""


class MetricsMessage(TypedDict):
    """Metrics of Trinity's explorer or trainer (`role`)."""

    role: str
    step: int
    metrics: dict[str, float]


class TakenGroup(TypedDict):
    """A group that a training step took."""

    batch: int
    position: int
    episodes: list[str]
    """Their ids."""


class TrainedMessage(TypedDict):
    """What Trinity's trainer took from the buffer for a step."""

    step: int
    calls: list[dict[str, Any]]
    """Fields of `LedgerEntry`."""
    groups: list[TakenGroup]
    """Empty in a swarm, whose clients make the episodes."""


class Mailbox:
    """A queue of (kind, content). A Ray actor."""

    def __init__(self) -> None:
        self._items: list[tuple[str, Mapping[str, object]]] = []
        self._news = asyncio.Event()

    async def put(self, kind: str, content: Mapping[str, object]) -> None:
        self._items.append((kind, content))
        self._news.set()

    async def take(self, seconds: float) -> list[tuple[str, Mapping[str, object]]]:
        """All messages since the last call; waits at most `seconds` for the first."""
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except asyncio.TimeoutError:
            return []
        self._news.clear()
        items = self._items
        self._items = []
        return items


def namespace_of(run_id: str) -> str:
    """The Ray namespace with a run's named actors."""
    return f"ajet/{run_id}"


def on_this_node() -> dict[str, NodeAffinitySchedulingStrategy]:
    """Options of an actor that runs on this process's node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


def open_mailbox(run_id: str) -> ActorHandle:
    """Start the actor on the driver's node. It ends with the driver's connection."""
    import ray

    options = {"name": _NAME, "namespace": namespace_of(run_id), "max_concurrency": 64}
    return ray.remote(Mailbox).options(num_cpus=0, **options, **on_this_node()).remote()


def mailbox_of(run_id: str) -> ActorHandle:
    import ray

    return ray.get_actor(_NAME, namespace=namespace_of(run_id))


def emptied(episodes: Sequence[Episode], of_calls: Mapping[str, object]) -> list[Episode]:
    """Copies of episodes without outputs, whose calls have the values `of_calls`."""
    light: list[Episode] = []
    for episode in episodes:
        calls = tuple(call.model_copy(update=of_calls) for call in episode.calls)
        light.append(episode.model_copy(update={"calls": calls, "output": None}))
    return light


def group_message(
    episodes: Sequence[Episode],
    step: int,
    position: int,
    purpose: str,
    metrics: Mapping[str, float],
) -> GroupMessage:
    """The message about a finished group; requests, responses and outputs stay in the node's
    trace."""
    texts = [episode.model_dump_json() for episode in emptied(episodes, _HEAVY)]
    return {
        "step": step,
        "position": position,
        "purpose": purpose,
        "metrics": dict(metrics),
        "episodes": texts,
    }
