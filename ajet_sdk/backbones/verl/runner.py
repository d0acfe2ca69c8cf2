"""The episodes of a run on one node: the user's code, a gateway and a trace file of its own. A Ray actor.

What one node records never depends on another; only ids, log-probabilities and rewards travel on to the batch.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.trinity.shipping import unpack
from ajet_sdk.backbones.verl.sampler import ClientSampler
from ajet_sdk.capture import ensure_api_key, installed
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.tokenizer import HFTokenizer
from ajet_sdk.episode import Attempt, run_batch
from ajet_sdk.gateway import Gateway, SamplingOverride
from ajet_sdk.outcomes import untrained_entries
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode
from ajet_sdk.workers import Workers, current_workers

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job

__all__ = ["Runner", "read_job", "write_job"]

_BARE: dict[str, Any] = {"request": {}, "response": {}}


def write_job(path: Path, job: Job, val: Sequence[Any], model: str, traces: Path) -> None:
    """Put what other processes need of a job into a file, which only its owner can read.

    `traces` is the directory for the nodes' trace files.
    """
    from ajet_sdk.backbones.trinity.shipping import pack

    content = {
        **pack(job),
        "directory": str(traces),
        "model": model,
        "train": [task.model_dump(mode="json") for task in job.train],
        "val": [task.model_dump(mode="json") for task in val],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(content))
    draft.replace(path)


def read_job(path: Path) -> dict[str, Any]:
    """The same, on the other side."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


class Runner:
    """Runs groups of attempts over verl's client; at most its share of `rollout.max_env_worker` episodes at once."""

    def __init__(self, job: Mapping[str, Any], client: Any, runners: int) -> None:
        ensure_api_key()
        self.config, self.workflow, self.judge = unpack(job)
        share = -(-self.config.rollout.max_env_worker // runners)
        self.config = self.config.model_copy(
            update={"rollout": self.config.rollout.model_copy(update={"max_env_worker": share, "runner": "thread"})}
        )
        self._share = share
        self._rooms: dict[int, asyncio.Semaphore] = {}
        name = f"trace-{platform.node() or 'node'}-{os.getpid()}.duckdb"
        self.writer = TraceWriter(Path(job["directory"]) / name)
        self.gateway = Gateway(self.writer).start()
        self._hooks = installed()
        self._hooks.__enter__()
        self.workers = Workers(share)
        tokenizer = HFTokenizer(str(job["model"]))
        sampler = ClientSampler(client, tokenizer, self.config.model_name, self.config.rollout.max_model_len)
        self.engine = TokenEngine(sampler, tokenizer, tool_call_parser=self.config.model.tool_call_parser)

    async def run(self, group: Sequence[Attempt], sampling: SamplingOverride | None) -> list[Episode]:
        """The episodes of one group, without what was said in them."""
        async with self._places(len(group)):
            token = current_workers.set(self.workers)
            try:
                episodes = await run_batch(
                    self.workflow, self.judge, group, engine=self.engine, gateway=self.gateway, config=self.config,
                    writer=self.writer, sampling=sampling,
                )  # fmt: skip
            finally:
                current_workers.reset(token)
        if group[0].split == "val":
            self.writer.put(*(entry for episode in episodes for entry in untrained_entries(episode)))
        self.writer.flush()
        return [_bare(episode) for episode in episodes]

    def _places(self, size: int) -> asyncio.Semaphore:
        """Room for as many groups of a size at once as the node's share of episodes holds."""
        return self._rooms.setdefault(size, asyncio.Semaphore(max(1, self._share // max(1, size))))


def _bare(episode: Episode) -> Episode:
    """The episode with the ids of its calls, which training needs, and without anything that may not travel."""
    calls = tuple(call.model_copy(update=_BARE) for call in episode.calls)
    return episode.model_copy(update={"calls": calls, "output": None})
