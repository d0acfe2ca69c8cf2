"""Runs code written by a model inside a fence (`fence`), with limits, in an empty scratch
directory.

The program has its own root, no network, no other processes, no environment variables and no
privileges. Time, memory, processes, file sizes and output are limited. With `unfenced` only the
limits apply, and the code has ajet's permissions.
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
"""Bytes at the end of stderr to search for an exceeded limit: many processes may write there."""
_START_UP = 5.0
"""Time for start and cleanup beyond the limit, in seconds."""
_numbers = itertools.count()


class SandboxError(AjetError, RuntimeError):
    """The code could not be started."""


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of the code, with sizes in bytes."""

    seconds: float = 10.0
    """Wall-clock time; CPU time is limited to one second more."""
    memory: int = 512 * _MIB
    """Limit of each process's address space, and of the resident memory of all."""
    file: int = 8 * _MIB
    """Size of a file."""
    disk: int = 64 * _MIB
    """Size of all files in its directory."""
    processes: int = 16
    """Concurrent processes and threads."""
    shown: int = 64 * 1024
    """Stored bytes of stdout and stderr each; the rest is counted and dropped."""
    output: int = 16 * _MIB
    """Total bytes of stdout and stderr; more ends the code."""


@dataclass(frozen=True)
class Ran:
    """The result of a run."""

    stdout: str
    stderr: str
    code: int
    """Exit status, or minus the signal."""
    stopped: str = ""
    """The exceeded limit, if any: time, memory, file size, disk, processes, output."""
    printed: int = 0
    """Bytes of stdout and stderr, including dropped ones."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.code == 0 and not self.stopped

    @property
    def failure(self) -> str:
        """The failure in one line; empty if `ok`."""
        if self.ok:
            return ""
        last = next((line for line in reversed(self.stderr.splitlines()) if line.strip()), "")
        if self.stopped:
            return f"exceeded its limit of {self.stopped}"
        return last[:300] or (
            f"killed by signal {-self.code}" if self.code < 0 else f"exit status {self.code}"
        )


async def run_code(
    code: str,
    *,
    stdin: str = "",
    channel: socket.socket | None = None,
    limits: ProgramLimits | None = None,
    unfenced: bool = False,
) -> Ran:
    """Run a Python program and return the result; its own errors are not raised.

    `channel` becomes its stdin and stdout, in place of `stdin` and a recorded `stdout`; it is
    closed here once the program has it.

    Raises NoFence without a working fence unless `unfenced`, ConfigError if the system has no
    limits either (Windows), SandboxError if nothing could be started.
    """
    if os.name != "posix":
        raise ConfigError(
            "running code needs Linux or macOS; verify with agreement:3 or a judge instead"
        )
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
    """Command line of the watcher."""

    command: Sequence[str]
    descriptors: Sequence[int]
    directory: str


@contextmanager
def _inside_fence(code: bytes, limits: ProgramLimits, report: int) -> Iterator[_Launcher]:
    around = fence()
    with program_files(code) as descriptors:
        inside = _command(SCRATCH, limits, report, user=around.user(next(_numbers)), fenced=True)
        yield _Launcher(
            [*around.command(limits.disk, *descriptors), *inside], (report, *descriptors), "/"
        )


@contextmanager
def _without_fence(code: bytes, limits: ProgramLimits, report: int) -> Iterator[_Launcher]:
    with tempfile.TemporaryDirectory(prefix="ajet-code-") as directory:
        Path(directory, "program.py").write_bytes(code)
        yield _Launcher(
            _command(directory, limits, report, user=0, fenced=False), (report,), directory
        )


def _command(
    directory: str, limits: ProgramLimits, report: int, *, user: int, fenced: bool
) -> list[str]:
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
            # Counted per user: outside of a namespace, all of the user's processes would count.
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
        stdin=inout,
        stdout=inout,
        stderr=asyncio.subprocess.PIPE,
        cwd=started.directory,
        env={},
        pass_fds=started.descriptors,
        start_new_session=True,
    )
    theirs.close()
    if channel is not None:
        channel.close()
    flood = asyncio.Event()
    counted = [0]
    readers = [
        asyncio.create_task(_read(stream, limits, counted, flood))
        for stream in (process.stdout, process.stderr)
    ]
    writer = asyncio.create_task(_write(process.stdin, stdin))
    ended = asyncio.create_task(process.wait())
    flooded = asyncio.create_task(flood.wait())
    late = False
    try:
        done, _ = await asyncio.wait(
            {ended, flooded},
            timeout=limits.seconds + _START_UP,
            return_when=asyncio.FIRST_COMPLETED,
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
    (out, _), (err, last) = (
        task.result() if not task.cancelled() else ("", "") for task in readers
    )
    ours.setblocking(False)
    stands, *reported = _all(ours).splitlines() or [b""]
    if not stands:
        raise SandboxError(
            f"no program can be started: {err.strip()[-300:] or 'the sandbox printed nothing'}"
        )
    code, killed = _ending(reported)
    stopped = "output" if flood.is_set() else "time" if late else killed
    return Ran(out, err, code, stopped or _limit(code, last), counted[0], round(seconds, 3))


def _all(ours: socket.socket) -> bytes:
    """Reads the report without waiting for processes that still have the other end of the
    socket."""
    data = b""
    with suppress(BlockingIOError):
        while chunk := ours.recv(_CHUNK):
            data += chunk
    return data


def _ending(reported: list[bytes]) -> tuple[int, str]:
    """Exit status and limit from the watcher's report. Without a valid report, the program was
    killed."""
    try:
        [ending] = map(json.loads, reported)
        code = ending.get("code", -signal.SIGKILL)
        killed = ending.get("killed", "")
    except (ValueError, RecursionError, AttributeError):
        return -signal.SIGKILL, ""
    if type(code) is int and isinstance(killed, str):
        return (code, killed)
    return (-signal.SIGKILL, "")


def _limit(code: int, err: str) -> str:
    """The limit according to the last exception in a program's stderr; other lines may follow."""
    if code == -signal.SIGXCPU:
        return "time"
    if code:
        raised = [line for line in err.splitlines() if _EXCEPTION.match(line)]
    else:
        raised = []
    if raised:
        return next((limit for words, limit in _LIMITED if words in raised[-1]), "")
    return ""


@functools.cache
def _source() -> str:
    return (files("ajet_sdk.sandbox") / "child.py").read_text(encoding="utf-8")


async def _read(
    stream: asyncio.StreamReader | None,
    limits: ProgramLimits,
    counted: list[int],
    flood: asyncio.Event,
) -> tuple[str, str]:
    """The stored beginning of a stream, and its end."""
    head = bytearray()
    last = b""
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
