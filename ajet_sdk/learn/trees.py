"""Token sequences that begin alike, laid out in one row so that what they share is computed once.

A row holds the tree of its sequences' prefixes, depth first: what follows token j in any of them lies behind it, up to
`ends[j]`. So token i sees token j where j <= i < ends[j], and its position in its sequence is its depth. A row of one
sequence is a tree without branches, and its mask is the causal one. Letters of shapes: B rows, T their padded length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from ajet_sdk.engines.local.forward import distance, rope_kinds, tolerance, unsupported_reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tokens = npt.NDArray[np.int32] | npt.NDArray[np.int64]
_Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tree:
    """One row: token ids, their depths, and where the tokens that follow each of them end."""

    ids_T: _Places
    depths_T: _Places
    ends_T: _Places
    places: list[_Places]
    """Where each sequence's tokens are in the row."""


def lay_out(sequences: Sequence[Tokens]) -> Tree:
    """The tree of the sequences' prefixes; equal sequences have the same places."""
    total = sum(len(ids) for ids in sequences)
    ids_T, depths_T, ends_T = (np.zeros(total, np.int64) for _ in range(3))
    places = [np.zeros(0, np.int64)] * len(sequences)
    path, size = places[0], 0
    for i, shared in _sorted(sequences, range(len(sequences))):
        ends_T[path[shared:]] = size
        new = np.arange(size, size + len(sequences[i]) - shared)
        ids_T[new], depths_T[new] = sequences[i][shared:], np.arange(shared, len(sequences[i]))
        places[i] = path = np.concatenate([path[:shared], new])
        size += len(new)
    ends_T[path] = size
    return Tree(ids_T[:size], depths_T[:size], ends_T[:size], places)


def trees_of(
    sequences: Sequence[Tokens], which: Sequence[int], budget: int, pairs_per_token: int
) -> Iterator[tuple[int, list[int]]]:
    """Those of `which` sequences that are laid out in one row, and its length.

    A sequence joins the row of the one before it in order of its tokens where what it shares costs more than the
    attention that it adds: in a row with branches all pairs of tokens are computed, else half of them. A row with
    branches is at most `budget` tokens long, or a quarter longer than the longest sequence. `pairs_per_token` 0: each
    sequence has a row of its own.
    """
    if not pairs_per_token or not which:
        yield from ((len(sequences[i]), [i]) for i in which)
        return
    limit = max(budget, max(len(sequences[i]) for i in which) * 5 // 4)
    row: list[int] = []
    size = pairs = 0
    for i, shared in _sorted(sequences, which):
        length = len(sequences[i])
        joined = size + length - shared
        more = joined**2 - pairs - length**2 // 2
        if row and joined <= limit and shared * pairs_per_token > more:
            row.append(i)
            size, pairs = joined, joined**2
        else:
            if row:
                yield size, row
            row, size, pairs = [i], length, length**2 // 2
    yield size, row


def _sorted(sequences: Sequence[Tokens], which: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The sequences in order of their tokens, each with how many first tokens it shares with the one before it."""
    before: Tokens = np.zeros(0, np.int64)
    for i in sorted(which, key=lambda i: sequences[i].astype(">i4").tobytes()):
        width = min(len(before), len(sequences[i]))
        differs = np.flatnonzero(before[:width] != sequences[i][:width])
        yield i, int(differs[0]) if len(differs) else width
        before = sequences[i]


@dataclass(frozen=True, slots=True)
class Rows:
    """Trees, padded on the right to one length."""

    ids_BT: torch.Tensor
    depths_BT: torch.Tensor | None = None
    """None, as `ends_BT`: no row has branches. A causal model never looks right, so that padding needs no mask."""
    ends_BT: torch.Tensor | None = None

    def inputs(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What a model of transformers is called with; the mask is added to its attention scores."""
        if self.depths_BT is None or self.ends_BT is None:
            return {"input_ids": self.ids_BT}
        at_T = torch.arange(self.ends_BT.shape[1], device=self.ends_BT.device)
        hidden_BTT = (at_T[:, None] < at_T) | (at_T[:, None] >= self.ends_BT[:, None, :])
        mask_BTT = torch.zeros(hidden_BTT.shape, dtype=dtype, device=hidden_BTT.device)
        mask_B1TT = mask_BTT.masked_fill_(hidden_BTT, -torch.inf)[:, None]
        return {"input_ids": self.ids_BT, "position_ids": self.depths_BT, "attention_mask": mask_B1TT}


def grid(
    sequences: Sequence[Tokens], row_sizes: Sequence[int], device: torch.device | str = "cpu"
) -> tuple[Rows, list[_Places]]:
    """Rows of so many sequences each, and where each sequence's tokens are in the flattened (B, T) grid.

    Padding sees itself, and nothing before it sees padding.
    """
    ends = np.cumsum(row_sizes).tolist()
    trees = [lay_out(sequences[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    width = max(1, max(len(tree.ids_T) for tree in trees))
    ids_BT, depths_BT = (np.zeros((len(trees), width), np.int64) for _ in range(2))
    ends_BT = np.full((len(trees), width), width)
    for row, tree in enumerate(trees):
        used = len(tree.ids_T)
        ids_BT[row, :used], depths_BT[row, :used], ends_BT[row, :used] = tree.ids_T, tree.depths_T, tree.ends_T
    places = [row * width + at for row, tree in enumerate(trees) for at in tree.places]
    tensors = [torch.from_numpy(part).to(device) for part in (ids_BT, depths_BT, ends_BT)]
    branches = any((tree.ends_T < len(tree.ends_T)).any() for tree in trees)
    return Rows(*(tensors if branches else tensors[:1])), places


def pairs_per_token(model: PreTrainedModel) -> int:
    """How many pairs of tokens cost as much in attention as one token costs in all other layers; 0 where the model
    cannot take a tree.

    That is where attention takes no mask (flash), does not see the whole context (sliding windows, state spaces), or
    turns positions by the length of a pass; and where a trial gives other logits than sequence by sequence, for which
    the model must be in the mode of passes without dropout.
    """
    config = model.config.get_text_config()
    by_length = any("dynamic" in kind or kind == "longrope" for kind, _ in rope_kinds(config))
    plain = getattr(model.config, "_attn_implementation", "eager") in ("sdpa", "eager")
    if by_length or not plain or unsupported_reason(config) or not _trial(model):
        return 0
    return 6 * int(config.hidden_size)  # 24 H² of matrices against 4 H for a query with a key and its value


def _trial(model: PreTrainedModel) -> bool:
    """Whether three sequences give the same logits in a row as each by itself."""
    ids = (np.arange(12) * 7919 + 13) % model.config.get_text_config().vocab_size
    sequences = [ids[[0, 1, 2, 3, 4, 5]], ids[[0, 1, 2, 6, 7]], ids[[0, 1, 2, 6, 8, 9, 10]]]
    rows, places = grid(sequences, [len(sequences)], model.device)
    try:
        with torch.no_grad():
            logits = model(**rows.inputs(model.dtype), use_cache=False).logits[0]
            for at, tokens in zip(places, sequences, strict=True):
                alone = model(input_ids=torch.from_numpy(tokens)[None].to(model.device), use_cache=False).logits[0]
                if not distance(logits[torch.from_numpy(at).to(model.device)], alone) <= tolerance(model):
                    return False
    except Exception:  # noqa: BLE001  (a model may refuse such a pass in any way)
        return False
    return True
