"""What is installed here, and the GPUs of this machine."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float
    """GiB."""
    driver: str


def gpus() -> list[Gpu]:
    """Return the GPUs that `nvidia-smi` lists."""
    executable = shutil.which("nvidia-smi")
    if executable is None:
        return []
    query = [
        executable,
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[1].isdigit():
            found.append(Gpu(cells[0], int(cells[1]) / 1024, cells[2]))
    return found


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def required(extra: str = "") -> tuple[str, ...]:
    """Return the packages that ajet or one of its extras requires."""
    try:
        lines = importlib.metadata.requires("ajet") or []
    except importlib.metadata.PackageNotFoundError:  # it runs from a directory
        return ()
    names = []
    for line in lines:
        name = re.match(r"[\w-]+", line)
        of_extra = re.search(r"extra == ['\"](\w+)", line)
        if name and name[0] != "ajet" and (of_extra[1] if of_extra else "") == extra:
            names.append(name[0])
    return tuple(names)


EXTRAS = (
    "local",
    "tools",
    "documents",
    "prompts",
    "math",
    "environments",
    "datasets",
    "agentscope",
    "agentjet",
    "loggers",
    "tinker",
    "ray",
    "trinity",
    "verl",
)
"""All extras but those for developing ajet."""
