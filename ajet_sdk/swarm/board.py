"""A swarm server's state and its events, for everyone who watches."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any

from ajet_sdk.swarm.messages import EventKind, ServerState, SwarmEvent

EVENTS = 10_000
"""Newest events that a reader can still get."""


class Board:
    """The state, and the newest events."""

    def __init__(self) -> None:
        self.state: ServerState = "offline"
        self.events: deque[SwarmEvent] = deque(maxlen=EVENTS)
        self._count = 0
        self._listeners: set[asyncio.Event] = set()

    def enter(self, state: ServerState) -> None:
        """Change the state."""
        if state != self.state:
            self.state = state
            self.emit("state", state=state)

    def emit(self, kind: EventKind, **data: Any) -> None:
        """Tell all listeners."""
        self._count += 1
        self.events.append(SwarmEvent(id=self._count, kind=kind, data=data))
        for listener in self._listeners:
            listener.set()

    async def next_event(self, patience: float) -> None:
        """Wait for an event, at most `patience` seconds."""
        await self.events_after(self._count, patience)

    async def events_after(self, last: int, patience: float) -> list[SwarmEvent]:
        """The events after one; waits at most `patience` seconds for the first."""
        heard = asyncio.Event()
        self._listeners.add(heard)
        try:
            if self._count <= last:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(heard.wait(), patience)
        finally:
            self._listeners.discard(heard)
        return [event for event in self.events if event.id > last]
