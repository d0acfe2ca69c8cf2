"""Passwords and keys in addresses: read in one place, used to connect, and written nowhere."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ajet
from ajet_sdk.addresses import below, public
from ajet_sdk.config.config import keys, load_config
from ajet_sdk.errors import AjetError, ConfigError
from ajet_sdk.run import run
from ajet_sdk.secret_keys import masked
from ajet_sdk.trace.reader import open_trace
from ajet_tools.dataset.card import Facts, write_card
from ajet_tools.dataset.generate.directory import Directory
from ajet_tools.trace.export import export
from ajet_tools.trace.redact import Redactor

SECRET = "hunter2hunter2"
WITH_SECRET = [
    f"http://user:{SECRET}@host/v1",
    f"https://{SECRET}@host:8080/v1?model=x",
    f"http://user:a@{SECRET}@host/v1",
    f"http://user:p/{SECRET}#x@host/v1",
    f"https://host/v1?api-key={SECRET}",
    f"https://host/v1?api-version=2024-02-01-preview&API%2DKEY={SECRET}#top",
    f"https://host/v1?key={SECRET}&alt=sse",
    f"https://host/v1?token={SECRET}",
    f"https://host/v1?sig={SECRET}",
    f"https://bucket.s3.amazonaws.com/a?X-Amz-Credential=A&X-Amz-Signature={SECRET}&X-Amz-Date=20260101",
    f"https://host/a?X-Amz-Security-Token={SECRET}",
    f"https://host/a?GoogleAccessId=a&Signature={SECRET}",
    f"https://host/v1?code={SECRET}",
    f"https://host/v1#access_token={SECRET}&state=1",
    f"https://host/v1?next=https%3A%2F%2Fuser%3A{SECRET}%40host",
    f"https://host/v1?next=https://user:{SECRET}@host",
    f"http://a:1@b/v1,http://user:{SECRET}@host/v1",
    f"postgresql://user:{SECRET}@host/db?sslmode=require",
    f"jdbc:sqlserver://host;user=u;password={SECRET};encrypt=true",
    f"redis://:{SECRET}@host:6379/0",
    f"host=localhost user=me password={SECRET} dbname=x",
    f"AccountName=a;AccountKey={SECRET};EndpointSuffix=core.windows.net",
    f"user:{SECRET}@proxy.local:3128",
    f"socks5h://user:{SECRET}@[::1]:1080",
    "https://host/v1?opaque=f7Qz0aLw93kTn5Xb2v" + SECRET,
    f"https://proxy.example/v1/sk-{SECRET}-0123456789/chat/completions",
    f"https://user@proxy.example/sk-proj-{SECRET}0123456789/v1?model=x",
    f"https://proxy.example/sk%2D{SECRET}0123456789/v1",
    f"https://proxy.example/ghp_{SECRET}0123456789/v1",
    f"https://api.telegram.org/bot123456789:AAE{SECRET}{SECRET}/sendMessage",
    f"https://hooks.slack.com/services/T00000000/B00000000/{SECRET}",
    f"https://discord.com/api/webhooks/123456789/{SECRET}?wait=true",
    f"https://maker.ifttt.com/trigger/done/with/key/{SECRET}",
    f"https://mainnet.infura.io/v3/{SECRET}",
    f"https://host/webhook/token/a1b2c3d4e5f6{SECRET}/run",
]
WITHOUT = [
    "http://127.0.0.1:8000/v1",
    "http://[::1]:8000/v1",
    "https://host/v1?api-version=2024-02-01-preview&model=Qwen2.5-0.5B-Instruct",
    "https://medium.com/@someone/a-text?page=2#part-3",
    "s3://bucket/folder/file@2.parquet",
    "file:///tmp/a@b",
    "https://huggingface.co/Qwen/Qwen2.5-0.5B-Instruct/resolve/060db6499f32faf8b98477b0a26969ef7d8b9987/config.json",
    "https://host/v1/sk-learn/models/task-12345678-long-name/token/count",
    "https://hooks.slack.com/services/",
    "https://host:8080/sk/key/value",
    "local://0a1b2c3d4e5f6071",
    "git@github.com:owner/name.git",
    "a:b and c@d",
    "max_tokens=5, next_page_token=3",
]


@pytest.mark.parametrize("text", WITH_SECRET)
def test_passwords_and_keys_leave_every_form_of_address(text: str) -> None:
    assert SECRET not in public(text) and "***" in public(text)
    assert public(public(text)) == public(text)
    assert SECRET not in json.dumps(masked({"a": [{"url": text, text: 1}]}, "***"))
    assert SECRET not in str(AjetError(f"{text} did not answer"))


@pytest.mark.parametrize("text", [text for text in WITH_SECRET if "://" in text])
def test_an_export_replaces_them_in_the_middle_of_a_text(text: str) -> None:
    assert SECRET not in Redactor().text(f"I asked {text} and (see <{text}>) it was there")


@pytest.mark.parametrize("text", WITHOUT)
def test_what_is_no_secret_stays(text: str) -> None:
    assert public(text) == text


@given(
    user=st.text(st.characters(exclude_characters="/?#@:\"'<>`\\", exclude_categories=("Z", "C"))),
    scheme=st.sampled_from(["http", "https", "postgres", "mongodb+srv", "wss"]),
    before=st.text(max_size=5),
)
def test_whatever_stands_before_the_at_sign_is_gone(user: str, scheme: str, before: str) -> None:
    assert SECRET not in public(f"{before} {scheme}://{user}:{SECRET}@host/path")


def test_long_texts_take_no_long_time() -> None:
    for evil in (
        "http://" + "a:" * 50_000,
        "://" * 50_000,
        "a" * 200_000 + "=",
        "a=" * 50_000,
        "http://a@" * 20_000,
    ):
        public(evil)


def test_a_route_goes_before_the_query() -> None:
    assert (
        below("http://host/v1?key=a", "chat/completions") == "http://host/v1/chat/completions?key=a"
    )
    assert below("http://host/v1/", "models") == "http://host/v1/models"


@pytest.mark.slow
def test_no_key_of_a_config_writes_what_its_address_hides(tmp_path: Path) -> None:
    """Whatever key holds an address: it is written without secrets, or refused without them."""
    written = 0
    for address in (f"http://user:{SECRET}@host/v1?api-key={SECRET}", f"password={SECRET} host=a"):
        for path in keys():
            for value in (address, [address], {"any": {"thing": [address]}}):
                values: Any = value
                for name in reversed(path.split(".")):
                    values = {name: values}
                try:
                    config = load_config(values={"ajet": values})
                except ConfigError as error:
                    assert SECRET not in str(error), path
                    continue
                written += 1
                assert SECRET not in json.dumps(config.shown()), path
    assert written > 50


class Server(BaseHTTPRequestHandler):
    """A chat endpoint that answers who logs in and brings the key, and tells what others sent."""

    seen: list[tuple[str, str | None]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.seen.append((self.path, self.headers["authorization"]))
        allowed = self.path == f"/v1/chat/completions?api-key={SECRET}"
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "hi"},
            "finish_reason": "stop",
        }
        error = {"error": {"message": f"no key at http://user:{SECRET}@host{self.path}"}}
        body = json.dumps(
            {"choices": [choice], "usage": {"prompt_tokens": 1}} if allowed else error
        ).encode()
        self.send_response(200 if allowed else 403)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    Server.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@ajet.workflow
async def asking(task: ajet.Task, model: ajet.Model) -> str:
    return (await model.chat([{"role": "user", "content": "hello"}])).content or ""


@pytest.mark.parametrize("key", ["api-key", "wrong-key"])
def test_a_run_connects_with_what_it_never_writes(key: str, port: int, tmp_path: Path) -> None:
    url = f"http://user:{SECRET}@127.0.0.1:{port}/v1?{key}={SECRET}"
    config = load_config(
        values={
            "ajet": {
                "experiment_dir": str(tmp_path / "run"),
                "model": {"base_url": url, "name": "m"},
            },
            "service": {"proxy": f"user:{SECRET}@proxy:3128", "dsn": f"host=a password={SECRET}"},
        }
    )
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("ajet").addHandler(handler)
    task = {"question": "q", "page": f"https://host/a?token={SECRET}"}
    try:
        report = run(config, workflow=asking, judge=ajet.judge(lambda output: 1.0), tasks=[task])
        assert (report.reward == 1.0) == (key == "api-key") and SECRET not in str(report)
    except AjetError as error:
        assert key != "api-key" and SECRET not in str(error)
    finally:
        logging.getLogger("ajet").removeHandler(handler)
    path, login = Server.seen[0]
    assert path.endswith(f"={SECRET}") and login == "Basic dXNlcjpodW50ZXIyaHVudGVyMg=="
    assert SECRET not in log.getvalue()
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and file.suffix != ".duckdb":
            assert SECRET not in file.read_text(errors="replace"), file
    with open_trace(tmp_path / "run") as trace:
        stored = [
            trace.query(f"SELECT * FROM {name}").to_pylist()
            for name in ("runs", "episodes", "calls")
        ]
    assert SECRET not in str(stored)
    with open_trace(tmp_path / "run") as trace:
        ids = [
            row["episode_id"] for row in trace.query("SELECT episode_id FROM episodes").to_pylist()
        ]
        export(trace, ids, "native", tmp_path / "out.jsonl")
    assert SECRET not in (tmp_path / "out.jsonl").read_text()


@pytest.mark.slow
def test_generated_datasets_name_their_endpoint_without_it(tmp_path: Path) -> None:
    url = f"http://user:{SECRET}@host/v1?key={SECRET}"
    facts = {
        "options": {"count": 3, "judge": f"name@{url}"},
        "endpoint": url,
        "verify_models": {"judge": [url, "m"]},
    }
    directory = Directory(tmp_path / "out")
    directory.begin(facts)
    directory.compare(facts)
    write_card(
        tmp_path / "out",
        {"train": [{"question": "q", "answer": "a"}]},
        Facts(parameters=facts, notes=[f"asked {url}"]),
    )
    for file in (tmp_path / "out").rglob("*"):
        if file.is_file():
            assert SECRET not in file.read_text(errors="replace"), file
