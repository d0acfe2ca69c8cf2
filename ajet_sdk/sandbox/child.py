"""The program between `sandbox` and the code that it runs: it sets the limits, runs the code, watches it, and reports.

It is started as `python -I -S -c SOURCE LIMITS` and imports nothing of ajet. To the file descriptor that the limits
name, a socket, it writes lines of JSON: that it stands, then the code's exit status and what it was killed for. Once
the other side has nothing more to send, it ends the code: so it does where ajet is killed. Inside a fence it is the
first process: the code can send it no signal, and its end is the end of all that the code has started. Outside it kills
them one by one. It does without pathlib, to start quickly.
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


DEATH_SIGNAL, DUMPABLE, ADOPT_ORPHANS, NO_NEW_PRIVILEGES = 1, 4, 36, 38
LOOK_EVERY = 0.02
FILES = 10_000


def main() -> None:
    limits = json.loads(sys.argv[1])
    control(NO_NEW_PRIVILEGES, 1)
    control(ADOPT_ORPHANS, 1)
    control(DUMPABLE, 0)  # else the code, of the same user, could write into this process
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
    """Give up what is left of rights, set the limits that outlive exec, and turn into the program."""
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
    if os.getppid() != watcher:  # it was killed before: no signal comes any more
        os._exit(1)
    os.nice(10)  # whoever watches it must get a turn while it forks as fast as it can
    keep_stdio()
    os.execve(limits["argv"][0], limits["argv"], limits["environment"])


def keep_stdio() -> None:
    """Nothing else crosses the fence, whatever its number; the report least of all."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))


def watch(child: int, limits: Json) -> Json:
    """Wait for the code's end; bring it about where it took too long, is too many, or took too much."""
    until, status, killed = time.monotonic() + limits["seconds"], None, ""
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
        return {"killed": killed} if status is None else {"code": os.waitstatus_to_exitcode(status)}
    end(child)
    if status is None:
        _, status = os.waitpid(child, 0)
    return {"killed": killed, "code": os.waitstatus_to_exitcode(status)}


def passed(limits: Json, until: float) -> str:
    """The limit that the code has passed, or nothing."""
    if time.monotonic() > until:
        return "time"
    running = descendants()
    if len(running) > limits["processes"] + 1:
        return "processes"
    if sum(running.values()) > limits["memory"]:
        return "memory"
    size, files = filled(limits["folders"]) if limits["folders"] else (used(limits["directory"], limits["disk"]), 0)
    return "disk" if size > limits["disk"] or files > FILES else ""


def end(child: int) -> None:
    """Kill all that the code has started, until no new one is found; orphans of its processes became ours."""
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
    """All processes below this one: id -> bytes of memory that are its alone, or shared with its children."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc") if sys.platform.startswith("linux") else ():  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has ended
                continue
            children.setdefault(int(fields[1]), []).append((int(name), int(fields[21]) * resource.getpagesize()))
    pids, todo = dict[int, int](), [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        pids.update(below)
        todo += [pid for pid, _ in below]
    return pids


def filled(folders: list[str]) -> tuple[int, int]:
    """Bytes and files in file systems that are the code's alone."""
    there = [os.statvfs(folder) for folder in folders]
    size = sum((filesystem.f_blocks - filesystem.f_bfree) * filesystem.f_frsize for filesystem in there)
    return size, sum(filesystem.f_files - filesystem.f_ffree for filesystem in there)


def used(directory: str, enough: int) -> int:
    """Bytes of the files below a directory; counting stops where it is more than enough."""
    total, folders = 0, [directory]
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
