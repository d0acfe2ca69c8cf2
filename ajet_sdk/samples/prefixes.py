"""Finds the earlier call that a call extends, and the one with which it shares the longest prefix.

Prompts are compared with the keys of their pictures in place of the image tokens
(`pictures.keyed`), since all pictures of one size have the same ids.

The extended call, of the same agent and phase, is a prefix of the prompt as a whole; merging
follows it. The nearest call, of any agent, shares most tokens; the trace stores only the tokens
after the shared prefix.

Memory is linear in the number of distinct tokens: ids are stored as a tree of runs, and messages as
digests.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import threading
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ajet_sdk.pictures import keyed
from ajet_sdk.types import Call

T = TypeVar("T")
Ids = npt.NDArray[np.int32]
_LEAVES = 64
_NO_IDS = np.empty(0, np.int32)


def is_trained(call: Call) -> bool:
    """Whether a call's sampled tokens are masked in: it is trainable, and not a judge's."""
    return call.trainable and call.phase == "rollout"


def rank(call: Call) -> tuple[bool, Any, str]:
    """Order among calls with equal prompts and outputs, of which the first is extended: trained
    ones, then by time."""
    return not is_trained(call), call.started_at, call.call_id


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the common prefix of two token sequences."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    for end in (64, n) if n > 4096 else (n,):  # long sequences mostly differ early or not at all
        differs = a[:end] != b[:end]
        first = int(differs.argmax())
        if differs[first]:
            return first
    return n


def common_start(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the common prefix of two texts or lists, by bisection, since slices compare faster
    than items."""
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


IdHash = hashlib.blake2b
"""Incremental hash of the bytes of token ids."""
DIGEST = 16
"""Length of a digest, in bytes."""


class Ends(Generic[T]):
    """Sequences (prompt and output) of an agent by length, to find the longest that is a prefix of
    a prompt."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._items: dict[tuple[int, int], dict[bytes, tuple[object, T]]] = {}
        """The item of lowest rank by digest, by length and last id."""

    def longest(self, prompt: Ids, limit: int, hashed: IdHash, known: int = 0) -> T | None:
        """The longest sequence of `known` to `limit` ids that is a prefix of a prompt.

        `hashed` has the first `known` ids of the prompt, and all of them afterwards.
        """
        best: T | None = None
        prompt = np.ascontiguousarray(prompt)
        first = bisect_left(self._lengths, known)
        last = bisect_right(self._lengths, limit)
        for length in self._lengths[first:last]:
            items = self._items.get((length, int(prompt[length - 1]) if length else -1))
            if items is not None:
                hashed.update(prompt[known:length].data)
                known = length
                item = items.get(hashed.digest())
                best = best if item is None else item[1]
        hashed.update(prompt[known:].data)
        return best

    def add(self, hashed: IdHash, length: int, last_id: int, rank: Any, item: T) -> None:
        """Add a sequence by its hash, length and last id (-1 if empty)."""
        place = bisect_left(self._lengths, length)
        if place == len(self._lengths) or self._lengths[place] != length:
            insort(self._lengths, length)
        items = self._items.setdefault((length, last_id), {})
        digest = hashed.digest()
        current = items.get(digest)
        if current is None or rank < current[0]:
            items[digest] = rank, item


class CallPlace(NamedTuple):
    """A call's relation to the earlier calls of its episode."""

    extends_call_id: str | None = None
    """The longest call of the same agent and phase whose prompt and output are a prefix of the
    prompt."""
    parent_call_id: str | None = None
    """The call with the longest common prefix."""
    prefix_len: int = 0
    """Length of the common prefix of the prompt and the parent's prompt and output, in tokens."""
    prefix_messages: int = 0
    """Length of the common prefix with the parent's messages."""


PLACE = CallPlace._fields
"""Fields of `Call` with its place."""


@dataclass(slots=True, eq=False)
class IdRun:
    """Ids after a prefix: the first `start` ids of `parent`, followed by `tail`, up to `end`."""

    parent: IdRun | None
    start: int
    tail: Ids
    end: int

    def chain(self) -> list[tuple[IdRun, int]]:
        """The runs from the first to this one, each with the end of its used ids."""
        runs = list[tuple[IdRun, int]]()
        run = self
        end = self.end
        while True:
            runs.append((run, end))
            if run.parent is None:
                return runs[::-1]
            run, end = run.parent, min(end, run.start)

    def whole(self) -> Ids:
        """All ids from the first, read-only."""
        ids = np.concatenate([run.tail[: max(end - run.start, 0)] for run, end in self.chain()])
        ids.flags.writeable = False
        return ids


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """A call that no later one repeats completely; its ids are the first `end` of a run."""

    call_id: str
    run: IdRun | None
    end: int
    keys: Sequence[bytes]
    hashed: IdHash | None
    """Hash of its prompt and output, if it has both."""


class PrefixIndex:
    """Index of an episode's calls for finding the place of later ones. Thread-safe.

    A call that a later one repeats completely never shares more than the latter, so that only
    leaves are compared: one for a linear conversation of any length, at most 64. The extended call
    is found among all calls.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leaves: list[_Leaf] = []
        self._ends: dict[tuple[str, str], Ends[str]] = defaultdict(Ends)
        self._spelt: tuple[Sequence[object], Sequence[bytes]] = (), ()
        """Messages of the latest call, and their keys."""

    def add(self, call: Call) -> Call:
        """Add a call and return it with its place."""
        return call.model_copy(update=self.place(call)._asdict())

    def place(self, call: Call) -> CallPlace:
        """Find the place of a call, and add it."""
        return self.find(call)[0]

    def find(
        self, call: Call, engine_ids: array[int] | None = None
    ) -> tuple[CallPlace, IdRun | None]:
        """Find the place of a call, and add it. Also returns the run that starts with its keyed
        prompt.

        `engine_ids` are the last ids of its prompt if the engine stores them, so that they are not
        stored twice.
        """
        with self._lock:
            prompt = _NO_IDS if call.prompt_ids is None else call.prompt_ids
            if call.pictures:
                prompt = keyed(prompt, call.pictures)
            if call.output_ids is None or call.prompt_ids is None:
                output = _NO_IDS
            else:
                output = call.output_ids
            keys = self._keys(call.request.get("messages"))
            shared, nearest = self._nearest(prompt, keys)
            hashed = None
            extended = None
            if call.prompt_ids is not None and call.output_ids is not None:
                if nearest is not None and shared[0] == nearest.end:
                    whole = nearest
                else:
                    whole = None
                hashed, extended = self._extended(call, prompt, output, whole)
            new = prompt[shared[0] :]
            if engine_ids and np.array_equal(
                new, engines := np.frombuffer(engine_ids, dtype=np.int32)
            ):
                new = engines
            run = _append(None if nearest is None else nearest.run, shared[0], new)
            last = _append(run, len(prompt), output)
            if nearest is not None and shared == (nearest.end, len(nearest.keys)):
                self._leaves.remove(nearest)
            leaf = _Leaf(call.call_id, last, len(prompt) + len(output), keys, hashed)
            self._leaves = [*self._leaves[-(_LEAVES - 1) :], leaf]
            return CallPlace(extended, None if nearest is None else nearest.call_id, *shared), run

    def _nearest(self, prompt: Ids, keys: Sequence[bytes]) -> tuple[tuple[int, int], _Leaf | None]:
        """The leaf that shares most ids, then messages, and their numbers."""
        best = (0, 0)
        nearest = None
        known: dict[IdRun | None, int] = {None: 0}
        data = prompt.tobytes()
        for leaf in self._leaves:
            shared = (
                min(_shared(leaf.run, prompt, data, known), leaf.end),
                common_start(keys, leaf.keys),
            )
            if shared > best:
                best = shared
                nearest = leaf
        return best, nearest

    def _extended(
        self, call: Call, prompt: Ids, output: Ids, first: _Leaf | None
    ) -> tuple[IdHash, str | None]:
        """The extended call, and the hash of prompt and output; `first` is a leaf that is a prefix
        of the prompt."""
        limit = min(len(prompt), len(prompt) + len(output) - 1)
        ends = self._ends[call.agent, call.phase]
        hashed = IdHash(digest_size=DIGEST)
        extended = None
        if first is not None and first.hashed is not None and first.end <= limit:
            hashed = first.hashed.copy()
            extended = ends.longest(prompt, limit, hashed, first.end)
        if extended is None:  # the nearest may be of another agent
            hashed = IdHash(digest_size=DIGEST)
            extended = ends.longest(prompt, limit, hashed)
        hashed.update(np.ascontiguousarray(output).data)
        last = output if len(output) else prompt
        ends.add(
            hashed,
            len(prompt) + len(output),
            int(last[-1]) if len(last) else -1,
            rank(call),
            call.call_id,
        )
        return hashed, extended

    def _keys(self, messages: object) -> Sequence[bytes]:
        """For each message a digest of it and its predecessors, up to one that cannot be
        serialized."""
        if not isinstance(messages, list):
            return ()
        before, known = self._spelt
        keys = list[bytes]()
        for message, previous, key in zip(messages, before, known, strict=False):
            if message is not previous:
                break
            keys.append(key)
        for message in messages[len(keys) :]:
            spelling = _spelling(message)
            if spelling is None:
                break
            keys.append(
                hashlib.blake2b((keys[-1] if keys else b"") + spelling, digest_size=16).digest()
            )
        self._spelt = messages, keys
        return keys


def place_all(calls: Iterable[Call]) -> list[Call]:
    """Sets the place of each call of an episode among those before it by `index`; keeps the given
    order."""
    calls = list(calls)
    index = PrefixIndex()
    placed = {id(call): index.add(call) for call in sorted(calls, key=attrgetter("index"))}
    return [placed[id(call)] for call in calls]


def _shared(run: IdRun | None, prompt: Ids, data: bytes, known: dict[IdRun | None, int]) -> int:
    """Length of the common prefix of a run and a prompt with the bytes `data`. Caches each run in
    `known`."""
    above = list[IdRun]()
    while run is not None and run not in known:
        above.append(run)
        run = run.parent
    count = known[run]
    for ancestor in reversed(above):
        if count >= ancestor.start:
            tail: Any = ancestor.tail  # a buffer; bytes compare faster than arrays
            whole = data.startswith(tail, 4 * ancestor.start)
            if whole:
                count = ancestor.end
            else:
                count = ancestor.start + common_prefix(ancestor.tail, prompt[ancestor.start :])
        known[ancestor] = count
    return count


def _append(run: IdRun | None, start: int, ids: Ids) -> IdRun | None:
    """The run that ends with `ids`, after the first `start` ids of another; None if there are no
    ids."""
    while run is not None and run.start >= start:
        run = run.parent
    if not len(ids):
        return run
    part = (
        isinstance(ids.base, np.ndarray) and ids.base.size > ids.size
    )  # a view would keep the whole prompt in memory
    return IdRun(run, start, ids.copy() if part else np.ascontiguousarray(ids), start + len(ids))


def _spelling(message: Any) -> bytes | None:
    """Serializes a message for comparison; None if impossible."""
    try:
        return marshal.dumps(
            message, 2
        )  # the last format without references, so that equal values have equal bytes
    except ValueError:
        pass
    try:
        return json.dumps(message, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        return None
