"""Loads a viewer, checks its terminal, and serves it during a run."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ajet_sdk.errors import ConfigError, MissingExtra
from ajet_sdk.reporting.output import echo, style

_EXTRA = (
    "textual",
    "textual_plotext",
    "plotext",
    "textual_serve",
    "textual_image",
    "aiohttp",
    "aiohttp_jinja2",
)
_PATIENCE = 10.0


def load_viewer(name: str) -> ModuleType:
    """Imports `ajet_tools.tui.NAME`. Raises MissingExtra if a package of the extra `tools` is not
    installed."""
    try:
        return importlib.import_module(f"ajet_tools.tui.{name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        raise MissingExtra(missing.replace("_", "-"), "tools") from None


def check_terminal(command: str, otherwise: str) -> None:
    """Raises ConfigError if the terminal can't position a cursor; `otherwise` names an
    alternative."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            f"`{command}` needs a terminal, but the output is a pipe or a file; {otherwise}"
        )
    if os.environ.get("TERM") in ("dumb", "", None):
        raise ConfigError(
            f"the terminal TERM={os.environ.get('TERM', '')!r} cannot position the cursor; set TERM"
            f" (for example xterm-256color), or {otherwise}"
        )


@contextmanager
def logview(directory: Path, wanted: bool = True) -> Iterator[None]:
    """Serves the trace that a run writes to `directory`, prints the URL, and stops when the run
    ends.

    The viewer is a separate process: if it fails, the run continues after a warning. It ends if the
    run is killed, since it reads a pipe from this process.
    """
    process = _started(directory) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            _stop(process)


def _started(directory: Path) -> subprocess.Popen[str] | None:
    command = [
        sys.executable,
        "-m",
        "ajet",
        "trace",
        "view",
        str(directory),
        "--web",
        "--until-eof",
    ]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run; the viewer is stopped afterwards
        )
    except OSError as error:
        _warn(str(error))
        return None
    threading.Thread(target=_announce, args=(process,), daemon=True).start()
    return process


def _announce(process: subprocess.Popen[str]) -> None:
    """Prints the URL, then keeps reading so that the pipe never fills up."""
    assert process.stdout is not None
    lines: list[str] = []
    shown = False
    for line in process.stdout:
        if shown:
            continue
        if line.startswith("http://"):
            echo(f"The viewer is at {line.strip()} during the run", err=True)
            shown = True
        else:
            lines.append(line.strip())
    if not shown and process.wait() not in (0, -15):
        _warn(" ".join(lines) or f"exit code {process.returncode}")


def _warn(reason: str) -> None:
    text = f"--with-logview: the viewer did not start ({reason}); the run continues without it"
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
