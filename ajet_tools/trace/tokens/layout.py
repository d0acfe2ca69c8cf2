"""Breaks the tokens of a timeline into lines, and maps between tokens and positions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len, chop_cells

from ajet_tools.trace.decoding import shown
from ajet_tools.trace.tokens.view import TokenView

FORK = "◆"
"""Marks a token at which timelines fork."""

Piece = tuple[int, str, int]
"""A token, its text in a line, and the width of that text in cells."""


def labels(view: TokenView) -> list[str]:
    """Return the label of each token: its text, with `⏎` before line breaks and `⇥` for tabs, or
    its id.

    A token that only continues a character has an empty label. The tokens of a picture have one
    label, on the first of them.
    """
    token_labels = _labels(view)
    for placed in view.pictures:
        if placed.start < len(token_labels):
            count = min(placed.end, len(token_labels)) - placed.start
            line = f"[{placed.picture.line}, {count} tokens]"
            token_labels[placed.start : placed.end] = [line, *[""] * (count - 1)]
    return token_labels


def _labels(view: TokenView) -> list[str]:
    if view.spelled is None:
        return [f"{token} " for token in view.ids.tolist()]
    spelled = view.spelled
    text = view.spelled.text
    starts = spelled.starts.tolist()
    by_text: dict[str, str] = {}
    token_labels = []
    for i, token in enumerate(view.ids.tolist()):
        if not spelled.pieces[i]:
            token_labels.append(f"‹{token}›")
            continue
        piece = text[starts[i] : starts[i + 1]]
        if (label := by_text.get(piece)) is None:
            label = by_text[piece] = shown(piece).replace("\n", "⏎\n").replace("\t", "⇥")
        token_labels.append(label)
    return token_labels


@dataclass(frozen=True, eq=False)
class Layout:
    width: int
    lines: Sequence[Sequence[Piece]]
    line_of: npt.NDArray[np.int32]
    """Line of each token's first piece."""
    firsts: Sequence[int]
    """First token that begins in or after each line."""

    def token_at(self, line: int, cell: int) -> int:
        """Return the token at a cell of a line, or the last one of a shorter line."""
        pieces = self.lines[line]
        if not pieces:
            return min(self.firsts[line], len(self.line_of) - 1)
        for token, _, cells in pieces:
            cell -= cells
            if cell < 0:
                return token
        return pieces[-1][0]

    def cell_of(self, token: int) -> int:
        """Return the cell of its line at which a token begins."""
        at = 0
        for shown_token, _, cells in self.lines[self.line_of[token]]:
            if shown_token >= token:
                break
            at += cells
        return at


def lay_out(tokens: Sequence[str], width: int, forks: Collection[int] = ()) -> Layout:
    """Break labels into lines: at line breaks, and before a token that does not fit."""
    builder = _Lines(max(1, width))
    marked = set(forks)
    sizes: dict[str, int] = {}
    line_of = []
    for i, label in enumerate(tokens):
        size = sizes.get(label)
        if size is None:
            size = sizes[label] = _BREAKS if "\n" in label else cell_len(label)
        if size > builder.free or size == _BREAKS or i in marked:
            line_of.append(builder.add(i, f"{FORK}{label}" if i in marked else label))
            continue
        line_of.append(len(builder.lines) - 1)
        if label:
            builder.line.append((i, label, size))
            builder.free -= size
    if len(builder.lines) > 1 and not builder.line:
        builder.lines.pop()
        builder.firsts.pop()
    last = len(builder.lines) - 1
    return Layout(
        builder.width, builder.lines, np.minimum(np.array(line_of, np.int32), last), builder.firsts
    )


_BREAKS = -1
"""Size of a label with line breaks."""


class _Lines:
    """Builds lines."""

    def __init__(self, width: int) -> None:
        self.width = self.free = width
        self.line: list[Piece] = []
        self.lines = [self.line]
        self.firsts = [0]

    def add(self, token: int, label: str) -> int:
        """Add a token that may have line breaks or not fit; returns the line in which it begins."""
        began: int | None = None
        *broken, last_part = label.split("\n")
        for text, breaks in (*((part, True) for part in broken), (last_part, False)):
            cells = cell_len(text)
            if cells > self.free and self.line:
                self._next(token if began is None else token + 1)
            while cells > self.width:
                head = chop_cells(text, self.width)[0] or text[0]
                began = self._put(token, head, began)
                text = text[len(head) :]
                cells = cell_len(text)
                self._next(token + 1)
            if text or breaks:
                began = self._put(token, text, began)
            if breaks:
                self._next(token + 1)
        if began is None:
            return len(self.lines) - 1
        return began

    def _put(self, token: int, text: str, began: int | None) -> int:
        if text:
            cells = cell_len(text)
            self.line.append((token, text, cells))
            self.free -= cells
        if began is None:
            return len(self.lines) - 1
        return began

    def _next(self, first: int) -> None:
        self.line = []
        self.lines.append(self.line)
        self.firsts.append(first)
        self.free = self.width
