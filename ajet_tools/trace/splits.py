"""Splits of episodes into several timelines, with their causes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TypedDict

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.timelines import merge
from ajet_sdk.trace.reader import calls_of, episodes
from ajet_sdk.types import Episode, Split
from ajet_tools.trace.decoding import Vocabulary, vocabulary
from ajet_tools.trace.queries import find_run

log = logging.getLogger("ajet.trace")

_CHUNK = 100


def splits_of(
    reader: TraceReader,
    episode_ids: Sequence[str],
    trace: Path | None,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[tuple[str, Split]], int, int]:
    """Return the splits of episodes with their ids, and the total numbers of timelines and sampled
    tokens.

    Some causes can only be found in decoded text; if `vocabulary` finds no tokenizer, a warning is
    logged once.
    """
    splits: list[tuple[str, Split]] = []
    timelines = sampled = 0

    @cache
    def vocabulary_of(run_id: str | None) -> Vocabulary | None:
        try:
            return vocabulary(reader, run_id or find_run(reader, None), trace=trace)
        except ConfigError as error:
            log.warning(
                "Causes are guessed from what changed in the requests, else `unknown`: %s", error
            )
            return None

    for start in range(0, len(episode_ids), _CHUNK):
        chunk = episode_ids[start : start + _CHUNK]
        whole: Iterable[Episode] = episodes(reader, episode_ids=chunk, superseded=True)
        known = {e.episode_id: e for e in whole}
        for episode_id in chunk:
            ended = known.get(episode_id)
            calls = ended.calls if ended else calls_of(reader, episode_id)
            merged = merge(calls)
            if merged.splits:
                texts = vocabulary_of(ended.run_id if ended else None)
                if texts:
                    merged = merge(calls, texts.decode, texts.template)
            timelines += len(merged.timelines)
            sampled += sum(int(t.loss_mask.sum()) for t in merged.timelines)
            splits += [(episode_id, split) for split in merged.splits]
        if progress:
            progress(len(chunk))
    return splits, timelines, sampled


class SplitCause(TypedDict):
    """Splits with the same cause and hint."""

    cause: str
    splits: int
    extra_tokens: int
    hint: str


def by_cause(splits: Sequence[Split]) -> list[SplitCause]:
    """Count splits by cause and hint; only hints distinguish the causes `several` and `unknown`."""
    causes: dict[tuple[str, str], SplitCause] = {}
    for split in splits:
        initial = SplitCause(cause=split.cause, splits=0, extra_tokens=0, hint=split.hint)
        entry = causes.setdefault((split.cause, split.hint), initial)
        entry["splits"] += 1
        entry["extra_tokens"] += split.extra_tokens
    return sorted(causes.values(), key=lambda entry: -entry["extra_tokens"])
