"""Text in a given number of terminal cells, whatever characters it has."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

from ajet_tools.trace.text import visible

__all__ = ["fitted", "steady"]

_UNSURE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufe0e\ufe0f\ufeff"))
"""Characters of no width that join or restyle their neighbours: terminals disagree about how wide the result is."""


def fitted(text: str, width: int, *, right: bool = False) -> str:
    """The text on one line in exactly `width` cells, cut with an ellipsis or padded on one side."""
    plain = visible(" ".join(text[: 4 * width + 16].split()).translate(_UNSURE))
    length = cell_len(plain)
    if length > width:
        return set_cell_size(set_cell_size(plain, max(0, width - 1)).rstrip() + "…", width) if width else ""
    padding = " " * (width - length)
    return padding + plain if right else plain + padding


def steady(text: str) -> str:
    """The text without the characters that make its width another in another terminal."""
    return text.translate(_UNSURE)
