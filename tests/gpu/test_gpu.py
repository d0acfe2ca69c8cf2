"""The GPU program's own code, run dry; what it knows of GPUs by name; what its folder of wheels
holds."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.gpu import Figure, Setting
from tests.gpu.machine import peak_rate
from tests.gpu.wheels import HEAVY, collected, download

pytestmark = pytest.mark.slow


@pytest.fixture
def program() -> ModuleType:
    """Imported by who uses it: that takes seconds, and the main suite collects these tests too."""
    return importlib.import_module("tests.gpu.__main__")


ROOT = Path(__file__).parents[2]


def test_a_dry_run_goes_through_every_part(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.gpu", "--dry", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(out.read_text())
    parts = {part["part"]: part for part in report["parts"]}
    assert not any("error" in part for part in parts.values())
    local = parts["local"]["figures"] + parts["eager"]["figures"]
    types = [f"{dtype} {what}" for dtype in ("float32", "bfloat16") for what in ("full", "LoRA")]
    assert {f["case"] for f in local} == {
        f"0.5B {one} {attention}" for one in types for attention in ("sdpa", "eager")
    }
    large = {figure["case"] for figure in parts["large"]["figures"]}
    assert large == {"3B bfloat16 full sdpa", "3B bfloat16 LoRA sdpa"}
    [falls] = [f for f in parts["sharded"]["figures"] if f["name"] == "loss falls"]
    assert falls["passed"]
    assert [f["passed"] for f in local if f["name"] in ("gap", "gap after")] == [True] * 16
    assert len([f for f in local if f["name"] == "merged, off by" and f["value"] < 0.1]) == 4
    assert {f["name"] for f in parts["calculator"]["figures"]} >= {
        "held-out reward before",
        "held-out reward after",
    }
    assert all(part["figures"] and "skipped" not in part for part in parts.values())


def test_a_part_beyond_the_time_is_not_begun(tmp_path: Path, program: ModuleType) -> None:
    out = tmp_path / "figures.json"
    assert program.main(["--dry", "--json", str(out), "--minutes", "0", "local", "merged"]) == 0
    parts = json.loads(out.read_text())["parts"]
    assert [(part["part"], part["figures"]) for part in parts] == [("local", []), ("merged", [])]


def test_a_part_that_fails_keeps_what_it_measured_and_ends_with_1(
    tmp_path: Path,
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def breaks(setting: Setting) -> Iterator[Figure]:
        yield Figure("one", "speed", 3.0)
        raise ValueError("no such [kernel]")

    monkeypatch.setitem(program._PARTS, "merged", breaks)
    out = tmp_path / "figures.json"
    assert program.main(["--dry", "--json", str(out), "merged"]) == 1
    [part] = json.loads(out.read_text())["parts"]
    assert part["error"] == "ValueError: no such [kernel]"
    assert [f["value"] for f in part["figures"]] == [3.0]
    assert "merged: failed, ValueError: no such [kernel]" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 2
    assert "--dry" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "low", "full"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA GeForce RTX 4090", 165e12, 82.6e12),
        ("Something Else", None, None),
    ],
)
def test_a_gpu_is_known_by_its_longest_name(
    name: str, low: float | None, full: float | None
) -> None:
    assert peak_rate(name, torch.bfloat16) == low
    assert peak_rate(name, torch.float32) == full


def test_every_dependency_is_in_the_folder_or_on_the_machine() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert listed is not None
    every = {
        re.split(r"[^\w.-]", line.strip().strip('",'))[0]
        for line in listed[1].splitlines()
        if line.strip()
    }
    assert {re.split(r"[^\w.-]", each)[0] for each in collected("3.12")} | HEAVY == every
    arguments = download(Path("wheels"), "3.12", "aarch64")
    assert arguments[arguments.index("--python-version") + 1] == "3.12"
    assert "manylinux2014_aarch64" in arguments and not [a for a in arguments if "x86" in a]
