"""Task rows, as `task_reader.type: jsonl_dataset_file` reads them back: each task once."""

from __future__ import annotations

import hashlib
from typing import BinaryIO

from ajet_tools.trace.export.job import Job
from ajet_tools.trace.export.target import json_line

__all__ = ["write"]


def write(job: Job, file: BinaryIO) -> None:
    """One line for each task: the first form in which an id is met; a second one under the same id is left out."""
    known: dict[bytes, bytes] = {}
    for record in job.records():
        task = record.episode.task
        line = json_line(task.model_dump())
        digest = hashlib.blake2b(line, digest_size=16).digest()
        key = hashlib.blake2b(task.task_id.encode("utf-8", "replace"), digest_size=16).digest()
        if not (task.main_query or task.init_messages or task.metadata):
            job.left_out["episodes without a task"] += 1
        elif key not in known:
            known[key] = digest
            file.write(line)
            job.wrote(record)
        elif known[key] != digest:
            job.left_out["episodes whose task has the id of another task"] += 1
        else:
            job.wrote(record, rows=0)
