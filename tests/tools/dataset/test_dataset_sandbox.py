"""Code that a model wrote: what it may use, what becomes of it when it wants more, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ajet_tools.dataset.sandbox import Limits, Ran, run_code

SHORT = Limits(seconds=5.0, memory=256 << 20, file=1 << 20, disk=4 << 20, processes=8, kept=1000, output=1 << 20)


def ran(code: str, stdin: str = "", limits: Limits = SHORT) -> Ran:
    return asyncio.run(run_code(code, stdin=stdin, limits=limits))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the program's directory is made, so that its processes can be told from those of other tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return str(tmp_path)


def alive(mark: str) -> list[int]:
    """Processes whose memory of their arguments or directory names the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark in (folder / "cmdline").read_text(errors="replace") + str((folder / "cwd").readlink()):
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def test_a_program_runs_with_its_input_in_an_empty_directory_and_a_bare_environment() -> None:
    os.environ["AJET_TEST_SECRET"] = "sesame"
    try:
        got = ran("import os\nprint(input())\nprint(os.listdir('.'), sorted(os.environ))", stdin="hello\n")
    finally:
        del os.environ["AJET_TEST_SECRET"]
    assert got.ok and got.code == 0 and got.failure == "" and got.stopped == ""
    assert got.stdout.splitlines() == ["hello", "['program.py'] ['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH']"]


def test_an_exception_is_kept_and_named() -> None:
    got = ran("print('before')\nraise ValueError('no such fruit')")
    assert not got.ok and got.code == 1 and got.stdout == "before\n" and got.stopped == ""
    assert got.failure == "ValueError: no such fruit" and "Traceback" in got.stderr


def test_an_exit_status_and_a_signal_are_told() -> None:
    assert ran("raise SystemExit(3)").failure == "exit status 3"
    assert ran("raise SystemExit(200)").code == 200
    assert ran("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)").code == -11


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time\ntime.sleep(60)", "input()\nimport time\ntime.sleep(60)"]
)
def test_code_that_loops_or_sleeps_is_stopped(code: str) -> None:
    began = time.monotonic()
    got = ran(code, limits=Limits(seconds=1.0), stdin="x\n")
    assert got.stopped == "time" and got.failure == "met its limit of time"
    assert time.monotonic() - began < 8


def test_code_that_eats_memory_is_stopped_by_its_limit() -> None:
    got = ran("held = []\nwhile True:\n    held.append(bytearray(1 << 24))")
    assert got.stopped == "memory" and "MemoryError" in got.stderr


def test_a_big_file_and_many_files_are_stopped() -> None:
    assert ran("open('big', 'wb').write(b'0' * (8 << 20))").stopped == "file size"
    many = "import time\nfor i in range(200):\n    open(f'{i}', 'wb').write(b'0' * 900_000)\n    time.sleep(0.01)"
    assert ran(many).stopped == "disk"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are counted by /proc")
@pytest.mark.parametrize("own", ["", "        os.setsid()\n"], ids=["in its group", "in a session of its own"])
def test_code_that_forks_without_end_is_stopped_and_nothing_is_left(own: str, place: str) -> None:
    code = f"import os, time\nwhile True:\n    if os.fork() == 0:\n{own}        time.sleep(100)\n"
    got = ran(code)
    assert not got.ok and got.stopped == "processes"
    time.sleep(0.3)
    assert alive(place) == []


def test_a_fork_bomb_is_stopped_soon() -> None:
    began = time.monotonic()
    assert ran("import os\nwhile True:\n    os.fork()").stopped == "processes"
    assert time.monotonic() - began < 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are found by /proc")
def test_what_a_program_leaves_running_ends_with_it(place: str) -> None:
    got = ran("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint('done')")
    assert got.ok and got.stdout == "done\n" and got.seconds < 4
    assert alive(place) == []


def test_megabytes_of_output_are_cut_and_counted_and_too_many_stop_it() -> None:
    some = ran("print('x' * 500_000)")
    assert some.ok and len(some.stdout) == 1000 and some.printed == 500_001
    endless = ran("while True:\n    print('y' * 1000)")
    assert endless.stopped == "output" and len(endless.stdout) == 1000


def test_the_network_is_out_of_reach_where_the_system_allows_it() -> None:
    got = ran("import socket\nserver = socket.socket()\nserver.bind(('127.0.0.1', 0))\nserver.listen()\n"
              "socket.create_connection(server.getsockname(), 2)\nprint('connected')")  # fmt: skip
    if "no network" not in got.fences:
        pytest.skip("no user namespaces here")
    assert not got.ok and "connected" not in got.stdout


def test_its_directory_is_gone_afterwards_whatever_it_did_to_it() -> None:
    code = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.chmod('a', 0)\nprint(os.getcwd())"
    got = ran(code)
    assert got.ok and not Path(got.stdout.strip()).exists()


def test_surrogates_and_bytes_that_are_no_text_do_no_harm() -> None:
    got = ran("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe ok')\n# \ud800")
    assert got.ok and got.stdout.endswith(" ok")


def test_a_cancelled_run_leaves_nothing(place: str) -> None:
    async def stopped() -> None:
        task = asyncio.create_task(run_code("import time\ntime.sleep(60)", limits=Limits(seconds=60)))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    began = time.monotonic()
    asyncio.run(stopped())
    assert time.monotonic() - began < 10
    if sys.platform.startswith("linux"):
        assert alive(place) == []
