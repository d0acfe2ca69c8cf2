"""What a call shares with an earlier call of its episode, so that only the rest is stored.

Conversations repeat themselves: the prompt of turn 50 is nearly all of turn 49 again. A call is stored as the id of an
earlier call, how much of that call's prompt and output it repeats, and what follows.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import TraceError

__all__ = ["Placed", "Prefixes", "Stored", "Whole", "rebuild"]

_LEAVES = 64
_EPISODES = 2048
_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a call stands: `prefix_len` ids of the parent's prompt and output, `prefix_messages` of its messages."""

    parent_call_id: str | None = None
    prefix_len: int = 0
    prefix_messages: int = 0


@dataclass(frozen=True, slots=True)
class _Leaf:
    call_id: str
    ids: npt.NDArray[np.int32]
    messages: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return self.ids.nbytes + 64 * len(self.messages) + 256


@dataclass(slots=True)
class _Conversation:
    leaves: list[_Leaf] = field(default_factory=list)
    size: int = 0


_NO_IDS = np.empty(0, dtype=np.int32)


class Prefixes:
    """The calls of running episodes that a later call may extend. Bounded; what is evicted is stored whole again.

    A call that is wholly repeated by a later one can never be a longer prefix than that one, so only leaves are kept:
    one for a linear conversation of any length.
    """

    def __init__(self) -> None:
        self._episodes: OrderedDict[str, _Conversation] = OrderedDict()
        self._size = 0

    def place(
        self,
        episode_id: str,
        call_id: str,
        prompt_ids: npt.NDArray[np.int32] | None,
        output_ids: npt.NDArray[np.int32] | None,
        messages: Sequence[bytes] | None,
    ) -> Placed:
        """Find the earlier call with the longest prefix, and remember this one; equal messages have equal bytes."""
        prompt = _NO_IDS if prompt_ids is None else prompt_ids
        keys = tuple(hashlib.blake2b(m, digest_size=16).digest() for m in messages or ())
        conversation = self._episodes.setdefault(episode_id, _Conversation())
        self._episodes.move_to_end(episode_id)
        best, parent = (0, 0), None
        for leaf in conversation.leaves:
            shared = (_common(prompt, leaf.ids), _common_keys(keys, leaf.messages))
            if shared > best:
                best, parent = shared, leaf
        whole = prompt if output_ids is None or prompt_ids is None else np.concatenate([prompt, output_ids])
        self._remember(conversation, _Leaf(call_id, whole, keys), parent, best)
        return Placed(parent.call_id if parent else None, *best)

    def _remember(self, conversation: _Conversation, new: _Leaf, parent: _Leaf | None, shared: tuple[int, int]) -> None:
        if parent and shared == (len(parent.ids), len(parent.messages)):
            self._drop(conversation, parent)
        if len(conversation.leaves) >= _LEAVES:
            self._drop(conversation, conversation.leaves[0])
        conversation.leaves.append(new)
        conversation.size += new.size
        self._size += new.size
        while len(self._episodes) > _EPISODES or (self._size > _BYTES and len(self._episodes) > 1):
            self.forget(next(iter(self._episodes)))

    def _drop(self, conversation: _Conversation, leaf: _Leaf) -> None:
        conversation.leaves = [kept for kept in conversation.leaves if kept is not leaf]
        conversation.size -= leaf.size
        self._size -= leaf.size

    def forget(self, episode_id: str) -> None:
        """The episode is over."""
        gone = self._episodes.pop(episode_id, None)
        if gone:
            self._size -= gone.size

    def clear(self) -> None:
        """Forget all: calls that were placed have been lost, and nothing may refer to them."""
        self._episodes.clear()
        self._size = 0

    def __len__(self) -> int:
        return len(self._episodes)


def _common(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n


def _common_keys(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


@dataclass(frozen=True, slots=True)
class Stored:
    """A call's prompt as it is stored."""

    call_id: str
    placed: Placed
    prompt_suffix: npt.NDArray[np.int32] | None
    output_ids: npt.NDArray[np.int32] | None
    messages_suffix: str | None
    """A JSON list."""


Whole = tuple[npt.NDArray[np.int32], list[Any]]
"""A call's whole prompt and messages; empty where it has none."""


def rebuild(calls: Sequence[Stored]) -> dict[str, Whole]:
    """The inverse of `Prefixes.place`: whole prompts by call id, of calls that stand in any order with their parents.

    Raises TraceError where a parent is missing or calls refer to each other in a circle.
    """
    stored = {call.call_id: call for call in calls}
    whole: dict[str, Whole] = {}
    for call in calls:
        chain: dict[str, Stored] = {}
        at: str | None = call.call_id
        while at is not None and at not in whole:
            if at in chain or at not in stored:
                wrong = "refers to itself" if at in chain else f"refers to call {at}, which is not there"
                raise TraceError(
                    f"the prompt of call {call.call_id} cannot be rebuilt: its chain of earlier calls {wrong}; "
                    "`ajet trace check` lists what is broken"
                )
            chain[at] = stored[at]
            at = stored[at].placed.parent_call_id
        for link in reversed(chain.values()):
            whole[link.call_id] = _extend(link, stored, whole)
    return whole


def _extend(call: Stored, stored: dict[str, Stored], whole: dict[str, Whole]) -> Whole:
    ids, messages = _NO_IDS, list[Any]()
    parent = call.placed.parent_call_id
    if parent is not None:
        ids, messages = whole[parent]
        output = stored[parent].output_ids
        ids = (ids if output is None else np.concatenate([ids, output]))[: call.placed.prefix_len]
    own = json.loads(call.messages_suffix or "[]")
    suffix = call.prompt_suffix
    return (
        ids if suffix is None else np.concatenate([ids, suffix]),
        [*messages[: call.placed.prefix_messages], *own],
    )
