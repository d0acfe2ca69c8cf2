"""Runs the learner of a run without GPUs: `ajet trainer serve` as a child process of the driver, on
loopback.

Trinity's Tinker trainer and model use it through the official SDK, by TINKER_BASE_URL and
TINKER_API_KEY.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx

import ajet_sdk
from ajet_sdk.backbones.trinity.launch import environment
from ajet_sdk.engines.http import without_certificates
from ajet_sdk.errors import ConfigError, EngineUnavailable, TrainingError
from ajet_sdk.gateway.gateway import listening_socket

T = TypeVar("T")

_PROCESS = "ajet_sdk.backbones.trinity.learner_process"
"""Run in a process, as it loads torch."""

_START = 120.0
_STOP = 10.0
_PAUSE = 0.2
"""Seconds for the learner to answer and to end, and between two checks."""
_SHOWN_LINES = 8


@dataclass(frozen=True)
class Learner:
    url: str
    log: Path
    process: subprocess.Popen[bytes]

    async def beside(self, work: Awaitable[T]) -> T:
        """Wait for `work`. Raises TrainingError if the learner ends before, as clients would retry
        for minutes."""
        working = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({working}, timeout=_PAUSE))[0]:
                if (code := self.process.poll()) is not None:
                    raise TrainingError(
                        f"the learner ended with exit code {code}; log file: {self.log}. Continue"
                        " with --resume"
                    )
            return await working
        finally:
            if not working.done():
                working.cancel()
                await asyncio.wait({working})


@asynccontextmanager
async def run_learner(
    model: str, state: Path, log: Path, *, temperature: float, max_model_len: int, seed: int = 0
) -> AsyncIterator[Learner]:
    """Run a learner for `model`, a directory or a Hugging Face name; clients of the SDK in the
    block use it.

    It stores adapters and optimizers in `state`, and continues from existing ones. Tokens are
    sampled and scored at `temperature`. Raises ConfigError without a model, EngineUnavailable with
    the end of the log if it does not start.
    """
    if Path(model).is_absolute() and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"model.path: {model} is not a model directory (it has no config.json)")
    options = {
        "model": model,
        "temperature": temperature,
        "max_model_len": max_model_len,
        "seed": seed,
    }
    key = {"TINKER_API_KEY": f"tml-{secrets.token_hex(16)}"}
    learner, begin = _start(options, state, log, key)
    try:
        await asyncio.to_thread(_reach, learner, begin)
        direct = ",".join(
            filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"])
        )
        with environment(
            TINKER_BASE_URL=learner.url,
            TINKER_TELEMETRY="0",
            no_proxy=direct,
            NO_PROXY=direct,
            **key,
        ):
            yield learner
    finally:
        await asyncio.to_thread(_end, learner.process)


def _start(
    options: dict[str, object], state: Path, log: Path, key: dict[str, str]
) -> tuple[Learner, int]:
    """Start the process; returns also the position in the log where its output begins."""
    path = os.pathsep.join(
        filter(None, [str(Path(ajet_sdk.__file__).parent.parent), os.environ.get("PYTHONPATH")])
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream, listening_socket("127.0.0.1", 0) as listener:
        handed = {
            "state": str(state.resolve()),
            "listener": listener.fileno(),
            "parent": os.getpid(),
        }
        begin = stream.tell()
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", _PROCESS, json.dumps({**options, **handed})],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "PYTHONPATH": path, **key},
            pass_fds=[listener.fileno()],
            start_new_session=True,  # the driver handles Ctrl-C and ends it
        )
        return Learner(f"http://127.0.0.1:{port}", log, process), begin


def _reach(learner: Learner, begin: int) -> None:
    """Wait until it answers or its process ends."""
    deadline = time.monotonic() + _START
    failure = ""
    while not failure:
        try:
            httpx.get(
                f"{learner.url}/api/v1/healthz",
                timeout=1.0,
                trust_env=False,
                verify=without_certificates(),
            )
            return
        except httpx.TransportError:
            time.sleep(_PAUSE)
        if (code := learner.process.poll()) is not None:
            failure = f"the learner exited with code {code} during startup"
        elif time.monotonic() > deadline:
            failure = f"the learner did not start within {_START:.0f} s"
    lines = learner.log.read_bytes()[begin:].decode(errors="replace").splitlines()[-_SHOWN_LINES:]
    raise EngineUnavailable(
        f"{failure}; log file: {learner.log}" + "".join(f"\n  {line}" for line in lines)
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
