"""`ajet doctor` checks the installation; `ajet install` installs stacks that `pip` can't resolve by
itself."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

import ajet
from ajet_sdk.addresses import public
from ajet_sdk.environments.client import service_health
from ajet_sdk.errors import ConfigError, EnvironmentUnavailable
from ajet_sdk.reporting.output import echo, style
from ajet_sdk.sandbox.fence import NoFence, fence
from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.cli.readiness import (
    CORE,
    EXTRAS,
    TARGETS,
    Check,
    check_packages,
    check_target,
    gpus,
    target_of,
    usable,
)
from ajet_tools.cli.stacks import STACKS, Stack, installed_version, same_version


def doctor(
    directory: Annotated[Path, Argument(help="Directory to which runs would write.")] = Path(),
    purpose: Annotated[
        str | None,
        Option(
            "--for",
            metavar="NAME",
            help=(
                f"Check one setup in detail; exits with 1 if it cannot run: {', '.join(TARGETS)};"
                " trinity, verl and "
                "vllm stand for the variant of this machine."
            ),
        ),
    ] = None,
    environment: Annotated[
        list[str] | None,
        Option(metavar="URL", help="URL of an environment service to check. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the installation: packages, what can run here, and whether a run could write and
    listen.

    \b
    ajet doctor
    ajet doctor --for trinity
    ajet doctor --environment http://127.0.0.1:8080
    ajet doctor --json
    """
    target = None if purpose is None else target_of(purpose)
    if purpose is not None and target is None:
        raise ConfigError(
            f"--for {purpose}: choose one of trinity, verl, vllm, {', '.join(TARGETS)}"
        )
    checks = [
        Check("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        Check("ajet", "ok", f"{ajet.__version__}, in {Path(ajet.__file__).parent.parent}"),
        *_packages(), *_accelerator(), *_machine(directory), *_network(), *_programs(),
        *(_service(url) for url in environment or ()),
    ]  # fmt: skip
    targets = (target,) if target else TARGETS
    by_target = {name: check_target(name, imports=bool(target)) for name in targets}
    failed = not usable(checks) or bool(target and not usable(by_target[target]))
    if as_json:
        ways = {name: {"usable": usable(of), "checks": of} for name, of in by_target.items()}
        print_json({"ok": not failed, "checks": checks, "ways": ways})
    elif target:
        _print([check for check in checks if check.status == "fail"] + by_target[target])
        echo(f"{target} {'can run here' if not failed else 'cannot run here'}")
    else:
        _print(checks)
        echo("\nWhat can run here (details: ajet doctor --for NAME):")
        _print([_summary(name, of) for name, of in by_target.items()])
    raise typer.Exit(1 if failed else 0)


def _print(checks: list[Check]) -> None:
    width = max(len(check.name) for check in checks)
    colours = {"ok": "green", "miss": "yellow", "fail": "red"}
    room = (
        max(30, shutil.get_terminal_size().columns - width - 8)
        if sys.stdout.isatty()
        else sys.maxsize
    )
    for check in checks:
        status = style(f"{check.status:<4}", fg=colours[check.status], bold=True)
        lines = [check.detail + (f"; {check.fix}" if check.fix else "")]
        if len(lines[0]) > room:  # commands stay on one line
            lines = [
                *textwrap.wrap(check.detail, room, break_on_hyphens=False),
                *filter(None, [check.fix]),
            ]
        echo(f"{status}  {check.name:<{width}}  " + ("\n" + " " * (width + 8)).join(lines))


def _summary(name: str, checks: list[Check]) -> Check:
    """Summarizes checks by the first failure, else the first warning."""
    for status in ("fail", "miss"):
        matching = [check for check in checks if check.status == status]
        if matching:
            more = f" (and {len(matching) - 1} more)" if len(matching) > 1 else ""
            what = "" if status == "fail" else "can run; "
            detail = textwrap.shorten(
                f"{what}{matching[0].name}: {matching[0].detail}", 100, placeholder=" …"
            )
            return Check(name, "miss", f"{detail}{more}", matching[0].fix)
    return Check(name, "ok", "can run")


def _packages() -> Iterator[Check]:
    yield from check_packages("core", CORE, "pip install ajet")
    for extra, names in EXTRAS.items():
        absent = [name for name in names if installed_version(name) is None]
        present = ", ".join(
            f"{name} {installed_version(name)}" for name in names if name not in absent
        )
        if absent:
            detail = f"missing {', '.join(absent)}" + (f" (has {present})" if present else "")
            line = (
                "ajet install trinity"
                if extra in ("trinity", "verl")
                else f'pip install "ajet[{extra}]"'
            )
            yield Check(f"extra {extra}", "miss", detail, line)
        else:
            yield Check(f"extra {extra}", "ok", present)


def _accelerator() -> Iterator[Check]:
    seen = gpus()
    if installed_version("torch") is None:
        return
    try:
        import torch
    except Exception as error:  # noqa: BLE001  a broken install raises whatever its libraries raise
        yield Check(
            "torch", "miss", f"cannot be imported: {type(error).__name__}: {error}", "reinstall it"
        )
        return
    yield Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} CPU thread(s)")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            yield Check(
                f"gpu {index}", "ok", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GB"
            )
    elif seen:
        name, _, driver = seen[0]
        detail = (
            f"{len(seen)} × {name} with driver {driver}, but torch {torch.__version__} finds none"
        )
        build = (
            "this torch is a CPU build"
            if torch.version.cuda is None
            else f"it needs CUDA {torch.version.cuda}"
        )
        yield Check(
            "gpu", "miss", f"{detail}: {build}", "install a CUDA build of torch, or a newer driver"
        )
    else:
        yield Check("gpu", "ok", "none: models run on the CPU")


def _machine(directory: Path) -> Iterator[Check]:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    yield Check("cpu", "ok", f"{cores} core(s)")
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        fix = "" if total >= 2 else "2 GB are recommended"
        yield Check("memory", "miss" if fix else "ok", f"{total:.1f} GB", fix)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".ajet-doctor-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        detail = f"{directory.resolve()}: {error.strerror or error}"
        yield Check("write access", "fail", detail, "choose another directory")
        return
    free = shutil.disk_usage(directory).free / 2**30
    yield Check("write access", "ok", f"{directory.resolve()}, {free:.1f} GB free")


def _service(url: str) -> Check:
    """Checks whether an environment service answers, and its instances."""
    name = f"environment {public(url)}"
    try:
        health = service_health(url)
    except EnvironmentUnavailable as error:
        return Check(name, "fail", str(error), "start it with: ajet env serve")
    if "limit" not in health:
        return Check(name, "ok", "answers")
    running, limit, lost = health["running"], health["limit"], health["lost"]
    detail = (
        f"{health['env_type']}: {running} of {limit} instances in use, {health['created']} created,"
        f" {lost} lost"
    )
    if running >= limit:
        return Check(
            name, "miss", detail, "raise --instances there, or lower rollout.max_env_worker"
        )
    return Check(name, "ok", detail)


def _programs() -> Iterator[Check]:
    """Tests the sandbox with a program that tries to escape."""
    name = "sandbox for generated programs"
    try:
        sandbox = fence()
    except NoFence as error:
        yield Check(
            name,
            "miss",
            f"--verify code will be refused: {error}",
            "without a sandbox, use --unfenced",
        )
        return
    user = "a separate user" if sandbox.users else "your user in a namespace, without privileges"
    detail = (
        f"{sandbox.version} works (tested): own root, no network, no access to your processes,"
        f" {user}"
    )
    yield Check(name, "ok", detail)


def _network() -> Iterator[Check]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                yield Check("loopback", "ok", f"can listen and connect (tested on port {port})")
    except OSError as error:
        yield Check("loopback", "fail", str(error), "the gateway needs a port on 127.0.0.1")


class What(str, Enum):
    """The stack to install."""

    trinity = "trinity"
    vllm = "vllm"


def install(
    what: Annotated[
        What, Argument(help="trinity: the stack for clusters; vllm: only the sampler.")
    ],
    cpu: Annotated[bool, Option("--cpu", help="For a machine without GPUs.")] = False,
    cuda: Annotated[bool, Option("--cuda", help="For a machine with NVIDIA GPUs.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the commands without running them.")
    ] = False,
) -> None:
    """Install Trinity or vLLM, which pip can't resolve, in versions that work together.

    `pip install trinity-rft[vllm]` fails, since its parts require different versions of numpy and
    transformers. Default: CUDA if `nvidia-smi` shows a GPU, else CPU. Can be repeated at any time,
    and ends with `ajet doctor`.

    \b
    ajet install trinity
    ajet install trinity --cuda --dry-run
    """
    if cpu and cuda:
        raise ConfigError("--cpu and --cuda cannot be combined")
    build = "cuda" if cuda or (not cpu and gpus()) else "cpu"
    stack = STACKS[f"{what.value}-{build}"]
    steps = stack.commands()
    if dry_run:
        echo("\n".join(f"pip {shlex.join(step)}" for step in steps))
        return
    _check(stack)
    for step in steps:
        if (
            stack.cpu
            and step is steps[0]
            and same_version(installed_version("torch") or "", stack.pins()["torch"])
        ):
            continue
        _pip(step)
    echo("$ ajet doctor --for " + stack.name)
    done = subprocess.run(
        [sys.executable, "-m", "ajet", "doctor", "--for", stack.name], check=False
    )
    raise typer.Exit(done.returncode)


def _check(stack: Stack) -> None:
    """Raises ConfigError if the commands can't work here."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise ConfigError(
            f"{stack.name} needs an environment with Python 3.11 or 3.12 (this is"
            f" {platform.python_version()})"
        )
    if find_spec("pip") is None:
        raise ConfigError(f"{sys.prefix} has no pip; run `python -m ensurepip` first")
    if installed_version("ajet") is None:
        raise ConfigError(
            "ajet is not installed in this environment; run `pip install -e .` in its checkout"
            " first"
        )


def _pip(arguments: list[str]) -> None:
    """Runs a pip command. Raises ConfigError if it fails, after pip printed the cause."""
    echo(f"$ pip {shlex.join(arguments)}")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=False
    )
    if done.returncode:
        raise ConfigError(
            f"pip {arguments[0]} failed with exit code {done.returncode} (see above); run the"
            " command again to continue"
        )
