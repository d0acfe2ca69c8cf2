"""Runs the instances of an environment service: one process each, with limits; idle ones are
ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ajet_sdk
from ajet_sdk.environments.process import START
from ajet_sdk.environments.spec import Spec
from ajet_sdk.errors import ConfigError, first_line
from ajet_sdk.types import Json, JsonView

_LONGEST_LINE = 2**28
"""Maximum bytes of an instance's answer."""

_CLOSING = 5.0
"""Seconds for an instance to close."""


@dataclass(frozen=True)
class InstanceLimits:
    instances: int = 256
    """Maximum instances at a time; further requests get status 503."""
    timeout: float = 60.0
    """Seconds per request; an instance that takes longer is ended."""
    idle: float = 1800.0
    """Seconds without a request after which an instance is ended, as its rollout has probably
    died."""
    start: float = 300.0
    """Seconds to load the environment."""
    memory: int | None = None
    """Bytes of data of an instance's process; None for no limit. macOS doesn't enforce it."""


class Refused(Exception):
    """A request refused with an HTTP status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class _Instance:
    task_id: str
    process: _Process
    last_used: float
    """Time of its last request, on the monotonic clock."""
    started: float
    steps: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: str | None = None
    """The reason why the instance ended."""


class Instances:
    """Instances of one environment, by id. All methods are called on one event loop."""

    def __init__(self, spec: Spec, limits: InstanceLimits, python: str = sys.executable) -> None:
        self.limits = limits
        self.created = 0
        self.lost: dict[str, str] = {}
        """Reasons why instances ended before their release, by id."""
        self._template = _Template(spec, limits, python)
        self._instances: dict[str, _Instance] = {}
        self._starting = 0
        """Number of instances that are starting."""

    async def start(self) -> None:
        """Load the environment. Raises ConfigError with the environment's message if that fails.

        Names of actions are checked on an instance of the first task.
        """
        await self._template.start()
        spec = self._template.spec
        if not spec.actions:
            return
        try:
            [first, *_] = await self.tasks(next(iter(spec.splits), "train")) or ["0"]
            process = await self._template.fork()
            try:
                await self._ask(
                    process, {"what": "create", "task_id": first, "params": {}}, f"task {first}"
                )
            finally:
                process.kill()
        except Refused as refused:
            await self.close()
            raise ConfigError(
                f"{spec.target} with --actions {','.join(spec.actions)}: {refused}"
            ) from refused

    async def close(self) -> None:
        """End every instance and the template."""
        for instance in self._instances.values():
            instance.process.kill()
        self._instances.clear()
        self._template.kill()

    def listed(self) -> list[Json]:
        """The running instances: id, task, process id, steps, seconds since creation and since the
        last request."""
        now = time.monotonic()
        return [
            {
                "instance_id": name, "task_id": instance.task_id, "pid": instance.process.pid, "steps": instance.steps,
                "age": round(now - instance.started, 1), "idle": round(now - instance.last_used, 1),
            }
            for name, instance in self._instances.items()
        ]  # fmt: skip

    async def tasks(self, split: str) -> Any:
        """The task ids of a split, from a separate process. Raises Refused."""
        process = await self._template.fork()
        try:
            return await self._ask(
                process, {"what": "tasks", "split": split}, f"the tasks of split {split!r}"
            )
        finally:
            process.kill()

    async def create(self, name: str, task_id: str, params: JsonView) -> object:
        """Start an instance and return its first state. Ends an instance of the same id. Raises
        Refused."""
        await self.release(name)
        self.lost.pop(name, None)
        if len(self._instances) + self._starting >= self.limits.instances:
            raise Refused(503, f"all {self.limits.instances} instances are in use")
        now = time.monotonic()
        self._starting += 1
        try:
            process = await self._template.fork()
        finally:
            self._starting -= 1
        instance = self._instances[name] = _Instance(task_id, process, now, now)
        self.created += 1
        async with instance.lock:  # so that it does not count as idle
            try:
                request = {"what": "create", "task_id": task_id, "params": dict(params)}
                return await self._ask(process, request, f"the creation of task {task_id!r}")
            except BaseException:
                self._end(name, instance)
                raise
            finally:
                instance.last_used = time.monotonic()

    async def ask(self, name: str, request: Json) -> Any:
        """Send a request to an instance, which answers them one by one. Raises Refused."""
        instance = self._instances.get(name)
        if instance is None:
            raise Refused(
                410 if name in self.lost else 404,
                self.lost.get(name) or f"there is no instance {name}",
            )
        async with instance.lock:
            if name in self.lost:
                raise Refused(410, self.lost[name])
            instance.last_used = time.monotonic()
            instance.steps += request["what"] == "step"
            try:
                return await self._ask(
                    instance.process, request, f"{request['what']} of task {instance.task_id!r}"
                )
            except Refused as refused:
                # After a failed step the state is unknown, and a score would be meaningless.
                if request["what"] == "step" or not instance.process.alive:
                    self._lose(name, instance, str(refused))
                raise
            finally:
                instance.last_used = time.monotonic()

    async def release(self, name: str) -> bool:
        """Close and end an instance. Returns whether it existed."""
        instance = self._instances.get(name)
        if instance is None:
            return False
        async with instance.lock:
            with suppress(Refused):  # a failure does not matter any more
                await self._ask(instance.process, {"what": "close"}, "close", timeout=_CLOSING)
            self._end(name, instance)
        return True

    def end_idle(self) -> list[str]:
        """End the instances without a request for `InstanceLimits.idle` seconds. Returns their
        ids."""
        now = time.monotonic()
        idle = [
            name
            for name, instance in self._instances.items()
            if now - instance.last_used > self.limits.idle and not instance.lock.locked()
        ]
        for name in idle:
            self._lose(name, self._instances[name], f"no request for {self.limits.idle:g} s")
        return idle

    def _lose(self, name: str, instance: _Instance, why: str) -> None:
        self.lost[name] = f"instance {name} of task {instance.task_id!r} was stopped: {why}"
        self._end(name, instance)

    def _end(self, name: str, instance: _Instance) -> None:
        instance.process.kill()
        if self._instances.get(name) is instance:
            del self._instances[name]

    async def _ask(
        self, process: _Process, request: Json, name: str, *, timeout: float | None = None
    ) -> Any:
        seconds = timeout or self.limits.timeout
        try:
            answer = await asyncio.wait_for(process.ask(request), seconds)
        except asyncio.TimeoutError:
            process.kill()
            raise Refused(
                410, f"{name} took longer than {seconds:g} s; its process was killed"
            ) from None
        except asyncio.CancelledError:
            process.kill()  # else its answer would count as that of the next request
            raise
        except (OSError, EOFError, ValueError) as error:
            process.kill()
            raise Refused(410, f"{name}: its process died ({first_line(error)})") from None
        if "error" in answer:
            raise Refused(404 if answer.get("unknown") else 500, f"{name}: {answer['error']}")
        return answer["ok"]


class _Process(asyncio.StreamReaderProtocol):
    """The process of an instance, connected by a socket."""

    def __init__(self) -> None:
        self._answers = asyncio.StreamReader(limit=_LONGEST_LINE)
        super().__init__(self._answers)
        self.pid = 0
        self.alive = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.WriteTransport)
        self._writer = asyncio.StreamWriter(
            transport, self, self._answers, asyncio.get_running_loop()
        )

    def eof_received(self) -> bool:
        self.kill()
        return bool(super().eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        self.kill()
        super().connection_lost(exc)

    async def ask(self, request: dict[str, object] | None) -> Json:
        """Send a request and return the answer. Raises EOFError if the process has died."""
        line = b""
        with suppress(ConnectionError):  # handled below
            if request is not None:
                self._writer.write(json.dumps(request).encode() + b"\n")
                await self._writer.drain()
            line = await self._answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError("it was killed, crashed, or ran out of memory")
        answer: dict[str, object] = json.loads(line)
        return answer

    def kill(self) -> None:
        """Kill the process and its children; closing the socket ends it as well.

        It is also called when the process has ended by itself, as its id may be reused later.
        """
        if not self.alive:
            return
        self.alive = False
        self._writer.close()
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class _Template:
    """The process that loads the environment and forks a process for each instance."""

    def __init__(self, spec: Spec, limits: InstanceLimits, python: str) -> None:
        self.spec = spec
        self._limits = limits
        self._python = python
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Start the process. Raises ConfigError if the environment can't be loaded."""
        self.kill()
        self._process, self._control = self._spawned()
        try:
            line = await asyncio.wait_for(
                asyncio.to_thread(self._control.makefile("rb").readline), self._limits.start
            )
        except asyncio.TimeoutError:
            self.kill()
            raise ConfigError(
                f"loading {self.spec.target} took longer than {self._limits.start:g} s"
            ) from None
        if not line.endswith(b"\n"):
            raise ConfigError(
                f"{self.spec.target} exited {self._python} while it was being loaded; see its"
                " output above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ConfigError(
                f"{self.spec.target} cannot be loaded by {self._python}: {answer['error']}"
            )

    def _spawned(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        package = str(Path(ajet_sdk.__file__).parent)
        settings = (
            json.dumps({"spec": asdict(self.spec), "memory": self._limits.memory}).encode() + b"\n"
        )
        with theirs:
            command = [self._python, "-c", START, package, str(theirs.fileno())]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]
                )
            except OSError as error:
                raise ConfigError(
                    f"cannot start {self._python}: {error.strerror or error}"
                ) from error
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(settings)
        return process, ours

    async def fork(self) -> _Process:
        """Fork a process for an instance; a dead template is started anew. Raises Refused."""
        ours, theirs = socket.socketpair()
        with theirs:
            async with self._lock:
                if self._process is None or self._process.poll() is not None:
                    try:
                        await self.start()
                    except ConfigError as error:
                        raise Refused(500, str(error)) from error
                assert self._control is not None
                socket.send_fds(self._control, [b"x"], [theirs.fileno()])
        ours.setblocking(False)
        _, process = await asyncio.get_running_loop().create_connection(_Process, sock=ours)
        try:
            hello = await asyncio.wait_for(process.ask(None), self._limits.timeout)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            process.kill()
            raise Refused(
                500, f"no process could be started for an instance: {first_line(error)}"
            ) from error
        process.pid = hello["ok"]
        return process

    def kill(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
