"""How what happens on a cluster reaches the driver: one small Ray actor that everybody puts things into.

Metrics of Trinity's explorer and trainer, the tokens that were trained, and how each group of episodes went: the driver
takes them out and writes them to its own trace, console and loggers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from trinity.utils.monitor import Monitor

__all__ = ["Post", "ToTheDriver", "open_post", "post_of"]


class Post:
    """A queue of (kind, content), kept in order. A Ray actor."""

    def __init__(self) -> None:
        self._items: list[tuple[str, dict[str, Any]]] = []
        self._news = asyncio.Event()

    async def put(self, kind: str, content: dict[str, Any]) -> None:
        """Add one thing; what it holds must be plain data."""
        self._items.append((kind, content))
        self._news.set()

    async def take(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Everything that has come since the last call; waits for something for at most `seconds`."""
        try:
            await asyncio.wait_for(self._news.wait(), seconds)
        except asyncio.TimeoutError:
            return []
        self._news.clear()
        items, self._items = self._items, []
        return items


_NAME = "ajet-post"


def namespace_of(run_id: str) -> str:
    """The Ray namespace of a run: its actors, ours and Trinity's, are found by name there."""
    return f"ajet/{run_id}"


def open_post(run_id: str) -> Any:
    """The driver's end: starts the actor. It ends with the driver's connection."""
    actor = ray.remote(Post)
    return actor.options(name=_NAME, namespace=namespace_of(run_id), num_cpus=0, max_concurrency=64).remote()


def post_of(run_id: str) -> Any:
    """The same actor, from anywhere in the cluster."""
    return ray.get_actor(_NAME, namespace=namespace_of(run_id))


class ToTheDriver(Monitor):  # type: ignore[misc]
    """Trinity's monitor interface: sends the metrics of the explorer and the trainer to the driver."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        self.role = role
        arguments = (config.monitor.monitor_args if config is not None else None) or {}
        self._post = post_of(arguments["run_id"])

    def log(self, data: Mapping[str, Any], step: int, commit: bool = False) -> None:
        numbers = {name: float(value) for name, value in data.items() if _is_number(value)}
        self._post.put.remote("metrics", {"role": self.role, "step": int(step), "metrics": numbers})

    def close(self) -> None:
        """Nothing is held."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or hasattr(value, "item")
