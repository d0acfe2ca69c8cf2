"""What both clients of a swarm's server share: its address, their identity, and their requests."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from ajet_sdk.errors import ConfigError, TaskError, first_line
from ajet_sdk.swarm.exchange import AsyncTransport, Exchange, Transport
from ajet_sdk.swarm.messages import LONGEST_NAME, PREFIX, Claim, EpisodeSplit
from ajet_sdk.swarm.requests import Requests
from ajet_sdk.types import Task, new_id

T = TypeVar("T")

PATIENCE = 1800.0
"""Seconds for which a request is repeated while its server is away: time to restart it."""


class ClientCore:
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
        self.transport = Transport(self.url)
        self.async_transport = AsyncTransport(self.url)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def run(self, steps: Exchange[T]) -> T:
        """Run a request and wait for its result."""
        return self.transport.run(steps)

    async def arun(self, steps: Exchange[T]) -> T:
        """Await the result of a request."""
        return await self.async_transport.run(steps)

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
