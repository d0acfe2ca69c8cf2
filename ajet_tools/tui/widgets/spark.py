"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["spark"]

_BARS = "▁▂▃▄▅▆▇█"


def spark(values: Sequence[float], width: int) -> str:
    """Values as at most `width` bars, lowest to highest; where there are more values, the mean of each stretch."""
    if not values or width < 1:
        return ""
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(1.0, abs(high)):
        return _BARS[3] * len(values)
    return "".join(_BARS[min(7, int((value - low) / (high - low) * 8))] for value in values)
