"""Episodes as JSON files, beside the trace: for programs that were written for them."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic_core import to_jsonable_python

from ajet_sdk.types import Episode

__all__ = ["write_trajectory"]

log = logging.getLogger("ajet")


def write_trajectory(directory: Path, episode: Episode) -> None:
    """Write `trajectory/{split}-{step}/{episode_id}.json`.

    An output that JSON does not know is written as its `str`. A file that cannot be written is a warning, for the trace
    has the episode too.
    """
    place = directory / "trajectory" / f"{episode.split}-{episode.step}" / f"{episode.episode_id}.json"
    try:
        output = to_jsonable_python(episode.output, fallback=str)
        text = episode.model_copy(update={"output": output}).model_dump_json()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a lone surrogate, say
        log.warning("trainer_common.save_trajectory_as_json_file: %s was not written: %s", place, error)
