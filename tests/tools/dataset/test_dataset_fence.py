"""The fence, attacked: programs that want out of it, and what becomes of a machine that has
none."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ajet_sdk.sandbox.run as sandbox
from ajet_sdk.sandbox.fence import FOLDERS, Fence
from ajet_sdk.sandbox.run import ProgramLimits, Ran, run_code

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bubblewrap is of Linux"),
    pytest.mark.slow,
]

SHORT = ProgramLimits(seconds=5.0, memory=256 << 20, file=1 << 20, disk=4 << 20, processes=8)


@pytest.fixture(params=["a separate user", "a namespace of users"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root a program has a separate user; everyone else has the other way, which root can take
    too."""
    found: Fence = request.getfixturevalue("fenced")
    users = request.param == "a separate user"
    if users and not found.users:
        pytest.skip("needs root")
    monkeypatch.setattr(sandbox, "fence", lambda: replace(found, users=users))


def attack(code: str, *arguments: Any, limits: ProgramLimits = SHORT) -> Ran:
    """Run a program whose `given` are the arguments; it prints `escaped` where it got out."""
    return asyncio.run(run_code(f"given = {list(arguments)!r}\n{code}", limits=limits))


@pytest.fixture
def secret(tmp_path: Path) -> Iterator[Path]:
    """A file that only its owner may read, in a directory that only its owner may enter."""
    tmp_path.chmod(0o700)
    file = tmp_path / "secret"
    file.write_text("sesame")
    file.chmod(0o600)
    yield file
    assert file.read_text() == "sesame"


def test_files_of_the_user_are_out_of_reach(secret: Path) -> None:
    code = """
import os
for path in given:
    for act in (open, os.listdir, os.stat, lambda p: open(p, "a"), os.remove):
        try:
            act(path)
            print("escaped", path, act)
        except OSError:
            pass
"""
    others = str(Path.home() / ".bashrc"), "/etc/passwd", "/etc/shadow", "/sys"
    got = attack(code, str(secret), str(secret.parent), *others)
    assert got.ok and got.stdout == "", got


def test_a_directory_of_the_user_cannot_be_deleted(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "work.txt").write_text("a year of it")
    code = "import shutil\nfor path in given:\n    shutil.rmtree(path, ignore_errors=True)"
    got = attack(code, str(victim), str(tmp_path), str(Path(json.__file__).parent))
    assert (victim / "work.txt").read_text() == "a year of it"
    assert got.ok and Path(json.__file__).exists()


def test_links_lead_nowhere(secret: Path) -> None:
    code = """
import os
os.symlink("/", "root"); os.symlink(given[0], "direct"); os.symlink("/proc/1/root", "first")
os.symlink("../" * 40 + given[0][1:], "up")
for path in ("direct", "up", "root" + given[0], "first" + given[0], "/proc/1/cwd" + given[0]):
    try:
        print("escaped", path, open(path).read())
    except OSError:
        pass
"""
    got = attack(code, str(secret))
    assert got.ok and got.stdout == "", got


def test_the_root_and_python_itself_cannot_be_written() -> None:
    code = """
import os, sys
for path in (os.__file__, sys.executable, "/new", "/usr/lib/new", "/etc/new", "/dev/new", "/proc/sys/kernel/hostname",
             "/proc/sysrq-trigger", sys.prefix + "/new", sys.prefix + "/lib/new"):
    try:
        open(path, "a").close()
        print("escaped", path)
    except OSError:
        pass
"""
    got = attack(code)
    written = [line.removeprefix("escaped ") for line in got.stdout.splitlines()]
    own = tuple(
        f"{folder}/" for folder in FOLDERS
    )  # in memory; an environment below /tmp has its name in there
    assert got.ok and all(path.startswith(own) for path in written), got
    places = ("/", "/usr/lib", "/etc", "/dev", sys.prefix, f"{sys.prefix}/lib")
    assert not any(Path(place, "new").exists() for place in places)


@pytest.fixture
def listening() -> Iterator[list[Any]]:
    """A port of this machine on IPv4, and an abstract socket, which needs no file."""
    name = f"\0ajet-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        yield [port.getsockname()[1], name]


def test_the_network_is_out_of_reach(listening: list[Any]) -> None:
    code = """
import socket
def reach(family, kind, address):
    with socket.socket(family, kind) as one:
        one.settimeout(2)
        one.connect(address)
        one.send(b"x")
        print("escaped", address)
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for family, address in ((socket.AF_INET, ("192.0.2.1", 53)), (socket.AF_INET6, ("2001:db8::1", 53))):
        try:
            reach(family, kind, address)
        except OSError:
            pass
for family, address in ((socket.AF_INET, ("127.0.0.1", given[0])), (socket.AF_UNIX, given[1])):
    try:
        reach(family, socket.SOCK_STREAM, address)
    except OSError:
        pass
for family in (16, 17, 38, 40):  # netlink, packet, alg, vsock
    try:
        socket.socket(family, socket.SOCK_DGRAM)
        print("escaped", family)
    except OSError:
        pass
"""
    got = attack(code, *listening)
    assert got.ok and got.stdout == "", got


def test_nothing_of_the_environment_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AJET_TEST_SECRET", "sesame")
    code = """
import glob
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
    try:
        if b"sesame" in open(path, "rb").read():
            print("escaped", path)
    except OSError:
        pass
"""
    assert attack(code).stdout == ""


def test_no_descriptor_is_left_open() -> None:
    assert (
        attack("import os\nprint(sorted(os.listdir('/proc/self/fd'), key=int)[:-1])").stdout
        == "['0', '1', '2']\n"
    )


@pytest.mark.parametrize("target", ["os.getppid()", "1", "-1"])
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP", "SIGTERM"])
def test_the_watcher_cannot_be_ended_or_stopped(target: str, number: str) -> None:
    """Stopped, it would not see the time pass."""
    code = f"""
import os, signal, time
try:
    os.kill({target}, signal.{number})
except OSError:
    pass
time.sleep(600)
"""
    got = attack(code, limits=replace(SHORT, seconds=1.0))
    assert got.stopped == "time" and got.code == -9


def test_the_watchers_report_cannot_be_forged() -> None:
    code = """
import glob, os
for path in [*glob.glob("/proc/1/fd/*"), *(f"/proc/1/fd/{n}" for n in range(30)), "/proc/1/mem"]:
    try:
        os.write(os.open(path, os.O_WRONLY), b'{"code": 0}\\n')
        print("escaped", path)
    except OSError:
        pass
raise SystemExit(3)
"""
    got = attack(code)
    assert got.code == 3 and got.stdout == ""


def test_the_kernel_is_asked_for_no_more_than_a_program_needs() -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0, status
assert status["NoNewPrivs"].strip() == "1" and status["Seccomp"].strip() == "2", status
attempts = dict(
    unshare=lambda: libc.unshare(0x10000000),
    mount=lambda: libc.mount(b"x", b"/scratch", b"tmpfs", 0, None),
    memory=lambda: libc.memfd_create(b"x", 0),
    shared=lambda: libc.shmget(0, 4096, 0o1777),
    trace=lambda: libc.ptrace(16, 1, None, None),
    root=lambda: libc.setuid(0),
    chroot=lambda: libc.chroot(b"/scratch"),
)
for name, act in attempts.items():
    if act() != -1:
        print("escaped", name)
"""
    got = attack(code)
    assert got.ok and got.stdout == "", got


def test_a_fork_bomb_ends_and_a_sound_program_beside_it_does_not_notice() -> None:
    async def both() -> list[Ran]:
        bomb = (
            "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
        )
        sound = (
            "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        os._exit(0)\n   "
            " os.wait()\nprint('fine')"
        )
        return await asyncio.gather(
            run_code(bomb, limits=SHORT), run_code(sound, limits=replace(SHORT, seconds=60))
        )

    bomb, sound = asyncio.run(both())
    assert bomb.stopped == "processes" and sound.stdout == "fine\n", (bomb, sound)


def test_files_without_end_are_stopped_wherever_they_are_written() -> None:
    for folder in ("/scratch", "/tmp", "/dev/shm"):
        code = (
            "import time\nn = 0\nwhile True:\n    n += 1\n    open(f'{given[0]}/{n}',"
            " 'w').write('x' * 900000)"
        )
        assert attack(code, folder).stopped == "disk", folder
    empty = "n = 0\nwhile True:\n    n += 1\n    open(str(n), 'w').close()"
    assert attack(empty, limits=replace(SHORT, seconds=30)).stopped == "disk"


def test_threads_subprocesses_of_python_and_numbers_work() -> None:
    """What a program may rightly want."""
    code = """
import concurrent.futures, decimal, multiprocessing, socket, subprocess, sys, tempfile, threading, zoneinfo
import numpy
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    assert list(pool.map(str, range(3))) == ["0", "1", "2"]
assert subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout == "42\\n"
with multiprocessing.Pool(2) as pool:
    assert pool.map(abs, [-1, 2]) == [1, 2]
with tempfile.TemporaryFile() as file:
    file.write(b"x")
a, b = socket.socketpair()
print(int(numpy.arange(4).sum()), zoneinfo.ZoneInfo("Europe/Berlin"))
"""
    got = attack(code, limits=ProgramLimits(seconds=30))
    assert got.ok and got.stdout == "6 Europe/Berlin\n", got
