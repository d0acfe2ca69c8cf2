"""The judges `exact` and `regex`, and the text of an output that the built-in judges compare."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import ConfigError, NoReward
from ajet_sdk.sandbox.limited import TooExpensive, call

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.types import Task

log = logging.getLogger("ajet")


def text_of(output: object) -> str:
    """Returns the text of a workflow's output: a string or number itself, or the answer in a
    WorkflowOutput's metadata.

    The answer is `metadata["final_answer"]`, which also holds the plain result of a class workflow,
    else `metadata["output"]`. Raises NoReward for anything else, including None: an agent that
    returned nothing has failed, which is not a wrong answer.
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
        f"the built-in judges compare text, but the workflow returned {type(output).__name__};"
        ' return a string, or a WorkflowOutput with metadata={"final_answer": ...}'
    )


def exact(output: object, answer: object) -> bool:
    """Whether output and answer are equal, apart from surrounding white space."""
    return text_of(output).strip() == text_of(answer).strip()


def last_match(pattern: str, output: str) -> str | None:
    """The first group of a pattern's last match, the whole match if there are no groups; None
    without a match."""
    compiled = re.compile(pattern, re.MULTILINE)
    if not compiled.groups:
        match = compiled.search(output)
        return None if match is None else match[0]
    last = None
    for match in compiled.finditer(output):
        last = match[1] or ""
    return last


def open_exact(config: Config) -> Any:
    return exact


def open_regex(config: Config) -> Any:
    """Opens the judge `regex`: the first group of the last match is the answer; without groups, any
    match is right.

    Matching can take exponential time. It runs in a process that is killed after two seconds of
    processor time, and the output is then wrong. Raises ConfigError for an invalid pattern.
    """
    pattern = config.task_judge.pattern or ""
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ConfigError(
            f"task_judge.pattern {pattern!r} is not a valid regular expression: {error}"
        ) from None

    def regex(output: object, task: Task) -> bool:
        answer = task.metadata.get("answer")
        if compiled.groups and answer is None:
            raise NoReward(
                f"task {task.task_id} has no reference answer in its metadata; it has"
                f" {', '.join(task.metadata) or 'nothing'} (task_reader.field_mapping names the"
                " column of the answer)"
            )
        try:
            found = call("ajet_sdk.judges.text:last_match", (pattern, text_of(output)))
        except TooExpensive as error:
            log.warning(
                "task_judge.pattern %r: an output of %s gets 0: %s", pattern, task.task_id, error
            )
            return False
        if not compiled.groups:
            return found is not None
        return found is not None and found.strip() == text_of(answer).strip()

    return regex
