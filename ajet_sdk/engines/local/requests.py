"""Draws tokens from logits: temperature, top-k, top-p, and noise that depends only on the request.

B is the number of rows, V the size of the vocabulary. The noise of a token is a hash of the
request's seed and the token's position, so a reply does not depend on other requests in the batch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from ajet_sdk.engines.local.logits import LogitsProcessor
from ajet_sdk.pictures import Picture
from ajet_sdk.protocols import Sampled, Sampling

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB

_MASK = (1 << 64) - 1


def _scramble(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014, fig. 16), as in `mix`."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def mix(*parts: int) -> int:
    """One 64-bit seed from several integers; their order matters."""
    state = 0
    for part in parts:
        x = (state * _GOLDEN + part + _GOLDEN) & _MASK
        x = ((x ^ (x >> 30)) * _FIRST) & _MASK
        x = ((x ^ (x >> 27)) * _SECOND) & _MASK
        state = x ^ (x >> 31)
    return state


def uniform(
    seeds_B: npt.NDArray[np.uint64], places_B: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """A number in [0, 1) per row, a function of the row's seed and the token's position."""
    bits = _scramble(seeds_B + (places_B.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class TokenDraw:
    """The sampling parameters of a batch's rows, prepared once for many steps."""

    def __init__(
        self,
        temperature_B: npt.NDArray[np.float32],
        top_k_B: npt.NDArray[np.int64],
        top_p_B: npt.NDArray[np.float32],
        min_p_B: npt.NDArray[np.float32],
        device: torch.device,
    ) -> None:
        greedy = temperature_B <= 0
        scale = np.where(greedy, np.float32(1), temperature_B)
        limited = ((top_k_B > 0) | (top_p_B < 1) | (min_p_B > 0)) & ~greedy

        def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.all_greedy = bool(greedy.all())
        self.greedy_B = tensor(greedy) if greedy.any() else None
        self.scale_B1 = tensor(scale)[:, None] if (scale != 1).any() else None
        if limited.any():
            self.limited = tensor(np.flatnonzero(limited))
        else:
            self.limited = None
        if self.limited is not None:
            self.top_k = tensor(np.where(top_k_B > 0, top_k_B, np.iinfo(np.int64).max)[limited])
            self.top_p, self.min_p = tensor(top_p_B[limited]), tensor(min_p_B[limited])


def limit(
    logits_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor, min_p_B: torch.Tensor
) -> torch.Tensor:
    """Mask of the tokens that can be drawn, of shape (B, V).

    These are the `top_k` most likely tokens with at least `min_p` of the highest probability, and
    of them the smallest set of most likely tokens whose probability reaches `top_p`. It has no
    gradient.
    """
    ordered, order = logits_BV.detach().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    beyond = (rank >= top_k_B[:, None]) | (ordered < ordered[:, :1] + min_p_B[:, None].log())
    probabilities = ordered.masked_fill(beyond, -torch.inf).double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    beyond |= (before >= top_p_B[:, None].double()) & (rank > 0)
    return torch.empty_like(beyond).scatter_(-1, order, ~beyond)


def _drawn_from(logits_BV: torch.Tensor, how: TokenDraw) -> torch.Tensor:
    """The logits at the temperature, with -inf for tokens that cannot be drawn."""
    logits = logits_BV.float()
    if how.scale_B1 is not None:
        logits = logits / how.scale_B1
    if how.limited is not None:
        limited = logits[how.limited]
        drawn_from = limit(limited, how.top_k, how.top_p, how.min_p)
        logits = logits.index_copy(0, how.limited, limited.masked_fill(~drawn_from, -torch.inf))
    return logits


def most_likely(
    logits_BV: torch.Tensor, how: TokenDraw, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most likely tokens of the distribution drawn from and their log-probabilities,
    each (B, count)."""
    logprobs_BV = torch.log_softmax(_drawn_from(logits_BV, how), -1)
    best = logprobs_BV.topk(min(count, logprobs_BV.shape[-1]), dim=-1)
    return best.indices, best.values


def draw(
    logits_BV: torch.Tensor, how: TokenDraw, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens; returns them and their log-probabilities under the distribution drawn from, each
    of shape B.

    Greedy rows (temperature 0) report the log-probability at temperature 1, as that of a point mass
    would be 0.
    """
    logits = _drawn_from(logits_BV, how)
    logprobs = torch.log_softmax(logits, -1)
    if how.all_greedy:
        tokens = logits.argmax(-1)
    else:
        cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
        tokens = torch.searchsorted(cdf, (uniform_B * cdf[:, -1])[:, None], right=True)[:, 0]
        tokens = tokens.clamp(
            max=cdf.shape[-1] - 1
        )  # exceeded only if logits are NaN, which the caller detects
        if how.greedy_B is not None:
            tokens = torch.where(how.greedy_B, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


class StopWatch:
    """Finds the first stop string in a growing reply, regardless of token boundaries, or an id that
    ends it.

    It compares bytes, so that a stop string may span parts of tokens, and decodes each token once.
    Stop strings within the first `least` tokens are ignored.
    """

    def __init__(
        self,
        stop: Sequence[str],
        token_bytes: Callable[[int], bytes],
        ids: Sequence[int] = (),
        least: int = 0,
        ignore_eos: bool = False,
    ) -> None:
        self.ignore_eos = ignore_eos
        """Whether end-of-turn ids are ignored."""
        self._ids = frozenset(ids)
        self._least = least
        self._begin = 0
        self._stops = [text.encode() for text in stop if text]
        self._longest = max(map(len, self._stops), default=0)
        self._token_bytes = token_bytes
        self._seen = bytearray()
        self.text: str | None = None
        """The text before the stop string, once found."""

    def feed(self, token_id: int) -> bool:
        """Add a token; True if it ends the reply."""
        if token_id in self._ids:
            return True
        if not self._stops:
            return False
        begin = max(self._begin, len(self._seen) - self._longest + 1)
        self._seen += self._token_bytes(token_id)
        if self._least > 0:
            self._least = self._least - 1
            self._begin = len(self._seen)
            return False
        matches = [at for stop in self._stops if (at := self._seen.find(stop, begin)) >= 0]
        if matches:
            self.text = self._seen[: min(matches)].decode(errors="replace")
        return bool(matches)


@dataclass(eq=False, slots=True)
class SamplingRequest:
    """A call of `sample`: the prompt, and a future for its `n` continuations."""

    prompt: npt.NDArray[np.int32]
    """With the keys of its pictures (`pictures.keyed`)."""
    sampling: Sampling
    session: str
    seed: int
    max_new: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[Sampled]]
    pictures: dict[int, Picture] = field(default_factory=dict)
    """By key."""
    continuations: list[Continuation] = field(default_factory=list)
    unfinished: int = 0


@dataclass(eq=False, slots=True)
class Continuation:
    request: SamplingRequest
    seed: int
    stop: StopWatch | None
    processors: tuple[LogitsProcessor, ...] = ()
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: Literal["stop", "length"] = "length"
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The most likely tokens at each position, if requested."""
    row: int | None = None
    """Its row of the cache while it runs."""
    policy_version: int | None = None
    weight_updates: list[int] = field(default_factory=list)
    """As in `Sampled`."""

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The prompt and `output`: in a running batch, what was sampled before a suspension."""
        if not self.output:
            return self.request.prompt
        return np.concatenate([self.request.prompt, np.array(self.output, np.int32)])

    def go_on(self, version: int | None) -> None:
        """Record the version of the weights that sample from here on."""
        if not self.output:
            self.policy_version = version
        elif version is not None and self.policy_version is not None:
            missed = version - self.policy_version - len(self.weight_updates)
            self.weight_updates += [len(self.output)] * missed

    def sampled(self) -> Sampled:
        return Sampled(
            self.output,
            self.logprobs,
            self.reason,
            self.policy_version,
            text=self.stop.text if self.stop else None,
            top=self.top if self.request.sampling.top_logprobs else None,
            weight_updates=self.weight_updates,
        )

    def keep_top(self, tokens: list[int], logprobs: list[float]) -> None:
        """Store the most likely tokens at a position, without those that could not be drawn."""
        wanted = self.request.sampling.top_logprobs
        self.top.append(
            [(t, p) for t, p in zip(tokens[:wanted], logprobs, strict=False) if p > -math.inf]
        )
