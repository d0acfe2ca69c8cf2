"""The service as a child of this process: started, waited for, and ended with the block."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import ajet_sdk
from ajet_sdk.backbones.trinity.launch import environment
from ajet_sdk.errors import ConfigError, EngineUnavailable

if TYPE_CHECKING:
    from ajet_sdk.learn.trainer import TrainerSettings

SHIMS = Path(__file__).parent / "shims"
"""What Trinity imports as `tinker` and `vllm` without GPUs."""

START_TIMEOUT = 120.0
"""Seconds until it has to listen."""
STOP_TIMEOUT = 10.0
"""Seconds that it has to end by itself."""
_SHOWN_LINES = 8


@asynccontextmanager
async def run_service(
    model: str | Path,
    *,
    temperature: float,
    max_model_len: int,
    work_dir: Path,
    log: Path,
    max_batch: int = 64,
    seed: int = 0,
    dtype: str = "float32",
    settings: TrainerSettings | None = None,
) -> AsyncIterator[str]:
    """The URL of a service over `model`, a directory or a Hugging Face name.

    It writes checkpoints to `work_dir` and what it has to say to `log`. `temperature` is that of sampling in training;
    `settings` gives the KL and entropy terms and the learning rate's course. Raises ConfigError where there is no
    model, EngineUnavailable, with the end of the log, where it does not start.
    """
    if Path(model).is_absolute() and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"model.path: {model} is not a model directory (it has no config.json)")
    with tempfile.TemporaryDirectory(prefix="ajet-service-") as scratch:
        ready = Path(scratch) / "ready.json"
        options = {
            "temperature": temperature,
            "max-model-len": max_model_len,
            "max-batch": max_batch,
            "seed": seed,
            "dtype": dtype,
            "settings": _service_settings(settings),
        }
        process, begin = _start(str(model), work_dir, ready, log, options)
        try:
            yield await asyncio.to_thread(_url, process, ready, log, begin)
        finally:
            await asyncio.to_thread(_end, process)


@contextmanager
def use_service(url: str) -> Iterator[None]:
    """Ajet's service at `url` where Trinity looks for `tinker`."""
    with environment(TINKER_BASE_URL=url):
        sys.path.insert(0, str(SHIMS))
        try:
            yield
        finally:
            sys.path.remove(str(SHIMS))


def _service_settings(settings: TrainerSettings | None) -> str:
    """The part of the settings that the service keeps; the rest comes with each request."""
    if settings is None:
        return "{}"
    terms = {"kl_coef": settings.loss.kl_coef, "kl_type": settings.loss.kl_type}
    course = {name: getattr(settings, name) for name in ("lr_scheduler_type", "warmup_steps", "total_updates")}
    return json.dumps({**course, "loss": {**terms, "entropy_coef": settings.loss.entropy_coef}})


def _start(
    model: str, work_dir: Path, ready: Path, log: Path, options: dict[str, object]
) -> tuple[subprocess.Popen[bytes], int]:
    """In a session of its own: Ctrl-C is for us, who end it. Returns also where its part of the log begins."""
    options = {
        "model": Path(model).resolve() if Path(model).exists() else model,
        "work-dir": work_dir.resolve(),
        "ready-file": ready,
        **options,
    }
    command = [sys.executable, "-m", "ajet_sdk.backbones.trinity.cpu.service", "--parent", str(os.getpid())]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    root = str(Path(ajet_sdk.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        begin = stream.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        return process, begin


def _url(process: subprocess.Popen[bytes], ready: Path, log: Path, begin: int) -> str:
    """Wait until it listens; ends, too, once the process is ended."""
    deadline = time.monotonic() + START_TIMEOUT
    while not ready.is_file():
        if (code := process.poll()) is not None:
            raise EngineUnavailable(f"the service exited with code {code} during startup{_last_lines(log, begin)}")
        if time.monotonic() > deadline:
            raise EngineUnavailable(f"the service did not start within {START_TIMEOUT:.0f} s{_last_lines(log, begin)}")
        time.sleep(0.05)
    return str(json.loads(ready.read_text())["url"])


def _last_lines(log: Path, begin: int) -> str:
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()[-_SHOWN_LINES:]
    return f"; log file: {log}" + "".join(f"\n  {line}" for line in lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
