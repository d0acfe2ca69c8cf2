"""Where the models of recipes lie: one at `model.path`, and beside it those of runs with other seeds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

__all__ = ["MARK", "made_as", "put", "taken_back"]

MARK = ".ajet"
"""The file in `model.path` that says which recipe made it."""


def made_as(place: Path) -> dict[str, Any]:
    """What was written down of the model at `place` (`recipe`, its key; `seed`); empty where no recipe made one."""
    mark = place / MARK
    record: dict[str, Any] = json.loads(mark.read_text()) if mark.is_file() else {}
    return record


def put(place: Path, model: Any, tokenizer: Any, record: dict[str, Any]) -> None:
    """Write beside the place and rename into it; an earlier model of a recipe gives way."""
    from ajet_sdk.learn.checkpoint import save_model

    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.with_name(f".{place.name}.{os.getpid()}")
    save_model(model, fresh)
    tokenizer.save_pretrained(fresh)
    (fresh / MARK).write_text(json.dumps(record, indent=1))
    _clear(place, record["seed"])
    fresh.rename(place)


def taken_back(place: Path, seed: int, key: str) -> bool:
    """Put the model that waits for runs with `seed` in its place again, where it is the one that is wanted."""
    waiting = _aside(place, seed)
    if made_as(waiting).get("recipe") != key:
        return False
    _clear(place, seed)
    waiting.rename(place)
    return True


def _aside(place: Path, seed: int) -> Path:
    return place.with_name(f".{place.name}.seed-{seed}")


def _clear(place: Path, seed: int) -> None:
    """Make room for a model of `seed`: an older one of the same seed is gone, one of another is put aside."""
    made = made_as(place)
    if not made:
        return
    if made["seed"] == seed:
        shutil.rmtree(place)
        return
    aside = _aside(place, made["seed"])
    if made_as(aside):
        shutil.rmtree(aside)
    place.rename(aside)
