"""Runs episodes on a node of a cluster, with its own gateway and trace file; serializes jobs for
nodes.

Nodes record independently and send only ids, log-probabilities and rewards. The code of workflow
and judge is sent as a `CodePackage`; a serialized job refers to it.
"""

from __future__ import annotations

import base64
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ajet_sdk.capture.hooks import installed
from ajet_sdk.cluster.code import installed_code
from ajet_sdk.config.api_keys import placeholder_keys
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Sampler
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.rollout.outcomes import untrained_entries
from ajet_sdk.rollout.threads import Workers, current_workers
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job

S = TypeVar("S", bound=Sampler)


class Node(Generic[S]):
    """The state of a process on a node, for the whole run.

    `job` is the result of `serialize_job`, with the trace directory and the model added. `sampler`
    makes the sampler over the trainer's model. `processes` processes share `rollout.max_env_worker`
    concurrent episodes.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        sampler: Callable[[Config, HFTokenizer], S],
        processes: int = 1,
    ) -> None:
        self._stack = ExitStack()  # until the process ends
        self._stack.enter_context(placeholder_keys())
        self.run_id = str(job["run_id"])
        config, self._workflow, self._judge = deserialize_job(job)
        self.at_once = -(-config.rollout.max_env_worker // processes)
        rollout = config.rollout.model_copy(update={"max_env_worker": self.at_once})
        self.config = config.model_copy(update={"rollout": rollout})
        name = f"trace-{platform.node() or 'node'}-{os.getpid()}.duckdb"
        self.writer = TraceWriter(Path(job["directory"]) / name)
        self._gateway = Gateway(self.writer).start()
        self._stack.enter_context(installed())
        self._workers = Workers(self.at_once)
        self.tokenizer = HFTokenizer(str(job["model"]))
        self.sampler = sampler(self.config, self.tokenizer)
        self._engine = TokenEngine(
            self.sampler,
            self.tokenizer,
            tool_call_parser=self.config.model.tool_call_parser,
            rescored=False,
        )

    async def run(
        self, group: Sequence[Attempt], sampling: SamplingOverride | None
    ) -> list[Episode]:
        """Run a group of attempts; returns episodes in the same order. Validation is booked in the
        ledger at once."""
        token = current_workers.set(self._workers)
        try:
            episodes = await run_batch(
                self._workflow,
                self._judge,
                group,
                engine=self._engine,
                gateway=self._gateway,
                config=self.config,
                writer=self.writer,
                sampling=sampling,
            )
        finally:
            current_workers.reset(token)
        if group[0].split == "val":
            self.writer.put(
                *(entry for episode in episodes for entry in untrained_entries(episode))
            )
        return episodes


def serialize_job(job: Job) -> dict[str, Any]:
    """Convert a job to plain data for nodes. Raises ConfigError if the workflow or the judge cannot
    be pickled."""
    from ray import cloudpickle

    code = {}
    for name, thing in (("workflow", job.workflow), ("judge", job.judge)):
        try:
            code[name] = base64.b64encode(cloudpickle.dumps(thing)).decode()
        except Exception as error:  # pickling runs the object's own code
            raise ConfigError(
                f"the {name} {getattr(thing, '__qualname__', thing)!r} can't be sent to other"
                f" processes ({type(error).__name__}: {error}); everything it refers to must be"
                " picklable: create open files, locks and clients inside the function"
            ) from error
    config = job.config
    return {
        "run_id": job.run_id,
        "directory": str(job.directory.resolve()),
        "config": {
            "ajet": config.model_dump(mode="json", exclude_unset=True),
            **config.roots.plain(),
        },
        "source": str(config.source) if config.source else None,
        **code,
    }


def deserialize_job(job: Mapping[str, Any]) -> tuple[Config, Any, Any]:
    """Restore config, workflow and judge of a serialized job."""
    from ray import cloudpickle

    config = load_config(values=job["config"])
    if job["source"]:
        installed = installed_code()
        if installed is not None:
            local = installed.local_path(job["source"])
        else:
            local = None
        config._source = local or Path(job["source"])
    workflow, judge = (
        cloudpickle.loads(base64.b64decode(job[name])) for name in ("workflow", "judge")
    )
    return config, workflow, judge
