"""Deterministic training (`rollout.deterministic`): deterministic operations, sorted samples, a
hash of each step."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ajet_sdk.samples.prefixes import is_trained
from ajet_sdk.types import Episode, Sample

_BITS = 52
"""Bits of the hash: a float, as metrics are, has no exact larger integers."""


@contextmanager
def deterministic_torch(wanted: bool) -> Iterator[None]:
    """Use torch's deterministic operations where they exist, and a single thread."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = torch.utils.deterministic  # its property has no type in torch
    filled = memory.fill_uninitialized_memory
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    torch.set_num_threads(1)  # a sum's result depends on the number of threads
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled
        torch.set_num_threads(threads)


def in_order(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    """Sort samples by content, since the order of an agent's parallel calls varies."""

    def key(sample: Sample) -> list[bytes]:
        line = sample.timeline
        return [
            array.tobytes()
            for array in (line.token_ids, line.loss_mask, line.logprobs, sample.advantages)
        ]

    return tuple(sorted(samples, key=key))


def step_hash(episodes: Sequence[Episode], weights: Iterable[torch.Tensor]) -> int:
    """Hash of a step's prompts, sampled tokens, log-probabilities and final weights."""
    contents: list[bytes] = []
    for episode in episodes:
        for call in filter(is_trained, episode.calls):
            parts = (call.prompt_ids, call.output_ids, call.logprobs)
            contents.append(b"".join(part.tobytes() for part in parts if part is not None))
    digest = hashlib.blake2b(digest_size=8)
    for content in sorted(contents):
        digest.update(hashlib.blake2b(content).digest())
    for tensor in weights:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "big") >> (64 - _BITS)
