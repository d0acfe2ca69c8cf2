"""`--with-logview`: the trace viewer in a browser, beside a run and no longer than it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ajet_sdk.output import echo, style

__all__ = ["logview"]

_PATIENCE = 10.0


@contextmanager
def logview(directory: Path, wanted: bool = True) -> Iterator[None]:
    """Serve the trace that a run writes to `directory`, print the URL, and stop when the run ends.

    The viewer is a process of its own: whatever becomes of it, the run goes on, after one warning. It also ends where
    the run is killed, for it reads this process's end of a pipe.
    """
    process = _started(directory) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            _stop(process)


def _started(directory: Path) -> subprocess.Popen[str] | None:
    command = [sys.executable, "-m", "ajet", "trace", "view", str(directory), "--web", "--until-eof"]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is the run's; the viewer is stopped after it
        )
    except OSError as error:
        _warn(str(error))
        return None
    threading.Thread(target=_announce, args=(process,), daemon=True).start()
    return process


def _announce(process: subprocess.Popen[str]) -> None:
    """Print the URL; then read on, so that the viewer never waits for a full pipe."""
    assert process.stdout is not None
    said: list[str] = []
    shown = False
    for line in process.stdout:
        if shown:
            continue
        if line.startswith("http://"):
            echo(f"The trace is at {line.strip()} while the run goes on", err=True)
            shown = True
        else:
            said.append(line.strip())
    if not shown and process.wait() not in (0, -15):
        _warn(" ".join(said) or f"exit code {process.returncode}")


def _warn(reason: str) -> None:
    text = f"--with-logview: the viewer did not start and the run goes on without it: {reason}"
    echo(style(text, fg="yellow"), err=True)


def _stop(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
