"""The judges `exact` and `regex`, and the text of an output that the built-in judges compare."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import ConfigError, NoReward

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.types import Task


def text_of(output: object) -> str:
    """Returns the text of a workflow's output: a string or number itself, or the answer in a WorkflowOutput's metadata.

    The answer is `metadata["final_answer"]`, which also holds the plain result of a class workflow, else
    `metadata["output"]`. Raises NoReward for anything else, including None: an agent that returned nothing has failed,
    which is not a wrong answer.
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


def exact(output: object, answer: object) -> bool:
    """Whether output and answer are equal, apart from surrounding white space."""
    return text_of(output).strip() == text_of(answer).strip()


def matches(pattern: re.Pattern[str], output: str, answer: object) -> bool:
    """Whether the first group of the last match is the answer; for a pattern without groups, whether it matches."""
    if not pattern.groups:
        return pattern.search(output) is not None
    groups = [match.group(1) for match in pattern.finditer(output)]
    return bool(groups) and (groups[-1] or "").strip() == text_of(answer).strip()


def open_exact(config: Config) -> Any:
    return exact


def open_regex(config: Config) -> Any:
    """Opens the judge `regex`. Raises ConfigError for an invalid pattern."""
    pattern = config.task_judge.pattern or ""
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ConfigError(f"task_judge.pattern {pattern!r} is not a valid regular expression: {error}") from None

    def regex(output: object, task: Task) -> bool:
        answer = task.metadata.get("answer")
        if compiled.groups and answer is None:
            raise NoReward(
                f"task {task.task_id} has no reference answer in its metadata; it has "
                f"{', '.join(task.metadata) or 'nothing'} (task_reader.field_mapping names the column of the answer)"
            )
        return matches(compiled, text_of(output), answer)

    return regex
