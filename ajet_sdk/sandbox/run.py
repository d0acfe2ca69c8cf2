"""Running code that a model wrote: fenced in (`fence`), with limits, in an empty scratch directory.

The program sees a root of its own, no network, no process of the machine, nothing of the environment; it has no
privilege. Limited are time, memory, processes, the size of a file and of all files, and output. With `unfenced` only
the limits hold: the code has ajet's rights then.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ajet_sdk.errors import AjetError, ConfigError
from ajet_sdk.sandbox.fence import FOLDERS, SCRATCH, fence, program_files

_MIB = 1 << 20
_CHUNK = 1 << 16
_LIMITED = (
    *(("MemoryError", "memory"), ("File too large", "file size"), ("No space left", "disk")),
    ("Resource temporarily unavailable", "processes"),
)
_EXCEPTION = re.compile(r"[\w.]*Error\b")
_LAST = 8192
"""Bytes of the end of the errors that are read for the limit that was met: many processes may write there."""
_START_UP = 5.0
"""Seconds beyond the time limit for starting and clearing up."""
_numbers = itertools.count()


class SandboxError(AjetError, RuntimeError):
    """The code could not even be started; says why."""


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of the code. Sizes are in bytes."""

    seconds: float = 10.0
    """By the clock; of processor time one second more."""
    memory: int = 512 * _MIB
    """Address space of each process, and resident memory of all."""
    file: int = 8 * _MIB
    """Of one file."""
    disk: int = 64 * _MIB
    """Of all files in its directory."""
    processes: int = 16
    """Processes and threads at once."""
    shown: int = 64 * 1024
    """Of output and of errors, each; what comes after is counted and dropped."""
    output: int = 16 * _MIB
    """Of output and errors together; more ends the code."""


@dataclass(frozen=True)
class Ran:
    """The result of a run."""

    stdout: str
    stderr: str
    code: int
    """The exit status; minus the signal where one ended it."""
    stopped: str = ""
    """The limit that it met: time, memory, file size, disk, processes, output. Empty where none."""
    printed: int = 0
    """Bytes of output and errors, dropped ones included."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """It ended by itself, with status 0."""
        return self.code == 0 and not self.stopped

    @property
    def failure(self) -> str:
        """Why it is not ok, in one line."""
        if self.ok:
            return ""
        last = next((line for line in reversed(self.stderr.splitlines()) if line.strip()), "")
        if self.stopped:
            return f"exceeded its limit of {self.stopped}"
        return last[:300] or (f"killed by signal {-self.code}" if self.code < 0 else f"exit status {self.code}")


async def run_code(
    code: str,
    *,
    stdin: str = "",
    channel: socket.socket | None = None,
    limits: ProgramLimits | None = None,
    unfenced: bool = False,
) -> Ran:
    """Run a Python program and say what came of it; what the program does wrong never raises.

    `channel` becomes its standard input and output, in place of `stdin` and of a `stdout` that is kept; it is closed
    here once the program has it.

    Raises NoFence where nothing here fences it in and `unfenced` is not given, ConfigError where the system has no
    limits either (Windows), SandboxError where nothing could be started.
    """
    if os.name != "posix":
        raise ConfigError("running code needs Linux or macOS; verify with agreement:3 or a judge instead")
    limits = limits or ProgramLimits()
    text = code.encode("utf-8", "replace")
    try:
        with ExitStack() as stack:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            around = _without_fence if unfenced else _inside_fence
            started = stack.enter_context(around(text, limits, theirs.fileno()))
            return await _run(started, stdin, channel, limits, ours, theirs)
    except OSError as error:
        raise SandboxError(f"no program can be started: {error}") from error


@dataclass(frozen=True)
class _Launcher:
    """How the program between us and the code is started."""

    command: Sequence[str]
    descriptors: Sequence[int]
    directory: str


@contextmanager
def _inside_fence(code: bytes, limits: ProgramLimits, report: int) -> Iterator[_Launcher]:
    around = fence()
    with program_files(code) as descriptors:
        inside = _command(SCRATCH, limits, report, user=around.user(next(_numbers)), fenced=True)
        yield _Launcher([*around.command(limits.disk, *descriptors), *inside], (report, *descriptors), "/")


@contextmanager
def _without_fence(code: bytes, limits: ProgramLimits, report: int) -> Iterator[_Launcher]:
    with tempfile.TemporaryDirectory(prefix="ajet-code-") as directory:
        Path(directory, "program.py").write_bytes(code)
        yield _Launcher(_command(directory, limits, report, user=0, fenced=False), (report,), directory)


def _command(directory: str, limits: ProgramLimits, report: int, *, user: int, fenced: bool) -> list[str]:
    settings: dict[str, object] = {
        "argv": [sys.executable, "-I", "-B", "program.py"],
        "environment": {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": directory,
            "TMPDIR": directory,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        },
        "directory": directory,
        "folders": FOLDERS if fenced else (),
        "user": user,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "disk": limits.disk,
        "processes": limits.processes,
        "report": report,
        "rlimits": {
            "AS": limits.memory,
            "CPU": math.ceil(limits.seconds) + 1,
            "FSIZE": limits.file,
            "NOFILE": 128,
            "CORE": 0,
            # Counted for a user in a namespace; outside of one all that the user runs would count.
            **({"NPROC": limits.processes + 2} if fenced else {}),
        },
    }
    return [sys.executable, "-I", "-S", "-c", _source(), json.dumps(settings)]


async def _run(
    started: _Launcher,
    stdin: str,
    channel: socket.socket | None,
    limits: ProgramLimits,
    ours: socket.socket,
    theirs: socket.socket,
) -> Ran:
    began = time.monotonic()
    inout = asyncio.subprocess.PIPE if channel is None else channel.fileno()
    process = await asyncio.create_subprocess_exec(
        *started.command,
        stdin=inout, stdout=inout, stderr=asyncio.subprocess.PIPE,
        cwd=started.directory, env={}, pass_fds=started.descriptors, start_new_session=True,
    )  # fmt: skip
    theirs.close()
    if channel is not None:
        channel.close()
    flood, counted = asyncio.Event(), [0]
    readers = [
        asyncio.create_task(_read(stream, limits, counted, flood)) for stream in (process.stdout, process.stderr)
    ]
    writer = asyncio.create_task(_write(process.stdin, stdin))
    ended, flooded = asyncio.create_task(process.wait()), asyncio.create_task(flood.wait())
    late = False
    try:
        done, _ = await asyncio.wait(
            {ended, flooded}, timeout=limits.seconds + _START_UP, return_when=asyncio.FIRST_COMPLETED
        )
        late = not done
    finally:
        ours.shutdown(socket.SHUT_WR)  # the watcher ends the code
        await asyncio.wait({ended}, timeout=_START_UP)
        with suppress(ProcessLookupError):  # it has ended
            process.kill()
        await asyncio.wait({*readers, ended}, timeout=_START_UP)
        tasks: list[asyncio.Task[Any]] = [*readers, ended, flooded, writer]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.monotonic() - began
    (out, _), (err, last) = (task.result() if not task.cancelled() else ("", "") for task in readers)
    ours.setblocking(False)
    stands, *reported = _all(ours).splitlines() or [b""]
    if not stands:
        raise SandboxError(f"no program can be started: {err.strip()[-300:] or 'the sandbox printed nothing'}")
    code, killed = _ending(reported)
    stopped = "output" if flood.is_set() else "time" if late else killed
    return Ran(out, err, code, stopped or _limit(code, last), counted[0], round(seconds, 3))


def _all(ours: socket.socket) -> bytes:
    """What was reported; what still has the other end of the socket is not waited for."""
    data = b""
    with suppress(BlockingIOError):
        while chunk := ours.recv(_CHUNK):
            data += chunk
    return data


def _ending(reported: list[bytes]) -> tuple[int, str]:
    """Exit status and limit by the watcher's report. Without a report that makes sense the program was killed."""
    try:
        [ending] = map(json.loads, reported)
        code, killed = ending.get("code", -signal.SIGKILL), ending.get("killed", "")
    except (ValueError, RecursionError, AttributeError):
        return -signal.SIGKILL, ""
    return (code, killed) if type(code) is int and isinstance(killed, str) else (-signal.SIGKILL, "")


def _limit(code: int, err: str) -> str:
    """The limit that a program met by itself, as the last exception in its errors says; lines of others may follow."""
    if code == -signal.SIGXCPU:
        return "time"
    raised = [line for line in err.splitlines() if _EXCEPTION.match(line)] if code else []
    return next((limit for words, limit in _LIMITED if words in raised[-1]), "") if raised else ""


@functools.cache
def _source() -> str:
    return (files("ajet_sdk.sandbox") / "child.py").read_text(encoding="utf-8")


async def _read(
    stream: asyncio.StreamReader | None, limits: ProgramLimits, counted: list[int], flood: asyncio.Event
) -> tuple[str, str]:
    """What is kept of a stream, and its end."""
    head, last = bytearray(), b""
    while stream is not None and (chunk := await stream.read(_CHUNK)):
        counted[0] += len(chunk)
        head += chunk[: limits.shown - len(head)]
        last = (last + chunk)[-_LAST:]
        if counted[0] > limits.output:
            flood.set()
    return head.decode("utf-8", "replace"), last.decode("utf-8", "replace")


async def _write(stream: asyncio.StreamWriter | None, text: str) -> None:
    if stream is None:
        return
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # the program need not read it
            stream.write(text.encode("utf-8", "replace"))
            await stream.drain()
    finally:
        stream.close()
