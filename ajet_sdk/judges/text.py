"""The texts that the built-in judges compare: that of an output, and the answer of a task.

The exact judge: the same text, but for white space around it.

The regex judge: what a pattern finds in the output.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import ConfigError, NoReward

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.types import Task


def text_of(output: object) -> str:
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
        f"the built-in judges compare text, but the workflow returned {type(output).__name__}; return a string, "
        'or a WorkflowOutput with metadata={"final_answer": ...}'
    )


def answer_of(task: Task, key: str) -> Any:
    """The right answer of a task. Raises NoReward where its metadata has none."""
    if task.metadata.get(key) is None:
        raise NoReward(
            f"task {task.task_id} has no reference answer {key!r} in its metadata; it has "
            f"{', '.join(task.metadata) or 'nothing'} (task_judge.answer_key)"
        )
    return task.metadata[key]


def exact(output: object, answer: object) -> bool:
    """Whether the output is the answer, white space around it aside."""
    return text_of(output).strip() == text_of(answer).strip()


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled pattern; ConfigError says where it is wrong."""
    try:
        return re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"task_judge.pattern {pattern!r} is not a valid regular expression: {error}") from None


def matches(pattern: re.Pattern[str], output: str, answer: object) -> bool:
    """Whether the first group of the last match is the answer; for a pattern without groups, whether it matches."""
    if not pattern.groups:
        return pattern.search(output) is not None
    groups = [match.group(1) for match in pattern.finditer(output)]
    return bool(groups) and (groups[-1] or "").strip() == text_of(answer).strip()


def on_answer(compare: Callable[[object, object], bool], key: str) -> Any:
    """A judge that compares an output with the answer of its task, by a metadata key."""
    if key == "answer":  # then a task without it is found before the first episode
        return compare

    def judge(output: object, task: Task) -> bool:
        return bool(compare(output, answer_of(task, key)))

    judge.__name__ = compare.__name__
    return judge


def open_exact(config: Config) -> Any:
    return on_answer(exact, config.task_judge.answer_key)


def open_regex(config: Config) -> Any:
    """The judge `regex`. Raises ConfigError for a pattern that is none."""
    compiled, key = compile_pattern(config.task_judge.pattern or ""), config.task_judge.answer_key

    def regex(output: object, task: Task) -> bool:
        return matches(compiled, text_of(output), answer_of(task, key) if compiled.groups else None)

    return regex
