"""Names of pictures' files in rows of datasets, which are compared by their pixels."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from ajet_sdk.errors import PictureError
from ajet_sdk.pictures import mapped, read_picture


class PictureFile(str):
    """The name of a picture's file in a row of a dataset, as the row has it.

    It knows the directory of the dataset's file, which it is relative to, so that whatever compares
    rows compares the pixels; for all others it is a text.
    """

    directory: Path

    def __new__(cls, name: str, directory: Path) -> PictureFile:
        file = super().__new__(cls, name)
        file.directory = directory
        return file

    def __getnewargs__(self) -> tuple[str, Path]:  # type: ignore[override]
        return str(self), self.directory

    @property
    def path(self) -> Path:
        """The file, which must be in or below the directory. Raises PictureError."""
        directory = self.directory.resolve()
        try:
            path = (directory / self).resolve()
            is_file = path.is_file()
        except (OSError, ValueError, RuntimeError) as error:  # too long, with a zero byte, a loop
            raise PictureError(f"{self!r:.80} is no name of a file: {error}") from error
        if not path.is_relative_to(directory):
            raise PictureError(f"the picture {self:.80} is not below {directory}")
        if not is_file:
            raise PictureError(f"there is no file {path}")
        return path

    @property
    def digest(self) -> str:
        """The digest of the picture, which is decoded once while its file stays as it is. Raises
        PictureError, OSError."""
        path = self.path
        status = path.stat()
        return _digest_of(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=1 << 20)
def _digest_of(path: Path, modified: int, size: int) -> str:
    return read_picture(path).digest


def _has_file(value: object) -> bool:
    """Whether a value of JSON has the name of a picture's file; each task is asked, so that the loop
    is plain."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            if not isinstance(item, str):
                if isinstance(item, dict | list) and _has_file(item):
                    return True
            elif type(item) is PictureFile:
                return True
    return False


def files_by_pixels(value: object) -> Any:
    """A value of JSON with the digests of pictures in place of their files' names; a file that
    cannot be read keeps its name. A value without files is returned as it is."""
    if not _has_file(value):
        return value

    def digest(text: str) -> str:
        try:
            return text.digest if isinstance(text, PictureFile) else text
        except (PictureError, OSError):
            return text

    return mapped(value, digest)
