"""The episodes a reader has bookmarked: a file of ids beside the trace, or in the user's own directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from ajet_sdk.errors import TraceError
from ajet_sdk.whole_file import write_whole
from ajet_tools.trace.queries.filters import Condition, Filter, Joined

_NAME = "bookmarks.json"


def bookmarks_file(where: Path, home: Path | None = None) -> Path:
    """Where the bookmarks of the trace at `where` (a file or a directory) are read from.

    They stand beside the trace, so that a team shares them with it. A reader who may not write there gets a file of
    their own in `~/.config/ajet`, and keeps it from then on.
    """
    own_path = _own_file(where, home)
    return own_path if own_path.exists() else _shared_file(where)


def bookmarked(where: Path, home: Path | None = None) -> frozenset[str]:
    """The ids of the bookmarked episodes; none where there is no file. Raises TraceError where it is not ours."""
    file = bookmarks_file(where, home)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot read the bookmarks in {file} ({error}); repair or delete that file") from error
    ids = content.get("episodes") if isinstance(content, dict) else None
    if not isinstance(ids, list) or not all(isinstance(id, str) for id in ids):
        raise TraceError(f'{file} is not a bookmarks file ({{"episodes": [...]}}); repair or delete it')
    return frozenset(ids)


def set_bookmark(where: Path, episode_ids: Iterable[str], on: bool, home: Path | None = None) -> frozenset[str]:
    """Bookmark episodes, or take their bookmarks off. Returns all bookmarks after it.

    The file is read anew first, for another viewer may have changed it. Raises TraceError where none can be written.
    """
    ids = frozenset(episode_ids)
    before = bookmarked(where, home)
    after = before | ids if on else before - ids
    if after == before:
        return after
    first = bookmarks_file(where, home)
    try:
        _write(first, after)
    except OSError:
        own_path = _own_file(where, home)
        try:
            own_path.parent.mkdir(parents=True, exist_ok=True)
            _write(own_path, after)
        except OSError as error:
            raise TraceError(f"bookmarks can be saved neither in {first} nor in {own_path}: {error}") from error
    return after


def only_bookmarked(filter: Filter, ids: Collection[str]) -> Filter:
    """A filter for the bookmarked episodes among those that fit `filter`."""
    listed = Condition("list_contains(?::VARCHAR[], e.episode_id)", (sorted(ids),))
    return replace(
        filter,
        sql=f"({filter.sql} AND {listed.sql})",
        parameters=(*filter.parameters, *listed.parameters),
        node=Joined("and", (filter.node, listed)),
    )


def _shared_file(where: Path) -> Path:
    """One file for a directory of traces: ids of episodes never collide."""
    return (where if where.is_dir() else where.parent) / _NAME


def _own_file(where: Path, home: Path | None) -> Path:
    directory = _shared_file(where).resolve().parent
    name = hashlib.blake2b(str(directory).encode(), digest_size=8).hexdigest()
    return (home or Path.home()) / ".config" / "ajet" / "bookmarks" / f"{name}.json"


def _write(file: Path, ids: frozenset[str]) -> None:
    """Whole or not at all: another viewer may read it meanwhile."""
    write_whole(file, json.dumps({"episodes": sorted(ids)}, indent=1) + "\n")
