"""A vLLM server process: its command and environment, its start and end, and the errors in its
log."""

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
"""Time limit of a start, in which large weights are read or downloaded."""
_REPLY_SECONDS = 24 * 3600.0
"""Time limit of a reply. Episodes have their own limits, and a dead server closes its
connections."""
_CONTROL_SECONDS = 600.0
_TICK = 0.2
_LEAST_BATCH = 2048
"""Minimum tokens of a pass."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum LoRA ranks that vLLM supports."""
LARGEST_RANK = _RANKS[-1]
"""Largest rank of an adapter that vLLM serves."""
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|\.error): \S")
_HOLLOW = (
    "See root cause above",
    "Engine core initialization failed",
    "Worker failed",
    "WorkerProc init",
)
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
    """Fraction of each GPU's memory."""
    gpus: tuple[int, ...] | None = None
    """Visible GPUs, numbered as in this process; None: all. Empty on a CPU."""
    prefix_cache: bool = True
    lora_rank: int | None = None
    """Serves adapters up to this rank; None: none."""
    changing: bool = False
    """Weights are reloaded, through vLLM's development routes."""
    takes_pictures: bool = False
    """Prompts may have pictures; needs `token_route`."""
    token_route: bool = False
    """Requests go to the route of `token_prompts` and not to that of completions."""
    port: int | None = None
    """A port of 127.0.0.1; None: a socket in a private directory."""


class Server:
    """A server process. To restart it, make a new one."""

    def __init__(self, settings: Settings, model: str, scratch: Path) -> None:
        if settings.port:
            _refuse_taken(settings.port)
        self.settings = settings
        self._room = Path(tempfile.mkdtemp(prefix="ajet-"))
        """The working directory, with the socket. Its path is short, as a socket's path has at most
        107 bytes."""
        self._socket = self._room / "vllm.sock"
        if settings.port:
            self._url = f"http://127.0.0.1:{settings.port}"
        else:
            self._url = "http://localhost"
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        with settings.log.open("ab") as into:
            self._log_from = into.tell()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    str(Path(__file__).with_name("keeper.py")),
                    str(os.getpid()),
                    str(scratch),
                    str(self._room),
                    "--",
                    *command(settings, model, self._socket),
                ],
                stdin=subprocess.DEVNULL,
                stdout=into,
                stderr=subprocess.STDOUT,
                cwd=self._room,
                env=environment(settings, os.environ),
                start_new_session=True,
            )
        self.endpoint = Endpoint(
            self._url, "none", timeout=_REPLY_SECONDS, retries=0, transport=self._transport()
        )

    def _transport(self) -> httpx.AsyncHTTPTransport:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        return httpx.AsyncHTTPTransport(
            uds=None if self.settings.port else str(self._socket), limits=limits
        )

    @property
    def pid(self) -> int:
        """Process id of the keeper, whose only child is vLLM."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ready(self) -> None:
        """Wait until it answers. Raises EngineError with the cause in its log if it ends
        instead."""
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
        """Whether it has ended, or ends within some seconds."""
        until = time.monotonic() + within
        while self.alive and time.monotonic() < until:  # noqa: ASYNC110  (there is no event for a process's end)
            await asyncio.sleep(_TICK)
        return not self.alive

    async def control(self, route: str, body: Mapping[str, object] | None = None) -> str:
        """POST to a control route of the server, over a new connection. Raises EngineError."""
        import httpx

        try:
            async with httpx.AsyncClient(
                transport=self._transport(), timeout=_CONTROL_SECONDS
            ) as client:
                response = await client.post(f"{self._url}/{route}", json=dict(body or {}))
        except httpx.HTTPError as error:
            raise EngineError(f"{route}: {type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code >= 400:
            raise EngineError(f"{route} answered {response.status_code}: {response.text[:600]}")
        return response.text

    def log_text(self, since: int | None = None) -> str:
        """Its log, from the server's start or from a position returned by `logged`."""
        with self.settings.log.open("rb") as file:
            file.seek(self._log_from if since is None else since)
            return file.read().decode(errors="replace")

    def logged(self) -> int:
        return self.settings.log.stat().st_size

    def cause(self) -> str:
        """Why it ended, by exit code and log, with the path of the log."""
        code = self._process.poll()
        ended = (
            ""
            if code is None
            else f"exit code {code}; "
            if code < 128
            else f"killed by signal {code - 128}; "
        )
        return f"{ended}{cause_in(self.log_text())}\nLog file: {self.settings.log}"

    async def stop(self) -> None:
        """End the server and its processes."""
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
        # Chunked prefill crashes the CPU build, which cannot rewind a request's generator.
        whole = max(settings.max_model_len, settings.max_num_seqs, _LEAST_BATCH)
        arguments += [
            "--enforce-eager",
            "--no-enable-chunked-prefill",
            "--max-num-batched-tokens",
            str(whole),
        ]
    else:
        arguments += ["--gpu-memory-utilization", str(settings.memory_share)]
    if settings.token_route:
        arguments.append("--enable-scale-out")
    if settings.lora_rank is not None:
        rank = maximum_rank(settings.lora_rank)
        arguments += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
    return arguments


def maximum_rank(rank: int) -> int:
    """The smallest maximum of vLLM that admits adapters of a rank."""
    for known in _RANKS:
        if known >= rank:
            return known
    return rank


def environment(settings: Settings, variables: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: the run's, with variables for vLLM; some of them the user may
    override."""
    needed = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": (
            "3600"
        ),  # else a connection may be closed while a request is on its way
        "VLLM_SERVER_DEV_MODE": str(int(settings.changing and settings.lora_rank is None)),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(int(settings.lora_rank is not None)),
    }
    usual = {}
    if settings.gpus == ():
        usual = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    elif settings.gpus is not None:
        visible = [
            device for device in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if device
        ]
        needed["CUDA_VISIBLE_DEVICES"] = ",".join(
            visible[i] if visible else str(i) for i in settings.gpus
        )
    # Trinity-RFT's plug-in needs the vLLM version that it was made for.
    groups = [group for group in entry_points().groups if group.startswith("vllm.")]
    plugins = [plugin for group in groups for plugin in entry_points(group=group)]
    names = [plugin.name for plugin in plugins if not plugin.value.startswith("trinity.")]
    if len(names) < len(plugins):
        usual["VLLM_PLUGINS"] = ",".join(names)
    return {**usual, **variables, **needed}


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EngineError(
                f"vLLM cannot listen at 127.0.0.1:{port} ({error.strerror}); set"
                " debug.debug_vllm_port to a free port"
            ) from error


def cause_in(text: str) -> str:
    """The first error in a log that names a cause, else its last lines."""
    lines = [_PREFIX.sub("", line).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if line.strip()]
    errors = [line for line in lines if _ERROR.match(line) and not any(h in line for h in _HOLLOW)]
    if errors:
        return errors[0][:500]
    if lines:
        return "its last output:\n  " + "\n  ".join(line[:200] for line in lines[-8:])
    return "it printed nothing"
