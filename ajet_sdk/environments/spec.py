"""The environment to host, and what the instances of every kind return."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajet_sdk.types import Json


class WrongTarget(ValueError):
    """The target can't be hosted; the message says what to do."""


class UnknownTask(ValueError):
    """There is no task with this id."""


@dataclass(frozen=True)
class Spec:
    """The environment to host: `FILE.py:NAME`, `package.module:NAME`, `gymnasium:ID`,
    `mcp:COMMAND`, `openenv:NAME`, `verifiers:NAME`."""

    target: str
    arguments: Json = field(default_factory=dict)
    """Keyword arguments of the environment."""
    splits: dict[str, list[str]] = field(default_factory=dict)
    """Task ids by split, for an environment without task ids."""
    actions: list[str] = field(default_factory=list)
    """Names of a gymnasium environment's actions, starting at action 0."""


async def resolved(value: object) -> Any:
    """The value, awaited if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


_PARTS = ("text", "image_url", "image")
"""Types of the parts of a message. Written as text, a picture would be a page of base64."""


def _is_part(value: object) -> bool:
    return isinstance(value, Mapping) and "role" not in value and value.get("type") in _PARTS


def _message_of(content: object) -> dict[str, object]:
    """Convert an observation to a user message."""
    if isinstance(content, Mapping) and "role" in content:
        return dict(content)
    if isinstance(content, list) and any(map(_is_part, content)):
        parts = [
            part if _is_part(part) else {"type": "text", "text": str(part)} for part in content
        ]
        return {"role": "user", "content": parts}
    return {"role": "user", "content": "" if content is None else str(content)}


def messages_of(state: object) -> list[Json]:
    """Convert an observation (text, a message, its parts, or a list of messages) to messages."""
    if _is_part(state):
        state = [state]
    if isinstance(state, list) and not any(map(_is_part, state)):
        return [_message_of(message) for message in state]
    return [_message_of(state)]


def answer(
    observation: object, reward: float, terminated: bool, info: Mapping[str, object] | None
) -> Json:
    """The service's response to a step."""
    state = messages_of(observation)
    return {
        "state": state,
        "reward": float(reward),
        "is_terminated": terminated,
        "info": dict(info or {}),
    }
