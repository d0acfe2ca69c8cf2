"""Pictures of exported rows as files beside the rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError, PictureError
from ajet_sdk.pictures import is_data_url, mapped, picture_at
from ajet_sdk.whole_file import write_whole


class PictureFiles:
    """A directory with a file for each different picture of a file's rows."""

    def __init__(self, rows: Path) -> None:
        """Raises ConfigError if the rows go to stdout or to a directory."""
        if not rows.suffix:
            raise ConfigError(
                f"--picture-files writes them beside a file of rows (got --out {rows}); name one,"
                " such as --out rows.jsonl"
            )
        self.directory = rows.with_name(f"{rows.name.partition('.')[0]}.pictures")
        self._written: set[str] = set()

    def put(self, row: Mapping[str, object]) -> dict[str, Any]:
        """Returns the row with the names of files, relative to its own, in place of data URLs."""
        named: dict[str, Any] = mapped(row, self._name)
        return named

    def _name(self, text: str) -> str:
        if not is_data_url(text):
            return text
        try:
            picture = picture_at(text)
        except PictureError:  # another text that begins with data:
            return text
        name = f"{picture.digest}.{picture.media_type.removeprefix('image/')}"
        if picture.digest not in self._written:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_whole(self.directory / name, picture.data)
            self._written.add(picture.digest)
        return f"{self.directory.name}/{name}"
