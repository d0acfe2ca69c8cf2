"""Short, safe text: one line without control characters, counts, shortened ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ajet_sdk.reporting.output import visible as visible

if TYPE_CHECKING:
    from ajet_sdk.types import Episode


def kind_of(episode: Episode) -> str:
    """Return the split of an episode, with the decoding mode unless implied: train, val sampled,
    val greedy."""
    known = episode.split == "val" or episode.decoding == "greedy"
    return " ".join(filter(None, (episode.split, episode.decoding if known else None)))


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: `1 call`, `2,000 calls`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def one_line(value: object, width: int = 120) -> str:
    """Format a value as one line of at most `width` visible characters."""
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    text = visible(" ".join(text[: 4 * width].split()))
    return text if len(text) <= width else text[: width - 1] + "…"


def flat_keys(document: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each value of nested objects with its dotted path; an empty object counts as a
    value."""
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from flat_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def short_ids(ids: Sequence[str]) -> dict[str, str]:
    """Map each id to its shortest prefix, of 8 characters or more, that keeps all ids distinct."""
    distinct = set(ids)
    longest = max(map(len, distinct), default=0)
    n = 8
    while n < longest and len({i[:n] for i in distinct}) < len(distinct):
        n += 1
    return {i: i[:n] for i in ids}


_ZERO_WIDTH = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufe0e\ufe0f\ufeff"))
"""Zero-width characters that join or restyle their neighbours; terminals disagree about the width
of the result."""


def drop_zero_width(text: str) -> str:
    """Remove the characters that make the width of a text depend on the terminal."""
    return text.translate(_ZERO_WIDTH)
