"""The live process that owns a trace file, announced in `gateway.json`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ajet_sdk.trace.schema import SCHEMA_VERSION
from ajet_sdk.whole_file import write_whole

ROWS_PATH = f"/trace/rows/{SCHEMA_VERSION}"

_MOMENT = 5.0

_ELSEWHERE = 1.0

_LOOPBACK = re.compile(r"https?://(localhost|127\.|\[::1\]|0\.0\.0\.0)")


@dataclass(frozen=True, slots=True)
class Owner:
    """The live process that writes a trace file; `url` is None if it serves no rows."""

    trace: str
    pid: int
    started: str
    host: str
    writes: bool = False
    """Whether its TraceWriter has the file open, rather than only its gateway."""
    url: str | None = None
    token: str | None = None
    brief: bool = False
    """Whether it has the file open only briefly, so that others should wait."""
    source: Path | None = None
    """Its gateway.json."""

    @property
    def alive(self) -> bool:
        """Whether the process lives; for one on another machine with a shared disk, whether its
        gateway answers."""
        if self.host == socket.gethostname():
            return process_started(self.pid) == self.started != ""
        return bool(self.url) and not _LOOPBACK.match(self.url or "") and _answers(self)

    @property
    def stands(self) -> bool:
        """Whether it is alive and still announced: a service that has started another file retracts
        this one."""
        now = self if self.source is None else _read(self.source)
        return now is not None and (now.trace, now.url) == (self.trace, self.url) and self.alive


def _answers(owner: Owner) -> bool:
    import httpx

    try:
        with httpx.Client(trust_env=False, verify=False, timeout=_ELSEWHERE) as client:
            headers = {"Authorization": f"Bearer {owner.token}"}
            any_row = {"table": "runs", "columns": ["run_id"], "most": 1}
            answer = client.post(f"{owner.url}{ROWS_PATH}", json=any_row, headers=headers)
            return answer.status_code in (200, 404)  # 404: by another version of ajet
    except httpx.TransportError:
        return False


def process_started(pid: int) -> str:
    """Start time of a process in the system's format, to detect reused pids; empty without such a
    process."""
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return ""
        fields = stat.rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    done = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def announce(
    path: Path,
    url: str | None = None,
    token: str | None = None,
    *,
    writes: bool = False,
    brief: bool = False,
) -> None:
    """Announce beside a trace file, readable by this user only, that this process writes it or
    serves its rows.

    Called by writer and gateway in either order, keeping the other's data. The announcement of
    another live process is unchanged. `brief`: it has the file only briefly.
    """
    path = path.resolve()
    before = owner_of(path)
    if before and before.pid != os.getpid() and not before.brief:
        return
    content = {
        "trace": path.name,
        "pid": os.getpid(),
        "started": process_started(os.getpid()),
        "host": socket.gethostname(),
        "writes": writes or bool(before and before.writes),
        "url": url or (before.url if before else None),
        "token": token or (before.token if before else None),
        "brief": brief,
    }
    # gateway.json, unless another live process uses it. A file `trace-...` always gets its own,
    # since concurrent processes would race for gateway.json.
    target = path.with_name("gateway.json")
    per_trace = path.with_name(f"{path.stem}.gateway.json")
    there = _read(target) if target.exists() else None
    if path.name.startswith("trace-") or (
        there is not None and there.trace != path.name and there.alive
    ):
        target = per_trace
    write_whole(target, json.dumps(content), private=True)


def retract(path: Path, *, writes: bool = False) -> None:
    """Retract the url, or (`writes`) the whole announcement.

    A writer whose gateway has ended is about to close the file, so that readers wait for it.
    """
    owner = owner_of(path)
    if not owner or owner.pid != os.getpid() or not owner.source:
        return
    if owner.writes and not writes:
        write_whole(
            owner.source,
            json.dumps({**{name: getattr(owner, name) for name in _ANNOUNCED[:5]}, "brief": True}),
            private=True,
        )
    else:
        owner.source.unlink(missing_ok=True)


def owners(directory: Path) -> list[Owner]:
    """All owners announced in a directory, alive or not."""
    return [owner for source in sorted(directory.glob("*gateway.json")) if (owner := _read(source))]


def owner_of(path: Path) -> Owner | None:
    """The live owner of a trace file, if any."""
    return next(
        (o for o in owners(path.resolve().parent) if o.trace == path.name and o.alive), None
    )


def settled_owner(path: Path) -> Owner | None:
    """The live owner, after waiting for one that has the file only briefly."""
    deadline = time.monotonic() + _MOMENT
    while (owner := owner_of(path)) and owner.brief and time.monotonic() < deadline:
        time.sleep(0.01)
    return owner


def settled_owners(paths: Iterable[Path]) -> dict[Path, Owner]:
    """The settled owners of files; reads each directory once."""
    by_directory: dict[Path, list[Path]] = {}
    for path in paths:
        by_directory.setdefault(path.parent, []).append(path)
    settled: dict[Path, Owner] = {}
    for directory, files in by_directory.items():
        announced = {owner.trace for owner in owners(directory.resolve())}
        settled |= {
            file: owner
            for file in files
            if file.name in announced and (owner := settled_owner(file))
        }
    return settled


_ANNOUNCED = ("trace", "pid", "started", "host", "writes", "url", "token", "brief")


def _read(source: Path) -> Owner | None:
    try:
        raw = json.loads(source.read_text())
        return Owner(**{name: raw[name] for name in _ANNOUNCED if name in raw}, source=source)
    except (OSError, ValueError, AttributeError, TypeError):
        return None
