"""Which split the sources of a row stand on, so that what a job validates on is not what it learns.

`provenance.splits` of a row that ajet made names the splits of its sources, as traces name them, and
`provenance.seeds` the ids of the tasks that it was made of. Rows of `ajet trace export` say `split`.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.tasks.task_rows import SHARD, SPLITS

if TYPE_CHECKING:
    from ajet_sdk.types import Task

HELD_OUT = "val"
ANSWERS = ("answer", "solution", "target", "label", "expected")
"""Fields that may hold a task's answer."""

_NAMES = {name: "train" if name in ("train", "training") else HELD_OUT for name in SPLITS} | {"trial": "trial"}
"""Usual names of splits, as traces name them."""
_MEASURED = frozenset({"provenance", "difficulty", "pass_rate", "split"})
"""Of the metadata, what is no part of the task."""


def splits_of(values: Mapping[str, object]) -> frozenset[str]:
    """The splits of a row's sources: `train`, `val`, `trial`; none where the row does not say."""
    provenance = values.get("provenance")
    named = provenance.get("splits") if isinstance(provenance, Mapping) else None
    named = [values.get("split")] if named is None else named
    return frozenset(_NAMES[name] for name in named if isinstance(name, str) and name in _NAMES)


def split_named(source: str) -> str | None:
    """The split that a source's name says: `val` of `validation-00000-of-00002.parquet`, `test.jsonl`, `hub:dev`."""
    return _NAMES.get(SHARD.sub("", Path(source.rpartition(":")[2]).name.partition(".")[0]).lower())


def seeds_of(values: Mapping[str, object]) -> frozenset[str]:
    """The ids of the tasks that a row was made of."""
    provenance = values.get("provenance")
    seeds = provenance.get("seeds") if isinstance(provenance, Mapping) else None
    return frozenset(seed for seed in seeds if isinstance(seed, str)) if isinstance(seeds, list) else frozenset()


def plain_text(text: str) -> str:
    """A text in upper and lower case alike, whatever its white space."""
    return " ".join(text.casefold().split())


def question_of(task: Task) -> str:
    """A task's question as plain text: its query, else its conversation without the system prompt.

    The last message alone would not do: consultations that differ end with the same "yes".
    """
    if task.main_query.strip():
        return plain_text(task.main_query)
    contents = [message.get("content") for message in task.init_messages if message.get("role") != "system"]
    return plain_text("\n".join(text for content in contents for text in _texts(content)))


def _texts(content: object) -> Iterator[str]:
    """What a message says: a text, or the texts of its parts; of what is no text, such as an image, a number."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            yield text
        elif part is not None:
            data = json.dumps(part, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
            # texts that differ in numbers are never near copies, however long: two images tell their tasks apart
            yield str(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big"))


def same_tasks(tasks: Sequence[Task], held_out: Iterable[Task]) -> Iterator[tuple[int, Task]]:
    """Which of the tasks ask what a held-out one asks: their places, each with the held-out task."""
    by_id: dict[str, Task] = {}
    by_text: dict[str, list[Task]] = defaultdict(list)
    for task in held_out:
        by_id.setdefault(task.task_id, task)
        if text := question_of(task):
            by_text[text].append(task)
    for place, task in enumerate(tasks):
        same = by_id.get(task.task_id)
        if same is None and by_text:
            same = next((match for match in by_text.get(question_of(task), ()) if not clash(task, match)), None)
        if same is not None:
            yield place, same


def clash(task: Task, val_task: Task, *, by_answer: bool = True) -> bool:
    """Whether two tasks with one question are told apart by their metadata, as mazes of one query are by their seed."""
    mine, theirs = task.metadata, val_task.metadata
    shared = mine.keys() & theirs.keys() - _MEASURED - (frozenset() if by_answer else set(ANSWERS))
    return any(plain_text(str(mine[name])) != plain_text(str(theirs[name])) for name in shared)
