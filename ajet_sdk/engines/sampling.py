"""Sampling parameters: what a request asks for, and what is really used once the run has had its say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ajet_sdk.dialects.fields import COMPLETIONS, refuse
from ajet_sdk.errors import RequestRefused
from ajet_sdk.protocols import Sampling

__all__ = ["SamplingOverride", "mix_seed", "override", "refuse_processing", "refuse_unhonoured"]


@dataclass(frozen=True, slots=True)
class SamplingOverride:
    """A run's own sampling for trainable calls; None leaves the request's (or the default) as it is."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    greedy: bool = False
    """Temperature 0, whatever else is said."""


def override(sampling: Sampling, own: SamplingOverride | None, *, max_tokens: int | None) -> Sampling:
    """`sampling` with a run's own parameters in place of the agent's, and the reply's length limited."""
    changed = dict[str, Any]()
    if max_tokens is not None and (sampling.max_tokens is None or max_tokens < sampling.max_tokens):
        changed["max_tokens"] = max_tokens
    if own is not None:
        for name in ("temperature", "top_p", "top_k"):
            value = getattr(own, name)
            if value is not None:
                changed[name] = value
        if own.greedy:
            changed["temperature"] = 0.0
    return replace(sampling, **changed) if changed else sampling


def mix_seed(requested: int | None, attempt: int | None, agent: str, ordinal: int) -> int | None:
    """A seed for one call, the same in every process: attempts differ, repeated runs do not. None if neither is given.

    `ordinal` counts the agent's requests in the episode. The result fits 63 bits.
    """
    if requested is None and attempt is None:
        return None
    text = json.dumps([requested, attempt, agent, ordinal])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def refuse_processing(sampling: Sampling) -> None:
    """Raise RequestRefused for a parameter under which the backbone's trainer can't compute probabilities."""
    plain = Sampling().as_dict()
    for name, value in sampling.as_dict().items():
        if name not in plain and name != "top_logprobs":
            raise RequestRefused(
                f"{name}={json.dumps(value)[:200]} is not supported: the trainer of this backbone cannot score "
                "such tokens; leave it out, or use backbone local",
                name,
            )


def refuse_unhonoured(options: Mapping[str, Any]) -> None:
    """Raise RequestRefused for the first parameter that would change what is sampled and that token engines lack."""
    refuse(options, COMPLETIONS)
