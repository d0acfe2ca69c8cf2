"""Code that a model wrote: what it may use, what becomes of it when it wants more, and that nothing
of it is left."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from ajet_sdk.sandbox.run import ProgramLimits, Ran, run_code
from tests.waiting import until

pytestmark = pytest.mark.slow

SHORT = ProgramLimits(
    seconds=5.0,
    memory=256 << 20,
    file=1 << 20,
    disk=4 << 20,
    processes=8,
    shown=1000,
    output=1 << 20,
)
WAYS = ["fenced", "unfenced"]


def ran(code: str, stdin: str = "", limits: ProgramLimits = SHORT, *, unfenced: bool) -> Ran:
    return asyncio.run(run_code(code, stdin=stdin, limits=limits, unfenced=unfenced))


@pytest.fixture(params=WAYS)
def unfenced(request: pytest.FixtureRequest) -> bool:
    """Limits hold inside a fence and outside of one."""
    if request.param == "fenced":
        request.getfixturevalue("fenced")
    return bool(request.param == "unfenced")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories of programs are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


NAME = f"code{os.getpid()}"
LONG = ProgramLimits(seconds=600 + os.getpid() / 1e6)
NAMED = f"import ctypes, os, time\nctypes.CDLL(None).prctl(15, {NAME.encode()!r}, 0, 0, 0)\n"
"""Gives a program, and what it starts, a name that is seen from outside of its namespaces."""


def alive() -> list[int]:
    """Processes that a NAMED program, or one with LONG limits, has left."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                named = (folder / "comm").read_text().strip() == NAME
                named = named or f'"seconds": {LONG.seconds}' in (folder / "cmdline").read_text()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if named and state not in "ZX":
                found.append(int(folder.name))
    return found


def test_a_program_runs_with_its_input_in_an_empty_directory_and_a_bare_environment(
    unfenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AJET_TEST_SECRET", "sesame")
    got = ran(
        "import os\nprint(input())\nprint(os.listdir('.'), *sorted(os.environ))",
        "hello\n",
        unfenced=unfenced,
    )
    assert got.ok and got.code == 0 and got.failure == "" and got.stopped == ""
    assert got.stdout.splitlines() == [
        "hello",
        "['program.py'] HOME LANG OMP_NUM_THREADS PATH TMPDIR",
    ]


def test_many_programs_at_once_in_many_threads_each_say_their_own(unfenced: bool) -> None:
    """A descriptor closed twice closes another program's."""

    async def four(number: int) -> list[Ran]:
        program = "import sys; print(sys.stdin.read(), {})"
        each = (run_code(program.format(i), stdin=f"{number}", unfenced=unfenced) for i in range(4))
        return await asyncio.gather(*each)

    gc.collect()  # what earlier tests left open may be closed at any time; nothing new may stay open
    before = {path.name for path in Path("/dev/fd").iterdir()}
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda number: asyncio.run(four(number)), range(12)))
    assert [[one.stdout for one in four] for four in got] == [
        [f"{n} {i}\n" for i in range(4)] for n in range(12)
    ]
    gc.collect()
    until(lambda: {path.name for path in Path("/dev/fd").iterdir()} <= before)


def test_an_exception_is_kept_and_named(unfenced: bool) -> None:
    got = ran("print('before')\nraise ValueError('no such fruit')", unfenced=unfenced)
    assert not got.ok and got.code == 1 and got.stdout == "before\n" and got.stopped == ""
    assert got.failure == "ValueError: no such fruit" and "Traceback" in got.stderr


def test_an_exit_status_and_a_signal_are_told(unfenced: bool) -> None:
    run = partial(ran, unfenced=unfenced)
    assert run("raise SystemExit(3)").failure == "exit status 3"
    assert run("raise SystemExit(200)").code == 200
    assert run("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)").code == -11


@pytest.mark.parametrize("forged", ['{"code": 0}', "no JSON", "[1]", '{"code": "0"}'])
def test_nothing_but_stdio_reaches_a_program_however_many_files_are_open(
    unfenced: bool, tmp_path: Path, forged: str
) -> None:
    code = f"""
import gc
import os
for number in range(3, 1100):
    try:
        os.write(number, {forged.encode()!r} + b"\\n")
        print(number)
    except OSError:
        pass
raise AssertionError
"""
    with ExitStack() as files:
        for _ in range(300):
            files.enter_context((tmp_path / "file").open("w"))
        got = ran(code, unfenced=unfenced)
    assert (got.code, got.stopped, got.stdout) == (1, "", "")


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="only root takes the watcher's descriptors"
)
@pytest.mark.parametrize(
    "forged", ["no JSON", "[1]", '{"code": "0"}', '{"killed": 1}', '{"code": 0}']
)
def test_a_report_that_makes_no_sense_is_an_outcome(forged: str) -> None:
    """Outside a fence a program of root's can take whatever it wants, but `run_code` does not
    raise."""
    code = f"""
import ctypes, os
call = ctypes.CDLL(None).syscall
watcher = os.pidfd_open(os.getppid())
for number in range(3, 400):
    taken = call(438, watcher, number, 0)
    if taken >= 0:
        try:
            os.write(taken, {forged.encode()!r} + b"\\n")
        except OSError:
            pass
"""
    assert ran(code, unfenced=True).code == -9


@pytest.mark.parametrize(
    "code",
    ["while True: pass", "import time\ntime.sleep(3600)", "input()\nimport time\ntime.sleep(3600)"],
)
def test_code_that_loops_or_sleeps_is_stopped(code: str, unfenced: bool) -> None:
    got = ran(code, limits=ProgramLimits(seconds=1.0), stdin="x\n", unfenced=unfenced)
    assert got.stopped == "time" and got.failure == "exceeded its limit of time"


def test_code_that_eats_memory_is_stopped_by_its_limit(unfenced: bool) -> None:
    got = ran("held = []\nwhile True:\n    held.append(bytearray(1 << 24))", unfenced=unfenced)
    assert got.stopped == "memory" and "MemoryError" in got.stderr


def test_processes_that_eat_memory_together_are_stopped(unfenced: bool) -> None:
    code = (
        "import os, time\nfor _ in range(4):\n    os.fork()\nheld = b'x' * (100 <<"
        " 20)\ntime.sleep(3600)"
    )
    limits = ProgramLimits(seconds=30, memory=256 << 20, processes=20)
    assert ran(code, limits=limits, unfenced=unfenced).stopped == "memory"


def test_a_big_file_and_many_files_are_stopped(unfenced: bool) -> None:
    run = partial(ran, unfenced=unfenced)
    assert run("open('big', 'wb').write(b'0' * (8 << 20))").stopped == "file size"
    many = (
        "import time\nfor i in range(200):\n    open(f'{i}', 'wb').write(b'0' * 900_000)\n   "
        " time.sleep(0.01)"
    )
    assert run(many).stopped == "disk"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are counted by /proc")
@pytest.mark.parametrize(
    "own", ["", "        os.setsid()\n"], ids=["in its group", "in a session of its own"]
)
def test_code_that_forks_without_end_is_stopped_and_nothing_is_left(
    own: str, unfenced: bool
) -> None:
    code = f"{NAMED}while True:\n    if os.fork() == 0:\n{own}        time.sleep(3600)\n"
    got = ran(code, unfenced=unfenced)
    assert not got.ok and got.stopped == "processes"
    assert alive() == []


def test_a_fork_bomb_is_stopped(unfenced: bool) -> None:
    assert ran("import os\nwhile True:\n    os.fork()", unfenced=unfenced).stopped == "processes"


def test_the_limit_is_told_though_other_processes_write_before_and_after(unfenced: bool) -> None:
    raised = (
        "Traceback (most recent call last):\\nBlockingIOError: [Errno 11] Resource temporarily"
        " unavailable\\n"
    )
    before, after = "x" * 3000 + "\\n", "Traceback (most recent call last):\\n  File"
    code = (
        "import os,"
        f" sys\nsys.stderr.write('{before}{raised}{after}')\nsys.stderr.flush()\nos._exit(1)"
    )
    assert ran(code, unfenced=unfenced).stopped == "processes"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are found by /proc")
def test_what_a_program_leaves_running_ends_with_it(unfenced: bool) -> None:
    code = f"{NAMED}if os.fork() == 0:\n    os.setsid()\n    time.sleep(3600)\nprint('done')"
    got = ran(code, unfenced=unfenced)
    assert got.ok and got.stdout == "done\n"
    assert alive() == []


def test_megabytes_of_output_are_cut_and_counted_and_too_many_stop_it(unfenced: bool) -> None:
    some = ran("print('x' * 500_000)", unfenced=unfenced)
    assert some.ok and len(some.stdout) == 1000 and some.printed == 500_001
    endless = ran("while True:\n    print('y' * 1000)", unfenced=unfenced)
    assert endless.stopped == "output" and len(endless.stdout) == 1000


def test_its_directory_is_gone_afterwards_whatever_it_did_to_it(
    unfenced: bool, place: Path
) -> None:
    code = (
        "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.chmod('a',"
        " 0)\nprint(os.getcwd())"
    )
    got = ran(code, unfenced=unfenced)
    assert got.ok and not Path(got.stdout.strip()).exists() and list(place.iterdir()) == []


def test_surrogates_and_bytes_that_are_no_text_do_no_harm(unfenced: bool) -> None:
    got = ran("import sys\nsys.stdout.buffer.write(b'\\xff\\xfe ok')\n# \ud800", unfenced=unfenced)
    assert got.ok and got.stdout.endswith(" ok")


def test_a_cancelled_run_leaves_nothing(unfenced: bool) -> None:
    async def stopped() -> None:
        task = asyncio.create_task(
            run_code(f"{NAMED}time.sleep(600)", limits=LONG, unfenced=unfenced)
        )
        while not alive():
            assert not task.done(), task.result()
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stopped())
    assert alive() == []


def test_a_run_that_is_cancelled_while_it_starts_leaves_nothing(unfenced: bool) -> None:
    async def stopped(turns: int) -> None:
        task = asyncio.create_task(
            run_code("import time\ntime.sleep(600)", limits=LONG, unfenced=unfenced)
        )
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for turns in range(0, 60, 6):
        asyncio.run(stopped(turns))
    assert alive() == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found by /proc")
def test_nothing_is_left_where_ajet_itself_is_killed(unfenced: bool) -> None:
    code = f"{NAMED}time.sleep(600)"
    program = (
        "import asyncio\nfrom ajet_sdk.sandbox.run import ProgramLimits,"
        f" run_code\nasyncio.run(run_code({code!r}, limits=ProgramLimits(seconds={LONG.seconds}),"
        f" unfenced={unfenced}))"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as ajet:
        while not alive():
            assert ajet.poll() is None
        ajet.kill()
    until(lambda: not alive())
