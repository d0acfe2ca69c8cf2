"""Where an export goes: a file that appears whole, or an open stream."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ajet_sdk.errors import ConfigError
from ajet_sdk.whole_file import remove_draft

_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str, allow_nan=False)


@contextmanager
def opened(target: Path | BinaryIO) -> Iterator[BinaryIO]:
    """The stream to write to. A path is written under another name beside it and takes its place at the end.

    Raises ConfigError where the path is a trace, or cannot be written.
    """
    if not isinstance(target, Path):
        yield target
        return
    refuse_trace(target)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        remove_draft(draft)


def refuse_trace(path: Path) -> None:
    """Raises ConfigError where the path is a trace."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(12)[8:] == b"DUCK":
            raise ConfigError(f"{path} is a trace, which an export never overwrites; choose another file")


def json_line(value: object) -> bytes:
    """A value as one line of JSON, UTF-8; a lone surrogate, which UTF-8 cannot hold, becomes `?`."""
    return (_ENCODER.encode(value) + "\n").encode("utf-8", "replace")
