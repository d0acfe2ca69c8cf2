"""The processes of environments.

A template process loads the environment once and forks a process for each instance, which takes
milliseconds instead of the seconds of loading. An instance answers requests, one JSON object per
line, on its own socket. When the other end closes, because the instance was released or the service
died, it ends with all its child processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from ajet_sdk.environments.hosted import Hosted, load
from ajet_sdk.environments.spec import Spec, UnknownTask, WrongTarget, resolved

if TYPE_CHECKING:
    from ajet_sdk.types import Json

START = (
    "import sys, types; package = sys.modules['ajet_sdk'] = types.ModuleType('ajet_sdk');"
    " package.__path__ = [sys.argv[1]]; from ajet_sdk.environments.process import main;"
    " main(int(sys.argv[2]))"
)
"""The program of `python -c`: it makes `ajet_sdk` importable without adding ajet's environment to
the path."""


def main(control: int) -> None:
    """Run the template process; `control` is a Unix socket, and the spec comes on stdin.

    It writes one line, `{"ok": null}` or `{"error": ...}`, then forks for each socket that it
    receives.
    """
    settings = json.loads(sys.stdin.readline())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of the environment goes to the service's stderr
    server = socket.socket(fileno=control)
    try:
        hosted = load(Spec(**settings["spec"]))
    except BaseException as error:  # noqa: BLE001  reported by the service
        plain = isinstance(error, (ImportError, WrongTarget))  # the message suffices
        server.sendall(_line({"error": _described(error, whole=not plain)}))
        return
    server.sendall(_line({"ok": None}))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the system
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service handles Ctrl-C
    while True:
        data, sockets, _, _ = socket.recv_fds(server, 1, 1)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            server.close()
            _run(socket.socket(fileno=sockets[0]), hosted, settings["memory"])
        os.close(sockets[0])


def _run(connection: socket.socket, hosted: Hosted, memory: int | None) -> None:
    """Run an instance after the fork, to its end."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        asyncio.run(_Answers(connection, hosted).run())
    except BaseException:  # noqa: BLE001  a forked process must not continue in the template's code
        traceback.print_exc()
    _end()


def _end() -> None:
    """Kill this process and its children."""
    os.killpg(0, signal.SIGKILL)


class _Answers:
    """Answers the requests of an instance in order."""

    def __init__(self, connection: socket.socket, hosted: Hosted) -> None:
        self._connection = connection
        self._hosted = hosted
        self._instance: Any = None
        self._requests: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=[loop], daemon=True).start()
        self._connection.sendall(_line({"ok": os.getpid()}))
        while True:
            request = await self._requests.get()
            try:
                line = _line({"ok": await self._answer(request)})
            except UnknownTask as error:
                line = _line({"error": str(error), "unknown": True})
            except Exception as error:  # noqa: BLE001  handed to the service
                line = _line({"error": _described(error)})
            self._connection.sendall(line)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read in a thread, so that a process with a hanging request ends with the service."""
        with self._connection.makefile("rb") as lines:
            for line in lines:
                loop.call_soon_threadsafe(self._requests.put_nowait, json.loads(line))
        _end()

    async def _answer(self, request: Json) -> object:
        operation = request["what"]
        if operation == "tasks":
            return [
                str(task_id) for task_id in await resolved(self._hosted.tasks(request["split"]))
            ]
        if operation == "create":
            self._instance = await resolved(self._hosted.create(request["task_id"]))
            return {"state": await resolved(self._instance.reset())}
        if operation == "step":
            return await resolved(self._instance.step(request["messages"]))
        if operation == "close":
            return await resolved(self._instance.close())
        return await resolved(getattr(self._instance, operation)(request["params"]))


def _line(value: object) -> bytes:
    try:
        return json.dumps(value, default=_plain, allow_nan=False).encode() + b"\n"
    except ValueError as error:  # also for NaN and infinity
        raise ValueError(f"the environment returned a value that is not JSON: {error}") from None


def _plain(value: object) -> object:
    """Convert numpy's arrays and scalars to numbers, and other values to text."""
    for method in ("tolist", "model_dump"):
        if hasattr(value, method):
            return getattr(value, method)()
    return str(value)


def _described(error: BaseException, *, whole: bool = False) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, WrongTarget):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    with contextlib.suppress(IndexError):
        text += f" ({os.path.basename(frames[-1].filename)} line {frames[-1].lineno})"  # noqa: PTH119
    return text + ("\n" + "".join(traceback.format_exception(error)) if whole else "")
