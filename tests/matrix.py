"""`just matrix [3.10 ...]`: a quick part of the suite on each Python that ajet names, with the lowest and the newest
dependencies that `pyproject.toml` allows, each in an environment that `uv` makes (and whose interpreter it brings).

No torch: what trains is the main suite's. `--venvs FOLDER` keeps the environments; arguments after `--` are pytest's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
WHEELS = ("--only-binary", ":all:", "--no-binary", "ajet")
"""The lowest version that this Python has a wheel of: an earlier one would be built from sources that predate it."""
TESTS = (
    "tests/test_wheel.py::test_the_package_is_whole",
    "tests/sdk/test_config.py",
    "tests/sdk/test_decorators.py",
    "tests/sdk/test_job.py",
    "tests/sdk/test_run.py",
    "tests/tools/test_cli.py",
    "tests/tools/test_start.py",
    "tests/tools/test_trace_cli.py",
)
NEEDED = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",
    "matplotlib",
    "tokenizers",
    "textual",
    "textual-plotext",
)


def main(arguments: list[str]) -> int:
    given, _, passed_on = " ".join(arguments).partition(" -- ")
    parser = argparse.ArgumentParser(prog="just matrix", description=__doc__)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help=f"which (default: {', '.join(PYTHONS)})")
    parser.add_argument("--dependencies", choices=(*RESOLUTIONS, "both"), default="both")
    parser.add_argument("--venvs", type=Path, help="folder that keeps the environments")
    chosen = parser.parse_args(given.split())
    kinds = tuple(RESOLUTIONS) if chosen.dependencies == "both" else (chosen.dependencies,)
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for version in chosen.pythons or PYTHONS:
            for kind in kinds:
                name = f"Python {version}, {kind} dependencies"
                print(f"== {name}", flush=True)
                outcomes[name] = outcome(version, kind, chosen.venvs or Path(temporary), passed_on.split())
    print("\n".join(f"{text:<12} {name}" for name, text in outcomes.items()))
    return int(any(text != "passed" for text in outcomes.values()))


def outcome(version: str, kind: str, venvs: Path, passed_on: list[str]) -> str:
    """Make the environment where it is not there yet, and run the tests in it."""
    folder = venvs / f"{version}-{kind}"
    environment = {**os.environ, "PATH": os.pathsep.join([*_pyenv(version), os.environ["PATH"]]), "VIRTUAL_ENV": ""}
    if not (folder / "installed").exists():
        made = ["uv", "venv", "--quiet", "--clear", "--python", version, str(folder)]
        if subprocess.run(made, env=environment, check=False).returncode:
            return "no Python"
        install = ["uv", "pip", "install", "--quiet", "--python", str(folder / "bin/python")]
        install += ["--resolution", RESOLUTIONS[kind], *WHEELS, "--editable", str(ROOT), *_floors(kind)]
        if subprocess.run(install, env=environment, check=False).returncode:
            return "no install"
        (folder / "installed").touch()
    tests = [str(folder / "bin/python"), "-m", "pytest", "-q", "-m", "not slow", *TESTS, *passed_on]
    environment |= {"PYTHONPATH": str(ROOT), "PATH": os.pathsep.join([str(folder / "bin"), environment["PATH"]])}
    return "FAILED" if subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode else "passed"


def _floors(kind: str) -> list[str]:
    """What the tests need besides; its own lowest versions say nothing of ajet."""
    floors = {"pytest": "8.3", "pytest-asyncio": "0.26", "pytest-timeout": "2.3", "hypothesis": "6.140"}
    floors |= {"matplotlib": "3.9", "tokenizers": "0.22", "textual": "8", "textual-plotext": "1"}
    return [f"{name}>={floors[name]}" for name in NEEDED] if kind == "lowest" else list(NEEDED)


def _pyenv(version: str) -> list[str]:
    """Interpreters that pyenv has: `uv` sees only its shims, which refuse a version that is not chosen."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return [str(place) for place in sorted(root.glob(f"versions/{version}.*/bin"))]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
