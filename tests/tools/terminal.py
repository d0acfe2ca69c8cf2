"""The command in a real terminal, and keys pressed in it."""

from __future__ import annotations

import os
import pty
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def in_terminal(
    *arguments: str, term: str = "xterm-256color", keys: Sequence[tuple[bytes, bytes]] = ()
) -> tuple[int, bytes]:
    """Run `ajet` with these arguments; returns its exit code and what it wrote.

    `keys` are pairs of what is waited for, in what was written since the key before, and the key
    that is then pressed.
    """
    pid, master = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": term, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "LINES": "30"}
        os.execv(sys.executable, [sys.executable, "-m", "ajet", *arguments])
    written, since, left = b"", 0, list(keys)
    ended = False
    try:
        while True:
            try:
                written += os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if left and left[0][0] in written[since:]:
                os.write(master, left.pop(0)[1])
                since = len(written)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ended = True
        return code, written
    finally:
        os.close(master)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
