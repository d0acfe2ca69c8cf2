"""Conversations side by side: how far they say the same, and where they part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ajet_sdk.radix import common_prefix

__all__ = ["Attempt", "Divergence", "Said", "align", "common_text"]


@dataclass(frozen=True, slots=True)
class Said:
    """One message of a conversation."""

    role: str
    agent: str
    text: str
    call_id: str
    """The call in whose request or reply it first stands."""


@dataclass(frozen=True, eq=False)
class Attempt:
    """An episode as one of several that are compared."""

    episode_id: str
    run_id: str
    task_id: str
    question: str
    attempt: int
    step: int
    split: str
    status: str
    """`running` where it has not ended."""
    cause: str
    reward: float | None
    advantage: float | None
    """The mean over its trained tokens; None where none was trained."""
    recomputed: bool
    sampled: int
    trained: int
    messages: tuple[Said, ...]
    timelines: tuple[npt.NDArray[np.int32], ...]
    """The token ids of each timeline."""
    homes: dict[str, int]
    """The timeline of each call that has ids."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where one conversation differs from another."""

    message: int
    """How many messages are alike: the first one that differs. It may lie behind the end of one of the two."""
    character: int
    """How many characters of that message are alike; 0 where another role speaks or one of the two has ended."""
    timeline: int | None = None
    """Where the message stands in the second of the two; None where its call has no ids."""
    token: int | None = None
    """How many tokens of that timeline are alike."""


def align(reference: Attempt, other: Attempt) -> Divergence | None:
    """Where `other` first differs from `reference`; None where both say the same to the end."""
    a, b = reference.messages, other.messages
    same = 0
    while same < min(len(a), len(b)) and _alike(a[same], b[same]):
        same += 1
    if same == len(a) == len(b):
        return None
    character = 0
    if same < min(len(a), len(b)) and (a[same].role, a[same].agent) == (b[same].role, b[same].agent):
        character = common_text(a[same].text, b[same].text)
    timeline, token = _token(reference, other, same)
    return Divergence(same, character, timeline, token)


def common_text(a: str, b: str) -> int:
    """How many characters two texts begin with alike; messages may be megabytes long."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _alike(a: Said, b: Said) -> bool:
    return (a.role, a.agent, a.text) == (b.role, b.agent, b.text)


def _token(reference: Attempt, other: Attempt, message: int) -> tuple[int | None, int | None]:
    """The timeline of `other` in which a message stands, and how many of its ids the reference has alike."""
    ours, theirs = _home(reference, message), _home(other, message)
    if ours is None or theirs is None:
        return theirs, None
    return theirs, common_prefix(reference.timelines[ours], other.timelines[theirs])


def _home(attempt: Attempt, message: int) -> int | None:
    """The timeline of a message, or of the last one where the conversation has ended before."""
    if not attempt.messages:
        return None
    return attempt.homes.get(attempt.messages[min(message, len(attempt.messages) - 1)].call_id)
