"""What a call costs in a gateway: processor time of ours and of other projects', in front of one
local endpoint.

Each gateway is a process of its own, and each but ours is installed in an environment of its own.
Ours and rLLM's record each call on disk (DuckDB, SQLite), agent-lightning's in memory, LiteLLM's
proxy nowhere. The endpoint gives token ids and log-probabilities, as vLLM does. Linux only:
processor time is read from /proc.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from ajet_sdk.engines.remote import RemoteEngine
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from tests.bench import Figure

LEVELS = (16, 128)
"""Calls at once."""
CALLS = 512
"""In a round."""
ROUNDS = 3
EPISODES = 384
START_SECONDS = 180
GOAL = 1.0
"""CPU-ms a call of ours."""
TEXT = (
    "A gateway passes a question on to the model that is asked and records what it answered. " * 14
)

SETTINGS = {
    "PYTHONUNBUFFERED": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no download of prices
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": (
        "true"
    ),  # it listens on loopback, for a minute
}
"""Variables of every gateway's environment."""

console = Console(stderr=True)


class Unavailable(Exception):
    """A peer that cannot be installed or started here."""


@dataclass(frozen=True)
class Peer:
    """A gateway: what is installed for it, how it is started, and where each episode's calls go.

    `command` gets the folder of its environment, a folder for its files, a port and the endpoint's
    URL. `paths` are one for each episode; a gateway without them prints its URLs and keys itself,
    as `URLS [[url, key], ...]`.
    """

    name: str
    install: tuple[str, ...]
    command: Callable[[Path, Path, int, str], list[str]]
    paths: tuple[str, ...] | None = None


AGENT_LIGHTNING = """
import asyncio, json, sys
import agentlightning as agl

async def main(port, endpoint, count):
    store = agl.InMemoryLightningStore(thread_safe=True)
    model = {"model_name": "policy", "litellm_params": {"model": "hosted_vllm/policy", "api_base": endpoint}}
    proxy = agl.LLMProxy(port=port, host="127.0.0.1", model_list=[model], store=store, launch_mode="thread")
    await proxy.start()
    rollouts = [await store.start_rollout(input={}) for _ in range(count)]
    urls = [
        f"http://127.0.0.1:{port}/rollout/{one.rollout_id}/attempt/{one.attempt.attempt_id}/v1" for one in rollouts
    ]
    print("URLS", json.dumps([[url, "none"] for url in urls]), flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
"""


def _ajet(_: Path, folder: Path, port: int, endpoint: str) -> list[str]:
    return _program("gateway", endpoint, str(folder / "trace.duckdb"))


def _litellm(venv: Path, folder: Path, port: int, endpoint: str) -> list[str]:
    config = folder / "config.yaml"
    params = {"model": "hosted_vllm/policy", "api_base": endpoint}
    config.write_text(
        json.dumps({"model_list": [{"model_name": "policy", "litellm_params": params}]})
    )
    return [
        str(venv / "bin/litellm"),
        "--config",
        str(config),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]


def _agent_lightning(venv: Path, folder: Path, port: int, endpoint: str) -> list[str]:
    return [str(venv / "bin/python"), "-c", AGENT_LIGHTNING, str(port), endpoint, str(EPISODES)]


def _rllm(venv: Path, folder: Path, port: int, endpoint: str) -> list[str]:
    program = [str(venv / "bin/rllm-model-gateway"), "--host", "127.0.0.1", "--port", str(port)]
    return [
        *program,
        "--db-path",
        str(folder / "traces.db"),
        "--worker",
        endpoint,
        "--log-level",
        "warning",
    ]


AJET = Peer("ajet", (), _ajet)
LITELLM = Peer("LiteLLM's proxy, no recording", ("litellm[proxy]",), _litellm, ("/v1",) * EPISODES)
LIGHTNING = Peer("agent-lightning's proxy", ("agentlightning",), _agent_lightning)


def _rllm_peer(checkout: Path) -> Peer:
    """Without what it needs for chat templates of its own, which is used for token accumulation
    alone."""
    needs = ("fastapi", "uvicorn", "httpx", "pydantic", "aiosqlite", "PyYAML")
    paths = tuple(f"/sessions/{number}/v1" for number in range(EPISODES))
    return Peer(
        "rLLM's gateway", (*needs, str(checkout.resolve() / "rllm-model-gateway")), _rllm, paths
    )


def main(venvs: Path | None = None, rllm: Path | None = None) -> list[Figure]:
    """`venvs` keeps the environments for the next time; `rllm` is a checkout, for rLLM is in no
    package index."""
    figures = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        _process(_program("endpoint"), Path(temporary)) as endpoint,
    ):
        [[url, _]] = endpoint.urls()
        for number, peer in enumerate(
            (AJET, LITELLM, LIGHTNING, *([_rllm_peer(rllm)] if rllm else []))
        ):
            folder = Path(temporary) / str(number)
            try:
                venv = _environment(peer, venvs or Path(temporary) / "venvs")
                figures += _measure(peer, venv, folder, url)
            except (Unavailable, aiohttp.ClientError, asyncio.TimeoutError) as reason:
                console.print(f"{peer.name} is left out: {reason}", markup=False)
    if rllm is None:
        console.print(
            "rLLM's gateway is left out: it is in no package index; name a checkout with --rllm"
            " FOLDER"
        )
    return figures


def _measure(peer: Peer, venv: Path, folder: Path, endpoint: str) -> list[Figure]:
    folder.mkdir()
    port = _free_port()
    with _process(peer.command(venv, folder, port, endpoint), folder) as gateway:
        targets = [
            [f"http://127.0.0.1:{port}{path}", "none"] for path in peer.paths or ()
        ] or gateway.urls()
        costs = asyncio.run(_costs(gateway, targets))
    if peer is AJET:
        sent = 1 + CALLS // 4 + len(LEVELS) * ROUNDS * CALLS
        rows = open_trace(folder / "trace.duckdb").query(
            "SELECT count(*) FROM calls WHERE len(output_ids) > 0"
        )
        stored = rows[0][0].as_py()
        if stored != sent:
            raise RuntimeError(f"{stored} of {sent} calls were recorded with their ids")
    goal = (f"<= {GOAL}",) if peer is AJET else ()
    return [
        Figure(
            f"{peer.name}, {level} at once",
            cost,
            "CPU-ms/call",
            *goal,
            *([cost <= GOAL] if goal else []),
        )
        for level, cost in costs.items()
    ]


async def _costs(gateway: _Process, targets: list[list[str]]) -> dict[int, float]:
    """CPU-ms a call at each level: the median of rounds in turn, until what was put off is done
    too."""
    costs: dict[int, list[float]] = {level: [] for level in LEVELS}
    await _first_reply(gateway, targets[0])
    await _send(targets, CALLS // 4, LEVELS[0], "warm-up")
    for number in range(ROUNDS):
        for level in LEVELS:
            before = await gateway.cpu_seconds()
            await _send(targets, CALLS, level, f"{number} {level}")
            costs[level].append((await gateway.cpu_seconds() - before) * 1000 / CALLS)
    return {level: statistics.median(values) for level, values in costs.items()}


async def _send(targets: list[list[str]], count: int, at_once: int, what: str) -> None:
    """Calls over connections of their own: a gateway closes those that nobody used for a while."""
    numbers = iter(range(count))
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def sender() -> None:
            for number in numbers:
                status, text = await _post(
                    session, targets[number % len(targets)], f"{what} {number}"
                )
                if status != 200:
                    raise Unavailable(f"a call was answered {status}: {text[:500]}")

        await asyncio.gather(*(sender() for _ in range(at_once)))


async def _post(
    session: aiohttp.ClientSession, target: list[str], question: str
) -> tuple[int, str]:
    url, key = target
    messages = [
        {"role": "system", "content": TEXT},
        {"role": "user", "content": f"{question}: what is recorded?"},
    ]
    body = {"model": "policy", "messages": messages, "temperature": 1.0}
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(f"{url}/chat/completions", json=body, headers=headers) as response:
        return response.status, await response.text()


async def _first_reply(gateway: _Process, target: list[str]) -> None:
    last = ""
    for _ in gateway.while_starting():
        try:
            return await _send([target], 1, 1, "first")
        except (aiohttp.ClientConnectionError, Unavailable) as error:
            last = str(error)
        await asyncio.sleep(0.5)
    raise Unavailable(f"it answered no call: {last}")


@dataclass
class _Process:
    """A program whose output is in a file."""

    popen: subprocess.Popen[bytes]
    log: Path

    def while_starting(self) -> Iterator[None]:
        """Until it should have started; raises Unavailable with the end of its output where it
        ended."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.popen.poll() is not None:
                raise Unavailable(f"it ended while starting: {self.log.read_text()[-1000:]}")
            yield

    def urls(self) -> list[list[str]]:
        for _ in self.while_starting():
            for line in self.log.read_text().splitlines():
                if line.startswith("URLS "):
                    return json.loads(line[5:])
            time.sleep(0.2)
        raise Unavailable(f"it did not start: {self.log.read_text()[-1000:]}")

    async def cpu_seconds(self) -> float:
        """Of it and its children, once they have come to rest."""
        now = _cpu_seconds(self.popen.pid)
        for _ in range(20):
            await asyncio.sleep(0.5)
            before, now = now, _cpu_seconds(self.popen.pid)
            if now - before <= 0.02:
                break
        return now


def _cpu_seconds(pid: int) -> float:
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        number = int(stat.parent.name)
        parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks[one] for one in family) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _process(command: list[str], folder: Path) -> Iterator[_Process]:
    """Started in a group of its own. It may end by itself when its input is closed; else the group
    is ended."""
    log = folder / "log"
    environment = os.environ | SETTINGS
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        yield _Process(popen, log)
    finally:
        assert popen.stdin is not None
        popen.stdin.close()
        with suppress(ProcessLookupError):
            if command[:3] != _program():
                os.killpg(popen.pid, signal.SIGTERM)
            try:
                popen.wait(30)
            finally:
                os.killpg(popen.pid, signal.SIGKILL)


def _environment(peer: Peer, venvs: Path) -> Path:
    """The peer's virtual environment, made once for the same requirements."""
    if not peer.install:
        return Path(sys.prefix)
    venv = venvs / peer.install[-1].rpartition("/")[2].partition("[")[0]
    mark = venv / "installed"
    """What is installed; empty until all of it is. A folder without it is somebody else's."""
    if mark.exists() and mark.read_text() == "\n".join(peer.install):
        return venv
    if venv.exists() and not mark.exists():
        raise Unavailable(f"{venv} is in the way of its environment")
    console.print(f"installing {peer.name} in {venv} ...", style="dim", markup=False)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    mark.touch()
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet"]
    *needs, last = peer.install
    steps = [[*pip, *needs], [*pip, "--no-deps", last]] if needs else [[*pip, last]]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode != 0:
            raise Unavailable(f"it could not be installed: {done.stderr[-500:]}")
    mark.write_text("\n".join(peer.install))
    return venv


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# The programs of this repository


def _program(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.bench.peers", *arguments]


def run_gateway(endpoint: str, trace: str) -> None:
    """Our gateway with open episodes, until its input is closed; then what it recorded is
    complete."""
    engine = RemoteEngine(endpoint, "none", "policy")
    with TraceWriter(Path(trace)) as writer, Gateway(writer) as gateway:
        handles = [
            gateway.open(EpisodeSpec(f"episode{number}", engine)).model()
            for number in range(EPISODES)
        ]
        print(
            "URLS",
            json.dumps([[handle.base_url, handle.api_key] for handle in handles]),
            flush=True,
        )
        sys.stdin.read()


async def run_endpoint() -> None:
    """Answers everything with one reply, whose prompt ids differ in one place."""
    numbers = itertools.count()
    content = [
        {"token": "word ", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in range(64)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "word " * 64},
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "token_ids": list(range(1000, 1064)),
    }
    usage = {"prompt_tokens": 400, "completion_tokens": 64, "total_tokens": 464}
    prompt = [*range(2000, 2200), 123456, *range(3000, 3199)]
    reply = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [choice],
        "usage": usage,
        "prompt_token_ids": prompt,
    }
    before, after = json.dumps(reply).encode().split(b"123456")
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    head %= len(before) + 6 + len(after)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: *(\d+)", request, re.IGNORECASE)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(b"%s%s%d%s" % (head, before, 100_000 + next(numbers) % 50_000, after))
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=1024)
    print(
        "URLS",
        json.dumps([[f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "none"]]),
        flush=True,
    )
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    if sys.argv[1] == "endpoint":
        asyncio.run(run_endpoint())
    else:
        run_gateway(*sys.argv[2:])
