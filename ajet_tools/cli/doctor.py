"""`ajet doctor`: what is installed here, what is missing, and whether a run could write and listen."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["CORE", "EXTRAS", "app"]

app = typer.Typer(add_completion=False)

CORE = (
    "pydantic", "numpy", "duckdb", "pyarrow", "pytz", "typer", "rich", "pyyaml", "jinja2", "starlette", "uvicorn",
    "httpx", "openai",
)  # fmt: skip
EXTRAS = {
    "local": ("torch", "transformers", "tokenizers", "safetensors", "peft", "matplotlib", "tensorboard"),
    "tools": ("textual", "textual-plotext", "textual-serve", "aiohttp", "polars", "rapidfuzz"),
    "documents": ("pypdf", "python-docx", "beautifulsoup4"),
    "math": ("math-verify",),
    "datasets": ("datasets",),
    "agentscope": ("agentscope",),
    "loggers": ("wandb", "swanlab"),
    "ray": ("ray",),
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: `fail` stops every run, `miss` some of them."""

    name: str
    status: Literal["ok", "miss", "fail"]
    detail: str
    fix: str = ""


@app.command()
def doctor(
    directory: Annotated[Path, typer.Argument(help="Where runs would write.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is installed here, what is missing, and whether a run could write and listen.

    \b
    ajet doctor
    ajet doctor --json
    """
    checks = [*_python(), *_packages(), *_accelerator(), *_machine(directory), *_network()]
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        width = max(len(check.name) for check in checks)
        colours = {"ok": "green", "miss": "yellow", "fail": "red"}
        for check in checks:
            status = typer.style(f"{check.status:<4}", fg=colours[check.status], bold=True)
            typer.echo(f"{status}  {check.name:<{width}}  {check.detail}" + (f"; {check.fix}" if check.fix else ""))
    raise typer.Exit(1 if failed else 0)


def _python() -> Iterator[Check]:
    import ajet

    version = platform.python_version()
    yield Check("python", "ok", f"{version}, {platform.system()} {platform.machine()}")
    yield Check("ajet", "ok", f"{ajet.__version__}, in {Path(ajet.__file__).parent.parent}")


def _packages() -> Iterator[Check]:
    missing = [name for name in CORE if _version(name) is None]
    if missing:
        yield Check("core", "fail", f"missing {', '.join(missing)}", "pip install ajet")
    else:
        yield Check("core", "ok", ", ".join(f"{name} {_version(name)}" for name in CORE))
    for extra, names in EXTRAS.items():
        absent = [name for name in names if _version(name) is None]
        present = ", ".join(f"{name} {_version(name)}" for name in names if name not in absent)
        if absent:
            detail = f"missing {', '.join(absent)}" + (f" (has {present})" if present else "")
            yield Check(f"extra {extra}", "miss", detail, f'pip install "ajet[{extra}]"')
        else:
            yield Check(f"extra {extra}", "ok", present)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerator() -> Iterator[Check]:
    if _version("torch") is None:
        return
    try:
        import torch
    except Exception as error:  # noqa: BLE001  a broken install raises whatever its libraries raise
        yield Check("torch", "miss", f"cannot be imported: {type(error).__name__}: {error}", "install it again")
        return
    yield Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} CPU thread(s)")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            yield Check(f"gpu {index}", "ok", f"{torch.cuda.get_device_name(index)}, {memory:.0f} GB")
    else:
        yield Check("gpu", "ok", "none: models run on the CPU")


def _machine(directory: Path) -> Iterator[Check]:
    yield Check("cpu", "ok", f"{len(_cpus())} core(s)")
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        yield Check(
            "memory", "ok" if total >= 2 else "miss", f"{total:.1f} GB", "" if total >= 2 else "2 GB are better"
        )
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".ajet-doctor-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        yield Check(
            "write access", "fail", f"{directory.resolve()}: {error.strerror or error}", "choose another directory"
        )
        return
    free = shutil.disk_usage(directory).free / 2**30
    yield Check("write access", "ok", f"{directory.resolve()}, {free:.1f} GB free")


def _cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _network() -> Iterator[Check]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2):
                yield Check("loopback", "ok", f"listens and connects (tried port {port})")
    except OSError as error:
        yield Check("loopback", "fail", str(error), "the gateway needs a port on 127.0.0.1")
