"""One continuation to be sampled, and the watch for its stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ajet_sdk.protocols import Sampled, Sampling

__all__ = ["Job", "Request", "StopWatch"]


class StopWatch:
    """Finds the first stop string in a growing reply, wherever token boundaries fall.

    It compares bytes, so that a stop string may begin inside one token and end inside another, and no token is
    decoded twice.
    """

    def __init__(self, stop: Sequence[str], token_bytes: Callable[[int], bytes]) -> None:
        self._stops = [text.encode() for text in stop if text]
        self._longest = max(map(len, self._stops), default=0)
        self._token_bytes = token_bytes
        self._seen = bytearray()
        self.text: str | None = None
        """The text before the stop string, once one was found."""

    def feed(self, token_id: int) -> bool:
        """Take one more token; True when the reply now contains a stop string."""
        begin = max(0, len(self._seen) - self._longest + 1)
        self._seen += self._token_bytes(token_id)
        found = [at for stop in self._stops if (at := self._seen.find(stop, begin)) >= 0]
        if found:
            self.text = self._seen[: min(found)].decode(errors="replace")
        return bool(found)


@dataclass(eq=False, slots=True)
class Request:
    """One call of `sample`: a prompt, and a future that gets `n` continuations."""

    prompt: npt.NDArray[np.int32]
    sampling: Sampling
    session: str
    seed: int
    max_new: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Sampled]]
    jobs: list[Job] = field(default_factory=list)
    unfinished: int = 0
    started: bool = False
    """One of its jobs has begun: the others belong to the same policy version."""


@dataclass(eq=False, slots=True)
class Job:
    """One of a request's continuations."""

    request: Request
    seed: int
    stop: StopWatch | None
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: Literal["stop", "length"] = "length"
    place: Any = None
    """Where the engine keeps it while it runs."""
    policy_version: int | None = None

    def sampled(self) -> Sampled:
        text = self.stop.text if self.stop else None
        return Sampled(self.output, self.logprobs, self.reason, self.policy_version, text)
