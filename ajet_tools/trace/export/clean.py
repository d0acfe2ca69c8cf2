"""A record with its texts redacted. Ids, names, times and numbers stay; token ids cannot be redacted by text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ajet_sdk.types import Call, Feedback, Reward, Task
from ajet_tools.trace.export.record import Record
from ajet_tools.trace.redact import Redactor

__all__ = ["redacted_record"]


def redacted_record(record: Record) -> Record:
    """The record with every text that an agent, a model, a judge or a person wrote redacted, numbered as one."""
    redactor = Redactor()
    episode = record.episode
    changed: dict[str, Any] = {
        "task": _task(episode.task, redactor),
        "calls": tuple(_call(call, redactor) for call in episode.calls),
        "output": redactor.value(episode.output),
        "rewards": tuple(_reward(reward, redactor) for reward in episode.rewards),
        "error": redactor.value(episode.error),
    }
    feedback = tuple(_feedback(said, redactor) for said in record.feedback)
    if not redactor.counts:
        return record
    return replace(
        record, episode=episode.model_copy(update=changed), feedback=feedback, redacted=dict(redactor.counts)
    )


def _task(task: Task, redactor: Redactor) -> Task:
    names = ("main_query", "init_messages", "metadata")
    return task.model_copy(update={name: redactor.value(getattr(task, name)) for name in names})


def _call(call: Call, redactor: Redactor) -> Call:
    names = ("request", "response", "error", "sampling")
    return call.model_copy(update={name: redactor.value(getattr(call, name)) for name in names})


def _reward(reward: Reward, redactor: Redactor) -> Reward:
    return reward.model_copy(update={"reason": redactor.value(reward.reason)})


def _feedback(said: Feedback, redactor: Redactor) -> Feedback:
    names = ("author", "comment", "correction")
    return said.model_copy(update={name: redactor.value(getattr(said, name)) for name in names})
