"""The watcher between `sandbox` and the code that it runs: sets limits, runs the code, watches it,
and reports.

It is started as `python -I -S -c SOURCE LIMITS` and imports nothing of ajet. It writes lines of
JSON to a socket, whose file descriptor is among the limits: that it has started, then the code's
exit status and the limit that it exceeded. When the other side closes the socket, it ends the code,
also if ajet is killed. Inside a fence it is the first process: the code cannot send it signals, and
all of the code's processes end with it. Outside it kills them one by one. It does without pathlib,
to start quickly.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet_sdk.types import Json


DEATH_SIGNAL = 1
DUMPABLE = 4
ADOPT_ORPHANS = 36
NO_NEW_PRIVILEGES = 38
LOOK_EVERY = 0.02
FILES = 10_000


def main() -> None:
    limits = json.loads(sys.argv[1])
    control(NO_NEW_PRIVILEGES, 1)
    control(ADOPT_ORPHANS, 1)
    control(DUMPABLE, 0)  # otherwise the code, of the same user, could write into this process
    say(limits, {"stands": True})
    watcher = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        become(limits, watcher)
    say(limits, watch(child, limits))


def control(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def say(limits: Json, message: Json) -> None:
    os.write(limits["report"], json.dumps(message).encode() + b"\n")


def become(limits: Json, watcher: int) -> None:
    """Drop remaining privileges, set the limits that outlive exec, and execute the program."""
    for name in ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE"):
        wanted = limits["rlimits"].get(name)
        kind = getattr(resource, "RLIMIT_" + name, None)
        if wanted is None or kind is None:
            continue
        _, hard = resource.getrlimit(kind)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))
    if limits["user"]:
        os.setgroups([])
        os.setresgid(*[limits["user"]] * 3)
        os.setresuid(*[limits["user"]] * 3)
    control(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != watcher:  # it has already been killed: no signal will come
        os._exit(1)
    os.nice(10)  # the watcher must get a turn even if the code forks as fast as it can
    for name in os.listdir("/dev/fd"):  # noqa: PTH208
        if int(name) > 2:  # the report, above all
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))
    os.execve(limits["argv"][0], limits["argv"], limits["environment"])


def watch(child: int, limits: Json) -> Json:
    """Wait for the code's end, or end it if it exceeds a limit."""
    until = time.monotonic() + limits["seconds"]
    status = None
    killed = ""
    called_off = select.poll()
    called_off.register(limits["report"], select.POLLIN)
    while status is None:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            status = ended
        elif pid == 0:
            killed = "time" if called_off.poll(0) else passed(limits, until)
            if killed:
                break
            time.sleep(LOOK_EVERY)
    if limits["folders"]:  # inside a fence: all that is left ends with this process
        if status is None:
            return {"killed": killed}
        return {"code": os.waitstatus_to_exitcode(status)}
    end(child)
    if status is None:
        _, status = os.waitpid(child, 0)
    return {"killed": killed, "code": os.waitstatus_to_exitcode(status)}


def passed(limits: Json, until: float) -> str:
    """The limit that the code has exceeded, or empty."""
    if time.monotonic() > until:
        return "time"
    running = descendants()
    if len(running) > limits["processes"] + 1:
        return "processes"
    if sum(running.values()) > limits["memory"]:
        return "memory"
    size, files = (
        filled(limits["folders"])
        if limits["folders"]
        else (used(limits["directory"], limits["disk"]), 0)
    )
    return "disk" if size > limits["disk"] or files > FILES else ""


def end(child: int) -> None:
    """Kill all processes of the code until there are no new ones; orphans are children of this
    process."""
    killed: set[int] = set()
    while alive := ({child, *descendants()} - killed):
        for pid in alive:
            for kill in (os.kill, os.killpg):
                try:
                    kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):  # it has ended, or leads no group
                    continue
        killed |= alive


def descendants() -> dict[int, int]:
    """All descendants of this process: id -> resident bytes."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc") if sys.platform.startswith("linux") else ():  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has ended
                continue
            children.setdefault(int(fields[1]), []).append(
                (int(name), int(fields[21]) * resource.getpagesize())
            )
    pids = dict[int, int]()
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        pids.update(below)
        todo += [pid for pid, _ in below]
    return pids


def filled(folders: list[str]) -> tuple[int, int]:
    """Bytes and files in the code's file systems."""
    there = [os.statvfs(folder) for folder in folders]
    size = sum(
        (filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize for filesystem in there
    )
    return size, sum(filesystem.f_files - filesystem.f_ffree for filesystem in there)


def used(directory: str, enough: int) -> int:
    """Bytes of the files below a directory; stops counting above `enough`."""
    total = 0
    folders = [directory]
    while folders and total <= enough:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return total


if __name__ == "__main__":
    main()
