"""A swarm server's state over its runs: gateway, clients, events, and the run in progress.

It belongs to the gateway's event loop; other threads use `SwarmHost.submit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.swarm.board import Board
from ajet_sdk.swarm.clients import Clients
from ajet_sdk.swarm.collection import Collection, IsGone
from ajet_sdk.swarm.messages import Claim, Claimed, ServerState, SwarmStatus
from ajet_sdk.swarm.refusals import Refused

T = TypeVar("T")


class SwarmHost:
    """The state of a swarm server."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.board = Board()
        self.clients = Clients(self._open_by_client)
        self.collection: Collection | None = None
        self.failure = ""
        """Why the last run ended, if it failed."""
        self.stop_run: Callable[[], object] = lambda: None
        """Stops the run in progress, from any thread."""
        self.stop_requested = False
        """Also before there is a run to stop."""

    @property
    def state(self) -> ServerState:
        return self.board.state

    def submit(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run a coroutine in the gateway's event loop, from any thread."""
        return self.gateway.submit(work)

    def enter_soon(self, state: ServerState, failure: str = "") -> None:
        """Change the state from another thread, and wait until it is changed."""

        async def enter() -> None:
            self.failure = failure
            if failure:
                self.collection = None  # claims are told why
            self.board.enter(state)

        self.submit(enter()).result()

    def _open_by_client(self) -> Counter[str]:
        if self.collection is None:
            return Counter()
        return Counter(a.claim.client_id for a in self.collection.attempts.open.values())

    # Requests

    async def claim(
        self, claim: Claim, address: str = "", is_gone: IsGone | None = None
    ) -> tuple[Claimed, bool]:
        """Open an episode; waits for a place at most `claim.wait` seconds.

        Returns whether it is new, rather than that of an earlier claim with the same `request_id`.
        Raises Refused.
        """
        self.clients.seen(claim.client_id, claim.client_name, address)
        return await self.running().claim(claim, is_gone)

    def running(self) -> Collection:
        """The run in progress. Raises Refused without one."""
        if self.collection is not None:
            return self.collection
        if self.state == "booting":
            raise Refused(503, "booting", "the model is being loaded", 2.0)
        why = f" ({self.failure})" if self.failure else ""
        raise Refused(
            503,
            "offline",
            f"no training runs here{why}: send a config and start it (`ajet train CONFIG --swarm"
            " URL`), or start the server with a config",
            5.0,
        )

    def status(self) -> SwarmStatus:
        """One look at the server."""
        if self.collection is not None:
            return self.collection.status(self.clients.infos())
        waiting = "a config and `start`"
        if self.state == "booting":
            waiting = "the model is being loaded"
        elif self.failure:
            waiting = f"a config and `start`; the last run failed: {self.failure}"
        return SwarmStatus(
            state=self.state,
            clients=self.clients.infos(),
            waiting=waiting,
            failure="" if self.state == "booting" else self.failure,
        )
