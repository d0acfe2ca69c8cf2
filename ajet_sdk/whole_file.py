"""Writes small files atomically, and removes drafts."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file atomically; after a failure, as on a full disk, no draft is left.

    `private`: readable by its owner only, from the start. The directory must exist. Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{uuid4().hex[:8]}.part")
    try:
        descriptor = os.open(
            draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    finally:
        remove_draft(draft)


def remove_draft(path: Path) -> None:
    """Remove a file if it exists; unlike `unlink(missing_ok=True)`, allows for a file in place of
    its directory."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
