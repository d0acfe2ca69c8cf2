"""The texts that the built-in judges compare: that of an output, and the answer of a task.

The exact judge: the same text, but for white space around it.

The regex judge: what a pattern finds in the output.
"""

from __future__ import annotations

import re
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


def open_exact(config: Config) -> Any:
    return exact


def open_regex(config: Config) -> Any:
    """The judge `regex`. Raises ConfigError for a pattern that is none."""
    compiled = compile_pattern(config.task_judge.pattern or "")

    def regex(output: object, task: Task) -> bool:
        answer = task.metadata.get("answer")
        if compiled.groups and answer is None:
            raise NoReward(
                f"task {task.task_id} has no reference answer in its metadata; it has "
                f"{', '.join(task.metadata) or 'nothing'} (task_reader.field_mapping names the column of the answer)"
            )
        return matches(compiled, text_of(output), answer)

    return regex
