"""Scores of each token in a training step, their rows of the table `trained`, and their means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ajet_sdk.learn.batches import trained_positions
from ajet_sdk.learn.objective import Scored
from ajet_sdk.samples.draft import output_tokens
from ajet_sdk.types import Episode, Floats, Sample, Trained


def trained_calls(
    run_id: str,
    step: int,
    samples: Sequence[Sample],
    episodes: Iterable[Episode],
    logprobs: Sequence[npt.NDArray[np.float32]] = (),
    entropy: Sequence[npt.NDArray[np.float32]] = (),
) -> Iterator[Trained]:
    """Yields a record for each call in the samples, with the tokens in its span.

    Args:
        logprobs: for each sample an array of length T; empty if no trainer of ours has scored them.
        entropy: likewise.
    """
    calls = {call.call_id: call for episode in episodes for call in episode.calls}
    for i, sample in enumerate(samples):
        unknown = np.full(len(sample.timeline.token_ids), np.nan, np.float32)
        values = (
            sample.advantages,
            logprobs[i] if logprobs else unknown,
            entropy[i] if entropy else unknown,
        )
        for span in sample.timeline.spans:
            size = output_tokens(calls[span.call_id])
            columns = [_pad(array[span.start : span.end], size) for array in values]
            yield Trained(
                run_id=run_id,
                step=step,
                episode_id=sample.episode_id,
                call_id=span.call_id,
                advantages=columns[0],
                logprobs=columns[1],
                entropy=columns[2],
            )


def _pad(values: Floats, size: int) -> npt.NDArray[np.float32]:
    """Pads the values of a call's trained tokens with NaN for those cut off."""
    whole = np.full(size, np.nan, np.float32)
    whole[: len(values)] = values
    return whole


class TokenScores:
    """The trainer's scores of each token before a step's first update; NaN if unknown."""

    def __init__(self) -> None:
        self.logprobs: list[npt.NDArray[np.float32]] = []
        """One array of length T for each sample."""
        self.entropy: list[npt.NDArray[np.float32]] = []

    def begin(self, samples: Sequence[Sample]) -> None:
        """Make room for the scores of samples; all are unknown."""
        self.logprobs = [np.full(len(s.timeline.token_ids), np.nan, np.float32) for s in samples]
        self.entropy = [np.full(len(s.timeline.token_ids), np.nan, np.float32) for s in samples]

    def take(self, places: Sequence[int], other: TokenScores) -> None:
        """Take over the scores of some of the samples, which are at `places` here."""
        for place, logprobs, entropy in zip(places, other.logprobs, other.entropy, strict=True):
            self.logprobs[place] = logprobs
            self.entropy[place] = entropy

    def record(
        self,
        samples: Sequence[Sample],
        share: Sequence[int],
        seen: Sequence[tuple[Sequence[int], Scored]],
    ) -> None:
        """Store the scores of micro-batches, whose positions index `share`."""
        self.begin(samples)
        for group, scored in seen:
            logprobs_N = scored.logprobs_N.float().cpu().numpy()
            if scored.entropy_N is None:
                entropy_N = None
            else:
                entropy_N = scored.entropy_N.float().cpu().numpy()
            begin = 0
            for index in (share[i] for i in group):
                at = trained_positions(samples[index])
                end = begin + len(at)
                self.logprobs[index][at] = logprobs_N[begin:end]
                if entropy_N is not None:
                    self.entropy[index][at] = entropy_N[begin:end]
                begin = end


class Tally:
    """Sums and maxima of per-token values over the micro-batches of a step; read once, at its
    end."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor) -> None:
        total, count = self._sums.get(name, (torch.zeros((), device=values.device), 0))
        self._sums[name] = (total + values.sum(), count + values.numel())

    def add_all(self, seen: Mapping[str, torch.Tensor], *, first: bool) -> None:
        """Add the values of a loss. The gap is only that of the first update: later ones compare
        different policies."""
        for name, values in seen.items():
            if name != "gap":
                self.add(name, values)
            elif first:
                self.add("logprob_gap_mean", values)
                top = values.max()
                name = "logprob_gap_max"
                self._maxima[name] = (
                    torch.maximum(self._maxima[name], top) if name in self._maxima else top
                )

    def means(self) -> dict[str, float]:
        means = {name: float(total) / max(1, count) for name, (total, count) in self._sums.items()}
        return means | {name: float(top) for name, top in self._maxima.items()}
