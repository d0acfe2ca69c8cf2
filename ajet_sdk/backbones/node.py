"""The episodes of a run on one node of a cluster: the user's code, a gateway and a trace file of its own.

What one node records never depends on another; only ids, log-probabilities and rewards travel on.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from ajet_sdk.backbones.shipping import unpack
from ajet_sdk.capture import ensure_api_key, installed
from ajet_sdk.config import Config
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.tokenizer import HFTokenizer
from ajet_sdk.episode import Attempt, run_batch
from ajet_sdk.gateway import Gateway, SamplingOverride
from ajet_sdk.outcomes import untrained_entries
from ajet_sdk.protocols import Sampler
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode
from ajet_sdk.workers import Workers, current_workers

__all__ = ["Node"]

S = TypeVar("S", bound=Sampler)


class Node(Generic[S]):
    """What a process on a node keeps for a run, as long as it lives.

    `given` is the job as `shipping.pack` made it, with the directory for traces and the model; `sampler` makes the
    sampler over what the trainer serves. `processes` share `rollout.max_env_worker` episodes at once.
    """

    def __init__(
        self, given: Mapping[str, Any], sampler: Callable[[Config, HFTokenizer], S], processes: int = 1
    ) -> None:
        ensure_api_key()
        self.run_id = str(given["run_id"])
        config, self._workflow, self._judge = unpack(given)
        self.at_once = -(-config.rollout.max_env_worker // processes)
        rollout = config.rollout.model_copy(update={"max_env_worker": self.at_once})
        self.config = config.model_copy(update={"rollout": rollout})
        name = f"trace-{platform.node() or 'node'}-{os.getpid()}.duckdb"
        self.writer = TraceWriter(Path(given["directory"]) / name)
        self._gateway = Gateway(self.writer).start()
        self._hooks = installed()
        self._hooks.__enter__()
        self._workers = Workers(self.at_once)
        self.tokenizer = HFTokenizer(str(given["model"]))
        self.sampler = sampler(self.config, self.tokenizer)
        self._engine = TokenEngine(self.sampler, self.tokenizer, tool_call_parser=self.config.model.tool_call_parser)

    async def run(self, group: Sequence[Attempt], sampling: SamplingOverride | None) -> list[Episode]:
        """The episodes of a group of attempts, in their order; those of a validation are in the ledger at once."""
        token = current_workers.set(self._workers)
        try:
            episodes = await run_batch(
                self._workflow, self._judge, group, engine=self._engine, gateway=self._gateway, config=self.config,
                writer=self.writer, sampling=sampling,
            )  # fmt: skip
        finally:
            current_workers.reset(token)
        if group[0].split == "val":
            self.writer.put(*(entry for episode in episodes for entry in untrained_entries(episode)))
        return episodes
