"""A small file that is written whole or not at all; drafts that are taken away."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4


def write_whole(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Put a file in the place of what is at `path`; where that fails, as on a full disk, nothing is left beside it.

    `private`: for its owner's eyes only, from its first byte on. The directory must be there. Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{uuid4().hex[:8]}.part")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        draft.replace(path)
    finally:
        remove_draft(draft)


def remove_draft(path: Path) -> None:
    """Remove a file that need not be there, nor its directory: `unlink(missing_ok=True)` raises below a file."""
    with suppress(FileNotFoundError, NotADirectoryError):
        path.unlink()
