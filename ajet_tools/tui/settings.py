"""The viewer's settings on disk: SQL, filters, searches, export options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from ajet_sdk.errors import ConfigError
from ajet_sdk.whole_file import write_whole

_MAX_QUERIES, _MAX_ENTRIES = 100, 50

EXAMPLES: Mapping[str, str] = {
    "reward by step": (
        "SELECT step, split, count(DISTINCT episode_id) AS episodes, avg(value * weight) AS reward\n"
        "FROM episodes JOIN rewards USING (episode_id)\nGROUP BY ALL ORDER BY ALL"
    ),
    "why episodes failed": (
        "SELECT cause, status, count(*) AS episodes, any_value(error) AS example\n"
        "FROM episodes WHERE status <> 'succeeded'\nGROUP BY ALL ORDER BY episodes DESC"
    ),
    "hardest tasks": (
        "SELECT task_id, count(*) AS attempts, avg(value * weight) AS reward, any_value(task->>'main_query') AS query\n"
        "FROM episodes JOIN rewards USING (episode_id)\nGROUP BY task_id ORDER BY reward LIMIT 50"
    ),
    "slowest calls": (
        "SELECT call_id, agent, epoch(ended_at - started_at) AS seconds, len(output_ids) AS tokens, finish_reason\n"
        "FROM calls ORDER BY seconds DESC LIMIT 50"
    ),
    "least likely tokens": (
        "SELECT call_id, episode_id, list_min(logprobs) AS lowest, list_avg(logprobs) AS mean\n"
        "FROM calls WHERE len(logprobs) > 0 ORDER BY lowest LIMIT 50"
    ),
    "what became of the tokens": (
        "SELECT step, outcome, sum(tokens) AS tokens FROM ledger\nGROUP BY ALL ORDER BY step, tokens DESC"
    ),
}
"""Queries to begin with, by name."""


class _Remembered(BaseModel):
    """A JSON file in the user's own directory."""

    model_config = ConfigDict(frozen=True, strict=True)
    NAME: ClassVar[str]

    @classmethod
    def file(cls) -> Path:
        return Path.home() / ".config" / "ajet" / cls.NAME

    @classmethod
    def load(cls) -> Self:
        """The saved settings, or defaults if there is no file. Raises ConfigError if the file can't be read."""
        try:
            return cls.model_validate_json(cls.file().read_bytes())
        except FileNotFoundError:
            return cls()
        except ValidationError as error:
            [first, *_] = error.errors(include_url=False)
            reason = ": ".join([*map(str, first["loc"]), first["msg"]])
            raise ConfigError(f"cannot read {cls.file()} ({reason}); repair or delete it") from None
        except OSError as error:
            raise ConfigError(f"cannot read {cls.file()} ({error}); repair or delete it") from error

    def save(self) -> None:
        """Write the file, whole or not at all. Raises ConfigError where that fails."""
        try:
            self.file().parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file(), self.model_dump_json(indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {self.file()}: {error}") from error


class SavedQueries(_Remembered):
    """Earlier SQL queries, the newest last, and saved queries by name."""

    NAME = "queries.json"
    history: tuple[str, ...] = ()
    saved: dict[str, str] = {}

    def with_query(self, sql: str) -> SavedQueries:
        return self.model_copy(update={"history": _append(self.history, sql)[-_MAX_QUERIES:]})

    def with_saved(self, name: str, sql: str) -> SavedQueries:
        return self.model_copy(update={"saved": {**self.saved, name: sql}})

    def without(self, name: str) -> SavedQueries:
        return self.model_copy(update={"saved": {key: sql for key, sql in self.saved.items() if key != name}})


class Settings(_Remembered):
    """The newest entries stand last."""

    NAME = "view.json"
    filters: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()
    export_format: str = ""
    export_folder: str = ""

    def with_filter(self, text: str) -> Settings:
        return self.model_copy(update={"filters": _append(self.filters, text)[-_MAX_ENTRIES:]})

    def with_search(self, text: str) -> Settings:
        return self.model_copy(update={"searches": _append(self.searches, text)[-_MAX_ENTRIES:]})


def _append(entries: tuple[str, ...], text: str) -> tuple[str, ...]:
    return (*(entry for entry in entries if entry != text), text) if text else entries
