"""Runs a server as its only child and ends it, with all its processes, when the parent process is
gone.

    python keeper.py PARENT DIRECTORY... -- COMMAND...

A separate program of the standard library only, as it has to survive a `kill -9` of the run. It
exits with the server's exit code; on SIGTERM it ends the server first. The directories are removed
when the parent is gone.
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
"""Seconds between SIGTERM and SIGKILL."""
TICK = 0.2


def main() -> int:
    split = sys.argv.index("--")
    parent = int(sys.argv[1])
    directories = sys.argv[2:split]
    command = sys.argv[split + 1 :]
    signals: list[int] = []

    def ask(number: int, _: FrameType | None) -> None:
        signals.append(number)

    signal.signal(signal.SIGTERM, ask)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while server.poll() is None and not signals and os.getppid() == parent:
        time.sleep(TICK)
    if server.poll() is None:
        end(server)
    with contextlib.suppress(ProcessLookupError):  # remaining processes of a dead server
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
