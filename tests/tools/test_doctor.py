"""`ajet doctor`: what could run here, what stops it, and the versions that were found against those
wanted."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.sandbox.fence import NoFence, fence
from ajet_tools.cli import readiness
from ajet_tools.cli.app import app
from ajet_tools.cli.readiness import TARGETS, check_target, target_of, usable
from ajet_tools.cli.stacks import STACKS
from tests.tools.dataset.terminal import at_a_terminal


def doctor(*args: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *args])


def found(target: str, name: str) -> Any:
    return next(check for check in check_target(target) if check.name == name)


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """A machine with all packages in the versions that are wanted; changed by what a test puts
    in."""
    changed: dict[str, str | None] = dict.fromkeys(
        ("torchvision", "torchaudio", "torchcodec", "flash-attn")
    )
    pins = {name: version for stack in STACKS.values() for name, version in stack.pins().items()}
    monkeypatch.setattr(
        readiness, "installed_version", lambda name: (pins | changed).get(name, "1")
    )
    return changed


def smi(directory: Path, monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    """An `nvidia-smi` that shows these GPUs."""
    (directory / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{rows}\nEND\n")
    (directory / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def package(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str) -> None:
    """An installed package that does this when it is imported."""
    (directory / name).mkdir()
    (directory / name / "__init__.py").write_text(code)
    (directory / f"{name}-9.9.dist-info").mkdir()
    (directory / f"{name}-9.9.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n"
    )
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("PYTHONPATH", str(directory))


def test_each_way_of_running_is_told(tmp_path: Path) -> None:
    done = doctor(str(tmp_path), "--json")
    assert done.exit_code == 0
    ways = json.loads(done.stdout)["ways"]
    assert set(ways) == set(TARGETS)
    assert ways["debug"]["usable"]
    for way in ways.values():
        assert way["usable"] == all(check["status"] != "fail" for check in way["checks"])


@pytest.mark.slow
def test_what_is_asked_for_decides_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor(str(tmp_path), "--for", "debug").exit_code == 0
    monkeypatch.setenv("PATH", str(tmp_path))
    done = doctor(str(tmp_path), "--for", "trinity-cuda")
    assert done.exit_code == 1
    assert "fail  gpus" in done.stdout and "trinity-cuda cannot run here" in done.stdout
    wrong = doctor(str(tmp_path), "--for", "trinty")
    assert wrong.exit_code == 2 and "choose one of trinity, verl, vllm, debug" in wrong.stderr


def test_trinity_stands_for_that_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (target_of("trinity"), target_of("vllm")) == ("trinity-cpu", "vllm-cpu")
    smi(tmp_path, monkeypatch, "NVIDIA H100, 81559, 580.65.06")
    assert (target_of("trinity"), target_of("vllm"), target_of("verl")) == (
        "trinity-cuda",
        "vllm-cuda",
        "trinity-cuda",
    )


def test_another_version_is_told_with_the_one_that_is_wanted(
    everything: dict[str, str | None],
) -> None:
    assert found("trinity-cuda", "vllm").status == "ok"
    everything["vllm"] = "0.33.0"
    check = found("trinity-cuda", "vllm")
    assert check.status == "miss"
    assert check.detail == f"0.33.0, but cuda.txt requires {STACKS['trinity-cuda'].pins()['vllm']}"
    assert check.fix == "ajet install trinity --cuda"


def test_a_missing_package_stops_what_needs_it_and_nothing_else(
    everything: dict[str, str | None],
) -> None:
    everything["verl"] = None
    assert found("trinity-cuda", "packages").detail == "missing verl"
    assert usable(check_target("trinity-cpu"))


def test_gpus_and_their_driver(
    everything: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, "NVIDIA H100, 81559, 580.65.06\nNVIDIA H100, 81559, 580.65.06")
    assert found("trinity-cuda", "gpus").detail == "2 × NVIDIA H100, 80 GiB"
    assert found("trinity-cuda", "driver").status == "ok"
    assert (
        usable(check_target("trinity-cuda"))
        and found("trinity-cuda", "flash-attn").status == "miss"
    )
    smi(tmp_path, monkeypatch, "NVIDIA A100, 81559, 535.104.05")
    assert found("trinity-cuda", "driver").detail == "535.104.05 is too old for CUDA 13"
    assert not usable(check_target("trinity-cuda"))


def test_a_torchvision_of_another_build_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(
        tmp_path,
        monkeypatch,
        "torchvision",
        "raise RuntimeError('operator torchvision::nms does not exist')",
    )
    check = found("local", "torchvision")
    assert check.status == "fail" and "operator torchvision::nms does not exist" in check.detail
    assert check.fix.startswith("pip uninstall -y torchvision")


def test_a_torchvision_that_goes_with_torch_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, "torchvision", "")
    assert found("local", "torchvision").status == "ok"


def test_the_token_of_ray(
    everything: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert found("ray", "ray token").status == "ok"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    check = found("ray", "ray token")
    assert (
        check.status == "miss"
        and "set RAY_AUTH_MODE on each" in check.fix
        and "secret" not in str(check)
    )
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert found("ray", "ray token").status == "ok"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    assert found("ray", "ray token").status == "fail"


def test_what_a_run_imports_can_be_imported() -> None:
    """The list of packages is complete: nothing that Trinity imports on a CPU is missing where they
    are all there."""
    pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
    checks = check_target("trinity-cpu", imports=True)
    assert checks[-1].name == "imports" and usable(checks), checks
    assert sys.modules.get("tinker") is None


@pytest.mark.slow
def test_whether_programs_of_a_model_are_fenced_in_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> dict[str, Any]:
        fence.cache_clear()
        checks = json.loads(doctor(str(tmp_path), "--json").stdout)["checks"]
        return next(check for check in checks if check["name"] == "sandbox for generated programs")

    (tmp_path / "bwrap").write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    broken = said()
    assert (
        broken["status"] == "miss" and "No permissions to create new namespace" in broken["detail"]
    )
    assert "--unfenced" in broken["fix"]
    monkeypatch.undo()
    try:
        fence()
    except NoFence:
        assert said()["status"] == "miss"
    else:
        assert said()["status"] == "ok" and "no network" in said()["detail"]


@pytest.mark.slow
def test_at_a_terminal_lines_fit_and_commands_stay_whole(tmp_path: Path) -> None:
    code, shown = at_a_terminal([sys.executable, "-m", "ajet", "doctor"], columns=80, cwd=tmp_path)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    commands = [line for line in lines if re.search(r"^ *(pip|ajet) install", line)]
    assert code == 0 and lines[0].startswith("ok    python   ")
    assert not [line for line in lines if len(line) > 80 and line not in commands]
    assert all(line.count('"') in (0, 2) for line in commands)
