"""`ajet env`: hosts environments as a service."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from ajet_sdk import serve as sdk
from ajet_sdk.environments.hosted import KINDS
from ajet_sdk.environments.instances import InstanceLimits
from ajet_sdk.environments.spec import Spec
from ajet_sdk.errors import ConfigError
from ajet_tools.cli.arguments import Host, Port

app = typer.Typer(no_args_is_help=True, add_completion=False)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@app.callback()
def env() -> None:
    """Host environments that agents act in, as a service.

    \b
    ajet env serve lake_env.py:Lake
    """


@app.command()
def serve(
    target: Annotated[str, Argument()],
    name: str | None = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    arg: Annotated[list[str] | None, Option(metavar="KEY=VALUE")] = None,
    split: Annotated[list[str] | None, Option(metavar="NAME=IDS")] = None,
    actions: str = "",
    python: Annotated[str | None, Option(metavar="PATH")] = None,
    instances: Annotated[
        int, Option(min=1, help="Maximum number of instances.")
    ] = InstanceLimits.instances,
    timeout: Annotated[
        float, Option(min=0.1, help="Time limit of a request, in seconds.")
    ] = InstanceLimits.timeout,
    memory: Annotated[str | None, Option(metavar="SIZE")] = None,
) -> None:
    """Host an environment, each instance in a process of its own, until Ctrl-C.

    Jobs must send the key of AJET_ENV_KEY, if it is set; it is required if other machines can
    connect. An instance without a request for half an hour is stopped.

    Args:
        target: What to host: FILE.py:NAME, package.module:NAME (a class, or a function that maps a task id to an
            environment), gymnasium:ID, mcp:COMMAND, openenv:NAME, verifiers:NAME.
        name: Name of the environment, as in task_reader.env_service.env_type. Default: the target's name.
        arg: Keyword argument of the environment, as JSON or text. Repeatable.
        split: Task ids of a split, if the environment does not list them: 0:1000 for numbers, or a file with one id per
            line. Repeatable.
        actions: Names of a gymnasium environment's actions, from 0, separated by commas.
        python: Python interpreter for the environment's processes, with its packages installed; ajet need not be.
        memory: Memory limit per instance, such as 2G. Linux only.

    \b
    ajet env serve lake_env.py:Lake
    ajet env serve gymnasium:FrozenLake-v1 --split train=0:1000 --split dev=1000:1100 \\
      --arg render_mode=ansi --actions left,down,right,up
    ajet env serve "mcp:python server.py"
    """
    spec = Spec(
        target,
        arguments=dict(_argument(item) for item in arg or ()),
        splits=dict(_split(item) for item in split or ()),
        actions=[item.strip() for item in actions.split(",") if item.strip()],
    )
    limits = InstanceLimits(instances=instances, timeout=timeout, memory=_bytes(memory))
    sdk.serve_environment(
        spec,
        host,
        port,
        name=name or _name_of(target),
        limits=limits,
        python=python or sys.executable,
        api_key=os.environ.get("AJET_ENV_KEY"),
    )


def _name_of(target: str) -> str:
    """Returns `Lake` for `lake_env.py:Lake`, `FrozenLake-v1` for `gymnasium:FrozenLake-v1`, `mcp`
    for an MCP server."""
    kind, _, remainder = target.partition(":")
    if kind == "mcp":
        return kind
    if kind in KINDS:
        return remainder
    return re.split("->|:", target)[-1]


def _argument(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--arg {text}: write KEY=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _split(text: str) -> tuple[str, list[str]]:
    name, equals, value = text.partition("=")
    numbers = re.fullmatch(r"(\d+):(\d+)", value)
    if numbers:
        return name, [str(number) for number in range(int(numbers[1]), int(numbers[2]))]
    if not equals or not Path(value).is_file():
        raise ConfigError(
            f"--split {text}: write NAME=FIRST:END, or NAME=FILE with one id per line"
        )
    return name, [
        line.strip()
        for line in Path(value).read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)(i?B)?", text, re.IGNORECASE)
    if size is None:
        raise ConfigError(f"--memory {text}: write a size such as 512M or 2G")
    return int(float(size[1]) * _UNITS[size[2].upper()])
