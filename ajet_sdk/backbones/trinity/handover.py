"""Hands the experiences of steps that the driver has collected to Trinity's runners, through a Ray
actor."""

# without Ray, pyright takes `ray` for the module beside this one:
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ajet_sdk.cluster.mailbox import namespace_of, on_this_node

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from trinity.common.experience import Experience

_NAME = "ajet-handover"


class Handover:
    """The experiences of each step. A Ray actor."""

    def __init__(self) -> None:
        self._steps: dict[int, Sequence[Experience]] = {}
        self._wanted = 0
        self._changed = asyncio.Condition()

    async def put(self, step: int, experiences: Sequence[Experience]) -> None:
        """Give a step to the runners."""
        async with self._changed:
            self._steps[step] = experiences
            self._changed.notify_all()

    async def take(self, step: int, position: int, positions: int) -> list[Experience]:
        """The share of one of the `positions` of a step; waits until the step is given.

        A runner that is started anew after a crash gets the same share again.
        """
        async with self._changed:
            self._wanted = max(self._wanted, step)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: step in self._steps)
            return list(self._steps[step][position::positions])

    async def wait_for_demand(self, step: int) -> None:
        """Wait until a runner wants a step: its weights are as new as they are to be."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._wanted >= step)

    async def forget(self, step: int) -> None:
        """Free a step that was trained, and those before it."""
        self._steps = {later: kept for later, kept in self._steps.items() if later > step}


def open_handover(run_id: str) -> ActorHandle:
    """Start the actor on the driver's node. It ends with the driver's connection."""
    import ray

    options = {"name": _NAME, "namespace": namespace_of(run_id), "max_concurrency": 1000}
    return ray.remote(Handover).options(num_cpus=0, **options, **on_this_node()).remote()


def handover_of(run_id: str) -> ActorHandle:
    import ray

    return ray.get_actor(_NAME, namespace=namespace_of(run_id))
