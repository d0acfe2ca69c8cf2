"""The program between `sandbox` and the code that it runs: it fences itself in, runs the code, and reports.

It is started as `python -I -S -c SOURCE LIMITS` and imports nothing of ajet. To the file descriptor that the limits
name it writes lines of JSON: which fences stand, the code's exit status, what it was killed for. SIGTERM, and its own
end, end the code with everything that it has started. It does without pathlib, to start quickly.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from typing import Any

__all__ = ["main"]

NEW_USER, NEW_IPC, NEW_PID, NEW_NET = 0x10000000, 0x08000000, 0x20000000, 0x40000000
DEATH_SIGNAL, ADOPT_ORPHANS, NO_NEW_PRIVILEGES = 1, 36, 38
LOOK_EVERY = 0.02


def main() -> None:
    limits = json.loads(sys.argv[1])
    fences = fence(limits)
    say(limits, {"fences": fences})
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        first(limits, fences)
    say(limits, watch(child, limits, fences, stop))


def say(limits: dict[str, Any], what: dict[str, Any]) -> None:
    os.write(limits["report"], json.dumps(what).encode() + b"\n")


def fence(limits: dict[str, Any]) -> list[str]:
    """Leave the user, the network and the process table of the machine, as far as the system lets this process."""
    fences = []
    if limits["as_nobody"]:
        os.setgroups([])
        os.setgid(limits["as_nobody"])
        os.setuid(limits["as_nobody"])
        fences.append("user")
    if not sys.platform.startswith("linux"):
        return fences
    libc = ctypes.CDLL(None, use_errno=True)
    if limits["namespaces"]:
        for flags, names in (
            (NEW_USER | NEW_NET | NEW_PID | NEW_IPC, ["network", "namespace"]),
            (NEW_USER | NEW_NET, ["network"]),
        ):
            if libc.unshare(flags) == 0:
                fences += names
                break
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    return fences


def first(limits: dict[str, Any], fences: list[str]) -> None:
    """In the new process table the first process, which only waits: when it ends, all others are ended."""
    if "namespace" not in fences:
        become(limits, fences)
    die_with_parent()
    program = os.fork()
    if program == 0:
        die_with_parent()
        become(limits, fences)
    while True:
        pid, status = os.wait()
        if pid == program:
            say(limits, {"code": os.waitstatus_to_exitcode(status)})
            os._exit(0)


def die_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def become(limits: dict[str, Any], fences: list[str]) -> None:
    """Set the limits that outlive exec, and turn into the program."""
    for name in ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE"):
        wanted = limits["rlimits"].get(name)
        kind = getattr(resource, "RLIMIT_" + name, None)
        if wanted is None or kind is None or (name == "NPROC" and "network" not in fences):
            continue  # outside a namespace of its own the user's other processes would count
        _, hard = resource.getrlimit(kind)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (value, value))
    os.nice(10)  # whoever watches it must get a turn while it forks as fast as it can
    os.closerange(3, 256)
    os.execve(limits["argv"][0], limits["argv"], limits["environment"])


def watch(child: int, limits: dict[str, Any], fences: list[str], stop: list[int]) -> dict[str, Any]:
    """Wait for the code's end; bring it about where it took too long, is too many, or wrote too much."""
    until, status, killed = time.monotonic() + limits["seconds"], None, ""
    while status is None:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            status = ended
        elif pid == 0:
            killed = passed(limits, until) or ("stopped" if stop else "")
            if killed:
                break
            time.sleep(LOOK_EVERY)
    end(child)
    if status is None:
        _, status = os.waitpid(child, 0)
    in_between = "namespace" in fences and not killed  # then the first process has said how the program ended
    return {"killed": killed, **({} if in_between else {"code": os.waitstatus_to_exitcode(status)})}


def passed(limits: dict[str, Any], until: float) -> str:
    """The limit that the code has passed, or nothing."""
    if time.monotonic() > until:
        return "time"
    if len(descendants()) > limits["processes"] + 1:
        return "processes"
    return "disk" if used(limits["directory"], limits["disk"]) > limits["disk"] else ""


def end(child: int) -> None:
    """Kill all that the code has started, until no new one is found; orphans of its processes became ours."""
    killed: set[int] = set()
    while left := ({child, *descendants()} - killed):
        for pid in left:
            for kill in (os.kill, os.killpg):
                try:
                    kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):  # it has ended, or leads no group
                    continue
        killed |= left


def descendants() -> set[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if sys.platform.startswith("linux") else ():  # noqa: PTH208
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:  # it has ended
                continue
            children.setdefault(parent, []).append(int(name))
    found, todo = set(), [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


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
