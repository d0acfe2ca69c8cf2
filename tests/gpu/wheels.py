"""`python -m tests.gpu.wheels [FOLDER]`, or `just wheels`: this repository and its light
dependencies as wheels.

For a machine with a GPU and no network, which has torch, transformers, peft, numpy and pyarrow
already. There: `pip install --no-index --find-links FOLDER ajet`, then `python -m tests.gpu` in a
copy of the repository.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HEAVY = frozenset({"numpy", "pyarrow"})
"""What the other machine has: with them the folder would be twice as large."""
LIMIT = 60_000_000
_ROOT = Path(__file__).parents[2]
_GLIBC = (17, 24, 26, 27, 28)


def collected(python: str) -> list[str]:
    """The requirements of `ajet` that go into the folder for a Python such as 3.12, as
    pyproject.toml words them."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    light = [
        each
        for each in project["dependencies"]
        if re.split(r"[^\w.-]", each)[0].lower() not in HEAVY
    ]
    # pip reads the conditions of requirements by the Python that it runs in.
    return [*light, "exceptiongroup"] if python == "3.10" else light


def download(folder: Path, python: str, machine: str) -> list[str]:
    """pip's arguments that fetch them for that Python on Linux on a processor such as x86_64."""
    tags = [f"manylinux_2_{glibc}_{machine}" for glibc in _GLIBC] + [f"manylinux2014_{machine}"]
    platforms = [part for tag in tags for part in ("--platform", tag)]
    where = [
        "--dest",
        str(folder),
        "--only-binary",
        ":all:",
        "--python-version",
        python,
        "--implementation",
        "cp",
    ]
    return ["download", "--quiet", *where, *platforms, *collected(python)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.wheels", description=(__doc__ or "").partition("\n")[2]
    )
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("folder", nargs="?", type=Path, default=_ROOT / "wheels")
    parser.add_argument(
        "--python",
        default=running,
        help="version of the other machine's Python (default: %(default)s)",
    )
    parser.add_argument(
        "--machine", default=platform.machine(), help="its processor (default: %(default)s)"
    )
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True, exist_ok=True)
    for old in asked.folder.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(asked.folder), str(_ROOT)]
    for command in (wheel, download(asked.folder, asked.python, asked.machine)):
        if status := subprocess.run([*pip, *command], check=False).returncode:
            return status
    wheels = sorted(asked.folder.glob("*.whl"), key=lambda file: -file.stat().st_size)
    size = sum(file.stat().st_size for file in wheels)
    for file in wheels:
        print(f"{file.stat().st_size / 1e6:6.1f} MB  {file.name}")
    print(
        f"{size / 1e6:6.1f} MB  {len(wheels)} wheels in {asked.folder} for Python {asked.python} on"
        f" {asked.machine}"
    )
    if size > LIMIT:
        print(f"that is more than {LIMIT / 1e6:.0f} MB", file=sys.stderr)
    return int(size > LIMIT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
