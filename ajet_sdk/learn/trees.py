"""Token sequences that begin alike, laid out in one row so that what they share is computed once.

A row holds the tree of its sequences' prefixes, depth first: what follows token j in any of them lies behind it, up to
`ends[j]`. So token i sees token j where j <= i < ends[j], and its position in its sequence is its depth. A row of one
sequence is a tree without branches, and its attention is the causal one.

Letters of shapes: B rows, T their padded length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from ajet_sdk.engines.local.forward import distance, rope_kinds, tolerance, unsupported_reason
from ajet_sdk.engines.local.products import exact_products

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
    sequences: Sequence[Tokens], which: Sequence[int], budget: int, *, share: bool
) -> Iterator[tuple[int, list[int]]]:
    """Those of `which` sequences that are laid out in one row, and its length.

    With `share` a sequence joins the row of the one before it in order of its tokens where they begin alike. A row with
    branches is at most `budget` tokens long, or a quarter longer than the longest sequence. Without, each sequence has
    a row of its own.
    """
    if not share or not which:
        yield from ((len(sequences[i]), [i]) for i in which)
        return
    limit = max(budget, max(len(sequences[i]) for i in which) * 5 // 4)
    row: list[int] = []
    size = 0
    for i, shared in _sorted(sequences, which):
        joined = size + len(sequences[i]) - shared
        if row and joined <= limit and shared:
            row.append(i)
            size = joined
        else:
            if row:
                yield size, row
            row, size = [i], len(sequences[i])
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
    """On the CPU: attention reads it in each layer."""

    def inputs(self) -> dict[str, torch.Tensor]:
        """The arguments of a transformers model; in place of a mask its attention gets the ends (`_attend`)."""
        if self.depths_BT is None or self.ends_BT is None:
            return {"input_ids": self.ids_BT}
        ends_B11T = self.ends_BT[:, None, None, :]
        return {"input_ids": self.ids_BT, "position_ids": self.depths_BT, "attention_mask": ends_B11T}


class Run(NamedTuple):
    """Tokens of a row without a branch between them: each sees those before it in the run, and all of some runs."""

    size: int
    above: tuple[int, ...]
    """The indices of the runs that it continues, the first first."""


@lru_cache(maxsize=8)
def _runs(ends: bytes) -> tuple[Run, ...]:
    """The runs of a row in their order, by the bytes of its 64-bit `ends_T`."""
    ends_T = np.frombuffer(ends, np.int64)
    at_T = np.arange(len(ends_T))
    begins = np.flatnonzero((at_T == 0) | (ends_T != np.roll(ends_T, 1)) | (at_T >= np.roll(ends_T, 1)))
    runs: list[Run] = []
    path: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(pairwise([*begins, len(ends_T)])):
        while path and path[-1][1] <= start:
            path.pop()
        runs.append(Run(int(stop - start), tuple(index for index, _ in path)))
        path.append((number, int(ends_T[start])))
    return tuple(runs)


@lru_cache(maxsize=256)
def _mask(before: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to the scores of so many tokens for so many before them, all seen, and for their own."""
    return torch.full((size, before + size), -torch.inf, dtype=dtype, device=device).triu(before + 1)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' `sdpa`, and that of rows with branches run by run: no hidden pair is computed.

    Args:
        query: (B, heads, T, D), as key and value of maybe fewer heads.
        attention_mask: the ends of a row's tokens, 64-bit integers of shape (B, 1, 1, T); or any that `sdpa` takes.
    """
    if torch.is_autocast_enabled(query.device.type):  # as the sampler computes it, and faster on a CPU
        with torch.autocast(query.device.type, enabled=False):
            return _attend(module, query.float(), key.float(), value.float(), attention_mask, **more)
    if attention_mask is None or attention_mask.dtype != torch.int64:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **more)
        return plain
    settings = {"scale": more.get("scaling"), "dropout_p": more.get("dropout", 0.0)}
    rows = [
        checkpoint(
            _attend_in_row,
            _runs(ends_T.tobytes()),
            *row,
            settings,
            use_reentrant=False,
            preserve_rng_state=settings["dropout_p"] > 0,
        )
        for ends_T, *row in zip(
            attention_mask[:, 0, 0].numpy(), *(x.split(1) for x in (query, key, value)), strict=True
        )
    ]
    return torch.cat(rows).transpose(1, 2).contiguous(), None


def _attend_in_row(
    runs: Sequence[Run], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: dict[str, Any]
) -> torch.Tensor:
    """Attention of one row. Each run has a copy of the keys and values that it sees, which the backward pass makes
    again: kept, those of a prompt with eight replies are a quarter of all activations."""
    heads = query.shape[1] // key.shape[1]
    sizes = [run.size for run in runs]
    queries, keys, values = query.split(sizes, 2), *(repeat_kv(x, heads).split(sizes, 2) for x in (key, value))
    attended = []
    for number, run in enumerate(runs):
        seen = [*run.above, number]
        before = sum(runs[index].size for index in run.above)
        mask = _mask(before, run.size, query.dtype, query.device) if before and run.size > 1 else None
        attended.append(
            scaled_dot_product_attention(
                queries[number],
                torch.cat([keys[index] for index in seen], 2),
                torch.cat([values[index] for index in seen], 2),
                attn_mask=mask,
                is_causal=not before,
                **settings,
            )
        )
    return torch.cat(attended, 2)


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
    tensors = [torch.from_numpy(ids_BT).to(device), torch.from_numpy(depths_BT).to(device), torch.from_numpy(ends_BT)]
    branches = any((tree.ends_T < len(tree.ends_T)).any() for tree in trees)
    return Rows(*(tensors if branches else tensors[:1])), places


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Whether rows with branches give what their sequences give one by one.

    They don't where the model's attention is not transformers' `sdpa`, does not see the whole context (sliding windows,
    state spaces), or turns positions by the length of a pass; and where a trial gives other logits, for which the model
    must be in the mode of passes without dropout.
    """
    config = model.config.get_text_config()
    by_length = any("dynamic" in kind or kind == "longrope" for kind, _ in rope_kinds(config))
    if by_length or getattr(model.config, "_attn_implementation", "") != "sdpa" or unsupported_reason(config):
        return False
    AttentionInterface.register("sdpa", _attend)
    return _trial(model)


def _trial(model: PreTrainedModel) -> bool:
    """Whether three sequences give the same logits in a row as each by itself."""
    ids = (np.arange(12) * 7919 + 13) % model.config.get_text_config().vocab_size
    sequences = [ids[[0, 1, 2, 3, 4, 5]], ids[[0, 1, 2, 6, 7]], ids[[0, 1, 2, 6, 8, 9, 10]]]
    rows, places = grid(sequences, [len(sequences)], model.device)
    try:
        with torch.no_grad(), exact_products(model):
            logits = model(**rows.inputs(), use_cache=False).logits[0]
            for at, tokens in zip(places, sequences, strict=True):
                alone = model(input_ids=torch.from_numpy(tokens)[None].to(model.device), use_cache=False).logits[0]
                if not distance(logits[torch.from_numpy(at).to(model.device)], alone) <= tolerance(model):
                    return False
    except Exception:  # noqa: BLE001  (a model may refuse such a pass in any way)
        return False
    return True
