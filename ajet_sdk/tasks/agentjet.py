"""AgentJet's task readers, by which its swarm programs load their tasks where the agent runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ajet_sdk.config.config import Config, load_config
from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.types import Task

_DUMMIES = 1000
_ORDER = random.Random(42)


@dataclass
class HuggingfaceDatRepo:
    """A dataset of Hugging Face: a name, a directory or a file."""

    dataset_path: str = "gsm8k"
    dataset_name: str | None = None
    training_split: str = "train"
    validation_split: str | None = "validation"
    http_proxy_address: str = ""


@dataclass
class JsonlTrainingFp:
    file_path: str = ""


@dataclass
class JsonlDatasetFile:
    """Files with a JSON object per line."""

    training: JsonlTrainingFp = field(default_factory=JsonlTrainingFp)
    validation: JsonlTrainingFp = field(default_factory=JsonlTrainingFp)


@dataclass
class AjetTaskReader:
    """What a reader reads."""

    type: str = "huggingface_dat_repo"
    huggingface_dat_repo: HuggingfaceDatRepo = field(default_factory=HuggingfaceDatRepo)
    jsonl_dataset_file: JsonlDatasetFile = field(default_factory=JsonlDatasetFile)


class RouterTaskReader:
    """Reads tasks by the name of a kind of reader."""

    def __init__(self, reader_type: str, reader_config: Any) -> None:
        """Nothing is read yet.

        Args:
            reader_type: `huggingface_dat_repo`, `jsonl_dataset_file` or `random_dummy`.
            reader_config: an `AjetTaskReader`, or an object with such attributes.

        Raises:
            ConfigError: the kind is unknown.
        """
        if reader_type not in _READERS:
            raise ConfigError(
                f"reader_type must be one of {', '.join(_READERS)} (got {reader_type!r})"
            )
        self.reader_type = reader_type
        self.reader_config = reader_config

    def get_training_tasks(self) -> list[Task]:
        """The training tasks. Raises TaskError."""
        return _READERS[self.reader_type](self.reader_config, False)

    def get_validation_tasks(self) -> list[Task]:
        """The validation tasks. Raises TaskError."""
        return _READERS[self.reader_type](self.reader_config, True)

    def generate_training_tasks(self) -> Iterator[Task]:
        """Yield the training tasks in a new order each time."""
        yield from _shuffled(self.get_training_tasks())

    def generate_validation_tasks(self) -> Iterator[Task]:
        """Yield the validation tasks."""
        yield from self.get_validation_tasks()


class HuggingFaceTaskReader(RouterTaskReader):
    """Reads a dataset of Hugging Face."""

    def __init__(self, reader_config: Any) -> None:
        super().__init__("huggingface_dat_repo", reader_config)


class JsonlTaskReader(RouterTaskReader):
    """Reads files with a JSON object per line."""

    def __init__(self, reader_config: Any) -> None:
        super().__init__("jsonl_dataset_file", reader_config)


def _shuffled(tasks: list[Task]) -> list[Task]:
    return _ORDER.sample(tasks, len(tasks))


def _config(kind: str, section: dict[str, Any]) -> Config:
    reader = {"type": kind, kind: section}
    return load_config(values={"ajet": {"task_reader": reader, "backbone": "debug"}})


def _of_huggingface(reader_config: Any, validation: bool) -> list[Task]:
    repo = reader_config.huggingface_dat_repo
    split = repo.validation_split if validation else repo.training_split
    section = {
        "dataset_path": repo.dataset_path,
        "dataset_name": repo.dataset_name,
        "training_split": split,  # each split is read alone: the other one may not exist
        "validation_split": None,
    }
    return load_tasks(_config("huggingface_dat_repo", section)).train


def _of_jsonl(reader_config: Any, validation: bool) -> list[Task]:
    files = reader_config.jsonl_dataset_file
    file = files.validation if validation else files.training
    section = {"training": {"file_path": file.file_path}}
    return load_tasks(_config("jsonl_dataset_file", section)).train


def _dummies(_config: Any, _validation: bool) -> list[Task]:
    """Tasks with a number from 0 to 999 each, as seeds of environments."""
    return [
        Task(
            main_query=f"[dummy task @ {number}]",
            task_id=str(number),
            env_type="no_env",
            metadata={"random_number": number},
        )
        for number in random.Random(42).sample(range(_DUMMIES), _DUMMIES)
    ]


_READERS = {
    "huggingface_dat_repo": _of_huggingface,
    "jsonl_dataset_file": _of_jsonl,
    "random_dummy": _dummies,
}
