"""Micro-batches: padded rows of samples with common prefixes, their trained positions, and their
size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch

from ajet_sdk.engines.local.logits import LogitsProcessor, processors
from ajet_sdk.engines.local.products import products_of
from ajet_sdk.engines.local.vision import Vision
from ajet_sdk.errors import TrainingError
from ajet_sdk.learn.trees import Rows, Tokens, grid, trees_of
from ajet_sdk.pictures import PlacedPicture, keyed, within
from ajet_sdk.protocols import Sampling, Tokenizer
from ajet_sdk.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FEWEST = 512
_MOST = 8192
"""Bounds of the tokens in a pass: fewer are slower, more are no faster."""
_CPU_BYTES = 2 << 30
_SHARE = 0.25
"""Share of the device's memory for activations."""


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of a micro-batch, row by row."""

    members: list[int]
    """Indices of the samples."""
    row_sizes: list[int]
    """Number of samples in each row."""


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The U positions of the flattened (B, T) grid whose logits are computed, and the index of the
    one that predicts each trained token. Samples that share a position share its logits."""

    positions_U: torch.Tensor
    temperatures_U: torch.Tensor | None
    """None if every token was sampled at temperature 1."""
    rows_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """The M trained tokens sampled with `top_p`, `top_k` or `min_p`: their indices among the N, and
    their limits."""

    rows_M: torch.Tensor
    top_k_M: torch.Tensor
    top_p_M: torch.Tensor
    min_p_M: torch.Tensor


@dataclass(frozen=True, slots=True)
class Processing:
    """The trained tokens of a reply with logits processors; their indices start at `begin`."""

    begin: int
    processors: Callable[[], tuple[LogitsProcessor, ...]]
    """New logits processors for each pass."""
    output_ids: npt.NDArray[np.int32]
    places_K: list[int]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded on the right, each a tree of its samples' tokens, and the trained tokens in
    them."""

    rows: Rows
    logits: LogitRows
    targets_N: torch.Tensor
    sampler_N: torch.Tensor
    advantages_N: torch.Tensor
    limits: Limits | None = None
    """None if every token was drawn from the whole vocabulary."""
    processing: tuple[Processing, ...] = ()
    pairs_N: torch.Tensor | None = None
    """Index of a token's pair among the batch's P (`Sample.group_id`)."""
    samples_N: torch.Tensor | None = None
    """Index of a token's sample in the batch."""
    turns_N: torch.Tensor | None = None
    """Index of a token's call among the batch's trained calls."""
    weights_N: torch.Tensor | None = None
    """Weight of each token in the loss of the update."""
    old_N: torch.Tensor | None = None
    """The trainer's log-probabilities before the step's first update; None: those of this pass."""

    def segments_N(self, level: Literal["turn", "sequence"]) -> torch.Tensor:
        """Index of the turn or sample of each trained token."""
        segments_N = self.samples_N if level == "sequence" else self.turns_N
        assert segments_N is not None
        return segments_N


def micro_batches(
    inputs: Sequence[Tokens],
    budget: int,
    together: Sequence[Sequence[int]] | None = None,
    *,
    share: bool = False,
) -> list[Group]:
    """Puts samples with a common prefix in one row (`trees.trees_of`), and rows of similar length
    in groups whose rows × longest row is at most `budget` tokens.

    A longer row gets its own group. The samples of a list in `together` stay in one group of any
    size, and share rows only with each other.
    """
    units: list[tuple[int, list[list[int]]]] = []
    for which in together or [range(len(inputs))]:
        trees = list(trees_of(inputs, which, budget, share=share))
        if together is None:
            units += [(size, [row]) for size, row in trees]
        else:
            units.append((max(size for size, _ in trees), [row for _, row in trees]))
    groups: list[list[list[int]]] = []
    longest = 0
    for length, rows in sorted(units, key=lambda unit: (-unit[0], unit[1][0][0])):
        if groups and (len(groups[-1]) + len(rows)) * longest <= budget:
            groups[-1] += rows
        else:
            groups.append([*rows])
            longest = length
    return [Group([i for row in rows for i in row], [len(row) for row in rows]) for rows in groups]


def trained_positions(sample: Sample) -> npt.NDArray[np.intp]:
    """Positions of the tokens in the loss: those masked in, except position 0, which has no
    context."""
    at = np.flatnonzero(sample.timeline.loss_mask)
    return at[at > 0]


def trained_inputs(sample: Sample) -> Tokens:
    """The input tokens for a sample's loss: all before its last trained token, with the keys of
    pictures in place of their tokens (`pictures.keyed`)."""
    line = sample.timeline
    trained = np.flatnonzero(line.loss_mask)
    size = int(trained[-1]) if len(trained) else 0
    return keyed(line.token_ids[:size], within(line.pictures, size))


def collate(
    samples: Sequence[Sample],
    sampling: Sampling | Mapping[str, Sampling] = Sampling(),  # noqa: B008, it is frozen
    device: torch.device | str = "cpu",
    tokenizer: Tokenizer | None = None,
    row_sizes: Sequence[int] | None = None,
    vision: Vision | None = None,
) -> MicroBatch:
    """Lay the samples out in rows, padded on the right.

    Leaves out tokens after the last trained one, and a trained token at position 0, which has no
    context.

    Args:
        samples: row by row.
        sampling: of all samples, or of each call by `call_id`.
        device: of the tensors.
        tokenizer: needed if the sampling of a call is `processed`.
        row_sizes: number of samples in each row; None: one.
        vision: needed if a sample has pictures.
    """
    inputs = [trained_inputs(sample) for sample in samples]
    rows, places = grid(inputs, row_sizes or [1] * len(samples), device)
    shown = [placed for sample in samples for placed in sample.timeline.pictures]
    if vision is not None:
        rows = with_pictures(rows, inputs, places, shown, vision)
    elif shown:
        raise TrainingError("the samples have pictures, but the model takes none")
    positions = []
    targets = []
    sampler = []
    advantages = []
    drawn = []
    processing: list[Processing] = []
    pairs: dict[str, int] = {}
    paired: list[npt.NDArray[np.int64]] = []
    turns: list[npt.NDArray[np.int64]] = []
    calls = 0
    trained = 0
    for number, sample in enumerate(samples):
        line = sample.timeline
        at = trained_positions(sample)
        positions.append(places[number][at - 1])
        targets.append(line.token_ids[at])
        sampler.append(line.logprobs[at])
        advantages.append(sample.advantages[at])
        paired.append(np.full(len(at), pairs.setdefault(sample.group_id, len(pairs)), np.int64))
        starts = np.array([span.start for span in line.spans], np.int64)
        turns.append(calls + np.searchsorted(starts, at, side="right").astype(np.int64))
        calls += len(starts) + 1
        drawn.append(_sampling_rows(sample, sampling)[:, at])
        processing += _processing(sample, sampling, at, trained, tokenizer)
        trained += len(at)
    heat, top_k, top_p, min_p = np.concatenate(drawn, axis=1)
    limited = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
    top_k = np.where(top_k > 0, top_k, np.inf)
    return MicroBatch(
        rows=rows,
        logits=logit_rows(
            np.concatenate(positions), heat, device, shared=not (processing or len(limited))
        ),
        targets_N=torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
        sampler_N=torch.from_numpy(np.concatenate(sampler)).to(device),
        advantages_N=torch.from_numpy(np.concatenate(advantages)).to(device),
        limits=(
            Limits(
                *(
                    torch.from_numpy(array).to(device)
                    for array in (limited, *(a[limited] for a in (top_k, top_p, min_p)))
                )
            )
            if len(limited)
            else None
        ),
        processing=tuple(processing),
        pairs_N=torch.from_numpy(np.concatenate(paired)).to(device),
        samples_N=torch.from_numpy(
            np.repeat(np.arange(len(positions)), [len(part) for part in positions])
        ).to(device),
        turns_N=torch.from_numpy(np.concatenate(turns)).to(device),
    )


def with_pictures(
    rows: Rows,
    inputs: Sequence[Tokens],
    places: Sequence[npt.NDArray[np.int64]],
    shown: Iterable[PlacedPicture],
    vision: Vision,
) -> Rows:
    """Rows of keyed ids with their pictures: ids, positions and pixels as the model takes them.

    `places` are those of the inputs in the flattened (B, T) grid.
    """
    pictures = {placed.picture.key: placed.picture for placed in shown}
    keyed_BT = rows.ids_BT.cpu().numpy()
    device = rows.ids_BT.device
    positions_3BT = None
    if vision.processor.has_grid_positions:
        grid_3L = np.zeros((3, keyed_BT.size), np.int64)
        for tokens, at in zip(inputs, places, strict=True):
            grid_3L[:, at] = vision.positions(tokens, pictures)
        positions_3BT = torch.from_numpy(grid_3L.reshape(3, *keyed_BT.shape)).to(device)
    return replace(
        rows,
        ids_BT=torch.from_numpy(vision.model_ids(keyed_BT)).to(device),
        positions_3BT=positions_3BT,
        pictures=vision.arguments(keyed_BT, pictures, device),
    )


def logit_rows(
    positions_N: npt.NDArray[np.int64],
    heat_N: npt.NDArray[np.float32],
    device: torch.device | str = "cpu",
    *,
    shared: bool = True,
) -> LogitRows:
    """Each position at each temperature once; all N unless `shared`, since each may have its own
    limits."""
    first_U = rows_N = np.arange(len(positions_N))
    if shared:
        keys_N = positions_N.astype(np.int64) << 32 | heat_N.view(np.uint32)
        _, first_U, rows_N = np.unique(keys_N, return_index=True, return_inverse=True)
    return LogitRows(
        torch.from_numpy(positions_N[first_U]).to(device),
        None if np.all(heat_N == 1.0) else torch.from_numpy(heat_N[first_U]).to(device),
        torch.from_numpy(rows_N).to(device),
    )


def _processing(
    sample: Sample,
    sampling: Sampling | Mapping[str, Sampling],
    at: npt.NDArray[np.intp],
    begin: int,
    tokenizer: Tokenizer | None,
) -> Iterator[Processing]:
    """Replies of a sample with logits processors; `at` are its trained tokens, with indices from
    `begin`."""
    line = sample.timeline
    for span in line.spans:
        if isinstance(sampling, Mapping):
            how = sampling.get(span.call_id, Sampling())
        else:
            how = sampling
        first, last = np.searchsorted(at, (span.start, span.end))
        if how.processed and first < last:
            if tokenizer is None:
                raise TrainingError(
                    "a call was sampled with a penalty or a bias; the tokenizer is needed to"
                    " score it"
                )
            changes = partial(processors, how, line.token_ids[: span.start].tolist(), tokenizer)
            places = (at[first:last] - span.start).tolist()
            yield Processing(
                begin + int(first), changes, line.token_ids[span.start : span.end], places
            )


def _sampling_rows(
    sample: Sample, sampling: Sampling | Mapping[str, Sampling]
) -> npt.NDArray[np.float32]:
    """Temperature, `top_k`, `top_p` and `min_p` of each token, shape (4, T)."""
    line = sample.timeline
    how = np.empty((4, len(line.token_ids)), dtype=np.float32)
    how[:] = _sampling_column(Sampling() if isinstance(sampling, Mapping) else sampling)
    if isinstance(sampling, Mapping):
        for span in line.spans:
            if span.call_id in sampling:
                how[:, span.start : span.end] = _sampling_column(sampling[span.call_id])
    return how


def _sampling_column(sampling: Sampling) -> npt.NDArray[np.float32]:
    """Sampling parameters as a column; greedy calls report log-probabilities at temperature 1
    without limits."""
    greedy = sampling.temperature <= 0
    drawn = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    how = (1.0, -1, 1.0, 0.0) if greedy else drawn
    return np.array(how, dtype=np.float32)[:, None]


def tokens_of_a_pass(
    model: PreTrainedModel, *, checkpointing: bool, memory: float | None = None
) -> int:
    """Default number of tokens in a training pass: activations take at most a quarter of the
    memory of a GPU (None: of the model's device), and on a CPU at most 2 GiB."""
    if memory is not None:
        limit = memory * _SHARE
    elif model.device.type == "cuda":
        limit = torch.cuda.mem_get_info(model.device)[1] * _SHARE
    else:
        limit = min(_CPU_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE)
    stored, once, scored = bytes_of_a_token(model, checkpointing=checkpointing)
    return max(_FEWEST, min(_MOST, int(limit / (stored + once + scored)) // 64 * 64))


def bytes_of_a_token(model: PreTrainedModel, *, checkpointing: bool) -> tuple[int, int, int]:
    """Bytes of a token's activations in all layers, of temporary ones, and of a trained token's
    logits."""
    shape = model.config.get_text_config()
    size = model.dtype.itemsize
    hidden = shape.hidden_size
    layers = shape.num_hidden_layers
    inner = getattr(shape, "intermediate_size", None) or 4 * hidden
    product = products_of(model).itemsize
    layer = size * 8 * hidden + product * (
        2 * hidden + 4 * inner
    )  # two norms, attention; gate and up, their product
    if hasattr(model, "disable_adapter") and product < 4:  # adapters, and their copy of each input
        layer += (4 if product == size else product) * (6 * hidden + inner)
    logits = shape.vocab_size * (
        12 if size == 4 else 16
    )  # with gradient and log-probabilities, in float32
    if checkpointing:
        return (layers * hidden * size, layer, logits)
    return (layers * layer, 0, logits)
