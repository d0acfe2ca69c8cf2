"""`just matrix [3.10 ...]`: a quick part of the suite on each Python that ajet names, with the
lowest and the newest dependencies that `pyproject.toml` allows, each in an environment that `uv`
makes (and whose interpreter it brings).

`--dependencies floors` sets one dependency after the other to its lowest version beside the newest
of all others, and runs commands that load them all. `--dependencies agentjet` installs the extra of
that name, imports what it is for, and runs AgentJet's own environment client beside ours.

No torch: what trains is the main suite's. `--venvs FOLDER` keeps the environments; arguments after
`--` are pytest's.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
WHEELS = ("--only-binary", ":all:", "--no-binary", "ajet")
"""The lowest version that this Python has a wheel of: an earlier one would be built from sources
that predate it."""
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
COMMANDS = (
    "init demo",
    (
        "run demo/agent.py:solve --judge demo/agent.py:exact --tasks demo/tasks.jsonl --model"
        " demo/replies.py:reply"
    ),
    "trace ls",
    "dataset check demo/tasks.jsonl",
)
"""Together they load every dependency of the package itself."""
AGENTJET = (
    "agentscope.agent",
    "agentscope.formatter",
    "agentscope.memory",
    "agentscope.message",
    "agentscope.model",
    "agentscope.pipeline",
    "agentscope.tool",
    "beast_logger",
    "datasets",
    "dotenv",
    "gymnasium.envs.toy_text",
    "langchain.agents",
    "langchain_openai",
    "loguru",
    "numpy",
    "openai",
    "pydantic",
    "requests",
)
"""What AgentJet's tutorials import, but for the judges of `example_deep_finance` and
`example_rm_auto_grader` and the vLLM of a preprocessing script."""
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
    parser.add_argument(
        "pythons", nargs="*", metavar="PYTHON", help=f"which (default: {', '.join(PYTHONS)})"
    )
    parser.add_argument(
        "--dependencies", choices=(*RESOLUTIONS, "both", "floors", "agentjet"), default="both"
    )
    parser.add_argument("--venvs", type=Path, help="folder that keeps the environments")
    chosen = parser.parse_args(given.split())
    kinds = tuple(RESOLUTIONS) if chosen.dependencies == "both" else (chosen.dependencies,)
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for version in chosen.pythons or PYTHONS:
            for kind in kinds:
                name = f"Python {version}, {kind} dependencies"
                print(f"== {name}", flush=True)
                venvs = chosen.venvs or Path(temporary)
                if kind == "floors":
                    outcomes |= {
                        f"{name}: {floor}": floor_outcome(version, floor, venvs)
                        for floor in direct_floors()
                    }
                elif kind == "agentjet":
                    outcomes[name] = agentjet_outcome(version, venvs)
                else:
                    outcomes[name] = outcome(version, kind, venvs, passed_on.split())
    print("\n".join(f"{text:<12} {name}" for name, text in outcomes.items()))
    return int(any(text != "passed" for text in outcomes.values()))


def direct_floors() -> list[str]:
    """Each dependency of the package itself at its lowest version: `numpy==2.0.*`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert listed is not None
    return [f"{name}=={floor}.*" for name, floor in re.findall(r'"([\w-]+)>=([\d.]+)"', listed[1])]


def floor_outcome(version: str, floor: str, venvs: Path) -> str:
    """Commands that load every dependency, with one at its lowest version and all others at their
    newest."""
    python = environment_of(
        version, venvs / f"{version}-{floor.partition('=')[0]}", str(ROOT), floor, *WHEELS
    )
    if python is None:
        return "no install"
    with tempfile.TemporaryDirectory() as here:
        for command in COMMANDS:
            done = subprocess.run(
                [python, "-m", "ajet", *command.split()],
                cwd=here,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                print(done.stdout + done.stderr, file=sys.stderr)
                return "FAILED"
    return "passed"


def agentjet_outcome(version: str, venvs: Path) -> str:
    """Whether all that AgentJet's tutorials import is there with the extra `agentjet`, and can be
    imported at once; and whether AgentJet's own client and judge, of its wheel, agree with ours."""
    python = environment_of(version, venvs / f"{version}-agentjet", f"{ROOT}[agentjet]")
    if python is None:
        return "no install"
    if subprocess.run(
        [python, "-c", f"import {', '.join(AGENTJET)}, ajet"], check=False
    ).returncode:
        return "FAILED"
    wheel = venvs / f"{version}-agentjet-wheel"
    install = ["uv", "pip", "install", "--quiet", "--python", python]
    for more in (["--no-deps", "--target", str(wheel), "agentjet==0.0.1"], NEEDED):
        if subprocess.run([*install, *more], check=False).returncode:
            return "no install"
    tests = [python, "-m", "pytest", "-q", "tests/sdk/environments/test_agentjet_client.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AJET_TEST_AGENTJET": str(wheel)}
    return (
        "FAILED"
        if subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode
        else "passed"
    )


def environment_of(version: str, folder: Path, package: str, *more: str) -> str | None:
    """The interpreter of an environment with the package and the newest of what it needs; None
    where uv has none."""
    python = str(folder / "bin/python")
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*_pyenv(version), os.environ["PATH"]]),
        "VIRTUAL_ENV": "",
    }
    made = ["uv", "venv", "--quiet", "--clear", "--python", version, str(folder)]
    install = ["uv", "pip", "install", "--quiet", "--python", python, "--editable", package, *more]
    for command in (made, install):
        if subprocess.run(command, env=environment, check=False).returncode:
            return None
    return python


def outcome(version: str, kind: str, venvs: Path, passed_on: list[str]) -> str:
    """Make the environment where it is not there yet, and run the tests in it."""
    folder = venvs / f"{version}-{kind}"
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([*_pyenv(version), os.environ["PATH"]]),
        "VIRTUAL_ENV": "",
    }
    if not (folder / "installed").exists():
        made = ["uv", "venv", "--quiet", "--clear", "--python", version, str(folder)]
        if subprocess.run(made, env=environment, check=False).returncode:
            return "no Python"
        install = ["uv", "pip", "install", "--quiet", "--python", str(folder / "bin/python")]
        install += [
            "--resolution",
            RESOLUTIONS[kind],
            *WHEELS,
            "--editable",
            str(ROOT),
            *_floors(kind),
        ]
        if subprocess.run(install, env=environment, check=False).returncode:
            return "no install"
        (folder / "installed").touch()
    tests = [str(folder / "bin/python"), "-m", "pytest", "-q", "-m", "not slow", *TESTS, *passed_on]
    environment |= {
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(folder / "bin"), environment["PATH"]]),
    }
    return (
        "FAILED"
        if subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode
        else "passed"
    )


def _floors(kind: str) -> list[str]:
    """What the tests need besides; its own lowest versions say nothing of ajet."""
    floors = {
        "pytest": "8.3",
        "pytest-asyncio": "0.26",
        "pytest-timeout": "2.3",
        "hypothesis": "6.140",
    }
    floors |= {"matplotlib": "3.9", "tokenizers": "0.22", "textual": "8", "textual-plotext": "1"}
    return [f"{name}>={floors[name]}" for name in NEEDED] if kind == "lowest" else list(NEEDED)


def _pyenv(version: str) -> list[str]:
    """Interpreters that pyenv has: `uv` sees only its shims, which refuse a version that is not
    chosen."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return [str(place) for place in sorted(root.glob(f"versions/{version}.*/bin"))]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
