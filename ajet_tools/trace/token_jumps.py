"""Where one would like to go in a timeline: masked-in spans, unlikely tokens, forks, wide gaps, a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ajet_tools.trace.token_view import TokenView

__all__ = ["found", "lowest", "next_place", "next_ranked", "widest_gaps"]


def next_place(places: Sequence[int], at: int, back: bool = False) -> int | None:
    """The place after a token (before it, if `back`), around the end; None where there is none. Places ascend."""
    if not places:
        return None
    if back:
        before = [place for place in places if place < at]
        return before[-1] if before else places[-1]
    return next((place for place in places if place > at), places[0])


def next_ranked(ranked: Sequence[int], at: int, back: bool = False) -> int | None:
    """The next in a ranking where a token has a rank, else the first (or last); around the end."""
    if not ranked:
        return None
    step = -1 if back else 1
    if at in ranked:
        return ranked[(ranked.index(at) + step) % len(ranked)]
    return ranked[-1 if back else 0]


def lowest(view: TokenView) -> list[int]:
    """The sampled tokens by the sampler's log-probability, the lowest first; masked-in ones where there are any."""
    among = view.mask if (view.mask & np.isfinite(view.sampler)).any() else view.sampled
    places = np.flatnonzero(among & np.isfinite(view.sampler))
    ranked: list[int] = places[np.argsort(view.sampler[places], kind="stable")].tolist()
    return ranked


def widest_gaps(view: TokenView) -> list[int]:
    """The tokens by how far trainer and sampler disagree of their log-probability, the farthest first."""
    gap = np.abs(view.gap)
    places = np.flatnonzero(np.isfinite(gap))
    ranked: list[int] = places[np.argsort(-gap[places], kind="stable")].tolist()
    return ranked


def found(view: TokenView, needle: str) -> list[int]:
    """The tokens in which an occurrence of a text begins, whatever its case; of ids where the view has no text."""
    if not needle:
        return []
    if view.spelled is None:
        wanted = int(needle) if needle.isdecimal() and len(needle) < 10 else -1
        ids: list[int] = np.flatnonzero(view.ids == wanted).tolist()
        return ids
    text, sought = view.spelled.text.lower(), needle.lower()
    if len(text) != len(view.spelled.text):  # a letter whose small form is longer: places would shift
        text, sought = view.spelled.text, needle
    places, at = [], text.find(sought)
    while at >= 0:
        places.append(view.spelled.token_at(at))
        at = text.find(sought, at + 1)
    return sorted(set(places))
