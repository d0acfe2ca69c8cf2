"""`ajet trace view` before there is a screen: what it opens, and what it says where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Run
from ajet_tools.cli.app import app
from ajet_tools.trace import queries
from ajet_tools.trace.locate import open_named
from tests.tools.terminal import in_terminal


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


def test_it_opens_a_file_a_directory_or_all_below(record: Path) -> None:
    one = record / "launcher_record" / "one"
    for name, wanted in (
        (str(one), ["onecafe"]),
        (str(one / "trace.duckdb"), ["onecafe"]),
        (None, BOTH),
        ("two", BOTH),
    ):
        reader, _, found = open_named(name)
        assert found == (name if name == "two" else None)
        assert sorted(row["run_id"] for row in queries.overview(reader)) == wanted
        reader.close()


BOTH = ["onecafe", "twocafe"]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "needs a terminal"),
        (["--web", "nothing"], 2, "no run 'nothing'"),
        (["--web", "nothing/there"], 1, "no file or directory nothing/there"),
        (["--web", "x", "."], 2, "no run 'x'"),
        (["--web", "--port", "70000"], 2, "65535"),
    ],
)
def test_what_cannot_be_is_said(record: Path, arguments: list[str], code: int, word: str) -> None:
    done = CliRunner().invoke(app, ["trace", "view", *arguments])
    assert done.exit_code == code and word in done.output and "Traceback" not in done.output


def test_a_directory_without_a_run_and_a_foreign_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["trace", "view", "--web"])
    assert done.exit_code == 1 and "there is no trace (*.duckdb)" in done.output
    (tmp_path / "odd.duckdb").write_bytes(b"not a database, but long enough to look like one" * 400)
    done = CliRunner().invoke(app, ["trace", "view", "--web", "odd.duckdb"])
    assert done.exit_code == 1 and "odd.duckdb" in done.output and "Traceback" not in done.output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
def test_in_a_real_terminal_it_opens_and_leaves(record: Path) -> None:
    two = str(record / "launcher_record" / "two")
    code, written = in_terminal("trace", "view", two, keys=[(b"finished", b"q")])
    assert code == 0 and b"twocafe" in written and b"Traceback" not in written
    code, written = in_terminal("trace", "view", term="dumb")
    assert code == 2 and b"cannot position the cursor" in written


@pytest.mark.slow
def test_without_textual_it_says_what_to_install(record: Path, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "textual.py").write_text(
        "raise ModuleNotFoundError('gone', name='textual')"
    )
    path = os.pathsep.join([str(tmp_path / "broken"), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ajet",
            "trace",
            "view",
            str(record / "launcher_record" / "two"),
        ],
        env={**os.environ, "PYTHONPATH": path, "TEXTUAL_DRIVER": "served"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (
        done.returncode == 2
        and 'pip install "ajet[tools]"' in done.stderr
        and "Traceback" not in done.stderr
    )
