"""Checks of what a training service answers: count, length, range and plausibility. Messages name
the service.

A service that answers wrongly would otherwise train on something else, or fail far from the cause.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ajet_sdk.errors import TrainingError
from ajet_sdk.types import Floats

_ABOVE = 1e-3
"""Log-probabilities may exceed 0 by rounding."""
_EQUAL = 16
"""Number of tokens that no model gives exactly the same log-probability, unless it is sure of
each."""
_LARGE = 1.0
"""Mean difference per token, in nats, between the log-probabilities of a reply as it was sampled
and as it is scored by the same weights: rounding gives hundredths, other weights or another
tokenizer whole nats."""


class WrongAnswer(TrainingError):
    """A service answered something that its request doesn't have as an answer."""

    infrastructure = True


def check_logprobs(
    service: str, action: str, values: Sequence[Floats], sizes: Sequence[int]
) -> None:
    """Raise WrongAnswer unless there are log-probabilities of `sizes` tokens for each sequence."""
    if len(values) != len(sizes):
        raise WrongAnswer(
            f"{service} answered {action} with {len(values)} results for {len(sizes)} sequences"
        )
    for number, (value, size) in enumerate(zip(values, sizes, strict=True), 1):
        if value.shape != (size,):
            raise WrongAnswer(
                f"{service} answered {action} with {value.size} log-probabilities for the {size}"
                f" tokens of sequence {number} of {len(sizes)}; it may be the result of another"
                " request"
            )
        check_range(service, action, value)
    if sizes:
        check_variety(service, action, np.concatenate(values))


def check_range(service: str, action: str, logprobs: Floats) -> None:
    """Raise WrongAnswer for log-probabilities that are no numbers or above 0."""
    if not np.isfinite(logprobs).all() or (len(logprobs) and logprobs.max() > _ABOVE):
        wrong = logprobs[~(logprobs <= _ABOVE)]
        shown = wrong[0] if len(wrong) else logprobs[~np.isfinite(logprobs)][0]
        raise WrongAnswer(
            f"{service} answered {action} with {shown:g} as a log-probability, which is a number up"
            " to 0"
        )


def check_variety(service: str, action: str, logprobs: Floats) -> None:
    """Raise WrongAnswer if many tokens have exactly the same log-probability below 0."""
    if len(logprobs) >= _EQUAL and logprobs[0] < -_ABOVE and np.all(logprobs == logprobs[0]):
        raise WrongAnswer(
            f"{service} answered {action} with the same log-probability ({logprobs[0]:g}) for all"
            f" {len(logprobs)} tokens, which no model gives"
        )


def check_sample(
    service: str,
    output_ids: Sequence[int],
    logprobs: Sequence[float | None],
    *,
    longest: int,
    vocabulary: int | None,
) -> None:
    """Raise WrongAnswer for a sample that is too long, has ids beyond the vocabulary, or
    implausible probabilities."""
    if len(logprobs) != len(output_ids) or None in logprobs:
        raise WrongAnswer(f"{service} sent a sample without a log-probability for each token")
    if len(output_ids) > longest:
        raise WrongAnswer(
            f"{service} sent a sample of {len(output_ids)} tokens, of which {longest} were"
            " asked for"
        )
    for token in output_ids:
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            raise WrongAnswer(
                f"{service} sent the token {token}, which is beyond the vocabulary of the model"
                f" ({vocabulary} tokens); does it serve another model?"
            )
    values = np.array(logprobs, np.float32)
    check_range(service, "a sample request", values)
    check_variety(service, "a sample request", values)


def check_agreement(service: str, sampled: Floats, scored: Floats) -> None:
    """Raise WrongAnswer if the weights that sampled tokens score them far otherwise."""
    if not len(sampled):
        return
    gap = float(np.abs(sampled - scored).mean())
    if gap > _LARGE:
        raise WrongAnswer(
            f"{service} gives the tokens that it sampled other log-probabilities in training, by"
            f" {gap:.2f} per token, with the same weights. Its sampler and its trainer compute"
            " different models; nothing here can correct it: report it to whoever runs the service"
        )
