"""Keys and values of many conversations in one block of memory per layer, read and written by rows.

R rows, each a conversation of up to C tokens; a row's tokens lie at positions 0, 1, 2, ... with no padding, so a
row is extended, shortened or copied by numbers alone. Shapes: keys and values of a layer are [R, C, H, D] (H key heads
of size D); a model hands in and gets back [B, H, T, D].
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

__all__ = ["RowCache"]


class RowCache(Cache):  # type: ignore[misc]  # transformers has no types
    """A transformers cache whose batch is any choice of its rows.

    `fresh`, `extend` and `dense` say which rows the next forward pass is about, and at which positions it writes.
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

    def extend(self, write: torch.Tensor, rows: torch.Tensor, window: int) -> None:
        """The next pass extends `rows`, and sees their first `window` places."""
        self._write, self._read, self._window = write, rows, window

    def dense(self, write: torch.Tensor, rows: slice, window: int) -> None:
        """The next pass extends rows that lie side by side, read in place."""
        self._write, self._read, self._window = write, rows, window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._keys) <= layer_idx:
            self._keys.append(self._block(key_states))
            self._values.append(self._block(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        self._store(keys, key_states)
        self._store(values, value_states)
        if self._read is None:
            return key_states, value_states
        if isinstance(self._read, slice):
            picked = keys[self._read, : self._window], values[self._read, : self._window]
        else:
            picked = (
                keys[:, : self._window].index_select(0, self._read),
                values[:, : self._window].index_select(0, self._read),
            )
        return picked[0].transpose(1, 2), picked[1].transpose(1, 2)

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
                kept = min(rows, self.rows), min(capacity, self.capacity)
                new[: kept[0], : kept[1]] = old[: kept[0], : kept[1]]
                blocks[i] = new
        self.rows, self.capacity = rows, capacity

    def copy_rows(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first `length` places of each row of `source` to the row of `target` beside it."""
        for block in (*self._keys, *self._values):
            block[target, :length] = block[source, :length]

    def drop(self) -> None:
        """Give the memory back."""
        self._keys, self._values = [], []
        self.rows, self.capacity = 0, 0

    @property
    def bytes_per_token(self) -> int:
        """What one token of one row takes, over all layers; 0 before the first pass."""
        return sum(b.element_size() * b.shape[2] * b.shape[3] for b in (*self._keys, *self._values))

    # What transformers asks of a cache when it builds a mask: a fresh pass has a plain causal mask, and the others
    # bring their own.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_sliding(self) -> list[bool]:
        return []

    @property
    def is_initialized(self) -> bool:
        return bool(self._keys)
