"""`ajet trace view --web` over real HTTP and a real websocket: the token, other origins, the
end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from ajet_sdk.trace.reader import open_trace
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


async def test_an_address_opens_its_screen_and_follows_the_viewer(training_trace: Path) -> None:
    with served(str(training_trace)) as (_, url):
        base = url.partition("/?")[0]
        async with browser() as known:
            assert await status_of(known, url) == 200
            async with known.ws_connect(f"{base}/ws/aaaa", origin=base) as terminal:
                assert await address_told(terminal) == "#aaaa0001"
                await terminal.send_json(["stdin", "\x1b"])  # back to the list of runs
                assert await address_told(terminal) == "#"
            hostile = "/ws/%24%28touch%20ran%29%20--web"
            async with known.ws_connect(base + hostile, origin=base) as terminal:
                assert await address_told(terminal) == "#"  # what is shown, not what was asked for
                assert not Path("ran").exists()


async def address_told(terminal: aiohttp.ClientWebSocketResponse) -> str:
    """The next address that the viewer asks the browser to show."""
    while True:
        message = await terminal.receive(HANGS)
        assert message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT), message
        if message.type is aiohttp.WSMsgType.TEXT and message.json()[0] == "open_url":
            told = message.json()[1]
            assert told["new_tab"] is False
            return str(told["url"])


async def test_a_list_and_a_query_have_addresses(training_trace: Path) -> None:
    with served(str(training_trace)) as (_, url):
        base = url.partition("/?")[0]
        async with browser() as known:
            assert await status_of(known, url) == 200
            texts = "50%/?#%2F+&", "a/b?c#d%2F:+ %C3"
            for text, address in zip(
                texts,
                (f'episodes::task~"{texts[0]}"', f"sql:SELECT '{texts[1]}' AS x,\n 1"),
                strict=True,
            ):
                linked = URL(f"{base}/ws/{quote(address, safe='')}", encoded=True)
                async with known.ws_connect(linked, origin=base) as terminal:
                    if address.startswith("sql:"):
                        await shows(terminal, b"F5 runs it")
                        await terminal.send_json(["stdin", "\x1b[15~"])  # F5
                    await shows(terminal, text.encode())
            async with known.ws_connect(f"{base}/ws", origin=base) as terminal:
                await shows(terminal, b"math")
                await terminal.send_json(["stdin", "e"])
                assert await address_told(terminal) == "#episodes:cccc0003:"
            for place in ("/ws/a%00b", "/ws?width=100000&height=30", "/ws?width=-1"):
                assert await status_of(known, f"{base}{place}") == 400
            async with known.ws_connect(f"{base}/ws", origin=base) as terminal:
                await shows(terminal, b"math")
                for size in (
                    {"width": 100_000, "height": 100_000},
                    {"width": "x", "height": None},
                    {"width": -1, "height": 9},
                ):
                    await terminal.send_json(["resize", size])
                await terminal.send_json(["resize", {"width": 50, "height": 10}])
                await terminal.send_json(
                    ["stdin", "e"]
                )  # it still answers, and draws as far as there is room
                assert await address_told(terminal) == "#episodes:cccc0003:"


ANA, BEN = "ana-" + "a" * 20, "ben-" + "b" * 20


def tokens_in(folder: Path, *lines: str, mode: int = 0o600) -> Path:
    file = folder / "tokens"
    file.write_text("# who may look\n\n" + "".join(f"{line}\n" for line in lines))
    file.chmod(mode)
    return file


async def signed_in(session: aiohttp.ClientSession, base: str, token: str) -> None:
    async with session.get(f"{base}/?token={token}") as page:
        assert page.status == 200 and token not in str(page.url)


async def test_people_with_tokens_only_read_and_are_locked_out(
    training_trace: Path, tmp_path: Path
) -> None:
    file = tokens_in(tmp_path, f"ana {ANA}", f"ben\t{BEN}  # until June")
    before = training_trace.read_bytes()
    [episode] = (
        open_trace(training_trace)
        .query("SELECT min(episode_id) AS id FROM episodes")["id"]
        .to_pylist()
    )
    with served(str(training_trace), "--tokens", str(file), cwd=tmp_path) as (process, url):
        assert url.endswith("/?token=TOKEN") and process.stdout is not None
        base = url.partition("/?")[0]
        journal = training_trace.with_name(
            f"{training_trace.name}.1-0.journal"
        )  # of a process killed meanwhile
        journal.write_text(json.dumps({"Call": {"call_id": "killed", "episode_id": episode}}))
        async with browser() as ana, browser() as ben, browser() as stranger:
            for given in ("TOKEN", "", "ana", ANA[:-1], f"{ANA}%20", "#"):
                assert await status_of(stranger, f"{base}/?token={given}") == 403
            await signed_in(ana, base, ANA)
            await signed_in(ben, base, BEN)
            async with ana.ws_connect(f"{base}/ws/{episode}", origin=base) as terminal:
                await shows(terminal, b"attempt 0")
                await terminal.send_json(["stdin", "f"])
                await shows(terminal, b"this viewer only reads")
            async with (
                ana.ws_connect(f"{base}/ws/sql:SELECT%201", origin=base) as terminal,
                ben.ws_connect(f"{base}/ws", origin=base) as other,
            ):
                # a link runs nothing by itself; both are read at once, since who does not read
                # answers no ping
                await asyncio.gather(shows(other, b"math"), shows(terminal, b"F5 runs it"))
                await other.send_json(["stdin", "e"])
                assert await address_told(other) == "#episodes:cccc0003:"
                await terminal.send_json(["stdin", "\x1b[15~"])  # F5
                await shows(terminal, b"1 row")
                await terminal.send_json(["stdin", "\x1b[19~"])  # F8
                await shows(terminal, b"this viewer only reads")
                tokens_in(tmp_path, f"ben {BEN}")
                assert await status_of(ana, f"{base}/") == 403
                while (await terminal.receive(HANGS)).type not in (
                    aiohttp.WSMsgType.CLOSE,
                    aiohttp.WSMsgType.CLOSED,
                ):
                    pass  # the viewer that was open is closed
                await other.send_json(["stdin", "?"])
                await shows(other, b"escape closes")
                tokens_in(tmp_path, f"ben {BEN}", "ana short")
                assert await status_of(ben, f"{base}/") == 403, (
                    "nobody gets in by a file that cannot be read"
                )
        process.send_signal(signal.SIGINT)
        told = process.stdout.read()
    for line in (
        rf"[-\d]+ [:\d]+ ana opened #{episode}$",
        "ben opened #$",
        "ben opened #episodes:cccc0003:$",
        "ana left #sql:SELECT 1$",
        "line 4: expected a name",
    ):
        assert re.search(line, told, re.M), told
    assert ANA not in told and BEN not in told
    assert (
        training_trace.read_bytes() == before
        and journal.exists()
        and [*tmp_path.glob("*.csv")] == []
    )


async def test_a_person_has_eight_viewers(training_trace: Path, tmp_path: Path) -> None:
    with served(str(training_trace), "--tokens", str(tokens_in(tmp_path, f"ana {ANA}"))) as (
        process,
        url,
    ):
        base = url.partition("/?")[0]
        async with browser() as ana, AsyncExitStack() as stack:
            await signed_in(ana, base, ANA)
            for _ in range(8):
                await stack.enter_async_context(ana.ws_connect(f"{base}/ws", origin=base))
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await ana.ws_connect(f"{base}/ws", origin=base)
            assert refused.value.status == 429
            process.send_signal(signal.SIGINT)
            await asyncio.to_thread(process.wait)


async def test_behind_a_proxy_with_tls(training_trace: Path) -> None:
    with served(str(training_trace), "--url", "https://traces.example/") as (_, url):
        assert url.startswith("https://traces.example/?token=")
    with served(
        str(training_trace), "--url", "https://traces.example", "--port", str(port := free_port())
    ) as (_, url):
        here, asked = (
            f"http://127.0.0.1:{port}",
            {"Host": "traces.example", "Origin": "https://traces.example"},
        )
        async with browser() as proxy:
            token = url.partition("token=")[2]
            async with proxy.get(
                f"{here}/?token={token}", headers=asked, allow_redirects=False
            ) as page:
                cookie = page.headers["Set-Cookie"]
                assert page.status == 302 and page.headers["Location"] == "/"
                assert "Secure" in cookie and "HttpOnly" in cookie and "SameSite=Strict" in cookie
            known = {**asked, "Cookie": cookie.partition(";")[0]}
            async with proxy.get(here, headers=known) as page:
                assert 'data-session-websocket-url="wss://traces.example/ws"' in await page.text()
            for wrong in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
                assert await status_of(proxy, here, headers={**known, **wrong}) == 403


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("lines", "mode", "message"),
    [
        ([f"ana {ANA}"], 0o644, "chmod 600"),
        (["ana"], 0o600, "line 3: expected a name and a token"),
        (["ana short"], 0o600, "line 3: expected"),
        ([f"ana {ANA}", f"ben {ANA}"], 0o600, "line 4: another line has the same token"),
        ([], 0o600, "nobody could look"),
    ],
)
def test_a_file_of_tokens_that_is_wrong(
    training_trace: Path, tmp_path: Path, lines: list[str], mode: int, message: str
) -> None:
    told = refused(
        str(training_trace), "--web", "--tokens", str(tokens_in(tmp_path, *lines, mode=mode))
    )
    assert message in told and ANA not in told


def refused(*arguments: str) -> str:
    done = subprocess.run([*ARGUMENTS, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_options_of_the_web_alone(training_trace: Path, tmp_path: Path) -> None:
    assert "cannot read the tokens" in refused(
        str(training_trace), "--web", "--tokens", str(tmp_path / "none")
    )
    assert "add --web" in refused(str(training_trace), "--tokens", "x")
    assert "without a path" in refused(
        str(training_trace), "--web", "--url", "https://traces.example/ajet"
    )


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
    """A short run of the starter project with `--with-logview`."""
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
        "--limit",
        "1",
    ]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "ajet",
            "run",
            *named,
            "--scripted",
            "replies.py:reply",
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
    assert done.returncode == 0 and "Mean reward" in done.stdout
    assert done.stderr.count("the viewer did not start") == 1, done.stderr
    assert "pip install" in done.stderr and "Traceback" not in done.stderr


CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Page:
    """A page of a browser without a window, over its DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._asked = socket, 0

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._asked += 1
        await self._socket.send_json({"id": self._asked, "method": method, "params": parameters})
        while (answer := await self._socket.receive_json(timeout=HANGS)).get("id") != self._asked:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def value(self, script: str) -> Any:
        return (await self.ask("Runtime.evaluate", expression=script))["result"].get("value")

    async def until(self, script: str) -> None:
        give_up = time.monotonic() + HANGS
        while not await self.value(script):
            shown = "[location.href, document.body.className, document.body.innerText].join('\\n')"
            assert time.monotonic() < give_up, (
                f"{script} never came true on {await self.value(shown)}"
            )
            await asyncio.sleep(0.05)

    async def press(self, key: str) -> None:
        await self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        await self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)


@asynccontextmanager
async def opened(url: str, home: Path) -> AsyncIterator[Page]:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
               f"--user-data-dir={home}", url]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        said = home / "DevToolsActivePort"
        while not (said.exists() and said.read_text().count("\n")):
            await asyncio.sleep(0.05)
        port = said.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                if pages:
                    break
                await asyncio.sleep(0.05)
            async with session.ws_connect(
                pages[0]["webSocketDebuggerUrl"], max_msg_size=0
            ) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        process.wait()


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
async def test_keys_reach_the_viewer_before_any_click(training_trace: Path, tmp_path: Path) -> None:
    with served(str(training_trace)) as (_, url):
        async with opened(url, tmp_path / "browser") as page:
            await page.until("document.activeElement.className.includes('xterm-helper-textarea')")
            await page.press("q")
            await page.until("document.body.classList.contains('-closed')")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
@pytest.mark.parametrize("width", [1280, 390])
async def test_a_link_to_a_run_is_its_screen(
    training_trace: Path, tmp_path: Path, width: int
) -> None:
    with served(str(training_trace)) as (_, url):
        async with opened(f"{url}#aaaa", tmp_path / "browser") as page:
            await page.ask(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=800,
                deviceScaleFactor=1,
                mobile=width < 500,
            )
            await page.until("document.activeElement.className.includes('xterm-helper-textarea')")
            await page.until("location.hash === '#aaaa0001'")  # the viewer has opened it
            assert await page.value("document.title") == "ajet trace view"
            right = "document.querySelector('.xterm-screen').getBoundingClientRect().right"
            await page.until(
                f"innerWidth === {width} && {right} <= innerWidth && {right} > .9 * innerWidth"
            )
            await page.ask(
                "Input.dispatchKeyEvent", type="keyDown", key="Escape", windowsVirtualKeyCode=27
            )
            await page.until("location.hash === ''")
            steps = await page.value("history.length")
            await page.press("o")
            await page.until("location.hash.length > 1")
            assert await page.value("history.length") == steps


HASTY = """
import sys
from ajet_tools.tui import web
web._IDLE_SECONDS, web._CHECK_SECONDS = 0.3, 0.1
web.serve(["trace", "view", sys.argv[1]], 0, lambda url: print(url, flush=True), until_eof=True)
"""


async def test_half_a_request_is_not_waited_for(training_trace: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HASTY, str(training_trace)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split(":")[2].partition("/")[0])
        whole = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
        for sent in (b"", whole[:8], whole[:-2], whole):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            answer = await reader.read()  # ends when the server closes
            assert answer.startswith(b"HTTP/1.1 403") == (sent == whole)
            writer.close()
    finally:
        process.kill()
        process.wait()
