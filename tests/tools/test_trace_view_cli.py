"""`ajet trace view` before there is a screen: what it opens, and what it says where it cannot."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Run
from ajet_tools.cli.app import app
from ajet_tools.trace.locate import open_named


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two experiments below the current directory."""
    for name in ("one", "two"):
        with TraceWriter(tmp_path / "launcher_record" / name / "trace.duckdb") as writer:
            writer.put(Run(run_id=f"{name}cafe", name=name, status="finished"))
    old = tmp_path / "launcher_record" / "one" / "trace.duckdb"
    os.utime(old, (1, 1))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_opens_a_file_a_directory_a_run_or_the_newest(record: Path) -> None:
    one = record / "launcher_record" / "one"
    for name, run in ((str(one), None), (str(one / "trace.duckdb"), None), ("onec", "onecafe"), ("twocafe", "twocafe")):
        reader, where, found = open_named(name)
        assert found == run and (run or "one")[:3] in str(where)
        reader.close()
    reader, where, found = open_named()
    assert where.parent.name == "two" and found is None
    reader.close()


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "needs a terminal"),
        (["--web", "nothing"], 1, "no file or directory"),
        (["--web", "--run", "x"], 2, "no run 'x'"),
        (["--web", "--port", "70000"], 2, "65535"),
    ],
)
def test_what_cannot_be_is_said(record: Path, arguments: list[str], code: int, word: str) -> None:
    done = CliRunner().invoke(app, ["trace", "view", *arguments])
    assert done.exit_code == code and word in done.output and "Traceback" not in done.output


def test_a_directory_without_a_run_and_a_foreign_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["trace", "view", "--web"])
    assert done.exit_code == 1 and "there is no trace below" in done.output
    (tmp_path / "odd.duckdb").write_bytes(b"not a database, but long enough to look like one" * 400)
    done = CliRunner().invoke(app, ["trace", "view", "--web", "odd.duckdb"])
    assert done.exit_code == 1 and "odd.duckdb" in done.output and "Traceback" not in done.output


def in_terminal(*arguments: str, term: str, keys: bytes = b"", wait: bytes = b"") -> tuple[int, bytes]:
    """Run the command in a real terminal; returns its exit code and what it wrote."""
    pid, master = pty.fork()
    if pid == 0:
        os.environ["TERM"] = term
        os.execv(sys.executable, [sys.executable, "-m", "ajet", "trace", "view", *arguments])
    written, deadline = b"", time.monotonic() + 40
    try:
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.2)[0]:
                try:
                    written += os.read(master, 65536)
                except OSError:
                    break
            if keys and wait in written:
                os.write(master, keys)
                keys = b""
        else:
            os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written
    finally:
        os.close(master)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
def test_in_a_real_terminal_it_opens_and_leaves(record: Path) -> None:
    code, written = in_terminal(
        str(record / "launcher_record" / "two"), term="xterm-256color", keys=b"q", wait=b"twocafe"
    )
    assert code == 0 and b"finished" in written and b"Traceback" not in written
    code, written = in_terminal(term="dumb")
    assert code == 2 and b"cannot place a cursor" in written


def test_without_textual_it_says_what_to_install(record: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "textual.py").write_text("raise ModuleNotFoundError('gone', name='textual')")
    path = os.pathsep.join([str(tmp_path / "broken"), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-m", "ajet", "trace", "view", "--served", str(record / "launcher_record" / "two")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and 'pip install "ajet[tools]"' in done.stderr and "Traceback" not in done.stderr
