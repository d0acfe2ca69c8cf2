"""One vLLM server process: its command and environment, its start, its end, and what its log says of both."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.engines.http import Endpoint
from ajet_sdk.errors import EngineError

if TYPE_CHECKING:
    import httpx

START_SECONDS = 1800.0
"""How long a start may take: large weights are read, or downloaded, in it."""
_REPLY_SECONDS = 24 * 3600.0
"""Longest wait for a reply. Episodes have time limits of their own, and a server that dies closes its connections."""
_CONTROL_SECONDS = 600.0
_TICK = 0.2
_LEAST_BATCH = 2048
"""Tokens of one pass."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for."""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|\.error): \S")
_HOLLOW = ("See root cause above", "Engine core initialization failed", "Worker failed", "WorkerProc init")
_PREFIX = re.compile(r"^\([^)]*pid=\d+\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] )?")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a server; its weights may change while it runs."""

    model: str
    """An absolute directory or a Hugging Face name."""
    tokenizer: str
    name: str
    log: Path
    dtype: str = "auto"
    max_model_len: int = 4096
    max_num_seqs: int = 64
    seed: int = 0
    tensor_parallel_size: int = 1
    memory_share: float = 0.5
    """Of each GPU's memory."""
    gpus: tuple[int, ...] | None = None
    """Those that it sees, by their numbers in this process; None: all. Empty on a CPU."""
    prefix_cache: bool = True
    lora_rank: int | None = None
    """Serves adapters up to this rank; None: none."""
    changing: bool = False
    """Weights are reloaded, so vLLM's own routes for that are open."""
    port: int | None = None
    """A port of 127.0.0.1; None: a socket in a directory that is this user's alone."""


class Server:
    """A process from its start to its end. It never runs twice: to start again, make another."""

    def __init__(self, settings: Settings, model: str, scratch: Path) -> None:
        if settings.port:
            _refuse_taken(settings.port)
        self.settings = settings
        self._room = Path(tempfile.mkdtemp(prefix="ajet-"))
        """Of this server: its socket, and its working directory. Short, for a socket's path has 107 bytes at most."""
        self._socket = self._room / "vllm.sock"
        self._url = f"http://127.0.0.1:{settings.port}" if settings.port else "http://localhost"
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        with settings.log.open("ab") as into:
            self._log_from = into.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).with_name("keeper.py")), str(os.getpid()), str(scratch),
                 str(self._room), "--", *command(settings, model, self._socket)],
                stdin=subprocess.DEVNULL, stdout=into, stderr=subprocess.STDOUT, cwd=self._room,
                env=environment(settings, os.environ), start_new_session=True,
            )  # fmt: skip
        self.endpoint = Endpoint(self._url, "none", timeout=_REPLY_SECONDS, retries=0, transport=self._transport())

    def _transport(self) -> httpx.AsyncHTTPTransport:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        return httpx.AsyncHTTPTransport(uds=None if self.settings.port else str(self._socket), limits=limits)

    @property
    def pid(self) -> int:
        """Of the process that holds the server; its only child is vLLM."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ready(self) -> None:
        """Wait until it answers. Raises EngineError with what its log says where it ends instead."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if not self.alive:
                raise EngineError(f"vLLM did not start: {self.cause()}")
            if await self._answers():
                return
            await asyncio.sleep(_TICK)
        raise EngineError(f"vLLM did not start within {START_SECONDS:.0f} s: {self.cause()}")

    async def _answers(self) -> bool:
        import httpx

        try:
            async with httpx.AsyncClient(transport=self._transport(), timeout=5.0) as client:
                return (await client.get(f"{self._url}/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def gone(self, within: float) -> bool:
        """Whether it has ended, or does so within some seconds."""
        until = time.monotonic() + within
        while self.alive and time.monotonic() < until:  # noqa: ASYNC110  (a process tells nobody that it ends)
            await asyncio.sleep(_TICK)
        return not self.alive

    async def control(self, route: str, body: Mapping[str, object] | None = None) -> str:
        """POST to one of the server's own routes, over a connection of its own. Raises EngineError."""
        import httpx

        try:
            async with httpx.AsyncClient(transport=self._transport(), timeout=_CONTROL_SECONDS) as client:
                response = await client.post(f"{self._url}/{route}", json=dict(body or {}))
        except httpx.HTTPError as error:
            raise EngineError(f"{route}: {type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code >= 400:
            raise EngineError(f"{route} answered {response.status_code}: {response.text[:600]}")
        return response.text

    def log_text(self, since: int | None = None) -> str:
        """Its log, from its start or from a position that `logged` returned."""
        with self.settings.log.open("rb") as file:
            file.seek(self._log_from if since is None else since)
            return file.read().decode(errors="replace")

    def logged(self) -> int:
        return self.settings.log.stat().st_size

    def cause(self) -> str:
        """Why it ended, by its exit code and its log, and where the whole log is."""
        code = self._process.poll()
        ended = "" if code is None else f"exit code {code}; " if code < 128 else f"killed by signal {code - 128}; "
        return f"{ended}{cause_in(self.log_text())}\nLog file: {self.settings.log}"

    async def stop(self) -> None:
        """End it and everything that it started, at once where it does not end by itself."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._process.wait)
        await self.endpoint.aclose()
        shutil.rmtree(self._room, ignore_errors=True)


def command(settings: Settings, model: str, socket_path: Path) -> list[str]:
    """The server's command line, for weights at `model`."""
    where = ["--uds", str(socket_path)]
    if settings.port:
        where = ["--host", "127.0.0.1", "--port", str(settings.port)]
    arguments = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", *where,
        "--model", model,
        "--tokenizer", settings.tokenizer,
        "--served-model-name", settings.name,
        "--dtype", settings.dtype,
        "--max-model-len", str(settings.max_model_len),
        "--max-num-seqs", str(settings.max_num_seqs),
        "--tensor-parallel-size", str(settings.tensor_parallel_size),
        "--seed", str(settings.seed),
        "--logprobs-mode", "processed_logprobs",
        "--generation-config", "vllm",
        "--structured-outputs-config", '{"backend": "guidance"}',  # the library that the trainer makes masks with
        "--disable-uvicorn-access-log",
        "--disable-log-stats",
        "--enable-prefix-caching" if settings.prefix_cache else "--no-enable-prefix-caching",
    ]  # fmt: skip
    if settings.gpus == ():
        # A prompt that is read in parts ends the CPU build: it cannot wind a request's generator back.
        whole = max(settings.max_model_len, settings.max_num_seqs, _LEAST_BATCH)
        arguments += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", str(whole)]
    else:
        arguments += ["--gpu-memory-utilization", str(settings.memory_share)]
    if settings.lora_rank is not None:
        rank = next((known for known in _RANKS if known >= settings.lora_rank), settings.lora_rank)
        arguments += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
    return arguments


def environment(settings: Settings, variables: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: the run's own, with what the server needs; what the user has set of it stays."""
    needed = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",  # else a connection may be closed while a request is on its way
        "VLLM_SERVER_DEV_MODE": str(int(settings.changing and settings.lora_rank is None)),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(int(settings.lora_rank is not None)),
    }
    usual = {}
    if settings.gpus == ():
        usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    elif settings.gpus is not None:
        visible = [device for device in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        needed["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i] if visible else str(i) for i in settings.gpus)
    if (plugins := _plugins()) is not None:
        usual["VLLM_PLUGINS"] = plugins
    return {**usual, **variables, **needed}


def _plugins() -> str | None:
    """The plug-ins of vLLM but Trinity-RFT's, which needs the vLLM that it was made for; None: all of them."""
    groups = [group for group in entry_points().groups if group.startswith("vllm.")]
    plugins = [plugin for group in groups for plugin in entry_points(group=group)]
    names = [plugin.name for plugin in plugins if not plugin.value.startswith("trinity.")]
    return None if len(names) == len(plugins) else ",".join(names)


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EngineError(
                f"vLLM cannot listen at 127.0.0.1:{port} ({error.strerror}); set debug.debug_vllm_port to a free port"
            ) from error


def cause_in(text: str) -> str:
    """The first error of a log that names a cause, and its last lines."""
    lines = [_PREFIX.sub("", line).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip()]
    errors = [line for line in lines if _ERROR.match(line) and not any(h in line for h in _HOLLOW)]
    if errors:
        return errors[0][:500]
    return "its last output:\n  " + "\n  ".join(line[:200] for line in lines[-8:]) if lines else "it printed nothing"
