"""Measurements of tasks, in a file that grows with each, so that nothing is measured twice.

A measurement holds under conditions: the model, the agent, the judge, sampling and limits, the number of attempts. Its
key is a hash of those and of the task's content. Of the agent and the judge the text of their file counts (not of what
that file imports), of a local model its files' names, sizes and times, of an endpoint its URL and the model's name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ajet_sdk.config.config import Config
from ajet_sdk.errors import AjetError, TaskError
from ajet_sdk.types import Task

_ELSEWHERE = {"model": ("api_key_env", "scripted"), "rollout": ("user_workflow", "max_env_worker"), "task_judge": ()}
"""Keys of the config that change nothing, or for which a content is hashed instead."""


@dataclass(frozen=True)
class Measurement:
    """How a task went. Only whole measurements exist: each of the attempts was made and judged."""

    solved: int
    attempts: int
    reward: float
    """The mean."""

    @property
    def pass_rate(self) -> float:
        return self.solved / self.attempts


def conditions(config: Config, k: int) -> str:
    """A hash of what a measurement depends on beside the task."""
    values = config.model_dump(mode="json")
    facts: dict[str, Any] = {"k": k}
    for section, left_out in _ELSEWHERE.items():
        facts[section] = {name: value for name, value in values[section].items() if name not in left_out}
    named = (config.rollout.user_workflow, config.task_judge.judge_protocol, config.model.scripted)
    facts["code"] = [_code(config, class_path) for class_path in named if class_path]
    facts["task_judge"].pop("judge_protocol", None)
    if config.model.path and config.resolve(config.model.path).is_dir():
        files = ((path.name, path.stat()) for path in config.resolve(config.model.path).iterdir() if path.is_file())
        facts["files"] = sorted([name, known.st_size, known.st_mtime_ns] for name, known in files)
    return _digest(facts)


def _code(config: Config, class_path: str) -> list[str]:
    """The name, and a hash of the file in which it stands."""
    name = class_path.replace("->", ":").rpartition(":")[2]
    target = inspect.unwrap(config.load(class_path))
    target = target if inspect.isclass(target) or inspect.isroutine(target) else type(target)
    try:
        file = inspect.getsourcefile(target)
        text = Path(file).read_bytes() if file else class_path.encode()
    except (TypeError, OSError):  # made by a call, or in a shell: its name must do
        text = class_path.encode()
    return [name, hashlib.blake2b(text, digest_size=16).hexdigest()]


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Measurements:
    """The measurements of a file, by key; with no file they last as long as this object.

    Each is appended and flushed at once. A last line that a kill cut off is passed over, and measured again. Lines made
    under other conditions stay: they are of use when those come back.
    """

    def __init__(self, path: Path | None, held_under: str) -> None:
        self.path, self.held_under = path, held_under
        self._known: dict[str, Measurement] = dict(_read(path)) if path is not None and path.exists() else {}

    def key(self, task: Task) -> str:
        """The key of a task under these conditions; its id counts only where it stands for content elsewhere."""
        content = task.model_dump(mode="json", exclude={"task_id"})
        if not any(content.values()):
            content = {"task_id": task.task_id}
        return _digest([self.held_under, content])

    def get(self, key: str) -> Measurement | None:
        return self._known.get(key)

    def put(self, key: str, task: Task, measured: Measurement) -> None:
        """Keep one. Raises TaskError where the file cannot be written."""
        self._known[key] = measured
        if self.path is None:
            return
        line = json.dumps({"key": key, "task_id": task.task_id, **asdict(measured)}, ensure_ascii=True)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                start = b""
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    start = b"" if file.read(1) == b"\n" else b"\n"
                file.write(start + line.encode() + b"\n")
        except OSError as error:
            raise TaskError(f"cannot write {self.path}: {error.strerror or error}") from error


def _read(path: Path) -> Iterator[tuple[str, Measurement]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            yield (
                str(values["key"]),
                Measurement(int(values["solved"]), int(values["attempts"]), float(values["reward"])),
            )
        except (ValueError, KeyError, TypeError) as error:
            if line.strip() and not line.startswith(b"{"):  # else a line that a kill cut off
                raise AjetError(
                    f"{path} line {number} is not a measurement ({error}); the file is written by `ajet dataset "
                    "calibrate`: name another with --measurements, or delete it to measure everything again"
                ) from error
