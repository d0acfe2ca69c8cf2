"""The SQL that a user asked before, and the queries they gave a name.

What the viewer remembers of its user from one time to the next: the last filters and searches, how to export.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_sdk.whole_file import write_whole

_MAX_QUERIES = 100

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


@dataclass(frozen=True, slots=True)
class SavedQueries:
    """`history` has the newest last."""

    history: tuple[str, ...] = ()
    saved: dict[str, str] = field(default_factory=dict)

    def with_query(self, sql: str) -> SavedQueries:
        return replace(self, history=(*(entry for entry in self.history if entry != sql), sql)[-_MAX_QUERIES:])

    def with_saved(self, name: str, sql: str) -> SavedQueries:
        return replace(self, saved={**self.saved, name: sql})

    def without(self, name: str) -> SavedQueries:
        return replace(self, saved={other: sql for other, sql in self.saved.items() if other != name})


def queries_file() -> Path:
    return Path.home() / ".config" / "ajet" / "queries.json"


def load_queries() -> SavedQueries:
    """What the user saved; nothing where there is no file. Raises ConfigError where the file is not ours."""
    file = queries_file()
    content = _read_json(file)
    history = content.get("history", []) if isinstance(content, dict) else None
    saved = content.get("saved", {}) if isinstance(content, dict) else None
    texts = [*history, *saved, *saved.values()] if isinstance(history, list) and isinstance(saved, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{file} does not contain saved queries; repair or delete it")
    return SavedQueries(tuple(history or ()), dict(saved or {}))


def save_queries(queries: SavedQueries) -> None:
    """Write them, whole or not at all. Raises ConfigError where that fails."""
    _write_json(queries_file(), asdict(queries), "queries cannot be saved in")


def _read_json(file: Path) -> Any:
    """An empty object where there is no file."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file} ({error}); repair or delete it") from error


def _write_json(file: Path, content: Mapping[str, Any], failure: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{failure} {file}: {error}") from error


_MAX_ENTRIES = 50


@dataclass(frozen=True, slots=True)
class Settings:
    """The newest entries stand last."""

    filters: tuple[str, ...] = ()
    searches: tuple[str, ...] = ()
    export_format: str = ""
    export_folder: str = ""

    def with_filter(self, text: str) -> Settings:
        return replace(self, filters=_append(self.filters, text))

    def with_search(self, text: str) -> Settings:
        return replace(self, searches=_append(self.searches, text))


def _append(entries: tuple[str, ...], text: str) -> tuple[str, ...]:
    return (*(entry for entry in entries if entry != text), text)[-_MAX_ENTRIES:] if text else entries


def settings_file() -> Path:
    return Path.home() / ".config" / "ajet" / "view.json"


def load_settings() -> Settings:
    """What was remembered; nothing where there is no file. Raises ConfigError where the file is not ours."""
    file = settings_file()
    content = _read_json(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{file} does not contain settings of the viewer; repair or delete it")
    known = {field.name: content[field.name] for field in fields(Settings) if field.name in content}
    return Settings(**{name: _check_value(file, name, value) for name, value in known.items()})


def _check_value(file: Path, name: str, value: Any) -> Any:
    listed = isinstance(getattr(Settings(), name), tuple)
    if listed and isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    if not listed and isinstance(value, str):
        return value
    raise ConfigError(f"{file}: {name} is not {'a list of texts' if listed else 'a text'}; repair or delete the file")


def save_settings(what: Settings) -> None:
    """Keep it for the next time. Raises ConfigError where it cannot be written."""
    _write_json(settings_file(), asdict(what), "the viewer's settings cannot be saved in")
