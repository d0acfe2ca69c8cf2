"""`ajet install`: a stack that `pip` can't resolve by itself, with versions that work together."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from enum import Enum
from importlib.util import find_spec
from typing import Annotated

import typer

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo
from ajet_tools.cli.stacks import STACKS, Stack, installed_version, same_version

__all__ = ["app"]

app = typer.Typer(add_completion=False)


class What(str, Enum):
    """What is installed."""

    trinity = "trinity"
    vllm = "vllm"


@app.command()
def install(
    what: Annotated[What, typer.Argument(help="trinity: the stack for clusters; vllm: only the sampler.")],
    cpu: Annotated[bool, typer.Option("--cpu", help="For a machine without GPUs.")] = False,
    cuda: Annotated[bool, typer.Option("--cuda", help="For a machine with NVIDIA GPUs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands without running them.")] = False,
) -> None:
    """Install Trinity or vLLM, which pip can't resolve, in versions that work together.

    `pip install trinity-rft[vllm]` finds no versions that agree: its parts ask for different ones of numpy and of
    transformers. Default: CUDA if `nvidia-smi` shows a GPU, else CPU. It can be repeated at any time, and ends with
    `ajet doctor`.

    \b
    ajet install trinity
    ajet install trinity --cuda --dry-run
    """
    if cpu and cuda:
        raise ConfigError("--cpu and --cuda cannot be combined")
    build = "cpu" if cpu else "cuda" if cuda or _has_gpu() else "cpu"
    stack = STACKS[f"{what.value}-{build}"]
    steps = stack.commands()
    if dry_run:
        echo("\n".join(f"pip {shlex.join(step)}" for step in steps))
        return
    _check(stack)
    for step in steps:
        if stack.cpu and step is steps[0] and same_version(installed_version("torch") or "", stack.pins()["torch"]):
            continue
        _pip(step)
    echo("$ ajet doctor --for " + stack.name)
    done = subprocess.run([sys.executable, "-m", "ajet", "doctor", "--for", stack.name], check=False)
    raise typer.Exit(done.returncode)


def _has_gpu() -> bool:
    found = shutil.which("nvidia-smi")
    if found is None:
        return False
    listed = subprocess.run([found, "-L"], capture_output=True, text=True, timeout=60, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def _check(stack: Stack) -> None:
    """Raise ConfigError where the lines can't work."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise ConfigError(
            f"{stack.name} needs Python 3.11 or 3.12 (this is {sys.version_info[0]}.{sys.version_info[1]}); "
            "create an environment with one of them"
        )
    if find_spec("pip") is None:
        raise ConfigError(f"{sys.prefix} has no pip; run `python -m ensurepip` first")
    if installed_version("ajet") is None:
        raise ConfigError("ajet is not installed in this environment; run `pip install -e .` in its checkout first")


def _pip(arguments: list[str]) -> None:
    """Run one line. Raises ConfigError where pip fails; what it printed says why."""
    echo(f"$ pip {shlex.join(arguments)}")
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=False)
    if done.returncode:
        raise ConfigError(
            f"pip {arguments[0]} failed with exit code {done.returncode} (see above); to continue, run the same "
            "command again"
        )
