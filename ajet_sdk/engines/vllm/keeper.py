"""Runs a server as its only child and ends it, with all that it started, when the process that wanted it is gone.

    python keeper.py PARENT DIRECTORY... -- COMMAND...

A program of its own and of the standard library alone: it has to outlive a `kill -9` of the run. It ends with the
server's exit code; SIGTERM makes it end the server first. The directories are removed when the parent is gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from types import FrameType

GRACE = 10.0
"""Seconds between the polite signal and the other one."""
TICK = 0.2


def main() -> int:
    split = sys.argv.index("--")
    parent, directories, command = int(sys.argv[1]), sys.argv[2:split], sys.argv[split + 1 :]
    signals: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        signals.append(number)

    signal.signal(signal.SIGTERM, ask)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while server.poll() is None and not signals and os.getppid() == parent:
        time.sleep(TICK)
    if server.poll() is None:
        end(server)
    with contextlib.suppress(ProcessLookupError):  # what a server that died has left behind
        os.killpg(server.pid, signal.SIGKILL)
    if os.getppid() != parent:
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
    code = server.wait()
    return code if code >= 0 else 128 - code


def end(server: subprocess.Popen[bytes]) -> None:
    os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE)


if __name__ == "__main__":
    sys.exit(main())
