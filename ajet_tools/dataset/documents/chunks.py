"""Splits documents into chunks for prompts, at headings and paragraphs; tables and code stay
whole."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile

from ajet_tools.dataset.documents.blocks import Block
from ajet_tools.dataset.documents.read import Document

WHOLE = 4
"""A table or code block is split only if it is longer than this many chunks."""
_SMALL = 0.25
"""A heading starts a new chunk unless the current one is smaller than this share of the size."""
_SENTENCE = re.compile(r"[.!?。！？\n](?:(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？\n]))")
"""The pattern starts with a set of characters, which keeps the search of a 50 MB text under a
second."""
_BETWEEN = "\n\n"


@dataclass(frozen=True)
class Chunk:
    """Part of a document, as a prompt contains it."""

    document: Document
    number: int
    """Position in the document, from 0."""
    blocks: tuple[Block, ...]
    text: str

    def block_at(self, offset: int) -> Block:
        """Returns the block at an offset of `text`."""
        starts = []
        end = 0
        for block in self.blocks:
            starts.append(end)
            end += len(_show(block)) + len(_BETWEEN)
        return self.blocks[max(0, bisect_right(starts, offset) - 1)]


def chunks_of(document: Document, size: int) -> Iterator[Chunk]:
    """Yields chunks of at most `size` characters; a longer table or code block is its own chunk.

    Long paragraphs are split between sentences. Chunks without text under their headings are
    dropped.
    """
    taken: list[Block] = []
    length = number = 0
    pieces: list[Block | None] = []
    for block in document.blocks:
        pieces += _split_block(block, size)
    for piece in [*pieces, None]:
        more = len(_show(piece)) + len(_BETWEEN) if piece is not None else 0
        full = length + more - len(_BETWEEN) > size
        if taken and (
            piece is None or full or (piece.kind == "heading" and length >= _SMALL * size)
        ):
            last = reversed(taken) if piece is not None and piece.kind != "heading" else ()
            # headings at the end belong to the next chunk
            headings = [*takewhile(lambda block: block.kind == "heading", last)][::-1]
            body = taken[: len(taken) - len(headings)]
            if any(block.kind != "heading" for block in body):
                yield Chunk(document, number, tuple(body), _BETWEEN.join(map(_show, body)))
                number += 1
            taken = headings
            length = sum(len(_show(block)) + len(_BETWEEN) for block in headings)
        if piece is not None:
            taken.append(piece)
            length += more


def _show(block: Block) -> str:
    if block.kind != "heading":
        return block.text
    level = min(6, block.heading.count(" > ") + 1)
    return f"{'#' * level} {block.text}"


def _split_block(block: Block, size: int) -> Iterator[Block]:
    is_unit = block.kind in ("table", "code")
    if len(block.text) <= (WHOLE * size if is_unit else size):
        yield block
        return
    head, units = _units(block, size)
    piece = head
    for unit in units:
        if len(piece) > len(head) and len(piece) + len(unit) > size:
            yield replace(block, text=piece.strip("\n").rstrip())
            piece = head
        piece += unit
    if piece[len(head) :].strip():
        yield replace(block, text=piece.strip("\n").rstrip())


def _units(block: Block, size: int) -> tuple[str, Iterator[str]]:
    """Returns a prefix for each part (a table's header) and the smallest units to split at."""
    head = ""
    if block.kind in ("table", "code"):
        units = block.text.splitlines(keepends=True)
    else:
        units = list(sentences_of(block.text))
    if block.kind == "table":
        head = "".join(units[:2])
        units = units[2:]
    return head, chain.from_iterable(_split_text(unit, size) for unit in units)


def sentences_of(text: str) -> Iterator[str]:
    """Splits text after sentences and lines, with the white space that follows."""
    start = 0
    for match in _SENTENCE.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    if start < len(text):
        yield text[start:]


def _split_text(text: str, size: int) -> Iterator[str]:
    """Splits text above the size at white space, else anywhere."""
    start = 0
    while len(text) - start > size:
        cut = text.rfind(" ", start + size // 2, start + size)
        cut = cut + 1 if cut > 0 else start + size
        yield text[start:cut]
        start = cut
    yield text[start:]
