"""A command at a terminal of its own, and what a person would have seen there."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


def at_a_terminal(
    command: Sequence[str],
    typed: str = "",
    *,
    columns: int = 120,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """The exit code, and all that was shown; `typed` is typed when a question (`[y/N]`) is seen."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        env.pop(name, None)
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdin=side, stdout=side, stderr=side, start_new_session=True
    )
    os.close(side)
    shown = b""
    while True:
        try:
            more = os.read(main, 65536)
        except OSError:  # nobody has the other side any more
            break
        if not more:
            break
        shown += more
        if typed and b"[y/N]" in shown:
            os.write(main, typed.encode())
            typed = ""
    os.close(main)
    return process.wait(), shown.decode("utf-8", "replace")
