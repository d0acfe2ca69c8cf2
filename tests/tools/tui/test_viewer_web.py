"""`ajet trace view --web` over real HTTP and a real websocket: the token, other origins, the
end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.waiting import HANGS, is_running, until_async

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ARGUMENTS = [sys.executable, "-m", "ajet", "trace", "view"]


@contextmanager
def served(*arguments: str, **named: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the URL that it prints."""
    process = subprocess.Popen(
        [*ARGUMENTS, *arguments, "--web"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **named,
    )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if "://" in line), "")
        found = re.search(r"https?://\S+", line)
        assert found, process.wait()
        yield process, found[0]
    finally:
        process.kill()
        process.wait()


def browser() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))


async def status_of(session: aiohttp.ClientSession, url: str, **named: Any) -> int:
    async with session.get(url, **named) as answer:
        return answer.status


def viewers(of: int) -> list[int]:
    """The viewers that a server has started and that still run."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,stat"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listed.splitlines()[1:]]
    return [int(pid) for pid, parent, state, *_ in rows if int(parent) == of and "Z" not in state]


async def shows(terminal: aiohttp.ClientWebSocketResponse, text: bytes) -> None:
    drawn = b""
    while text not in drawn:
        message = await terminal.receive(HANGS)
        assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), message
        drawn += message.data if message.type is aiohttp.WSMsgType.BINARY else b""


async def test_only_who_has_the_token_gets_in_and_ctrl_c_ends_all(training_trace: Path) -> None:
    with served(str(training_trace)) as (process, url):
        base, websocket = url.partition("?")[0], url.partition("?")[0].replace("http", "ws") + "ws"
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{30,}", url)
        async with browser() as stranger:
            for place in (
                base,
                f"{base}?token=wrong",
                f"{base}static/js/textual.js",
                f"{base}ws",
                f"{base}ws?{url}",
            ):
                assert await status_of(stranger, place) == 403
            forged = {"Cookie": "ajet_view=wrong; token=wrong"}
            assert await status_of(stranger, base, headers=forged) == 403
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await stranger.ws_connect(websocket)
            assert refused.value.status == 403
        assert viewers(process.pid) == [], "nothing was started for a stranger"
        async with browser() as known:
            async with known.get(f"{url}&fontsize=20") as page:
                text = await page.text()
                assert (
                    page.status == 200
                    and "token" not in str(page.url)
                    and "fontsize=20" in str(page.url)
                )
            assert f'data-session-websocket-url="{websocket}"' in text and "googleapis" not in text
            assert await status_of(known, f"{base}static/js/textual.js") == 200
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await known.ws_connect(websocket, origin="http://127.0.0.1:1")
            async with known.ws_connect(
                f"{websocket}?width=100&height=30", origin=base.rstrip("/")
            ) as terminal:
                await shows(terminal, b"math")
                running = viewers(process.pid)
                assert running
                process.send_signal(signal.SIGINT)
                await asyncio.to_thread(process.wait)
        assert process.returncode == 0
        await until_async(lambda: not any(map(is_running, running)))


async def test_a_server_that_is_killed_ends_its_viewers(training_trace: Path) -> None:
    with served(str(training_trace)) as (process, url):
        async with browser() as known:
            async with known.get(url) as page:
                assert page.status == 200
            async with known.ws_connect(
                f"{url.partition('?')[0]}ws", origin=url.partition("/?")[0]
            ) as terminal:
                await shows(terminal, b"math")
                running = viewers(process.pid)
                assert running
                process.kill()
                await until_async(lambda: not any(map(is_running, running)))


async def test_another_name_for_this_machine(training_trace: Path) -> None:
    """A port forwarded under another name and number: the page leads back to where it was asked."""
    with served(str(training_trace)) as (_, url):
        async with browser() as session:
            named = url.replace("127.0.0.1", "localhost")
            async with session.get(named) as page:
                assert "ws://localhost:" in await page.text()


async def test_a_port_that_is_taken_is_an_error(training_trace: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*ARGUMENTS, str(training_trace), "--web", "--port", port],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 2 and f"127.0.0.1:{port} (Address already in use)" in done.stderr
    assert "choose another --port" in done.stderr and "Traceback" not in done.stderr


async def test_it_ends_with_the_process_that_started_it(training_trace: Path) -> None:
    with served(str(training_trace), "--until-eof", stdin=subprocess.PIPE) as (process, _):
        assert process.stdin is not None and process.poll() is None
        process.stdin.close()
        await asyncio.to_thread(process.wait)
        assert process.returncode == 0


def started(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A short debug run of the starter project with `--with-logview`."""
    subprocess.run(
        [sys.executable, "-m", "ajet", "init", "demo"],
        cwd=directory,
        check=True,
        capture_output=True,
    )
    agent = directory / "demo" / "agent.py"
    agent.write_text(agent.read_text() + "\n\nimport time\n\ntime.sleep(4)\n")
    named = [
        "agent.py:solve",
        "--judge",
        "agent.py:exact",
        "--tasks",
        "tasks.jsonl",
    ]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "ajet",
            "train",
            *named,
            "--backbone",
            "debug",
            "ajet.model.scripted=replies.py:reply",
            "--with-logview",
        ],
        cwd=directory / "demo",
        env={**os.environ, "PYTHONPATH": str(Path.cwd()), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_with_logview_serves_beside_a_run_and_ends_with_it(tmp_path: Path) -> None:
    done = started(tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"The viewer is at http://127\.0\.0\.1:(\d+)/\?token=", done.stderr)
    assert found, done.stderr
    time.sleep(0.2)
    with socket.socket() as again:
        assert again.connect_ex(("127.0.0.1", int(found[1]))) != 0, "it ended with the run"


def test_with_logview_that_fails_is_one_warning(tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "textual_serve"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ModuleNotFoundError('gone', name='textual_serve')")
    done = started(tmp_path, PYTHONPATH=os.pathsep.join([str(broken.parent), str(Path.cwd())]))
    assert done.returncode == 0 and "What is 17 + 25?" in done.stdout
    assert done.stderr.count("the viewer did not start") == 1, done.stderr
    assert "pip install" in done.stderr and "Traceback" not in done.stderr
