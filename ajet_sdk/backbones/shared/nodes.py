"""The nodes of a cluster run: which of them were lost, and which of its actors were there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_NOTICED = 15.0
"""Seconds until Ray says that a node is dead, after calls to its actors fail."""
_LOOK = 0.5
_ASKING = 30.0
"""Seconds for an actor to say where it is."""


class Placement:
    """Where a run's named actors are. Made while all of its nodes are alive."""

    def __init__(self) -> None:
        self._nodes = {str(node["NodeID"]) for node in _nodes() if node["Alive"]}
        self._actors: dict[str, list[str]] = {}
        """Names by node."""

    async def add(self, actors: Mapping[str, ActorHandle]) -> None:
        """Ask actors for their nodes. Those that do not say so are left out."""
        asked = [_node_of(actor) for actor in actors.values()]
        for name, node in zip(actors, await asyncio.gather(*asked), strict=True):
            if node:
                self._actors.setdefault(node, []).append(name)

    async def loss(self, error: Exception) -> str:
        """What was lost with a node since, and what to do; empty if all nodes are there. Waits for
        Ray's notice if the error may come of a lost node."""
        import ray

        looks = 1
        if isinstance(error, ray.exceptions.RayActorError):
            looks = int(_NOTICED / _LOOK)
        lost: dict[str, str] = {}
        for _ in range(looks):
            lost = self._lost()
            if lost:
                break
            await asyncio.sleep(_LOOK)
        if not lost:
            return ""
        parts = []
        for node_id, host in lost.items():
            names = ", ".join(sorted(self._actors.get(node_id, ())))
            parts.append(f"the node {host} was lost" + (f", and with it {names}" if names else ""))
        return (
            f"{'; '.join(parts)}. Start it again, or leave it out (trainer_common.nnodes), and"
            " continue with --resume"
        )

    def _lost(self) -> dict[str, str]:
        """Addresses of dead nodes, by id."""
        return {
            str(node["NodeID"]): str(node["NodeManagerAddress"])
            for node in _nodes()
            if not node["Alive"] and node["NodeID"] in self._nodes
        }


def _nodes() -> list[dict[str, Any]]:
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()
    return nodes


async def _node_of(actor: ActorHandle) -> str:
    import ray

    asking: Awaitable[str] = actor.__ray_call__.remote(_this_node)
    try:
        return await asyncio.wait_for(asyncio.ensure_future(_wait_for(asking)), _ASKING)
    except (ray.exceptions.RayError, asyncio.TimeoutError):
        return ""


async def _wait_for(reference: Awaitable[str]) -> str:
    return await reference


def _this_node(_actor: object) -> str:
    """The id of the node that an actor is on; called in its process."""
    import ray

    return str(ray.get_runtime_context().get_node_id())
