"""Calls a function on a text that a policy wrote, or a checkpoint brought, in a process that can be
killed.

A regular expression or an algebra system can take forever on a short text, and holds the
interpreter meanwhile: no time limit of a thread and no signal handler gets a turn. Here the kernel
ends the process after its processor time. The same text is therefore always refused or always read,
however busy the machine is.

    call("ajet_sdk.judges.text:matched", (pattern, output))

Processes are kept for further calls, at most one for each processor, and end with this process.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ajet_sdk.errors import AjetError

if sys.platform != "win32":
    import resource

PROCESSOR_SECONDS = 2.0
"""Limit of a call. Comparing two formulas takes some 50 ms."""
MEMORY = 2 << 30
"""Limit of the address space that a call may add to that of its process, in bytes."""
_MOST_WORKERS = 16
_POLL_SECONDS = 5.0
_OF_THE_TEXT = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL")
"""Signals by which a parser ends that runs out of stack."""


class TooExpensive(AjetError, RuntimeError):
    """Reading a text took more than the limit of processor time, memory or stack."""


class WorkerFailed(AjetError, RuntimeError):
    """The process could not be started, or something outside of it ended it."""


def call(
    function: str,
    arguments: Sequence[Any],
    *,
    seconds: float = PROCESSOR_SECONDS,
    memory: int = MEMORY,
) -> Any:
    """Calls `module:name` with arguments that are JSON, and returns its result, which is JSON too.

    The module is imported before the time is counted. Safe in threads, which wait for a process.

    Raises TooExpensive; ValueError with the message of an exception of the function; WorkerFailed.
    """
    if os.name != "posix":  # Windows has neither these limits nor fork
        return _function(function)(*arguments)
    request = json.dumps([function, list(arguments), seconds, memory]).encode() + b"\n"
    workers = _workers(os.getpid())  # a fork must not share the pipes of its parent
    worker = workers.get()
    reply = None
    try:
        if worker is not None:
            reply = _ask(worker, request)
        if reply is None:  # the first call, or something outside has ended the process
            if worker is not None:
                _close(worker)
            worker = contextvars.Context().run(_start)  # no episode: the process outlives it
            reply = _ask(worker, request)
    finally:
        workers.put(worker)
    kind, value = ("failed", "") if reply is None else json.loads(reply)
    if kind == "failed":
        raise WorkerFailed("the process that reads replies of a model ended")
    if kind == "too expensive":
        raise TooExpensive(f"reading the text takes too much of {value}")
    if kind == "error":
        raise ValueError(value)
    return value


@functools.cache
def _workers(pid: int) -> queue.LifoQueue[subprocess.Popen[bytes] | None]:
    """The processes of process `pid` that are free; None: one that has not been started."""
    workers: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
    for _ in range(min(_MOST_WORKERS, os.cpu_count() or 1)):
        workers.put(None)
    return workers


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.Popen(
            [sys.executable, "-c", "from ajet_sdk.sandbox.limited import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise WorkerFailed(f"no process to read replies can be started: {error}") from error


def _ask(worker: subprocess.Popen[bytes], request: bytes) -> bytes | None:
    """The reply of a process, or None if it has ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(request)
        worker.stdin.flush()
    except BrokenPipeError:
        return None
    return worker.stdout.readline() or None


def _close(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for stream in (worker.stdin, worker.stdout):
        if stream is not None:
            with suppress(OSError):  # a pipe with an unsent request
                stream.close()


def serve() -> None:
    """The process: answers each request in a fork of its own, until its parent ends.

    A fork starts in milliseconds with everything imported, and leaves nothing in the caches of
    libraries.
    """
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # of which a library may write to the second
        os.dup2(nothing, standard)
    parent = os.getppid()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        # A fork of the parent may hold the pipe open after the parent's end.
        while not select.select([requests], [], [], _POLL_SECONDS)[0]:
            if os.getppid() != parent:
                return
        line = requests.readline()
        if not line:
            return
        replies.write(_answer(line) + b"\n")
        replies.flush()


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    called: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return called


def _answer(line: bytes) -> bytes:
    """Calls the function in a fork, and returns the reply."""
    name, arguments, seconds, memory = json.loads(line)
    called = _function(name)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _limit_memory(memory)
        reply = _result(called, arguments, seconds)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(reply).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(pid, 0)
    ended_by = -os.waitstatus_to_exitcode(status)
    if not ended_by:
        return content
    if ended_by == signal.SIGPROF:
        return json.dumps(["too expensive", f"processor time ({seconds:g} s)"]).encode()
    if ended_by > 0 and signal.Signals(ended_by).name in _OF_THE_TEXT:
        return json.dumps(["too expensive", "stack"]).encode()
    return json.dumps(["failed", ended_by]).encode()


def _limit_memory(memory: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError, OSError):  # macOS has neither this file nor this limit
        with open("/proc/self/statm") as file:  # noqa: PTH123
            pages = int(file.read().split()[0])
        limit = memory + pages * resource.getpagesize()
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _result(called: Callable[..., Any], arguments: list[Any], seconds: float) -> list[Any]:
    # The signal's default action ends the process, whatever it does: no handler has to run.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return ["value", called(*arguments)]
    except MemoryError:
        return ["too expensive", "memory"]
    except RecursionError:
        return ["too expensive", "stack"]
    except Exception as error:  # noqa: BLE001  whatever a parser raises for a text of a policy
        return ["error", f"{type(error).__name__}: {error}"]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
