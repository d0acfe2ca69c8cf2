"""A step's command line, and the process that it runs in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ajet_sdk.errors import AjetError
from ajet_sdk.output import echo
from ajet_tools.dataset.steps import KINDS, Step

__all__ = ["StepFailed", "arguments_of", "run_command"]

_START = "import sys; sys.path[:] = [p for p in sys.path if p]; from ajet_tools.cli.app import main; main()"
"""As `python -m ajet`, but for the current directory, where a user's `types.py` would be imported for Python's own."""
_ROOT = Path(__file__).resolve().parents[2]
_SHARED = {"expand": ("cache", ".sqlite"), "from-docs": ("cache", ".sqlite"), "from-traces": ("cache", ".sqlite"),
           "calibrate": ("measurements", ".jsonl")}  # fmt: skip
"""Options that name what was paid for, which is kept when a step has to run again."""
_SWITCHES = ("redact", "card")
"""Flags that are on by default; the others are off, and `false` says what is so anyhow."""
_ONE_VALUE, _TWO_VALUES = ("fractions",), ("embeddings",)
"""Options that take a mapping as NAME=SHARE,NAME=SHARE, and those that take two values after each other."""
_TAIL = 5


class StepFailed(AjetError, RuntimeError):
    """The command of a step did not do what it was to do."""


def arguments_of(
    step: Step, parameters: Mapping[str, Any], sources: Sequence[str], out: Path, cache: Path, *, yes: bool = True
) -> list[str]:
    """The command of a step as one would type it, without `ajet dataset`; where not `yes` it asks before it spends."""
    kind, values = KINDS[step.kind], dict(parameters)
    argument = values.pop(kind.argument, None) if kind.argument else None
    if step.kind in _SHARED:
        name, suffix = _SHARED[step.kind]
        values.setdefault(name, str(cache / f"{step.name}{suffix}"))
    if kind.whole and step.write != "jsonl":
        values["format"] = step.write
    options = [text for name, value in values.items() for text in _option(name, value)]
    positional = [*sources, *([str(argument)] if argument is not None else [])]
    going_on = ["--resume"] if kind.whole and (out / ".expand").is_dir() else []
    agreed = ["--yes"] if kind.confirms and yes else []
    return [step.kind, *options, *agreed, *going_on, "--out", str(out), "--", *positional]


def _option(name: str, value: Any) -> list[str]:
    """An option and its value; true and false are a flag, a list is the option repeated, a mapping NAME=VALUE."""
    flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag] if value else [f"--no-{name}"] if name in _SWITCHES else []
    if name in _ONE_VALUE:
        shares = [f"{key}={one}" for key, one in value.items()] if isinstance(value, Mapping) else [str(value)]
        return [flag, ",".join(shares)]
    if name in _TWO_VALUES and isinstance(value, list):
        return [flag, *map(str, value)]
    if isinstance(value, Mapping):
        return [text for key, one in value.items() for text in (flag, f"{key}={one}")]
    if isinstance(value, list | tuple):
        return [text for one in value for text in (flag, str(one))]
    return [flag, str(value)]


def run_command(arguments: Sequence[str], name: str, directory: Path, kept: Path, *, asking: bool = False) -> str:
    """Run `ajet dataset ...` in a directory and return what it printed; what it says meanwhile is passed on to stderr.

    With `asking` it may ask the person at the terminal. Ctrl-C is the command's to answer, and is waited for. Raises
    StepFailed with the last that it said.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_path())}
    process = subprocess.Popen(
        [sys.executable, "-c", _START, "dataset", *arguments],
        cwd=directory, env=environment, stdin=None if asking else subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=None if sys.stderr.isatty() else subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    said: deque[str] = deque(maxlen=_TAIL)
    passing = threading.Thread(target=_pass_on, args=(process.stderr, said), daemon=True)
    passing.start()
    try:
        printed = _awaited(process)
    finally:
        passing.join(timeout=5)
    if process.returncode:
        told = "\n  ".join(said) or "see above"
        raise StepFailed(
            f"step {name} failed (exit code {process.returncode}):\n  {told}\n"
            f"What it did is kept in {kept}; the same command goes on from there"
        )
    return printed


def _awaited(process: subprocess.Popen[str]) -> str:
    printed = ""
    try:
        printed = process.stdout.read() if process.stdout else ""
        process.wait()
    except BaseException:
        if not sys.stdin.isatty() and process.poll() is None:  # on a terminal Ctrl-C reaches both
            process.send_signal(signal.SIGINT)
        process.wait()
        raise
    return printed


def _pass_on(lines: IO[str] | None, said: deque[str]) -> None:
    for line in lines or ():
        if line.strip():
            said.append(line.rstrip())
        echo(line.rstrip("\n"), err=True)


def _path() -> list[str]:
    """Where modules are found from another directory too, this ajet first."""
    given = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return list(dict.fromkeys((str(_ROOT), *given)))
