"""The fence around a program written by a model: bubblewrap's namespaces and a system call filter,
with a test.

Inside, a program has a read-only root with only the files that Python needs, a scratch directory in
memory, a private loopback as its only network, no privileges, and its own process table, whose
first process, the watcher, it can neither kill nor stop. `fence` tests this: it runs a program that
tries to escape, and raises if any attempt succeeds.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ajet_sdk.errors import ConfigError

log = logging.getLogger("ajet.dataset")

SCRATCH = "/scratch"
FOLDERS = (SCRATCH, "/tmp", "/dev/shm")
"""Writable directories, each a separate file system in memory."""
_STRANGER = 65534
_USERS = range(61_184, 65_520)
"""User ids that systemd reserves for running services."""
_PROBE_SECONDS = 20


class NoFence(ConfigError):
    """There is no working fence on this machine; the message names the missing part."""


@dataclass(frozen=True)
class Fence:
    """A way to run programs on this machine."""

    bwrap: str
    version: str
    users: bool
    """Whether each program gets its own user (ajet runs as root), rather than ajet's in a
    namespace."""

    @property
    def sized(self) -> bool:
        """Whether bubblewrap can limit file systems in memory (0.7); otherwise the watcher does."""
        return tuple(map(int, re.findall(r"\d+", self.version)[:2])) >= (0, 7)

    def user(self, number: int) -> int:
        """The user of a program: process limits count per user, so concurrent programs get
        different ones."""
        if self.users:
            return _USERS[(os.getpid() * 64 + number) % len(_USERS)]
        return 0

    def command(self, disk: int, calls: int, program: int) -> list[str]:
        """The beginning of a command line that runs its rest inside the fence.

        Args:
            disk: total bytes of files.
            calls: a file descriptor with `system_calls()`.
            program: a file descriptor with the content of /scratch/program.py.
        """
        if self.users:
            rights = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            rights = [
                "--unshare-user",
                "--uid",
                str(_STRANGER),
                "--gid",
                str(_STRANGER),
                "--cap-drop",
                "ALL",
            ]
        tmpfs = ("--perms", "0777", *(("--size", str(disk)) if self.sized else ()), "--tmpfs")
        return [
            self.bwrap, *rights,
            "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
            "--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "fence", "--seccomp", str(calls),
            "--proc", "/proc", "--dev", "/dev", *(text for folder in reversed(FOLDERS) for text in (*tmpfs, folder)),
            "--remount-ro", "/dev", "--remount-ro", "/proc", *_python(),
            "--perms", "0444", "--file", str(program), f"{SCRATCH}/program.py",
            "--remount-ro", "/", "--chdir", SCRATCH, "--",
        ]  # fmt: skip


@functools.cache
def fence() -> Fence:
    """Returns the fence of this machine after testing it. Raises NoFence."""
    if sys.platform != "linux":
        raise NoFence(f"bubblewrap does not exist for {platform.system()}")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise NoFence("bubblewrap is not installed (apt-get install bubblewrap)")
    if platform.machine() not in _CALLS:
        raise NoFence(
            f"the system call filter supports {' and '.join(_CALLS)}, not {platform.machine()}"
        )
    version = subprocess.run(
        [bwrap, "--version"], capture_output=True, text=True, check=False
    ).stdout.strip()
    problems = []
    for users in (True, False) if os.geteuid() == 0 else (False,):
        candidate = Fence(bwrap, version or "bubblewrap", users)
        problem = _prove(candidate)
        if not problem:
            return candidate
        problems.append(problem)
    raise NoFence(f"bubblewrap does not work here: {problems[-1]}")


def fenced(feature: str, *, unfenced: bool) -> bool:
    """Whether programs run inside a fence; False, with a warning, if `unfenced`. Raises NoFence."""
    if unfenced:
        log.warning(
            "%s unfenced: programs written by a model run with your permissions: they can read,"
            " change and delete your files and use the network. Only time, memory, files and output"
            " are limited",
            feature,
        )
        return False
    try:
        fence()
    except NoFence as error:
        raise NoFence(
            f"{feature} runs programs written by a model, and there is no working sandbox: {error}."
            " Fix that (`ajet doctor` checks the sandbox), verify with agreement:3 or a judge, or"
            " run them with your permissions: --with unfenced=true, in a job the key unfenced: true"
        ) from None
    return True


_ATTEMPTS = """
import json, os, socket, sys
secret, port = sys.argv[1], int(sys.argv[2])
found = []
def attempt(name, act):
    try:
        act()
    except OSError:
        return
    found.append(name)
attempt("reads files of yours", lambda: open(secret).read())
attempt("writes to the root", lambda: open("/usr/lib/ajet-was-here", "w"))
attempt("changes settings of the kernel", lambda: open("/proc/sys/kernel/core_pattern", "a"))
attempt("reaches the network", lambda: socket.create_connection(("127.0.0.1", port), 2))
if [name for name in os.listdir("/proc") if name.isdigit()] != [str(os.getpid())]:
    found.append("sees other processes")
attempt("becomes root", lambda: os.setuid(0))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
if int(status["CapEff"], 16) or int(status["CapPrm"], 16):
    found.append("has privileges")
if status["Seccomp"].strip() != "2" or status["NoNewPrivs"].strip() != "1":
    found.append("may ask the kernel for everything")
if set(os.environ) - {"LC_CTYPE"}:
    found.append("sees the environment")
open("mark", "w").write("x")
print(json.dumps(found))
"""


@contextmanager
def program_files(code: bytes) -> Iterator[tuple[int, int]]:
    """File descriptors for `Fence.command`: `system_calls()` and the program."""
    with tempfile.TemporaryFile() as calls, tempfile.TemporaryFile() as program:
        for file, content in ((calls, system_calls()), (program, code)):
            file.write(content)
            file.seek(0)
        yield calls.fileno(), program.fileno()


def _prove(candidate: Fence) -> str:
    """Tests a fence; returns the problem, or an empty text."""
    drop = (
        f"import os; os.setgroups([]); u = {candidate.user(0)}; os.setresgid(u, u, u);"
        " os.setresuid(u, u, u)\n"
    )
    run = "os.execve(sys.argv[1], [sys.argv[1], '-I', '-S', 'program.py', *sys.argv[2:]], {})"
    with (
        tempfile.TemporaryDirectory(prefix="ajet-fence-") as place,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        secret = Path(place, "secret")
        secret.write_text("secret")
        with program_files(_ATTEMPTS.encode()) as descriptors:
            command = [
                *candidate.command(1 << 20, *descriptors),
                sys.executable, "-I", "-S", "-c", f"import os, sys\n{drop if candidate.users else ''}{run}",
                sys.executable, str(secret), str(server.getsockname()[1]),
            ]  # fmt: skip
            try:
                done = subprocess.run(
                    command,
                    pass_fds=descriptors,
                    env={"AJET_FENCE": "x"},
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=_PROBE_SECONDS,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {done.returncode}"
    escapes = json.loads(done.stdout)
    return f"a program inside {', '.join(escapes)}" if escapes else ""


@functools.cache
def _python() -> tuple[str, ...]:
    """Mounts for this Python: its library, its site packages and the system's libraries only."""
    paths = dict.fromkeys(
        [
            *("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store"),
            *("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/usr/share/zoneinfo"),
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *(
                f"{prefix}/{name}"
                for prefix in (sys.base_prefix, sys.prefix)
                for name in ("lib", "lib64")
            ),
            f"{sys.prefix}/pyvenv.cfg",
        ]
    )
    shown: list[tuple[str, str, str]] = []
    for path in map(Path, paths):
        if path.is_symlink() and path.parent == Path("/"):  # /lib is /usr/lib on most systems
            shown.append(("--symlink", str(path.readlink()), str(path)))
        elif path.exists():
            shown.append(("--ro-bind", str(path), str(path)))
    path = Path(
        sys.executable
    )  # and the links that lead to it, whose location determines the environment
    while path.is_symlink():
        shown.append(("--symlink", str(path.readlink()), str(path)))
        path = path.parent / path.readlink()
    shown.append(("--ro-bind", str(path), str(path)))
    above = dict.fromkeys(
        str(parent) for *_, target in shown for parent in reversed(Path(target).parents)
    )
    above.pop("/")  # else they would be accessible for ajet's user only
    folders = [text for folder in above for text in ("--perms", "0755", "--dir", folder)]
    return (*folders, *(text for step in shown for text in step))


# System calls

_REFUSED = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "mount_setattr": (442, 442), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180), "personality": (135, 92), "syslog": (103, 116),
    "open_by_handle_at": (304, 265),
}  # fmt: skip
"""Numbers on x86-64 and arm64 of calls for namespaces, kernel tables, and memory outside of process
limits."""
_CALLS = {"x86_64": (0, 0xC000003E, 56, 41), "aarch64": (1, 0xC00000B7, 220, 198)}
"""Machine -> column of `_REFUSED`, the kernel's id of the machine, numbers of `clone` and
`socket`."""
_CLONE3 = 435
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW* of clone(2)
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6: the network namespace doesn't cover all others, such as
AF_VSOCK."""


def system_calls() -> bytes:
    """A seccomp filter in classic BPF (linux/filter.h): refused calls fail; those of other machines
    end the program."""
    column, machine, clone, sockets = _CALLS[platform.machine()]
    load = 0x20
    equal = 0x15
    at_least = 0x35
    has_bits = 0x45
    end = 0x06
    allow = 0x7FFF0000
    kill = 0x80000000

    def fail(number: int) -> tuple[int, int, int, int]:
        return (end, 0, 0, 0x00050000 | number)

    refused, no_such_call, no_such_family = (
        fail(1),
        fail(38),
        fail(97),
    )  # EPERM, ENOSYS, EAFNOSUPPORT
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (end, 0, 0, kill), (load, 0, 0, 0)]
    program += [
        (at_least, 0, 1, _X32),
        no_such_call,
        (equal, 0, 1, _CLONE3),
        no_such_call,
    ]  # then libc uses clone
    for numbers in _REFUSED.values():
        program += [(equal, 0, 1, numbers[column]), refused]
    program += [
        (equal, 0, 3, clone),
        (load, 0, 0, 16),
        (has_bits, 0, 1, _NEW_NAMESPACES),
        refused,
        (load, 0, 0, 0),
    ]
    families = [(equal, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
    program += [(equal, 0, len(families) + 2, sockets), (load, 0, 0, 16), *families, no_such_family]
    program += [(end, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *step) for step in program)
