"""The episodes that clients have claimed, on disk: a server that is killed and started again knows
whose episodes were open, and on which tasks."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ValidationError

from ajet_sdk.types import Episode, Task


class _Line(BaseModel):
    """A line of the file; a task stands in the line of its first episode alone, as it may have
    pictures."""

    episode: Episode
    task_id: str
    task: Task | None = None


class ClaimedEpisodes:
    """A file with a line for each episode that was claimed in the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = set[str]()
        """Ids of the tasks that this process wrote."""

    def add(self, episode: Episode) -> None:
        """Record an episode before its client hears of it."""
        task = episode.task
        line = _Line(episode=episode.model_copy(update={"task": Task()}), task_id=task.task_id)
        if task.task_id not in self._written:
            line.task = task
        # the last process may have ended in the middle of a line
        start = "" if self._written else "\n"
        with self._path.open("a") as stream:
            stream.write(f"{start}{line.model_dump_json(exclude_defaults=True)}\n")
        self._written.add(task.task_id)

    def clear(self) -> None:
        """Begin anew, for another run."""
        self._path.unlink(missing_ok=True)

    def read(self) -> dict[str, Episode]:
        """The episodes by id. A line that the end of a process cut off is left out."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return {}
        claimed: dict[str, Episode] = {}
        tasks: dict[str, Task] = {}
        for json_line in text.split("\n"):
            try:
                line = _Line.model_validate_json(json_line)
            except ValidationError:
                continue
            task = tasks.setdefault(line.task_id, line.task or Task(task_id=line.task_id))
            claimed[line.episode.episode_id] = line.episode.model_copy(update={"task": task})
        return claimed
