"""Converts samples to rows of a verl batch, and truncates a batch with too many samples; the
dataset of verl's loader.

Shapes: B rows, P the longest prompt, R the longest response. A row's prompt is everything before
its first trained token; prompts are padded on the left, responses on the right.

The dataset has positions in a batch instead of tasks, as the tasks follow from step and seed, as in
`local`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch.utils.data import Dataset
from verl import DataProto  # pyright: ignore[reportAttributeAccessIssue]

from ajet_sdk.engines.local.vision import positions_of
from ajet_sdk.pictures import Picture, keyed
from ajet_sdk.samples.build import Batch
from ajet_sdk.tokens.pictures import PictureProcessor
from ajet_sdk.types import Ids, LedgerEntry, Sample, Timeline


def training_rows(
    samples: Sequence[Sample],
    count: int,
    padding: int,
    processor: PictureProcessor | None = None,
) -> DataProto:
    """Make `count` rows: the samples, and blank rows without trained tokens.

    `rm_scores` has the advantage of each token, which verl's estimator `ajet_given` uses unchanged,
    and `rollout_log_probs` the sampler's log-probabilities of trained tokens. `padding` is the
    padding id. `processor`: of a model that takes pictures.
    """
    starts = [max(1, int(np.flatnonzero(sample.timeline.loss_mask)[0])) for sample in samples]
    wide = max(starts, default=1)
    long = max(
        (len(s.timeline.token_ids) - start for s, start in zip(samples, starts, strict=True)),
        default=1,
    )
    arrays = _Arrays(count, wide, long, padding)
    seen = [dict[str, torch.Tensor]() for _ in range(count)]
    turns = np.zeros(count, np.int32)
    for row, (sample, start) in enumerate(zip(samples, starts, strict=True)):
        line = sample.timeline
        arrays.put(row, line.token_ids[:start], line.token_ids[start:])
        end = len(line.token_ids) - start
        arrays.response_mask_BR[row, :end] = line.loss_mask[start:]
        arrays.logprobs_BR[row, :end] = line.logprobs[start:]
        arrays.scores_BR[row, :end] = sample.advantages[start:]
        turns[row] = len(line.spans)
        if processor is not None:
            arrays.place(row, positions_of(*_keyed(line), processor))
            seen[row] = picture_inputs(line, processor)
    for row in range(len(samples), count):
        arrays.put(row, [padding], [padding])
    return arrays.proto(turns, seen, grid=processor is not None)


def picture_inputs(line: Timeline, processor: PictureProcessor) -> dict[str, torch.Tensor]:
    """The model's arguments for the pictures of a timeline, in verl's form; empty without any."""
    pixels = [processor.process(placed.picture).pixels for placed in line.pictures]
    if not pixels:
        return {}
    inputs = {
        name: torch.from_numpy(np.concatenate([each[name] for each in pixels]))
        for name in pixels[0]
    }
    frames, height, width = inputs["image_grid_thw"].T
    inputs["images_seqlens"] = torch.repeat_interleave(height * width, frames)
    return inputs


def _keyed(line: Timeline) -> tuple[Ids, dict[int, Picture]]:
    pictures = {placed.picture.key: placed.picture for placed in line.pictures}
    return keyed(line.token_ids, line.pictures), pictures


def reward_rows(rewards: Sequence[float], padding: int) -> DataProto:
    """Make a row per validation task, with its reward only; verl computes its own metrics of
    them."""
    arrays = _Arrays(len(rewards), 1, 1, padding)
    for row, reward in enumerate(rewards):
        arrays.put(row, [padding], [padding])
        arrays.scores_BR[row, 0] = reward
    nothing = [dict[str, torch.Tensor]() for _ in rewards]
    return arrays.proto(np.zeros(len(rewards), np.int32), nothing, grid=False)


def truncate(batch: Batch, most: int) -> tuple[list[Sample], list[LedgerEntry]]:
    """Return at most `most` samples, and the ledger with the tokens of the others as `truncated`.

    The first timelines of all episodes are kept before any second ones, so that no group loses an
    attempt while another attempt has two rows.
    """
    if len(batch.samples) <= most:
        return list(batch.samples), list(batch.ledger)
    seen: Counter[str] = Counter()
    turns = []
    for at, sample in enumerate(batch.samples):
        turns.append((seen[sample.episode_id], at))
        seen[sample.episode_id] += 1
    chosen = sorted(at for _, at in sorted(turns)[:most])
    samples = [batch.samples[at] for at in chosen]
    trained = {span.call_id for sample in samples for span in sample.timeline.spans}
    return samples, _book_truncated(batch.ledger, trained)


def _book_truncated(ledger: Sequence[LedgerEntry], trained: set[str]) -> list[LedgerEntry]:
    """Change trained tokens of calls outside of `trained` to `truncated`, with one row per call and
    outcome."""
    rows: dict[tuple[str, str], list[LedgerEntry]] = defaultdict(list)
    for entry in ledger:
        if entry.outcome == "trained" and entry.tokens and entry.call_id not in trained:
            entry = entry.model_copy(update={"outcome": "truncated"})
        rows[entry.call_id, entry.outcome].append(entry)
    return [
        same[0].model_copy(update={"tokens": sum(entry.tokens for entry in same)})
        for same in rows.values()
    ]


class _Arrays:
    """The arrays of a batch under construction."""

    def __init__(self, count: int, wide: int, long: int, padding: int) -> None:
        self.prompts_BP = np.full((count, wide), padding, np.int64)
        self.responses_BR = np.full((count, long), padding, np.int64)
        self.attention_BT = np.zeros((count, wide + long), np.int64)
        self.response_mask_BR = np.zeros((count, long), np.int64)
        self.logprobs_BR = np.zeros((count, long), np.float32)
        self.scores_BR = np.zeros((count, long), np.float32)
        self.grid_B3T = np.zeros((count, 3, wide + long), np.int64)

    def put(self, row: int, prompt: Sequence[int] | Ids, response: Sequence[int] | Ids) -> None:
        wide = self.prompts_BP.shape[1]
        self.prompts_BP[row, wide - len(prompt) :] = prompt
        self.responses_BR[row, : len(response)] = response
        self.attention_BT[row, wide - len(prompt) : wide + len(response)] = 1

    def place(self, row: int, positions_3T: npt.NDArray[np.int64]) -> None:
        """Set the positions of a row in three dimensions (M-RoPE)."""
        self.grid_B3T[row][:, self.attention_BT[row].astype(bool)] = positions_3T

    def proto(
        self, turns: Ids, seen: Sequence[dict[str, torch.Tensor]], *, grid: bool
    ) -> DataProto:
        """The batch with all fields that verl's training loop reads from its agent loops.

        With `grid` the positions are (B, 4, T): those of text, which the attention mask needs, and
        those in three dimensions.
        """
        count = len(self.prompts_BP)
        positions = np.clip(np.cumsum(self.attention_BT, axis=1) - 1, 0, None)
        if grid:
            positions = np.concatenate([positions[:, None], self.grid_B3T], axis=1)
        tensors = {
            "prompts": self.prompts_BP,
            "responses": self.responses_BR,
            "response_mask": self.response_mask_BR,
            "input_ids": np.concatenate([self.prompts_BP, self.responses_BR], axis=1),
            "attention_mask": self.attention_BT,
            "position_ids": positions,
            "rollout_log_probs": self.logprobs_BR,
            "rm_scores": self.scores_BR,
        }
        inputs = np.empty(count, dtype=object)
        inputs[:] = seen
        return DataProto(
            batch=TensorDict(
                {name: torch.from_numpy(array) for name, array in tensors.items()}, batch_size=count
            ),
            non_tensor_batch={"__num_turns__": turns, "multi_modal_inputs": inputs},
            meta_info={"timing": {}, "reward_extra_keys": []},
        )


class BatchPositions(Dataset):  # type: ignore[misc]
    """A dataset of `data_files` rows: `data.train_files` and `data.val_files` are numbers here."""

    def __init__(self, data_files: int, **_: object) -> None:
        self._size = int(data_files)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < self._size:
            raise IndexError(index)
        return {"slot": torch.tensor([index]), "index": index, "data_source": "ajet"}
