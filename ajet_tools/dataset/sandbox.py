"""Running code that a model wrote: in a process of its own, with limits, in an empty directory.

It is a guard against accidents (loops, floods of output, a fork too many) and no jail: code that wants to do harm can
still read what this user can read. Run code that you do not trust in a container or a virtual machine.

Always: time, processor time, memory, size of a file, files in all, output; an empty temporary directory, an environment
of four variables, no standard input but what is given. Where the system lets us: no network and a process table of its
own (Linux with user namespaces), and another user (`nobody`, where ajet runs as root and that user can read the
interpreter). `Ran.fences` says which of these stood.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ajet_sdk.errors import AjetError, ConfigError

__all__ = ["Limits", "Ran", "SandboxError", "run_code"]

_MIB = 1 << 20
_CHUNK = 1 << 16
_FENCES = {"user": "another user", "network": "no network", "namespace": "processes of its own"}
_LIMITED = ("MemoryError", "memory"), ("File too large", "file size"), ("Resource temporarily unavailable", "processes")
_START_UP = 5.0
"""Seconds beyond the time limit for starting and clearing up."""


class SandboxError(AjetError, RuntimeError):
    """The code could not even be started; says why."""


@dataclass(frozen=True)
class Limits:
    """What the code may use. Sizes are in bytes."""

    seconds: float = 10.0
    """By the clock; of processor time one second more."""
    memory: int = 512 * _MIB
    """Address space of each process."""
    file: int = 8 * _MIB
    """Of one file."""
    disk: int = 64 * _MIB
    """Of all files in its directory, looked at 50 times a second."""
    processes: int = 16
    """Processes and threads at once."""
    kept: int = 64 * 1024
    """Of output and of errors, each; what comes after is counted and dropped."""
    output: int = 16 * _MIB
    """Of output and errors together; more ends the code."""


@dataclass(frozen=True)
class Ran:
    """What came of it."""

    stdout: str
    stderr: str
    code: int
    """The exit status; minus the signal where one ended it."""
    stopped: str = ""
    """The limit that it met: time, memory, file size, disk, processes, output. Empty where none."""
    printed: int = 0
    """Bytes of output and errors, dropped ones included."""
    seconds: float = 0.0
    fences: tuple[str, ...] = ()

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
            return f"met its limit of {self.stopped}"
        return last[:300] or (f"ended by signal {-self.code}" if self.code < 0 else f"exit status {self.code}")


async def run_code(code: str, *, stdin: str = "", limits: Limits | None = None) -> Ran:
    """Run a Python program under `limits` and say what came of it; what the program does wrong never raises.

    Raises ConfigError where the system has no such limits (Windows), SandboxError where nothing could be started.
    """
    if os.name != "posix":
        raise ConfigError(
            "running code needs the limits of Linux or macOS; verify by agreement:3 or by a judge instead"
        )
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="ajet-code-") as name:
        directory, nobody = Path(name), _nobody()
        (directory / "program.py").write_text(code, encoding="utf-8", errors="replace")
        if nobody:
            os.chown(directory, nobody, nobody)
        reading, writing = os.pipe()
        try:
            return await _run(directory, nobody, stdin, limits, reading, writing)
        except OSError as error:
            raise SandboxError(f"no program can be started here: {error}") from error
        finally:
            for descriptor in (reading, writing):
                with suppress(OSError):  # closed before, where all went well
                    os.close(descriptor)


async def _run(directory: Path, nobody: int, stdin: str, limits: Limits, reading: int, writing: int) -> Ran:
    asked = json.dumps(_asked(directory, nobody, limits, writing))
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", _source(), asked,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        cwd=directory, env={}, pass_fds=(writing,), start_new_session=True,
    )  # fmt: skip
    os.close(writing)
    flood, counted = asyncio.Event(), [0]
    readers = [
        asyncio.create_task(_read(stream, limits, counted, flood)) for stream in (process.stdout, process.stderr)
    ]
    writer = asyncio.create_task(_write(process.stdin, stdin))
    ended, flooded = asyncio.create_task(process.wait()), asyncio.create_task(flood.wait())
    try:
        await asyncio.wait({ended, flooded}, timeout=limits.seconds + _START_UP, return_when=asyncio.FIRST_COMPLETED)
    finally:
        _signal(process, signal.SIGTERM)
        await asyncio.wait({ended}, timeout=_START_UP)
        _signal(process, signal.SIGKILL)
        await asyncio.wait({*readers, ended}, timeout=_START_UP)
        for task in (*readers, ended, flooded, writer):
            task.cancel()
        await asyncio.gather(*readers, ended, flooded, writer, return_exceptions=True)
    seconds = time.monotonic() - started
    out, err = (task.result() if not task.cancelled() else "" for task in readers)
    lines = os.read(reading, _CHUNK).splitlines()
    return _ran(out, err, flood.is_set(), [json.loads(line) for line in lines], counted[0], seconds)


def _ran(out: str, err: str, flood: bool, said: list[dict[str, Any]], printed: int, seconds: float) -> Ran:
    if not said:
        raise SandboxError(f"no program can be started here: {err.strip()[-300:] or 'the sandbox said nothing'}")
    fences = tuple(_FENCES[name] for name in said[0]["fences"])
    told = {name: value for line in said for name, value in line.items()}
    code, killed = told.get("code", -signal.SIGKILL), told.get("killed", "")
    stopped = "output" if flood else "time" if killed == "stopped" else killed
    if not stopped and code == -signal.SIGXCPU:
        stopped = "time"
    if not stopped and code != 0:
        last = err.rstrip().rpartition("\n")[2]
        stopped = next((limit for words, limit in _LIMITED if words in last), "")
    return Ran(out, err, code, stopped, printed, round(seconds, 3), fences)


def _asked(directory: Path, nobody: int, limits: Limits, report: int) -> dict[str, Any]:
    seconds = math.ceil(limits.seconds) + 1
    return {
        "argv": [sys.executable, "-I", "-B", "program.py"],
        "environment": {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(directory),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        },
        "directory": str(directory),
        "seconds": limits.seconds,
        "disk": limits.disk,
        "processes": limits.processes,
        "as_nobody": nobody,
        "namespaces": True,
        "report": report,
        "rlimits": {
            "AS": limits.memory,
            "CPU": seconds,
            "FSIZE": limits.file,
            "NOFILE": 128,
            "NPROC": limits.processes + 3,  # those of the sandbox itself count too
            "CORE": 0,
        },
    }


@functools.cache
def _source() -> str:
    return (files("ajet_tools.dataset") / "sandbox_child.py").read_text(encoding="utf-8")


@functools.cache
def _nobody() -> int:
    """The id of a user who owns nothing, where this is root and that user can run this interpreter; else 0."""
    if os.geteuid() != 0:
        return 0
    import pwd

    try:
        nobody = pwd.getpwnam("nobody").pw_uid
    except KeyError:
        return 0
    needed = [Path(sys.executable).resolve(), Path(sys.prefix), Path(os.__file__).parent, Path(tempfile.gettempdir())]
    open_to_all = all((step.stat().st_mode & 0o001) for path in needed for step in (path, *path.parents))
    return nobody if open_to_all and shutil.which(sys.executable) else 0


async def _read(stream: asyncio.StreamReader | None, limits: Limits, counted: list[int], flood: asyncio.Event) -> str:
    kept = bytearray()
    while stream is not None and (chunk := await stream.read(_CHUNK)):
        counted[0] += len(chunk)
        kept += chunk[: limits.kept - len(kept)]
        if counted[0] > limits.output:
            flood.set()
    return kept.decode("utf-8", "replace")


async def _write(stream: asyncio.StreamWriter | None, text: str) -> None:
    if stream is None:
        return
    with suppress(BrokenPipeError, ConnectionResetError):  # the program need not read it
        stream.write(text.encode("utf-8", "replace"))
        await stream.drain()
    stream.close()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        process.send_signal(number)
