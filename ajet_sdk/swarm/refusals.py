"""Requests that a swarm server refuses."""

from __future__ import annotations

from ajet_sdk.errors import AjetError
from ajet_sdk.swarm.messages import Code


class Refused(AjetError):
    """A request that the server refuses, with the code and status of its reply."""

    def __init__(
        self, status: int, code: Code, message: str, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after


def ended_otherwise(episode_id: str) -> Refused:
    """The refusal of an end that differs from the first one."""
    return Refused(
        409,
        "already_ended",
        f"episode {episode_id} has ended before, in another way; the first end counts (see its"
        " receipt)",
    )
