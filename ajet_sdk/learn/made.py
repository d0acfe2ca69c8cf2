"""Where the models of recipes lie: each seed's in a directory of its own, and `model.path` a link to one of them.

Runs of several seeds may go on at once: none moves what another reads, and each change is one rename.
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

__all__ = ["MARK", "kept", "made_as", "put"]

MARK = ".ajet"
"""The file in a model's directory that says which recipe made it."""


def made_as(place: Path) -> dict[str, Any]:
    """What was written down of the model at `place` (`recipe`, its key; `seed`); empty where no recipe made one."""
    mark = place / MARK
    record: dict[str, Any] = json.loads(mark.read_text()) if mark.is_file() else {}
    return record


def kept(place: Path, seed: int, key: str) -> Path | None:
    """The directory of the seed's model, which `place` links to from now on; None where it isn't that of this recipe.

    A directory at `place`, of an earlier version of ajet, first goes where its seed's model belongs.
    """
    if not place.is_symlink() and (made := made_as(place)):
        own = _own(place, made["seed"])
        _discard(own)
        place.rename(own)
    own = _own(place, seed)
    if made_as(own).get("recipe") != key:
        return None
    _link(place, own)
    return own


def put(place: Path, model: Any, tokenizer: Any, record: dict[str, Any]) -> Path:
    """Write a model to its seed's directory, whole or not at all; an earlier one of that seed gives way.

    Returns the directory, which `place` links to from now on.
    """
    from ajet_sdk.learn.checkpoint import save_model

    place.parent.mkdir(parents=True, exist_ok=True)
    own = _own(place, record["seed"])
    fresh = _beside(own)
    save_model(model, fresh)
    tokenizer.save_pretrained(fresh)
    (fresh / MARK).write_text(json.dumps(record, indent=1))
    if made_as(own).get("recipe") == record["recipe"]:  # another run was faster, and may be reading it
        shutil.rmtree(fresh)
    else:
        _discard(own)
        fresh.rename(own)
    _link(place, own)
    return own


def _own(place: Path, seed: int) -> Path:
    return place.with_name(f".{place.name}.seed-{seed}")


def _beside(own: Path) -> Path:
    """A name that nothing has, not even what a killed run left: in a container it had the same process id."""
    return own.with_name(f"{own.name}.{secrets.token_hex(4)}")


def _link(place: Path, own: Path) -> None:
    link = _beside(own)
    link.symlink_to(own.name)
    link.replace(place)


def _discard(own: Path) -> None:
    """Remove it under another name: a directory that is removed by half must not be taken for a model."""
    if own.exists():
        old = _beside(own)
        own.rename(old)
        shutil.rmtree(old)
