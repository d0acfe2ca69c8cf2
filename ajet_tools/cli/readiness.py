"""Checks whether this machine meets the requirements of each backbone and way to run it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ajet_tools.cli.stacks import STACKS, Stack, installed_version, same_version


def _required(extra: str = "") -> tuple[str, ...]:
    """Returns the packages that ajet or one of its extras requires."""
    try:
        lines = importlib.metadata.requires("ajet") or []
    except importlib.metadata.PackageNotFoundError:  # it runs from a directory
        return ()
    pairs = [(re.match(r"[\w-]+", line), re.search(r"extra == ['\"](\w+)", line)) for line in lines]
    names = [name[0] for name, of in pairs if name is not None and (of[1] if of else "") == extra]
    return tuple(name for name in names if name != "ajet")


CORE = _required()
_SHOWN = (
    "local",
    "tools",
    "documents",
    "prompts",
    "math",
    "environments",
    "datasets",
    "agentscope",
    "agentjet",
    "loggers",
    "tinker",
    "ray",
    "trinity",
    "verl",
)
"""All extras but those for developing ajet."""
EXTRAS = {extra: _required(extra) for extra in _SHOWN}
DRIVER = 580
"""Oldest NVIDIA driver for CUDA 13, for which the pinned torch is built."""
_IMPORT_TIMEOUT = 300
_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Check:
    """The result of a check: `fail` prevents the target, `miss` may prevent or slow it."""

    name: str
    status: Literal["ok", "miss", "fail"]
    detail: str
    fix: str = ""


def usable(checks: list[Check]) -> bool:
    """Whether no check failed."""
    return all(check.status != "fail" for check in checks)


def check_target(target: str, *, imports: bool = False) -> list[Check]:
    """Checks the requirements of `target`. `imports` also imports packages, which takes up to a
    minute."""
    checks = list(_requirements(target))
    if imports and target in _IMPORTS and usable(checks):
        checks.append(_imported(target))
    return checks


def target_of(name: str) -> str | None:
    """Returns the target of a name (`trinity` and `vllm` depend on this machine), or None.

    `verl` uses the stack of Trinity on GPUs.
    """
    if name == "verl":
        return "trinity-cuda"
    if name in ("trinity", "vllm"):
        return f"{name}-{'cuda' if gpus() else 'cpu'}"
    return name if name in TARGETS else None


def gpus() -> list[tuple[str, float, str]]:
    """Returns name, memory in GiB and driver version of each GPU, from `nvidia-smi`."""
    executable = shutil.which("nvidia-smi")
    if executable is None:
        return []
    query = [
        executable,
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [(row[0], _number(row[1]) / 1024, row[2]) for row in rows if len(row) == 3]


TARGETS = (
    "debug",
    "local",
    "tinker",
    "ray",
    "vllm-cpu",
    "vllm-cuda",
    "trinity-cpu",
    "trinity-cuda",
)
"""The ways to run: backbones on one machine, and stacks."""


def _requirements(target: str) -> Iterator[Check]:
    stack = STACKS.get(target)
    if stack is not None:
        yield from _stack(stack)
    elif target == "debug":
        yield from check_packages("packages", CORE, "pip install ajet")
    else:
        yield from check_packages("packages", EXTRAS[target], f'pip install "ajet[{target}]"')
    if stack is not None or target == "local":
        yield from _beside_torch()
    if stack is not None and not stack.cpu:
        yield from _gpus()
    if target in ("local", "trinity-cuda"):
        yield from _flash_attention(required=target != "local")
    if target in ("ray", "trinity-cpu", "trinity-cuda"):
        yield from (_shared_memory(), _ray_tokens())


def check_packages(name: str, packages: tuple[str, ...], fix: str) -> Iterator[Check]:
    """Checks that all packages are installed, and lists their versions."""
    missing = [package for package in packages if installed_version(package) is None]
    if missing:
        yield Check(name, "fail", f"missing {', '.join(missing)}", fix)
    else:
        yield Check(
            name, "ok", ", ".join(f"{package} {installed_version(package)}" for package in packages)
        )


def _stack(stack: Stack) -> Iterator[Check]:
    """Checks the packages of a stack, and the pinned versions."""
    kind, _, build = stack.name.partition("-")
    fix = f"ajet install {kind} --{build}"
    needed = [name for extra in stack.extras for name in EXTRAS[extra]]
    yield from check_packages(
        "packages", tuple(dict.fromkeys([*needed, *stack.packages, *stack.bare])), fix
    )
    pins = stack.pins()
    for name in stack.compared:
        installed, wanted = installed_version(name), pins[name]
        if installed is None:
            continue
        if same_version(installed, wanted):
            yield Check(name, "ok", installed)
        else:
            yield Check(
                name, "miss", f"{installed}, but {stack.constraints} requires {wanted}", fix
            )


def _beside_torch() -> Iterator[Check]:
    """Checks packages with native code: if built for another torch, they break
    `import transformers`."""
    installed = [name for name in _BESIDE_TORCH if installed_version(name) is not None]
    for name in installed:
        done = _python(f"import {name}")
        pair = f"{installed_version(name)}, beside torch {installed_version('torch')}"
        if done.returncode:
            detail = f"{pair} cannot be imported: {_last_line(done.stderr)}"
            yield Check(name, "fail", detail, f"pip uninstall -y {' '.join(installed)}")
        else:
            yield Check(name, "ok", pair)


def _gpus() -> Iterator[Check]:
    devices = gpus()
    if not devices:
        yield Check(
            "gpus",
            "fail",
            "none: nvidia-smi is missing or lists none",
            "install NVIDIA's driver, or use --cpu",
        )
        return
    name, memory, driver = devices[0]
    yield Check("gpus", "ok", f"{len(devices)} × {name}, {memory:.0f} GiB")
    if _number(driver) < DRIVER:
        yield Check(
            "driver",
            "fail",
            f"{driver} is too old for CUDA 13",
            f"install driver {DRIVER} or later",
        )
    else:
        yield Check("driver", "ok", driver)


def _flash_attention(*, required: bool) -> Iterator[Check]:
    version = installed_version("flash-attn")
    if version is not None:
        done = _python("import flash_attn")
        if done.returncode:
            detail = f"{version} cannot be imported: {_last_line(done.stderr)}"
            yield Check(
                "flash-attn", "fail" if required else "miss", detail, "pip uninstall -y flash-attn"
            )
        else:
            yield Check("flash-attn", "ok", version)
    elif required:
        yield Check(
            "flash-attn",
            "miss",
            "not installed: backbone verl needs it; trinity uses sdpa and keeps the padding",
            "pip install flash-attn --no-build-isolation",
        )
    elif gpus():
        yield Check(
            "flash-attn",
            "ok",
            "not installed: needed only for model.attn_implementation: flash_attention_2",
        )


def _shared_memory() -> Check:
    """Ray keeps objects in /dev/shm: 30 % of the memory if they fit, else on disk, which is
    slow."""
    directory = Path("/dev/shm")
    if not directory.is_dir():
        return Check("shared memory", "ok", "no /dev/shm on this system")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    size, wanted = shutil.disk_usage(directory).total / 2**30, min(0.3 * total, 200)
    detail = f"{size:.1f} GiB in /dev/shm"
    if size < 0.95 * wanted:
        fix = f"enlarge it (docker run --shm-size={max(1, round(wanted))}g)"
        return Check(
            "shared memory",
            "miss",
            f"{detail}; Ray needs {wanted:.1f} GiB, and otherwise uses the disk",
            fix,
        )
    return Check("shared memory", "ok", detail)


def _ray_tokens() -> Check:
    """Ray 2.55 and later requires a token if it finds one, and rejects nodes without it."""
    name, mode = "ray token", os.environ.get("RAY_AUTH_MODE")
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    token = "RAY_AUTH_TOKEN" in os.environ or file.is_file()
    if mode == "token" and not token:
        return Check(
            name,
            "fail",
            "RAY_AUTH_MODE is token, but there is no token",
            "copy ~/.ray/auth_token from the head node",
        )
    if mode is not None:
        return Check(
            name,
            "ok",
            f"RAY_AUTH_MODE is {mode}: it must be the same on every node and where ajet starts",
        )
    if token:
        detail = (
            "RAY_AUTH_MODE is unset but a token exists: a cluster started here requires it from"
            " every node"
        )
        fix = (
            "for several nodes, set RAY_AUTH_MODE on each: token, with the same ~/.ray/auth_token,"
            " or disabled"
        )
        return Check(name, "miss", detail, fix)
    return Check(
        name,
        "ok",
        "none: a local Ray creates its own; a cluster without one is open to everyone who can"
        " connect",
    )


_IMPORTS = {
    "vllm-cpu": "import vllm",
    "vllm-cuda": "import vllm",
    "ray": "import ray",
    "trinity-cpu": (
        "from ajet_sdk.backbones.trinity.without_vllm import install; install()\nimport"
        " trinity.explorer.explorer, trinity.trainer.trainer,"
        " ajet_sdk.backbones.trinity.workflow\nimport trinity.common.models.tinker_model,"
        " trinity.trainer.tinker.tinker_trainer"
    ),
    "trinity-cuda": (
        "import trinity.explorer.explorer, trinity.trainer.trainer,"
        " ajet_sdk.backbones.trinity.workflow\nimport vllm, trinity.common.models.vllm_model,"
        " trinity.trainer.verl.trainer"
    ),
}
"""What a run imports: a package that is missing and in no list shows here."""


def _imported(target: str) -> Check:
    done = _python(_IMPORTS[target])
    if done.returncode == 0:
        return Check("imports", "ok", "all modules that a run needs can be imported")
    kind, _, build = target.partition("-")
    fix = f"ajet install {kind} --{build}" if build else f'pip install "ajet[{kind}]"'
    return Check("imports", "fail", _last_line(done.stderr), fix)


def _python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a separate process, since a broken native library may crash it."""
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", code]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, 1, "", f"the import took more than {_IMPORT_TIMEOUT} s"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def _number(text: str) -> float:
    match = re.match(r"\d+(\.\d+)?", text)
    return float(match[0]) if match else 0.0
