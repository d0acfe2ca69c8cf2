"""The episodes that clients have claimed, on disk: a server that is killed and started again knows
whose episodes were open, and on which tasks."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ajet_sdk.types import Episode


class ClaimedEpisodes:
    """A file with a line for each episode that was claimed since the server started."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, episode: Episode) -> None:
        """Record an episode before its client hears of it."""
        with self._path.open("a") as stream:
            stream.write(episode.model_dump_json() + "\n")

    def take(self) -> dict[str, Episode]:
        """The episodes that the last process recorded, by id; the file begins anew.

        A line that the end of the process cut off is left out.
        """
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return {}
        claimed = {}
        for line in lines:
            try:
                episode = Episode.model_validate_json(line)
            except ValidationError:
                continue
            claimed[episode.episode_id] = episode
        self._path.unlink()
        return claimed
