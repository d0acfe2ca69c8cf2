"""Logits processors of a request: grammar masks, bias, forbidden words, minimum length, penalties.

The sampler and the trainer use the same `processors`, so a token is scored under the distribution
that it was drawn from. The order is vLLM's: masks and bias, then penalties, then temperature,
min_p, top_k and top_p (`requests.draw`, `losses.score`). Shapes: K rows, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ajet_sdk.errors import EngineError
from ajet_sdk.protocols import Sampling, Tokenizer
from ajet_sdk.tokens.grammars import Matcher

LogitsProcessor = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
"""Changes the logits of a reply, given (logits_KV, output_ids, places_K); forbidden tokens get
-inf.

Each sampled or scored reply has its own processors. Row k predicts token `places_K[k]` of the
reply, after the tokens `output_ids[: places_K[k]]`. Places increase, within a call and between
calls, so that processors may have state.
"""


def processors(
    sampling: Sampling, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[LogitsProcessor, ...]:
    """The logits processors of a reply to the prompt, in order."""
    chain: list[LogitsProcessor] = []
    if sampling.grammar:
        chain.append(_GrammarMask(sampling.grammar, tokenizer))
    if sampling.bad_words:
        chain.append(_BadWords(_spellings(sampling.bad_words, tokenizer)))
    if sampling.min_tokens:
        chain.append(
            _MinTokens(sampling.min_tokens, (*sampling.stop_token_ids, *sorted(tokenizer.eos_ids)))
        )
    if sampling.logit_bias:
        chain.append(_Bias(sampling.logit_bias))
    if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
        chain.append(_Penalties(sampling, prompt_ids))
    return tuple(chain)


def process(
    logits_KV: torch.Tensor,
    how: Sequence[LogitsProcessor],
    output_ids: Sequence[int],
    places_K: Sequence[int],
) -> torch.Tensor:
    for processor in how:
        logits_KV = processor(logits_KV, output_ids, places_K)
    return logits_KV


class _GrammarMask:
    """Forbids tokens that a grammar does not allow next.

    A token that is the only one allowed has log-probability 0 and no gradient.
    """

    def __init__(self, grammar: str, tokenizer: Tokenizer) -> None:
        self._matcher = Matcher(grammar, tokenizer)
        self._taken = 0

    def __call__(
        self, logits_KV: torch.Tensor, output_ids: Sequence[int], places_K: Sequence[int]
    ) -> torch.Tensor:
        """Raises EngineError if the grammar does not accept the reply so far."""
        words_KW = np.concatenate([self._allowed(output_ids, position) for position in places_K])
        allowed_KV = np.unpackbits(words_KW.view(np.uint8), axis=1, bitorder="little")
        forbidden_KV = np.ones(tuple(logits_KV.shape), dtype=bool)
        width = min(allowed_KV.shape[1], logits_KV.shape[1])  # models round the vocabulary up
        forbidden_KV[:, :width] = allowed_KV[:, :width] == 0
        return logits_KV.masked_fill(
            torch.from_numpy(forbidden_KV).to(logits_KV.device), -torch.inf
        )

    def _allowed(self, output_ids: Sequence[int], position: int) -> npt.NDArray[np.int32]:
        """The bit mask of tokens allowed at a position of the reply."""
        for token_id in output_ids[self._taken : position]:
            if not self._matcher.take(int(token_id)):
                raise EngineError(
                    f"the grammar of the reply does not allow token {self._taken}, {int(token_id)}"
                )
            self._taken += 1
        return self._matcher.allowed().copy()


@dataclass(frozen=True, slots=True)
class _Bias:
    bias: tuple[tuple[int, float], ...]

    def __call__(
        self, logits_KV: torch.Tensor, output_ids: Sequence[int], places_K: Sequence[int]
    ) -> torch.Tensor:
        bias_V = logits_KV.new_zeros(logits_KV.shape[1])
        for token, value in self.bias:
            if token < len(bias_V):  # a teacher may round the vocabulary up less
                bias_V[token] = value
        return logits_KV + bias_V


@dataclass(frozen=True, slots=True)
class _MinTokens:
    """Forbids tokens that end a reply before its minimum length; end-of-turn ids even with
    `ignore_eos`, as in vLLM."""

    least: int
    ends: tuple[int, ...]

    def __call__(
        self, logits_KV: torch.Tensor, output_ids: Sequence[int], places_K: Sequence[int]
    ) -> torch.Tensor:
        forbidden_KV = torch.zeros_like(logits_KV, dtype=torch.bool)
        early = sum(position < self.least for position in places_K)
        forbidden_KV[:early, [i for i in self.ends if i < logits_KV.shape[1]]] = True
        return logits_KV.masked_fill(forbidden_KV, -torch.inf)


@dataclass(frozen=True, slots=True)
class _BadWords:
    """Forbids the last token of a word after its other tokens."""

    words: tuple[tuple[int, ...], ...]

    def __call__(
        self, logits_KV: torch.Tensor, output_ids: Sequence[int], places_K: Sequence[int]
    ) -> torch.Tensor:
        forbidden_KV = torch.zeros_like(logits_KV, dtype=torch.bool)
        for row, position in enumerate(places_K):
            for *before, last in self.words:
                if (
                    position >= len(before)
                    and list(output_ids[position - len(before) : position]) == before
                ):
                    forbidden_KV[row, last] = True
        return logits_KV.masked_fill(forbidden_KV, -torch.inf)


def _spellings(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The ids of each word at the start of a text, and after a blank if their number is equal, as
    in vLLM."""
    spellings: list[tuple[int, ...]] = []
    for word in words:
        first, inner = (tuple(tokenizer.encode(blank + word.lstrip())) for blank in ("", " "))
        spellings += [first] if first else []
        if first and inner and inner[0] != first[0] and len(inner) == len(first):
            spellings.append(inner)
    return tuple(spellings)


class _Penalties:
    """Lowers tokens that occurred: in the reply for presence and frequency, also in the prompt for
    repetition.

    The repetition penalty is that of Keskar et al. (2019, arXiv:1909.05858, section 4.1), the
    others are OpenAI's.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        self._repetition = sampling.repetition_penalty
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._prompt = torch.tensor(
            [int(i) for i in prompt_ids] if self._repetition != 1 else [], dtype=torch.long
        )

    def __call__(
        self, logits_KV: torch.Tensor, output_ids: Sequence[int], places_K: Sequence[int]
    ) -> torch.Tensor:
        counts_KV = _counts(output_ids, places_K, logits_KV.detach())
        if self._repetition != 1:
            occurred_KV = counts_KV > 0
            occurred_KV[:, self._prompt.to(logits_KV.device)] = True
            lowered_KV = torch.where(
                logits_KV > 0, logits_KV / self._repetition, logits_KV * self._repetition
            )
            logits_KV = torch.where(occurred_KV, lowered_KV, logits_KV)
        return logits_KV - self._frequency * counts_KV - self._presence * (counts_KV > 0)


def _counts(
    output_ids: Sequence[int], places_K: Sequence[int], like_KV: torch.Tensor
) -> torch.Tensor:
    places = torch.tensor([int(i) for i in places_K])
    ids = torch.tensor([int(i) for i in output_ids[: int(places_K[-1])]], dtype=torch.long)
    rows = torch.searchsorted(
        places, torch.arange(len(ids)), right=True
    )  # the first row after the token
    counts_KV = torch.zeros_like(like_KV)
    at = (rows.to(like_KV.device), ids.to(like_KV.device))
    counts_KV.index_put_(
        at, torch.ones(len(ids), dtype=like_KV.dtype, device=like_KV.device), accumulate=True
    )
    return counts_KV.cumsum(0)
