"""What the built-in judges compare: the text of an output, and the answer of a task."""

from __future__ import annotations

from typing import Any

from ajet_sdk.errors import NoReward
from ajet_sdk.types import Task

__all__ = ["answer_of", "text_of"]


def text_of(output: Any) -> str:
    """The text of what a workflow returned: itself, or a number's digits.

    Of a WorkflowOutput it is `metadata["final_answer"]`, where a class workflow's plain result stands too, else
    `metadata["output"]`.

    Raises NoReward for anything else, None included: an agent that returned nothing failed; its answer isn't wrong.
    """
    if isinstance(output, str):
        return output
    if isinstance(output, bool | int | float):
        return str(output)
    metadata = getattr(output, "metadata", None)
    if isinstance(metadata, dict):
        for name in ("final_answer", "output"):
            if isinstance(metadata.get(name), str | int | float):
                return str(metadata[name])
    raise NoReward(
        f"the built-in judges compare text, and the workflow returned {type(output).__name__}; return a string, "
        'or a WorkflowOutput with metadata={"final_answer": ...}'
    )


def answer_of(task: Task, key: str) -> Any:
    """The right answer of a task. Raises NoReward where its metadata has none."""
    if task.metadata.get(key) is None:
        raise NoReward(
            f"task {task.task_id} has no {key!r} in its metadata to judge by; it has "
            f"{', '.join(task.metadata) or 'nothing'} (task_judge.answer_key)"
        )
    return task.metadata[key]
