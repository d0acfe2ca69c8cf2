"""Lays out token sequences with common prefixes in one row, so that shared tokens are computed
once.

A row is the prefix tree of its sequences, depth first: the descendants of token j end at `ends[j]`.
Token i attends to token j if j <= i < ends[j], and its position in its sequence is its depth. A
single sequence is a tree without branches, with causal attention.

Letters of shapes: B rows, T their padded length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


_LEAST_SHARED = 32
"""Tokens of a common prefix for which it pays to lay samples out in one row. Attention is computed
run by run there, which takes the time of 16 to 45 tokens per branch (models of 3 and 0.1 million
parameters)."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A row: token ids, their depths, and the ends of their descendants."""

    ids_T: _Places
    depths_T: _Places
    ends_T: _Places
    places: list[_Places]
    """Positions of each sequence's tokens in the row."""


def lay_out(sequences: Sequence[Tokens]) -> Tree:
    """Builds the prefix tree of sequences; equal sequences have the same places."""
    total = sum(len(ids) for ids in sequences)
    ids_T, depths_T, ends_T = (np.zeros(total, np.int64) for _ in range(3))
    places = [np.zeros(0, np.int64)] * len(sequences)
    path = places[0]
    size = 0
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
    """Assigns the sequences `which` to rows; yields each row's length and its sequences.

    With `share`, a sequence joins the row of its predecessor in sorted order if they have a common
    prefix of at least `_LEAST_SHARED` tokens, or if it continues its predecessor. A row with
    branches has at most `budget` tokens, or a quarter more than the longest sequence. Otherwise
    each sequence gets its own row.
    """
    if not share or not which:
        yield from ((len(sequences[i]), [i]) for i in which)
        return
    limit = max(budget, max(len(sequences[i]) for i in which) * 5 // 4)
    row: list[int] = []
    size = 0
    for i, shared in _sorted(sequences, which):
        joined = size + len(sequences[i]) - shared
        continues = bool(row) and shared == len(sequences[row[-1]])  # the row gets no branch
        if row and joined <= limit and (shared >= _LEAST_SHARED or continues):
            row.append(i)
            size = joined
        else:
            if row:
                yield size, row
            row = [i]
            size = len(sequences[i])
    yield size, row


def _sorted(sequences: Sequence[Tokens], which: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Sorts sequences by their tokens; yields each with the length of the prefix shared with its
    predecessor."""
    before: Tokens = np.zeros(0, np.int64)
    for i in sorted(which, key=lambda i: sequences[i].astype(">i4").tobytes()):
        width = min(len(before), len(sequences[i]))
        differs = np.flatnonzero(before[:width] != sequences[i][:width])
        yield i, int(differs[0]) if len(differs) else width
        before = sequences[i]


@dataclass(frozen=True, slots=True)
class Rows:
    """Trees, padded on the right to equal length."""

    ids_BT: torch.Tensor
    depths_BT: torch.Tensor | None = None
    """None, like `ends_BT`, if no row has branches. Right padding needs no mask in a causal
    model."""
    ends_BT: torch.Tensor | None = None
    """On the CPU: attention reads it in each layer."""
    positions_3BT: torch.Tensor | None = None
    """Of a model with a grid of positions for pictures."""
    pictures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The model's arguments for the pictures in the rows."""

    def inputs(self) -> dict[str, torch.Tensor]:
        """Arguments of a transformers model; its attention gets the ends in place of a mask
        (`_attend`)."""
        inputs = {"input_ids": self.ids_BT, **self.pictures}
        if self.depths_BT is not None and self.ends_BT is not None:
            inputs["position_ids"] = self.depths_BT
            inputs["attention_mask"] = self.ends_BT[:, None, None, :]
        if self.positions_3BT is not None:
            inputs["position_ids"] = self.positions_3BT
        return inputs


class Run(NamedTuple):
    """Tokens of a row without a branch between them; each attends to earlier ones, and to all of
    the runs above."""

    size: int
    above: tuple[int, ...]
    """Indices of the runs that it continues, first to last."""


@lru_cache(maxsize=8)
def _runs(ends: bytes) -> tuple[Run, ...]:
    """The runs of a row, from the bytes of its 64-bit `ends_T`."""
    ends_T = np.frombuffer(ends, np.int64)
    at_T = np.arange(len(ends_T))
    begins = np.flatnonzero(
        (at_T == 0) | (ends_T != np.roll(ends_T, 1)) | (at_T >= np.roll(ends_T, 1))
    )
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
    """Causal mask of `size` tokens after `before` visible ones."""
    return torch.full((size, before + size), -torch.inf, dtype=dtype, device=device).triu(
        before + 1
    )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of transformers' `sdpa`; rows with branches are computed run by run, without masked
    pairs.

    Args:
        query: (B, heads, T, D), like key and value, which may have fewer heads.
        attention_mask: the ends of a row's tokens, int64 of shape (B, 1, 1, T); or any mask of `sdpa`.
    """
    if torch.is_autocast_enabled(query.device.type):  # as in the sampler, and faster on a CPU
        with torch.autocast(query.device.type, enabled=False):
            return _attend(
                module, query.float(), key.float(), value.float(), attention_mask, **more
            )
    if attention_mask is None or attention_mask.dtype != torch.int64:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **more
        )
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
    runs: Sequence[Run],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    settings: dict[str, Any],
) -> torch.Tensor:
    """Attention of one row. The backward pass recomputes each run's copy of keys and values, which
    for a prompt with eight replies would be a quarter of all activations."""
    heads = query.shape[1] // key.shape[1]
    sizes = [run.size for run in runs]
    queries, keys, values = (
        query.split(sizes, 2),
        *(repeat_kv(x, heads).split(sizes, 2) for x in (key, value)),
    )
    attended = []
    for number, run in enumerate(runs):
        seen = [*run.above, number]
        before = sum(runs[index].size for index in run.above)
        if before and run.size > 1:
            mask = _mask(before, run.size, query.dtype, query.device)
        else:
            mask = None
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
    """Lays out sequences in rows of `row_sizes`; also returns their positions in the flattened (B,
    T) grid.

    Padding attends to itself, and no other token attends to padding.
    """
    ends = np.cumsum(row_sizes).tolist()
    trees = [lay_out(sequences[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    width = max(1, max(len(tree.ids_T) for tree in trees))
    ids_BT, depths_BT = (np.zeros((len(trees), width), np.int64) for _ in range(2))
    ends_BT = np.full((len(trees), width), width)
    for row, tree in enumerate(trees):
        used = len(tree.ids_T)
        ids_BT[row, :used], depths_BT[row, :used], ends_BT[row, :used] = (
            tree.ids_T,
            tree.depths_T,
            tree.ends_T,
        )
    places = [row * width + at for row, tree in enumerate(trees) for at in tree.places]
    tensors = [
        torch.from_numpy(ids_BT).to(device),
        torch.from_numpy(depths_BT).to(device),
        torch.from_numpy(ends_BT),
    ]
    branches = any((tree.ends_T < len(tree.ends_T)).any() for tree in trees)
    return Rows(*(tensors if branches else tensors[:1])), places


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Whether rows with branches give the same logits as separate sequences.

    They don't if the model's attention is not transformers' `sdpa`, doesn't cover the whole context
    (sliding windows, state spaces) or scales positions by sequence length, or if a trial gives
    different logits. The model must be in a mode without dropout.
    """
    config = model.config.get_text_config()
    by_length = any("dynamic" in kind or kind == "longrope" for kind, _ in rope_kinds(config))
    if (
        by_length
        or getattr(model.config, "_attn_implementation", "") != "sdpa"
        or unsupported_reason(config)
    ):
        return False
    AttentionInterface.register("sdpa", _attend)
    return _trial(model)


def _trial(model: PreTrainedModel) -> bool:
    """Whether three sequences give the same logits in one row as separately."""
    ids = (np.arange(12) * 7919 + 13) % model.config.get_text_config().vocab_size
    sequences = [ids[[0, 1, 2, 3, 4, 5]], ids[[0, 1, 2, 6, 7]], ids[[0, 1, 2, 6, 8, 9, 10]]]
    rows, places = grid(sequences, [len(sequences)], model.device)
    try:
        with torch.no_grad(), exact_products(model):
            logits = model(**rows.inputs(), use_cache=False).logits[0]
            for at, tokens in zip(places, sequences, strict=True):
                alone = model(
                    input_ids=torch.from_numpy(tokens)[None].to(model.device), use_cache=False
                ).logits[0]
                if not distance(logits[torch.from_numpy(at).to(model.device)], alone) <= tolerance(
                    model
                ):
                    return False
    except Exception:  # noqa: BLE001  (a model may refuse such a pass in any way)
        return False
    return True
