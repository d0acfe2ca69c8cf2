"""Spider's and BIRD's questions as tasks, for whoever has the files.

    SPIDER_TRAIN=spider SPIDER_DEV=spider ajet train --conf grpo.yaml ajet.task_reader.type='spider.py->Spider'

Both have a JSON file of questions, with `db_id` and `query` (Spider) or `SQL` (BIRD), and a folder
of SQLite files, `database/ID/ID.sqlite` or `dev_databases/ID/ID.sqlite`. The workflow and the judge
get the file as `database`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ajet.schema.task import Task
from ajet.task_reader.task_reader_base import BaseTaskReader
from ajet_sdk.errors import MissingResource, TaskError

TRAINING, VALIDATION = ("train_spider.json", "train.json"), ("dev.json", "test.json")
FOLDERS = ("database", "dev_databases", "train_databases", "test_database")


class Spider(BaseTaskReader):
    """Reads the folders that SPIDER_TRAIN and SPIDER_DEV name."""

    def get_training_tasks(self) -> list[Task]:
        return list(tasks(folder_of("SPIDER_TRAIN"), TRAINING))

    def get_validation_tasks(self) -> list[Task]:
        return list(tasks(folder_of("SPIDER_DEV"), VALIDATION))


def folder_of(variable: str) -> Path:
    folder = Path(os.environ.get(variable, ""))
    if not os.environ.get(variable) or not folder.is_dir():
        raise MissingResource(
            f"{variable} must name a folder of Spider or BIRD (got {str(folder)!r})"
        )
    return folder


def tasks(folder: Path, names: Sequence[str]) -> Iterator[Task]:
    """Raises TaskError for a row without question, query or database."""
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise MissingResource(f"{folder} has none of {', '.join(names)}")
    for number, row in enumerate(json.loads(file.read_text(encoding="utf-8")), 1):
        query = row.get("query") or row.get("SQL")
        if not (
            isinstance(query, str) and isinstance(row.get("question"), str) and row.get("db_id")
        ):
            raise TaskError(f"{file} row {number} needs question, db_id, and query or SQL")
        files = [folder / one / row["db_id"] / f"{row['db_id']}.sqlite" for one in FOLDERS]
        database = next((one for one in files if one.is_file()), None)
        if database is None:
            raise TaskError(f"{file} row {number}: there is no {files[0]}")
        asked = f"{row['question']} ({row['evidence']})" if row.get("evidence") else row["question"]
        metadata = {
            "question": asked,
            "answer": query,
            "database": str(database.resolve()),
            "family": row["db_id"],
        }
        yield Task(main_query=asked, task_id=f"{file.stem}-{number}", metadata=metadata)
