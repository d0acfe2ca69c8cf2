"""The clients of a swarm server, and what became of their episodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ajet_sdk.swarm.messages import ClientInfo, EpisodeState
from ajet_sdk.swarm.refusals import Refused

ACTIVE_CLIENT = 600.0
"""Seconds after its last request for which a client has a say in `all_clients`."""
MOST_CLIENTS = 10_000


@dataclass
class Client:
    """A client and what became of its episodes."""

    client_id: str
    name: str = ""
    address: str = ""
    ended: int = 0
    failed: int = 0
    abandoned: int = 0
    in_step: int = 0
    """Episodes that it ended or aborted since the last update."""
    seen: float = field(default_factory=time.monotonic)


class Clients:
    """The clients by id; `open_by_client` counts their open episodes."""

    def __init__(self, open_by_client: Callable[[], Counter[str]]) -> None:
        self._clients: dict[str, Client] = {}
        self._open_by_client = open_by_client

    def __len__(self) -> int:
        return len(self._clients)

    def seen(self, client_id: str, name: str = "", address: str = "") -> Client:
        """Note a request of a client. Raises Refused if there are too many."""
        client = self._clients.get(client_id)
        if client is None:
            if len(self._clients) >= MOST_CLIENTS:
                self._forget_idle()
            client = self._clients[client_id] = Client(client_id)
        client.name = name or client.name
        client.address = address or client.address
        client.seen = time.monotonic()
        return client

    def _forget_idle(self) -> None:
        busy = self._open_by_client()
        idle = [client for client in self._clients.values() if client.client_id not in busy]
        if not idle:
            raise Refused(
                429,
                "too_many_clients",
                f"{len(self._clients):,} clients have open episodes; give the threads of a program"
                " one client",
                60.0,
            )
        oldest = min(idle, key=lambda client: client.seen)
        del self._clients[oldest.client_id]

    def count_end(self, client_id: str, state: EpisodeState) -> None:
        """Count an episode of a client that is over."""
        client = self._clients.get(client_id)
        if client is None:
            return
        if state == "abandoned":
            client.abandoned += 1
            return
        client.in_step += 1
        if state == "ended":
            client.ended += 1
        else:
            client.failed += 1

    def begin_step(self) -> None:
        """Count the episodes of a new step."""
        for client in self._clients.values():
            client.in_step = 0

    def took_part(self, client_id: str) -> bool:
        """Whether a client has ended an episode since the last update."""
        client = self._clients.get(client_id)
        return client is not None and client.in_step > 0

    def voters(self) -> list[str]:
        """Clients that took part in the step and were seen lately."""
        moment = time.monotonic()
        return [
            client.client_id
            for client in self._clients.values()
            if client.in_step and moment - client.seen < ACTIVE_CLIENT
        ]

    def infos(self) -> tuple[ClientInfo, ...]:
        """What there is to say about each."""
        moment = time.monotonic()
        open_by_client = self._open_by_client()
        return tuple(
            ClientInfo(
                client_id=client.client_id,
                client_name=client.name,
                address=client.address,
                open=open_by_client[client.client_id],
                ended=client.ended,
                failed=client.failed,
                abandoned=client.abandoned,
                last_seen=moment - client.seen,
            )
            for client in self._clients.values()
        )
