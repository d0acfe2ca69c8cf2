"""The process of `SqlProcess`: a line of JSON is a question; a line of JSON and an Arrow stream are the answer."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import IO

import pyarrow as pa

from ajet_sdk.errors import AjetError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.locate import open_located
from ajet_tools.trace.sql.console import result_of

_LOOK_EVERY = 0.02


def main(path: str | None, memory: int, read_only: bool) -> None:
    """Answer until there are no more questions."""
    answers = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)  # DuckDB draws a progress bar there for a query of more than two seconds
    limit(memory)
    reader: TraceReader | None = None
    for line in sys.stdin.buffer:
        try:
            reader = reader or open_located(None if path is None else Path(path), read_only)[0]
            result = result_of(reader, json.loads(line))
        except AjetError as error:
            say(answers, {"error": type(error).__name__, "message": str(error)})
            continue
        say(answers, {"rows": len(result)})
        with pa.ipc.new_stream(answers, result.schema) as stream:
            stream.write_table(result)
        answers.flush()


def say(answers: IO[bytes], head: dict[str, object]) -> None:
    answers.write(json.dumps(head).encode() + b"\n")
    answers.flush()


def limit(memory: int) -> None:
    """Limit this process to so many bytes more than it has now."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    else:  # macOS takes the limit and does not hold it
        threading.Thread(target=watch, args=(memory,), daemon=True).start()


def watch(memory: int) -> None:
    unit = 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + memory
    while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit < most:
        time.sleep(_LOOK_EVERY)
    os.kill(os.getpid(), 9)
