"""Episodes as JSON files, beside the trace: for programs that were written for them."""

from __future__ import annotations

import logging
from pathlib import Path

from ajet_sdk.types import Episode

__all__ = ["write_trajectory"]

log = logging.getLogger("ajet")


def write_trajectory(directory: Path, episode: Episode) -> None:
    """Write `trajectory/{split}-{step}/{episode_id}.json`.

    A file that cannot be written is a warning, for the trace has the episode too.
    """
    place = directory / "trajectory" / f"{episode.split}-{episode.step}" / f"{episode.episode_id}.json"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(episode.model_dump_json(), encoding="utf-8")
    except OSError as error:
        log.warning("trainer_common.save_trajectory_as_json_file: %s was not written: %s", place, error)
