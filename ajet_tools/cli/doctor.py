"""`ajet doctor`: what is installed, and whether a run could compute, write and listen here."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.text import Text
from typer import Argument, Option

import ajet
from ajet_sdk.addresses import public
from ajet_sdk.environments.client import service_health
from ajet_sdk.errors import EnvironmentUnavailable
from ajet_sdk.sandbox.fence import NoFence, fence
from ajet_tools.cli.machine import EXTRAS, gpus, installed_version, required
from ajet_tools.cli.result import Result

Status = Literal["ok", "miss", "fail"]
_COLOURS: dict[Status, str] = {"ok": "green", "miss": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Check:
    """The result of a check: `fail` prevents a run, `miss` a part of what ajet can do."""

    name: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class DoctorResult(Result):
    ok: bool
    checks: list[Check]

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def show(self, out: Console) -> None:
        width = max(len(check.name) for check in self.checks)
        if out.is_terminal:
            room = max(30, out.width - width - 8)
        else:
            room = sys.maxsize
        for check in self.checks:
            lines = [f"{check.detail}; {check.fix}" if check.fix else check.detail]
            if len(lines[0]) > room:  # commands stay on one line
                lines = textwrap.wrap(check.detail, room, break_on_hyphens=False)
                if check.fix:
                    lines.append(check.fix)
            line = Text(f"{check.status:<4}", style=f"bold {_COLOURS[check.status]}")
            indent = "\n" + " " * (width + 8)
            line.append(f"  {check.name:<{width}}  {indent.join(lines)}", style="not bold default")
            out.print(line, soft_wrap=True)


def doctor(
    directory: Annotated[Path, Argument(help="Directory to which runs would write.")] = Path(),
    environment: Annotated[
        list[str] | None,
        Option(metavar="URL", help="URL of an environment service to check. Repeatable."),
    ] = None,
) -> DoctorResult:
    """Check the installation: packages, GPUs, the sandbox, and whether a run could write and
    listen.

    \b
    ajet doctor
    ajet doctor --environment http://127.0.0.1:8080
    ajet doctor --json
    """
    system = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    checks = [
        Check("python", "ok", system),
        Check("ajet", "ok", f"{ajet.__version__}, in {Path(ajet.__file__).parent.parent}"),
        *_packages(),
        *_accelerator(),
        *_machine(directory),
        _loopback(),
        _sandbox(),
        *(_service(url) for url in environment or ()),
    ]
    return DoctorResult(all(check.status != "fail" for check in checks), checks)


def _packages() -> Iterator[Check]:
    for extra in ("", *EXTRAS):
        versions = {name: installed_version(name) for name in required(extra)}
        missing = [name for name, version in versions.items() if version is None]
        present = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        name = f"extra {extra}" if extra else "core"
        if not missing:
            yield Check(name, "ok", present)
            continue
        detail = f"missing {', '.join(missing)}" + (f" (has {present})" if present else "")
        if extra:
            fix = f'pip install "ajet[{extra}]"'
        else:
            fix = "pip install ajet"
        if extra in ("trinity", "verl"):
            fix = f"ajet install {extra}"
        yield Check(name, "miss" if extra else "fail", detail, fix)


def _accelerator() -> Iterator[Check]:
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
            name = torch.cuda.get_device_name(index)
            yield Check(f"gpu {index}", "ok", f"{name}, {memory:.0f} GB")
        return
    listed = gpus()
    if not listed:
        yield Check("gpu", "ok", "none: models run on the CPU")
        return
    if torch.version.cuda:
        build = f"it needs CUDA {torch.version.cuda}"
    else:
        build = "it is a CPU build"
    detail = (
        f"{len(listed)} × {listed[0].name} with driver {listed[0].driver}, but torch"
        f" {torch.__version__} finds none: {build}"
    )
    yield Check("gpu", "miss", detail, "install a CUDA build of torch, or a newer driver")


def _machine(directory: Path) -> Iterator[Check]:
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
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
    running = health["running"]
    limit = health["limit"]
    lost = health["lost"]
    detail = (
        f"{health['env_type']}: {running} of {limit} instances in use, {health['created']} created,"
        f" {lost} lost"
    )
    if running >= limit:
        return Check(
            name, "miss", detail, "raise --instances there, or lower rollout.max_env_worker"
        )
    return Check(name, "ok", detail)


def _sandbox() -> Check:
    """Tests the sandbox with a program that tries to escape."""
    name = "sandbox for generated programs"
    try:
        sandbox = fence()
    except NoFence as error:
        detail = f"--verify code will be refused: {error}"
        return Check(name, "miss", detail, "without a sandbox, use --with unfenced=true")
    if sandbox.users:
        user = "a separate user"
    else:
        user = "your user in a namespace, without privileges"
    detail = (
        f"{sandbox.version} works (tested): own root, no network, no access to your processes,"
        f" {user}"
    )
    return Check(name, "ok", detail)


def _loopback() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                return Check("loopback", "ok", f"can listen and connect (tested on port {port})")
    except OSError as error:
        return Check("loopback", "fail", str(error), "the gateway needs a port on 127.0.0.1")
