"""Commands of ajet that run beside a test, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import NEVER, until


class Program:
    """A running `ajet ...`, with its output so far."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ajet", *arguments],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def url(self) -> str:
        """The URL that a server has printed."""
        found = until(lambda: re.search(r"swarm server at (http\S+)", self.output))
        return str(found[1])

    def wait_beside(self, server: Program) -> int:
        """Wait for its end, which may not come if its server ends before."""
        until(lambda: self.process.poll() is not None or server.process.poll() is not None)
        if server.process.poll():
            self.process.kill()
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(timeout=NEVER)
        self._reader.join()
        return code


@contextmanager
def running(directory: Path) -> Iterator[Callable[..., Program]]:
    """Starts programs, and kills those that are left."""
    started: list[Program] = []

    def start(*arguments: str) -> Program:
        started.append(Program(directory, *arguments))
        return started[-1]

    try:
        yield start
    finally:
        for program in started:
            program.process.kill()
            program.process.wait()
