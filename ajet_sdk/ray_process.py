"""The worker process on a Ray node: takes one errand after the other and does it in the episode that it belongs to."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path
from typing import Any

from ajet_sdk.capture import ensure_api_key, installed
from ajet_sdk.errand import Errand, loads, sent
from ajet_sdk.model import current_episode
from ajet_sdk.parcel import unpack
from ajet_sdk.workers import Outcome, Workers

__all__ = ["AgentProcess"]


class AgentProcess:
    """Runs users' functions, one at a time. Its event loop lasts, so that clients made at module level do too."""

    def __init__(self) -> None:
        unpack()
        ensure_api_key()
        self._hooks = installed()  # for as long as the process lives
        self._hooks.__enter__()
        self._workers = Workers(limit=1, alone=True)
        self._kept: dict[str, Any] = {}

    def ready(self) -> bool:
        """Answers once the process is up."""
        return True

    def do(self, what: str, data: bytes, keys: list[str], *kept: bytes) -> tuple[bytes, int]:
        """Do an errand; its reply, and the bytes of memory that the process holds now."""
        try:
            self._kept |= {key: loads(one) for key, one in zip(keys, kept, strict=True)}
            errand: Errand = loads(data, self._kept)
        except BaseException as error:  # noqa: BLE001  importing the user's file may raise anything
            outcome = Outcome(error=error)
        else:
            outcome = asyncio.run(_run(self._workers, errand))
        return sent(outcome, what), _memory()


async def _run(workers: Workers, errand: Errand) -> Outcome:
    token = current_episode.set(errand.active)
    try:
        return await workers.call(errand.function, {}, timeout=errand.timeout, what=errand.what)
    finally:
        current_episode.reset(token)


def _memory() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux: only memory that was let go of is counted wrongly
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()
