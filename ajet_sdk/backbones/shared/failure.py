"""Finds the cause, actor, node and log of a failure in a cluster run from Ray's error reports.

A report is the text of a raised or logged Ray error: nested tracebacks of several processes, then
Ray's advice. The innermost traceback is the first cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COLOURS = re.compile(r"\x1b\[\d*m")
_TASK = re.compile(r"ray::(?P<actor>[^\s()]+)\(\) \(pid=(?P<pid>\d+), ip=(?P<node>[^,)]+)")
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:\([\w.]+\))?(?:: .*)?")
_FIELD = re.compile(r"^\s+(class_name|name|pid|ip): (.+)$", re.MULTILINE)
_MEMORY = re.compile(
    r"\(IP: (?P<node>[^,)]+).*?was (?P<used>[\d.]+ ?GB)(?: used)? / (?P<limit>[\d.]+ ?GB)",
    re.DOTALL,
)
_VICTIM = re.compile(
    r"name=(?P<actor>[^,)]+),.*?pid=(?P<pid>\d+),.*?memory used=(?P<used>[\d.]+) ?GB"
)


@dataclass(frozen=True)
class Failure:
    """The cause of a failure and its location, as far as the report has them."""

    cause: str
    actor: str = ""
    node: str = ""
    pid: int | None = None
    died: bool = False
    """The process itself died, so that its log does not have the cause."""

    def __str__(self) -> str:
        process = self.actor + (f" on {self.node}" if self.node else "")
        process += f", process {self.pid}" if self.pid is not None else ""
        log = self._log()
        details = [part for part in (process.strip(" ,"), f"log: {log}" if log else "") if part]
        if details:
            return f"{self.cause} ({'; '.join(details)})"
        return self.cause

    def _log(self) -> str:
        """The process's log on the node; a glob pattern for another machine."""
        if self.pid is None:
            return ""
        for directory in _log_directories(self.node):
            files = sorted(
                directory.glob(f"worker-*-{self.pid}.err"), key=lambda file: -file.stat().st_mtime
            )
            return str(files[0] if files else directory / f"worker-*-{self.pid}.err")
        return ""


def failure_of(report: str) -> Failure:
    """The first cause in a Ray report."""
    text = _COLOURS.sub("", report)
    if "running low on memory" in text and (memory := _MEMORY.search(text)) is not None:
        return _out_of_memory(text, memory)
    raised = [
        line.strip()
        for line in text.splitlines()
        if line[:1].strip() and _RAISED.fullmatch(line.strip())
    ]
    last = next(
        (line for line in reversed(raised) if "RayTaskError" not in line.partition(":")[0]), ""
    )
    tasks = list(_TASK.finditer(text))
    if "creation task" not in last and (fields := dict(_FIELD.findall(text))):
        return _dead(text, fields)
    actor, node, pid = (
        (tasks[-1]["actor"], tasks[-1]["node"], int(tasks[-1]["pid"])) if tasks else ("", "", None)
    )
    return Failure(last or _plain(text), actor, node, pid, died="because its node" in text)


def _out_of_memory(text: str, memory: re.Match[str]) -> Failure:
    """The failure of a process that Ray killed before the kernel would; the largest one is
    reported."""
    cause = (
        f"out of memory: {memory['used']} of the node's {memory['limit']} were in use, so Ray"
        " killed the process"
    )
    victims = sorted(_VICTIM.finditer(text), key=lambda victim: -float(victim["used"]))
    if not victims:
        return Failure(cause, node=memory["node"], died=True)
    largest = victims[0]
    return Failure(
        f"{cause}, which used {largest['used']} GB",
        largest["actor"],
        memory["node"],
        int(largest["pid"]),
        died=True,
    )


def _dead(text: str, fields: dict[str, str]) -> Failure:
    name = fields.get("name", "")
    kind = fields.get("class_name", "")
    if "connection error code 2" in text:
        cause = (
            "the process was killed or crashed; if the kernel ran out of memory, `dmesg` on the"
            " node says so"
        )
    else:
        death = re.search(
            r"^The actor (?:is dead|died) because (.*?)(?:\. |\.?$)", text, re.MULTILINE
        )
        cause = f"the process died: {death[1]}" if death else _plain(text)
    pid = int(fields["pid"]) if fields.get("pid", "").isdecimal() else None
    actor = f"{kind} {name}".strip() if name != kind else kind
    return Failure(cause, actor, fields.get("ip", ""), pid, died=True)


def _plain(text: str) -> str:
    """The first meaningful line, for a report without a traceback or a known form."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in lines if not line.startswith(("Traceback", "ray::", "File "))),
        "no message",
    )


def _log_directories(node: str) -> Iterator[Path]:
    """The log directories of Ray on a node, next to the socket of its object store."""
    import ray

    if not ray.is_initialized():
        return
    for known in ray.nodes():
        if node in ("", known.get("NodeManagerAddress")) and (
            socket := known.get("ObjectStoreSocketName")
        ):
            yield Path(socket).parent.parent / "logs"
