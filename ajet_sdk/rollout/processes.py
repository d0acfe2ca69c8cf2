"""Worker processes on a Ray cluster that run users' code, one call at a time; processes are reused.

Engine, gateway, trace and trainer stay in this process; agents send requests to the gateway over
HTTP. If an agent harms its process (blocks, leaks memory, crashes), only its own attempt fails, and
the process is replaced.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.capture.processes import for_other_process
from ajet_sdk.cluster.code import install_code
from ajet_sdk.cluster.ray import Node, RayCluster
from ajet_sdk.config.api_keys import placeholder_keys
from ajet_sdk.errors import ConfigError, EpisodeTimeout, TrainingError, WorkerLost
from ajet_sdk.memory import resident_bytes
from ajet_sdk.rollout.remote_call import (
    ObjectStore,
    RemoteCall,
    Reply,
    dump_object,
    dump_outcome,
    dumps,
    loads,
)
from ajet_sdk.rollout.threads import Outcome, Workers

log = logging.getLogger("ajet")

_PER_CPU = 4
"""Processes per CPU of a node: agents mostly wait for their model."""
_START = 300.0
"""Time for a process to start, in seconds, with the transfer of the code."""
_GRACE = 10.0
"""Seconds after a time limit for a process to report where its code is."""
_MOST_GROWTH = 2**30
"""Growth of a process since its first call, in bytes, above which it is replaced."""


@dataclass(eq=False)
class _Process:
    """A worker process, possibly still starting."""

    actor: Any
    node: Node
    busy: bool = True
    has: set[str] = field(default_factory=set)
    """Keys of the stored objects that it has."""
    memory: int = 0
    """Bytes of memory after its first call."""


class RayWorkers(Workers):
    """`Workers` that run users' functions in processes of a Ray cluster, and ajet's own in threads
    here.

    There are as many processes as concurrent calls, at most `limit` and four per CPU. Further calls
    wait, and their time limit starts when a process takes them. A lost process becomes WorkerLost
    on its attempt, not an error of Ray.
    """

    def __init__(self, limit: int, cluster: RayCluster) -> None:
        super().__init__(limit)
        self.cluster = cluster
        self.calls: Counter[str] = Counter()
        """Number of calls by node id."""
        self.lost = 0
        """Processes that died, or were killed after a time limit."""
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []
        self._waiting: deque[asyncio.Future[_Process | None]] = deque()
        self._gone: set[str] = set()
        self._kept = ObjectStore()
        self._data: dict[str, object] = {}
        """ObjectRefs of the stored objects, by key."""

    def close(self) -> None:
        """End every process."""
        super().close()
        for process in list(self._processes):
            self._end(process)
        if self.calls:
            hosts = {node.node_id: node.host for node in self.cluster.nodes()}
            by_node = ", ".join(
                f"{calls} on {hosts[node]} ({node[:8]})" for node, calls in self.calls.most_common()
            )
            log.info(
                "Ray ran %d calls of user code: %s; processes lost: %d",
                self.calls.total(),
                by_node,
                self.lost,
            )

    async def call(
        self,
        function: Callable[..., object],
        arguments: dict[str, object],
        *,
        timeout: float | None,
        label: str,
    ) -> Outcome:
        """Call a function in a process that no other call uses; see `Workers.call`.

        Raises TrainingError if the function cannot be pickled, ConfigError if its code cannot be
        set up there.
        """
        if _is_ours(function):
            return await super().call(function, arguments, timeout=timeout, label=label)
        active = current_episode.get()
        call = RemoteCall(
            functools.partial(function, **arguments),
            label,
            timeout,
            None if active is None else for_other_process(active),
        )
        data = self._serialize(call)
        process: _Process | None = None
        try:
            process = await self._take()
            outcome = await self._do(process, data, call)
        except WorkerLost as lost:
            return Outcome(error=lost)
        except BaseException:
            if process is not None:
                self._end(process)
            raise
        self._release(process)
        return outcome

    def _serialize(self, call: RemoteCall) -> bytes:
        try:
            data = dumps(call, self._kept)
            for key, thing in self._kept.objects.items():
                if key not in self._data:
                    self._data[key] = ray.put(dump_object(thing))
        except Exception as error:
            raise TrainingError(
                f"{call.label} cannot be sent to a worker process ({type(error).__name__}:"
                f" {error}). With rollout.runner: ray it must be picklable: create clients, locks"
                " and open files inside it or at module level, not on the instance or in an"
                " enclosing function"
            ) from error
        return data

    # One call

    async def _do(self, process: _Process, data: bytes, call: RemoteCall) -> Outcome:
        label, timeout, environment = call.label, call.timeout, call.environment
        new = {key: self._data[key] for key in self._data if key not in process.has}
        process.has |= set(new)
        self.calls[process.node.node_id] += 1
        answer = asyncio.wrap_future(
            process.actor.do.remote(label, data, list(new), *new.values()).future()
        )
        try:
            done, memory = await asyncio.wait_for(
                answer, None if timeout is None else timeout + _GRACE
            )
        except asyncio.TimeoutError:
            self._end(process, lost=True)
            return Outcome(
                error=EpisodeTimeout(
                    f"{label} did not finish within {timeout:.3g} s and could not be interrupted"
                )
            )
        except RayTaskError:
            raise  # a bug of ours: exceptions of users' code come as a reply
        except RayError as error:
            raise await self._explain_loss(process, error, f"while {label} ran") from error
        reply: Reply = loads(done)
        outcome = reply.outcome()
        if environment is not None:  # the process had a copy
            environment.fault = environment.fault or reply.fault
        process.memory = process.memory or memory
        if isinstance(outcome.error, EpisodeTimeout) or memory > process.memory + _MOST_GROWTH:
            self._end(process, lost=isinstance(outcome.error, EpisodeTimeout))
        return outcome

    async def _explain_loss(self, process: _Process, error: RayError, when: str) -> WorkerLost:
        """Tells a lost process from a lost node; lost nodes get no new processes."""
        node, text = process.node, str(error)
        gone = node.node_id in self._gone or not await asyncio.to_thread(self.cluster.reaches, node)
        self._end(process, lost=True)
        if gone:
            self._drop_node(node)
            return WorkerLost(f"lost the Ray node {node.host} {when}")
        detail = text.partition("Worker exit detail: ")[2].partition(" There are some")[0] or text
        return WorkerLost(
            f"the worker process on {node.host} died {when}: it was killed, ran out of memory, or"
            f" called os._exit ({' '.join(detail.split())[:500]})"
        )

    def _drop_node(self, node: Node) -> None:
        if node.node_id in self._gone:
            return
        self._gone.add(node.node_id)
        there = [p for p in self._processes if p.node.node_id == node.node_id]
        busy = 1 + sum(p.busy for p in there)
        for process in there:
            if not process.busy:
                self._end(process)
        log.warning(
            "Lost the Ray node %s (%s). Its %d running attempts are retried on other nodes, up to "
            "rollout.max_retries; their recorded calls are kept",
            node.host,
            node.node_id[:8],
            busy,
        )

    # The pool

    async def _take(self) -> _Process:
        """Takes a free process, or starts one."""
        while True:
            process = self._idle.pop() if self._idle else None
            if process is None and (node := self._choose_node()) is not None:
                return await self._start(node)
            if process is None:
                process = await self._wait_for_process()
            if process is not None:
                process.busy = True
                return process

    async def _wait_for_process(self) -> _Process | None:
        """Waits for a process that another call releases; None: a new one can be started."""
        turn: asyncio.Future[_Process | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._hand_over(turn.result())
            raise

    def _release(self, process: _Process) -> None:
        """Frees a process after a call, unless it has ended."""
        if process in self._processes:
            process.busy = False
            self._hand_over(process)

    def _hand_over(self, process: _Process | None) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(process)
                return
        if process is not None:
            self._idle.append(process)

    def _end(self, process: _Process, *, lost: bool = False) -> None:
        if process not in self._processes:
            return
        self._processes.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        self.lost += lost
        ray.kill(process.actor, no_restart=True)
        self._hand_over(None)

    def _choose_node(self) -> Node | None:
        """The node with the fewest processes per CPU; None if all are full. Raises
        TrainingError."""
        nodes = [
            n
            for n in self.cluster.nodes()
            if n.alive and n.cpus >= 1 and n.node_id not in self._gone
        ]
        if not nodes:
            raise TrainingError("no node of the Ray cluster has a CPU; see `ray status`")
        counts = Counter(process.node.node_id for process in self._processes)
        if len(self._processes) >= self.limit:
            return None
        node = min(nodes, key=lambda n: counts[n.node_id] / n.cpus)
        return node if counts[node.node_id] < _PER_CPU * node.cpus else None

    async def _start(self, node: Node) -> _Process:
        where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        actor = ray.remote(AgentProcess).options(num_cpus=0, scheduling_strategy=where).remote()
        process = _Process(actor, node)
        self._processes.add(process)
        try:
            await asyncio.wait_for(asyncio.wrap_future(actor.ready.remote().future()), _START)
        except RuntimeEnvSetupError as error:
            self._end(process)
            raise ConfigError(
                f"the run's code could not be set up on the Ray node {node.host}: {error}"
            ) from error
        except asyncio.TimeoutError as error:
            self._end(process)
            raise TrainingError(
                f"no worker process started on the Ray node {node.host} within {_START:g} s; see"
                " `ray status`"
            ) from error
        except RayError as error:
            if getattr(error, "actor_init_failed", False):
                self._end(process)
                reason = str(error).strip().splitlines()[-1]
                raise ConfigError(
                    f"ajet could not be started on the Ray node {node.host}: {reason}"
                ) from error
            raise await self._explain_loss(process, error, "while it started") from error
        except BaseException:
            self._end(process)
            raise
        return process


def _is_ours(function: Callable[..., object]) -> bool:
    """Whether a function is ajet's, and therefore needs no process."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0] == "ajet_sdk"


class AgentProcess:
    """Runs users' functions on a Ray node, one at a time, in a lasting event loop for module-level
    clients."""

    def __init__(self) -> None:
        install_code()
        self._stack = ExitStack()  # open until the process ends
        self._stack.enter_context(placeholder_keys())
        self._stack.enter_context(installed())
        self._workers = Workers(limit=1, alone=True)
        self._kept: dict[str, object] = {}

    def ready(self) -> bool:
        """Returns once the process has started."""
        return True

    def do(self, label: str, data: bytes, keys: list[str], *values: bytes) -> tuple[bytes, int]:
        """Run a call; returns its pickled reply and the process's memory in bytes."""
        try:
            self._kept |= {key: loads(value) for key, value in zip(keys, values, strict=True)}
            call: RemoteCall = loads(data, self._kept)
        except BaseException as error:  # noqa: BLE001  importing the user's file may raise anything
            return dump_outcome(Outcome(error=error), label), resident_bytes()
        outcome = asyncio.run(_run(self._workers, call))
        return dump_outcome(outcome, label, call.environment), resident_bytes()


async def _run(workers: Workers, call: RemoteCall) -> Outcome:
    token = current_episode.set(call.active)
    try:
        return await workers.call(call.function, {}, timeout=call.timeout, label=call.label)
    finally:
        current_episode.reset(token)
