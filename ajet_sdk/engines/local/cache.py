"""Who sits in which row of the key-value block, and what its tokens are.

A row is free, resting (a conversation between two turns) or running. R is the number of rows. Arrays with one element
per row stand side by side, so that a step over many rows is a few numpy calls; the sizes of the block follow from here.

Keys and values of many conversations in one block of memory per layer, read and written by rows.

R rows, each a conversation of up to C tokens; a row's tokens lie at positions 0, 1, 2, ... with no padding, so a
row is extended, shortened or copied by numbers alone. Shapes: keys and values of a layer are [R, C, H, D] (H key heads
of size D); a model hands in and gets back [B, H, T, D].
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

FREE, RESTING, RUNNING = 0, 1, 2

_SHARE_AT_LEAST = 16
"""Shared tokens below which copying another row's keys and values does not pay."""

_ROWS_EACH = 4
"""Rows at most, for each continuation that may run: those that rest are searched for shared prefixes."""

_Index = npt.NDArray[np.int64] | slice


class CacheRows:
    """The table of rows over a `RowCache`, whose memory it sizes.

    Without `share` no row outlives its reply: which of them are still there at the next turn depends on what else came
    in between, and a prompt that is computed whole has other last bits than one that is extended.
    """

    state: npt.NDArray[np.int8]
    length: npt.NDArray[np.int64]
    """Tokens whose keys and values are there; the id of one more may be known."""
    limit: npt.NDArray[np.int64]
    """Where the reply must end."""
    start: npt.NDArray[np.int64]
    """Where the reply begins."""
    used: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    min_p: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]

    def __init__(self, cache: RowCache, *, at_least: int, kv_bytes: int, share: bool) -> None:
        self._cache, self._at_least, self._kv_bytes, self._share = cache, at_least, kv_bytes, share
        self.clear()

    def clear(self) -> None:
        rows, capacity = self._cache.rows, self._cache.capacity
        self.ids: npt.NDArray[np.int32] = np.zeros((rows, capacity + 1), dtype=np.int32)
        self.logprobs: npt.NDArray[np.float32] = np.zeros((rows, capacity + 1), dtype=np.float32)
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(rows, dtype=dtype))
        self.continuations: list[Continuation | None] = [None] * rows
        self._owner: list[str | None] = [None] * rows
        self._sessions: defaultdict[str, set[int]] = defaultdict(set)
        self._tick = 0

    # Joining and leaving

    def seat(self, continuation: Continuation) -> tuple[int, int, int]:
        """Give a continuation a row. Returns (row, source, shared): the row, and the row from which its first
        `shared` tokens are to be copied (-1: none, or they are in place already)."""
        request = continuation.request
        source, shared = self._find(request.prompt, request.session)
        stays = source >= 0 and shared == self.length[source] and self.state[source] == RESTING
        if stays and self._owner[source] == request.session:
            row, source = source, -1
        else:
            row = self._allocate()
            self.length[row] = 0
        self._assign(row, request.session)
        total = len(request.prompt)
        self.ids[row, :total] = request.prompt
        self.state[row] = RUNNING
        self.continuations[row], continuation.row = continuation, row
        self.start[row], self.limit[row], self.seed[row] = total, total + request.max_new, continuation.seed
        sampling = request.sampling
        self.temperature[row], self.top_p[row], self.top_k[row] = sampling.temperature, sampling.top_p, sampling.top_k
        self.min_p[row] = sampling.min_p
        return row, source, shared

    def park(self, row: int) -> None:
        """A running row becomes a resting one, or free where its session was forgotten meanwhile."""
        self._tick += 1
        self.state[row], self.used[row], self.continuations[row] = RESTING, self._tick, None
        if self._owner[row] is None or not self._share:
            self._release(row)

    def forget(self, session: str) -> None:
        """Free a session's rows: at once where they rest, when they end where they run."""
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

    # Finding what is computed already

    def _find(self, prompt: npt.NDArray[np.int32], session: str) -> tuple[int, int]:
        """The row that shares most tokens with the prompt, and how many; (-1, 0) where none shares enough.

        The prompt's last token is never shared: its logits are what is asked for. A row that the prompt extends whole
        is preferred, since it can be taken over where it lies.
        """
        most = len(prompt) - 1
        rows = self._sessions.get(session, ())
        [last] = rows if len(rows) == 1 else [-1]
        if last >= 0 and self.state[last] == RESTING:
            length = int(self.length[last])
            if 0 < length <= most and np.array_equal(self.ids[last, :length], prompt[:length]):
                return last, length
        session_rows = np.fromiter(rows, dtype=np.int64)
        best, best_shared = -1, 0
        if len(session_rows):
            shared_B = self._shared_lengths(prompt[:most], session_rows)
            whole_B = (shared_B == self.length[session_rows]) & (self.state[session_rows] == RESTING)
            at = int((2 * shared_B + whole_B).argmax())
            best, best_shared = int(session_rows[at]), int(shared_B[at])
            if whole_B[at] and best_shared:
                return best, best_shared
        if self._share and best_shared < most and len(self.length):
            shared_B = self._shared_lengths(prompt[:most], slice(None))
            if shared_B.max() > best_shared:
                best, best_shared = int(shared_B.argmax()), int(shared_B.max())
        return (best, best_shared) if best_shared >= min(_SHARE_AT_LEAST, most) else (-1, 0)

    def _shared_lengths(self, ids: npt.NDArray[np.int32], rows: _Index) -> npt.NDArray[np.int64]:
        """How many first tokens each of the rows has in common with `ids`, as far as they are computed."""
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
        rows, most = len(self.state), self._most(self._cache.capacity)
        if rows < most:
            self._resize(min(max(8, rows * 2), most), self._cache.capacity)
            return rows
        oldest = self._oldest()[0]
        self._release(int(oldest))
        return int(oldest)

    def _oldest(self) -> npt.NDArray[np.int64]:
        """Resting rows, the one that rests longest first."""
        resting = np.flatnonzero(self.state == RESTING)
        return resting[self.used[resting].argsort()]

    def _most(self, capacity: int) -> int:
        """How many rows the memory allowed can hold, but never fewer than may run."""
        per_row = self._cache.bytes_per_token * capacity
        affordable = self._kv_bytes // per_row if per_row else 0
        return max(self._at_least, min(affordable, self._at_least * _ROWS_EACH))

    def reserve(self, length: int) -> None:
        """Make rows long enough for `length` tokens; what rests gives way where memory is short."""
        if length <= self._cache.capacity:
            return
        capacity = -(-max(length, int(self._cache.capacity * 1.5)) // 64) * 64
        rows, most = len(self.state), self._most(capacity)
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


_COLUMNS = {name: get_args(get_args(hint)[1])[0] for name, hint in get_type_hints(CacheRows).items()}
"""The arrays of `CacheRows` with one element per row, and their types."""


def _grow(array: npt.NDArray[D], rows: int, shape: tuple[int, ...]) -> npt.NDArray[D]:
    new = np.zeros(shape, dtype=array.dtype)
    new[(slice(rows), *map(slice, array.shape[1:]))] = array[:rows]
    return new


class RowCache(Cache):  # type: ignore[misc]  # transformers has no types
    """A transformers cache whose batch is any choice of its rows.

    `fresh` and `extend` say which rows the next forward pass is about, and at which positions it writes. It has no
    layers of transformers' own, so it is empty where a mask is built: a fresh pass has a plain causal mask, and the
    others bring their own.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.rows, self.capacity = 0, 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._write: torch.Tensor | None = None
        self._read: torch.Tensor | slice | None = None
        self._window = 0

    def fresh(self, write: torch.Tensor) -> None:
        """The next pass begins its rows: tokens see only the tokens of the same pass. `write`: flat places, B * T."""
        self._write, self._read = write, None

    def extend(self, write: torch.Tensor, rows: torch.Tensor | slice, window: int) -> None:
        """The next pass extends `rows`, and sees their first `window` places; a slice of rows is read in place."""
        self._write, self._read, self._window = write, rows, window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._keys) <= layer_idx:
            self._keys.append(self._block(key_states))
            self._values.append(self._block(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        self._store(keys, key_states)
        self._store(values, value_states)
        return (key_states, value_states) if self._read is None else (self._seen(keys), self._seen(values))

    def _seen(self, block: torch.Tensor) -> torch.Tensor:
        """The rows and places that the pass sees."""
        read, block = self._read, block[:, : self._window]
        return (block[read] if isinstance(read, slice) else block.index_select(0, read)).transpose(1, 2)

    def _block(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = states.shape
        return states.new_zeros(self.rows, self.capacity, heads, size)

    def _store(self, block: torch.Tensor, states: torch.Tensor) -> None:
        width = block.shape[2] * block.shape[3]
        assert self._write is not None
        block.view(-1, width).index_copy_(0, self._write, states.transpose(1, 2).reshape(-1, width))

    def resize(self, rows: int, capacity: int) -> None:
        """Make room, keeping what is there. New places hold zeros: a masked place must still be a number."""
        for blocks in (self._keys, self._values):
            for i, old in enumerate(blocks):
                new = old.new_zeros(rows, capacity, *old.shape[2:])
                common = min(rows, self.rows), min(capacity, self.capacity)
                new[: common[0], : common[1]] = old[: common[0], : common[1]]
                blocks[i] = new
        self.rows, self.capacity = rows, capacity

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first `length` places of each row of `source` to the row of `target` beside it."""
        for block in (*self._keys, *self._values):
            block[target, :length] = block[source, :length]

    def drop(self) -> None:
        self._keys, self._values = [], []
        self.rows, self.capacity = 0, 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token and row, over all layers; 0 before the first pass."""
        return sum(b.element_size() * b.shape[2] * b.shape[3] for b in (*self._keys, *self._values))
