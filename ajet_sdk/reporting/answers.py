"""Answers as text: their length, their phrases, and what judges of weight 0 say of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from ajet_sdk.types import Episode

_WORDS = 5
"""Words of a phrase."""
_READ = 4000
"""Characters of an answer to search for phrases."""


def answer_metrics(prefix: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of sound episodes: mean output length, share of the most frequent phrase, mean of
    each reward with weight 0."""
    sound = [e for e in episodes if e.status == "succeeded" and e.output is not None]
    texts = [text for e in sound if (text := answer_text(e.output))]
    metrics: dict[str, float] = {}
    if texts:
        metrics[f"{prefix}/answer_chars"] = float(np.mean([len(text) for text in texts]))
    shared = Counter(phrase for text in texts for phrase in phrases(text))
    if shared:
        metrics[f"{prefix}/phrase_share"] = shared.most_common(1)[0][1] / len(texts)
    watched: dict[str, list[float]] = {}
    for episode in sound:
        for reward in episode.rewards:
            if reward.weight == 0:
                watched.setdefault(reward.name, []).append(reward.value)
    return metrics | {
        f"{prefix}/held_out_{name}": float(np.mean(values)) for name, values in watched.items()
    }


def answer_text(output: object) -> str:
    """The text of an output, also of a WorkflowOutput."""
    if isinstance(output, Mapping):
        metadata = output.get("metadata")
        fields = metadata if isinstance(metadata, Mapping) else {}
        output = fields.get("final_answer", fields.get("output", output))
    if isinstance(output, str):
        return output
    return json.dumps(output, default=str)


def phrases(text: str) -> set[str]:
    """Lower-case phrases of five words at the beginning of an answer; a shorter answer is one
    phrase.

    A single word is not a phrase, since it is often the outcome of an environment ("goal").
    """
    words = text[:_READ].lower().split()
    if 1 < len(words) < _WORDS:
        return {" ".join(words)}
    return {" ".join(words[i : i + _WORDS]) for i in range(len(words) - _WORDS + 1)}
