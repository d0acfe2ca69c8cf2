"""Model output as text without control sequences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ajet_sdk.reporting.output import visible as visible

if TYPE_CHECKING:
    from ajet_sdk.types import Episode


def kind_of(episode: Episode) -> str:
    """The split of an episode, with its decoding where that matters: train, val sampled, val greedy."""
    known = episode.split == "val" or episode.decoding == "greedy"
    return " ".join(filter(None, (episode.split, episode.decoding if known else None)))


def counted(count: int, noun: str) -> str:
    """`1 call`, `2,000 calls`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def one_line(value: object, width: int = 120) -> str:
    """A value as at most `width` visible characters on one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = visible(" ".join(text[: 4 * width].split()))
    return text if len(text) <= width else text[: width - 1] + "…"


def flat_keys(document: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Each value of nested objects with its dotted path; an empty object is a value."""
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from flat_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Each id cut to the shortest length, at least 8, at which all differ; in their order."""
    distinct = set(ids)
    longest = max(map(len, distinct), default=0)
    n = 8
    while n < longest and len({i[:n] for i in distinct}) < len(distinct):
        n += 1
    return {i: i[:n] for i in ids}


_ZERO_WIDTH = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufe0e\ufe0f\ufeff"))
"""Characters of no width that join or restyle their neighbours: terminals disagree about how wide the result is."""


def drop_zero_width(text: str) -> str:
    """The text without the characters that make its width another in another terminal."""
    return text.translate(_ZERO_WIDTH)
