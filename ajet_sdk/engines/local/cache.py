"""The key-value cache of many conversations: a block of memory per layer, and the table of its
rows.

A row is free, resting (a conversation between two turns) or running. The table has an array per
property, so that a step over many rows takes a few numpy calls; it also sizes the block.

The block has R rows, each for a conversation of up to C tokens at positions 0, 1, 2, ... without
padding, so that rows can be extended, shortened or copied by indices alone. Keys and values of a
layer are [R, C, H, D] (H key heads of size D); a model passes and gets [B, H, T, D].
"""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache

from ajet_sdk.engines.local.requests import Continuation

D = TypeVar("D", bound=np.generic)

FREE = 0
RESTING = 1
RUNNING = 2

_SHARE_AT_LEAST = 16
"""Minimum number of shared tokens for which copying keys and values is worth it."""

_ROWS_EACH = 4
"""Maximum rows per concurrent continuation; resting ones are searched for shared prefixes."""

_Index = npt.NDArray[np.int64] | slice


class CacheRows:
    """The table of the rows of a `RowCache`, whose size it sets.

    Without `share` a row is freed after its reply, for reproducible results: otherwise it depends
    on other requests whether a prompt is computed whole or extended, which rounds differently.
    """

    state: npt.NDArray[np.int8]
    length: npt.NDArray[np.int64]
    """Tokens with computed keys and values; the id of one more may be known."""
    limit: npt.NDArray[np.int64]
    """Maximum length, including the reply."""
    start: npt.NDArray[np.int64]
    """Length of the prompt."""
    shift: npt.NDArray[np.int64]
    """Difference of position and place of a sampled token: a picture has fewer positions than
    tokens."""
    used: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]

    def __init__(self, cache: RowCache, *, at_least: int, kv_bytes: int, share: bool) -> None:
        self._cache = cache
        self._at_least = at_least
        self._kv_bytes = kv_bytes
        self._share = share
        self.clear()

    def clear(self) -> None:
        rows = self._cache.rows
        capacity = self._cache.capacity
        self.ids: npt.NDArray[np.int32] = np.zeros((rows, capacity + 1), dtype=np.int32)
        self.logprobs: npt.NDArray[np.float32] = np.zeros((rows, capacity + 1), dtype=np.float32)
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(rows, dtype=dtype))
        self.continuations: list[Continuation | None] = [None] * rows
        self._owner: list[str | None] = [None] * rows
        self._sessions: defaultdict[str, set[int]] = defaultdict(set)
        self._tick = 0

    # Joining and leaving

    def seat(self, continuation: Continuation, shift: int = 0) -> tuple[int, int, int]:
        """Assign a row to a continuation. Returns (row, source, shared): copy the first `shared`
        tokens from the row `source` (-1: nothing to copy)."""
        request = continuation.request
        ids = continuation.ids
        source, shared = self._find(ids, request.session)
        stays = source >= 0 and shared == self.length[source] and self.state[source] == RESTING
        if stays and self._owner[source] == request.session:
            row = source
            source = -1
        else:
            row = self._allocate()
            self.length[row] = 0
        self._assign(row, request.session)
        start = len(request.prompt)
        self.ids[row, : len(ids)] = ids
        self.logprobs[row, start : len(ids)] = continuation.logprobs
        self.shift[row] = shift
        self.state[row] = RUNNING
        self.continuations[row], continuation.row = continuation, row
        self.start[row], self.limit[row], self.seed[row] = (
            start,
            start + request.max_new,
            continuation.seed,
        )
        sampling = request.sampling
        self.temperature[row], self.top_p[row], self.top_k[row] = (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
        )
        self.min_p[row] = sampling.min_p
        return row, source, shared

    def park(self, row: int) -> None:
        """Change a running row to resting, or to free if its session was forgotten meanwhile."""
        self._tick += 1
        self.state[row], self.used[row], self.continuations[row] = RESTING, self._tick, None
        if self._owner[row] is None or not self._share:
            self._release(row)

    def forget(self, session: str) -> None:
        """Free a session's rows: resting ones at once, running ones at their end."""
        for row in list(self._sessions.get(session, ())):
            self._assign(row, None)
            if self.state[row] == RESTING:
                self._release(row)

    def _release(self, row: int) -> None:
        self._assign(row, None)
        self.state[row], self.length[row], self.continuations[row] = FREE, 0, None

    def _assign(self, row: int, session: str | None) -> None:
        before = self._owner[row]
        if before is not None and before != session:
            self._sessions[before].discard(row)
            if not self._sessions[before]:
                del self._sessions[before]
        self._owner[row] = session
        if session is not None:
            self._sessions[session].add(row)

    # Shared prefixes

    def _find(self, prompt: npt.NDArray[np.int32], session: str) -> tuple[int, int]:
        """The row that shares most tokens with the prompt, and their number; (-1, 0) if none shares
        enough.

        The prompt's last token is never shared, as its logits are needed. A row that the prompt
        extends completely is preferred, since it can be used in place.
        """
        most = len(prompt) - 1
        rows = self._sessions.get(session, ())
        [last] = rows if len(rows) == 1 else [-1]
        if last >= 0 and self.state[last] == RESTING:
            length = int(self.length[last])
            if 0 < length <= most and np.array_equal(self.ids[last, :length], prompt[:length]):
                return last, length
        session_rows = np.fromiter(rows, dtype=np.int64)
        best = -1
        best_shared = 0
        if len(session_rows):
            shared_B = self._shared_lengths(prompt[:most], session_rows)
            whole_B = (shared_B == self.length[session_rows]) & (
                self.state[session_rows] == RESTING
            )
            at = int((2 * shared_B + whole_B).argmax())
            best = int(session_rows[at])
            best_shared = int(shared_B[at])
            if whole_B[at] and best_shared:
                return best, best_shared
        if self._share and best_shared < most and len(self.length):
            shared_B = self._shared_lengths(prompt[:most], slice(None))
            if shared_B.max() > best_shared:
                best = int(shared_B.argmax())
                best_shared = int(shared_B.max())
        if best_shared >= min(_SHARE_AT_LEAST, most):
            return (best, best_shared)
        return (-1, 0)

    def _shared_lengths(self, ids: npt.NDArray[np.int32], rows: _Index) -> npt.NDArray[np.int64]:
        """Number of computed tokens at the start of each row that equal `ids`."""
        length_B = self.length[rows]
        width = min(len(ids), int(length_B.max()))
        if not width:
            return np.zeros(len(length_B), dtype=np.int64)
        differs = self.ids[rows, :width] != ids[:width]
        shared_B = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        return np.minimum(shared_B, length_B)

    # Memory

    def _allocate(self) -> int:
        free = np.flatnonzero(self.state == FREE)
        if len(free):
            return int(free[0])
        rows = len(self.state)
        most = self._most(self._cache.capacity)
        if rows < most:
            self._resize(min(max(8, rows * 2), most), self._cache.capacity)
            return rows
        oldest = self._oldest()[0]
        self._release(int(oldest))
        return int(oldest)

    def _oldest(self) -> npt.NDArray[np.int64]:
        """Resting rows, least recently used first."""
        resting = np.flatnonzero(self.state == RESTING)
        return resting[self.used[resting].argsort()]

    def _most(self, capacity: int) -> int:
        """Number of rows that fit the memory limit, but at least as many as may run."""
        per_row = self._cache.bytes_per_token * capacity
        affordable = self._kv_bytes // per_row if per_row else 0
        return max(self._at_least, min(affordable, self._at_least * _ROWS_EACH))

    def reserve(self, length: int) -> None:
        """Extend rows to `length` tokens; resting rows are freed if memory is short."""
        if length <= self._cache.capacity:
            return
        capacity = -(-max(length, int(self._cache.capacity * 1.5)) // 64) * 64
        rows = len(self.state)
        most = self._most(capacity)
        if rows > most:
            for row in self._oldest()[: rows - most]:
                self._release(int(row))
            last = int(np.flatnonzero(self.state != FREE).max(initial=-1))
            rows = max(most, last + 1)
        self._resize(rows, capacity)

    def _resize(self, rows: int, capacity: int) -> None:
        self._cache.resize(rows, capacity)
        common = min(rows, len(self.state))
        self.ids = _grow(self.ids, common, (rows, capacity + 1))
        self.logprobs = _grow(self.logprobs, common, (rows, capacity + 1))
        for name in _COLUMNS:
            setattr(self, name, _grow(getattr(self, name), common, (rows,)))
        self.continuations = self.continuations[:common] + [None] * (rows - common)
        self._owner = self._owner[:common] + [None] * (rows - common)


_COLUMNS = {
    name: get_args(get_args(hint)[1])[0] for name, hint in get_type_hints(CacheRows).items()
}
"""The types of the arrays of `CacheRows` with one element per row."""


def _grow(array: npt.NDArray[D], rows: int, shape: tuple[int, ...]) -> npt.NDArray[D]:
    new = np.zeros(shape, dtype=array.dtype)
    new[(slice(rows), *map(slice, array.shape[1:]))] = array[:rows]
    return new


class RowCache(Cache):  # type: ignore[misc]  # transformers has no types
    """A transformers cache whose batch is any selection of its rows.

    `fresh` and `extend` set the rows of the next forward pass, and the positions it writes. It has
    no layers of transformers, which therefore builds a plain causal mask for a fresh pass; other
    passes have their own mask.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.rows = 0
        self.capacity = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._write: torch.Tensor | None = None
        self._read: torch.Tensor | slice | None = None
        self._window = 0

    def fresh(self, write: torch.Tensor) -> None:
        """Set a pass whose tokens attend only to tokens of the same pass. `write`: flat positions,
        B * T."""
        self._write = write
        self._read = None

    def extend(self, write: torch.Tensor, rows: torch.Tensor | slice, window: int) -> None:
        """Set a pass that extends `rows` and attends to their first `window` positions; a slice is
        read in place."""
        self._write = write
        self._read = rows
        self._window = window

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._keys) <= layer_idx:
            self._keys.append(self._block(key_states))
            self._values.append(self._block(value_states))
        keys = self._keys[layer_idx]
        values = self._values[layer_idx]
        self._store(keys, key_states)
        self._store(values, value_states)
        if self._read is None:
            return (key_states, value_states)
        return (self._seen(keys), self._seen(values))

    def _seen(self, block: torch.Tensor) -> torch.Tensor:
        """The rows and positions that the pass attends to."""
        read = self._read
        block = block[:, : self._window]
        return (block[read] if isinstance(read, slice) else block.index_select(0, read)).transpose(
            1, 2
        )

    def _block(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = states.shape
        return states.new_zeros(self.rows, self.capacity, heads, size)

    def _store(self, block: torch.Tensor, states: torch.Tensor) -> None:
        width = block.shape[2] * block.shape[3]
        assert self._write is not None
        block.view(-1, width).index_copy_(0, self._write, states.transpose(1, 2).reshape(-1, width))

    def resize(self, rows: int, capacity: int) -> None:
        """Resize the block, keeping its content. New positions are zero, as masked positions must
        be finite."""
        for blocks in (self._keys, self._values):
            for i, old in enumerate(blocks):
                new = old.new_zeros(rows, capacity, *old.shape[2:])
                common = min(rows, self.rows), min(capacity, self.capacity)
                new[: common[0], : common[1]] = old[: common[0], : common[1]]
                blocks[i] = new
        self.rows = rows
        self.capacity = capacity

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of each row of `source` to the corresponding row of
        `target`."""
        for block in (*self._keys, *self._values):
            block[target, :length] = block[source, :length]

    def drop(self) -> None:
        self._keys = []
        self._values = []
        self.rows = 0
        self.capacity = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token and row, over all layers; 0 before the first pass."""
        return sum(b.element_size() * b.shape[2] * b.shape[3] for b in (*self._keys, *self._values))
